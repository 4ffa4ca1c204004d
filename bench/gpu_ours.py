"""What bench/gpu.py runs through eggpu: compiled functions with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import peers

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler import pytree
from eggpu.compiler.tracing import Array, array, trace_call


@dataclass
class Work:
    """A compiled function and what it is called with; its first `carry` results are the first
    arguments of the next call."""

    compiled: Any
    args: tuple[Any, ...]
    carry: int = 0

    def __call__(self) -> Any:
        """One call, which returns before the device has done it; its last result."""
        out = self.compiled(*self.args)
        if not self.carry:
            return out
        self.args = (*out[: self.carry], *self.args[self.carry :])
        return out[-1]


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Sizes of a language model and of a batch."""

    vocab: int
    context: int
    layers: int
    width: int
    heads: int
    batch: int


SMALL = GPTShape(vocab=65, context=256, layers=6, width=384, heads=6, batch=64)
GPT2 = GPTShape(vocab=50304, context=1024, layers=12, width=768, heads=12, batch=8)
HEADS = (8, 12, 1024, 64)
SQUARE = 8192


def values(*shape: int, seed: int = 0) -> Array:
    """Normal numbers."""
    return array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def matmul(m: int, n: int, k: int) -> Work:
    """a b for a (m, k) and b (k, n)."""
    return Work(
        eg.compile(eg.matmul, name=f"matmul_{m}_{n}_{k}"), (values(m, k), values(k, n, seed=1))
    )


def attention() -> Work:
    """Causal attention of HEADS."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        return nn.scaled_dot_product_attention(q, k, v, causal=True)

    return Work(
        eg.compile(attend, name="attention"), tuple(values(*HEADS, seed=i) for i in range(3))
    )


def attention_gradients() -> Work:
    """The gradients of causal attention of HEADS, forward pass included."""

    def loss(qkv: Any, do: Array) -> Array:
        return (nn.scaled_dot_product_attention(*qkv, causal=True) * do).sum()

    q, k, v, do = (values(*HEADS, seed=i) for i in range(4))
    return Work(eg.compile(eg.grad(loss), name="attention_gradients"), ((q, k, v), do))


def rowwise(name: str) -> Work:
    """A function of a SQUARE by SQUARE matrix, by name."""
    functions: dict[str, Callable[[Array], Array]] = {
        "softmax": nn.softmax,
        "layer_norm": nn.layer_norm,
        "gelu": nn.gelu,
        "sum_rows": lambda x: x.sum(1),
        "sum_columns": lambda x: x.sum(0),
    }
    return Work(eg.compile(functions[name], name=name), (values(SQUARE, SQUARE),))


def peer(task: str) -> Work:
    """A training step of a model of bench/peers.py on a batch that stays on the device."""
    weights, batches = peers.numbers(task, peers.ROOT.parent / "shared" / "peers")
    trainer = peers.Trainer(task, weights, batches)
    return Work(trainer.step, (trainer.model, trainer.state, *map(array, batches[0])), carry=2)


def gpt(shape: GPTShape, max_memory: int | None = None) -> Work:
    """A training step of a GPT with AdamW."""
    s = shape
    model = random_model(lambda: nn.GPT(s.vocab, s.layers, s.width, s.heads, s.context, key=0))
    optimizer = optim.adamw(1e-4)
    step = eg.compile(
        peers.training_step(optimizer), donate=("model", "state"), max_memory=max_memory,
        name=f"gpt_{s.layers}x{s.width}",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tokens = [
        array(rng.integers(0, s.vocab, (s.batch, s.context), dtype=np.int32)) for _ in range(2)
    ]
    return Work(step, (model, optimizer.init(model), *tokens), carry=2)


def random_model(build: Callable[[], Any]) -> Any:
    """The model that `build` describes, with numbers of NumPy: large ones take less time."""
    traced = trace_call(build, (), {})
    rng = np.random.default_rng(0)
    leaves = []
    for name, node in zip(pytree.paths(traced.results), traced.graph.outputs, strict=True):
        if len(node.shape) > 1:
            leaves.append(
                array(rng.standard_normal(node.shape, dtype=np.float32) * np.float32(0.02))
            )
        else:
            leaves.append(
                array(
                    np.full(
                        node.shape, float("norm" in name and name.endswith("weight")), np.float32
                    )
                )
            )
    return pytree.unflatten(traced.results, leaves)
