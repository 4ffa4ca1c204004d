"""The two models that are compared with other frameworks: their sizes, first weights and batches.

Every framework starts from the same float32 numbers, so losses can be compared step by step:

* mlp: 784-256-10 with ReLU, softmax cross-entropy, batches of 128, SGD at 0.1;
* gpt: 4 pre-norm blocks, width 128, 4 heads, context 64, vocabulary 65, batches of 8, GELU by tanh,
  learned positions, a head of its own with a bias, AdamW at 1e-3 without decay.

Weights are (inputs, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Arrays = dict[str, np.ndarray]
Batches = list[tuple[np.ndarray, np.ndarray]]
BATCHES = 20  # then from the start again


@dataclass(frozen=True, slots=True)
class MLPSize:
    """Sizes of the perceptron."""

    inputs: int = 784
    hidden: int = 256
    outputs: int = 10
    batch: int = 128
    lr: float = 0.1


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Sizes of the language model."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    vocab: int = 65
    batch: int = 8
    lr: float = 1e-3


def mlp_weights(size: MLPSize = MLPSize(), seed: int = 0) -> Arrays:
    """First weights, named as in nn.MLP."""
    rng = np.random.default_rng(seed)
    sizes = (size.inputs, size.hidden, size.outputs)
    out: Arrays = {}
    for k, (a, b) in enumerate(pairwise(sizes)):
        weight = rng.standard_normal((a, b)) * (1.0 / np.sqrt(a))
        out[f"layers.{k}.weight"] = weight.astype(np.float32)
        out[f"layers.{k}.bias"] = np.zeros(b, np.float32)
    return out


def mlp_batches(size: MLPSize = MLPSize(), seed: int = 1) -> Batches:
    """Normal inputs and the classes that a random linear teacher gives them."""
    rng = np.random.default_rng(seed)
    teacher = rng.standard_normal((size.inputs, size.outputs)).astype(np.float32)
    out = []
    for _ in range(BATCHES):
        x = rng.standard_normal((size.batch, size.inputs)).astype(np.float32)
        out.append((x, (x @ teacher).argmax(1).astype(np.int32)))
    return out


def gpt_weights(size: GPTSize = GPTSize(), seed: int = 0) -> Arrays:
    """First weights, named as in nn.GPT."""
    rng = np.random.default_rng(seed)
    d, residual = size.width, 0.02 / np.sqrt(2 * size.layers)
    out: Arrays = {}

    def linear(name: str, inputs: int, outputs: int, std: float = 0.02) -> None:
        weight = rng.standard_normal((inputs, outputs)) * std
        out[f"{name}.weight"] = weight.astype(np.float32)
        out[f"{name}.bias"] = np.zeros(outputs, np.float32)

    def norm(name: str) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = np.ones(d, np.float32), np.zeros(d, np.float32)

    for name, count in (("tokens", size.vocab), ("positions", size.context)):
        out[f"{name}.weight"] = (rng.standard_normal((count, d)) * 0.02).astype(np.float32)
    for k in range(size.layers):
        norm(f"blocks.{k}.norm1")
        for part in ("query", "key", "value"):
            linear(f"blocks.{k}.attention.{part}", d, d)
        linear(f"blocks.{k}.attention.output", d, d, residual)
        norm(f"blocks.{k}.norm2")
        linear(f"blocks.{k}.feed_forward.up", d, 4 * d)
        linear(f"blocks.{k}.feed_forward.down", 4 * d, d, residual)
    norm("norm")
    linear("head", d, size.vocab)
    return out


def gpt_batches(size: GPTSize = GPTSize(), seed: int = 1) -> Batches:
    """Windows of a random walk in which each token has four successors."""
    rng = np.random.default_rng(seed)
    successors = rng.integers(0, size.vocab, (size.vocab, 4))
    count = BATCHES * size.batch * (size.context + 1)
    tokens, picked = np.zeros(count, np.int64), rng.integers(0, 4, count)
    for i in range(1, count):
        tokens[i] = successors[tokens[i - 1], picked[i]]
    windows = tokens.reshape(BATCHES, size.batch, size.context + 1).astype(np.int32)
    return [(w[:, :-1].copy(), w[:, 1:].copy()) for w in windows]
