"""The models and kernels of the comparison in tinygrad, replayed by its TinyJit, without BEAM.

    pip install tinygrad dawn-python
    apt-get install clang mesa-vulkan-drivers

The environment says which backend (bench/peers_known.py): DEV=CPU compiles by clang; DEV=WEBGPU
takes dawn, whose library WEBGPU_PATH names; without TRAINING=1 optimizers refuse to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from peers_data import Arrays, Batches, GPTSize, MLPSize
from peers_known import PRODUCTS, chain
from tinygrad import Device, Tensor, TinyJit, nn

Weights = dict[str, Tensor]


class Trainer:
    """Weights and an optimizer between steps; `advance` as in bench/peers.py."""

    def __init__(self, task: str, weights: Arrays, batches: Batches, threads: int) -> None:
        # Threads are one a core that this process may use: `threads` of them (the worker).
        self.weights = {name: Tensor(v).contiguous().realize() for name, v in weights.items()}
        for value in self.weights.values():
            value.requires_grad = True
        every = list(self.weights.values())
        self.forward = mlp if task == "mlp" else gpt
        self.optimizer = (
            nn.optim.SGD(every, lr=MLPSize().lr)
            if task == "mlp"
            else nn.optim.AdamW(every, lr=GPTSize().lr, weight_decay=0.0)
        )
        self.batches = [tuple(Tensor(v).realize() for v in batch) for batch in batches]
        self.step = TinyJit(self.update)
        self.done = 0

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward and update; the loss is realized with the new weights, not after."""
        self.optimizer.zero_grad()
        loss = self.forward(self.weights, x, y).backward()
        return loss.realize(*self.optimizer.schedule_step())

    def advance(self) -> Loss:
        """One step; its loss."""
        batch = self.batches[self.done % len(self.batches)]
        self.done += 1
        return Loss(self.step(*batch))


class Loss:
    """A loss that float() waits for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value.item())


def mlp(p: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the perceptron."""
    logits = linear(p, "layers.1", linear(p, "layers.0", x).relu())
    return logits.sparse_categorical_crossentropy(y)


def gpt(p: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the language model."""
    size = GPTSize()
    h = p["tokens.weight"][x] + p["positions.weight"]
    for k in range(size.layers):
        name = f"blocks.{k}"
        h = h + attention(p, f"{name}.attention", norm(p, f"{name}.norm1", h), size.heads)
        up = linear(p, f"{name}.feed_forward.up", norm(p, f"{name}.norm2", h)).gelu()
        h = h + linear(p, f"{name}.feed_forward.down", up)
    return linear(p, "head", norm(p, "norm", h)).sparse_categorical_crossentropy(y)


def attention(p: Weights, name: str, x: Tensor, heads: int) -> Tensor:
    """Causal, by tinygrad's own function."""
    q, k, v = (
        linear(p, f"{name}.{part}", x).reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    out = q.scaled_dot_product_attention(k, v, is_causal=True)
    return linear(p, f"{name}.output", out.transpose(1, 2).reshape(*x.shape))


def linear(p: Weights, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p: Weights, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.layernorm(eps=1e-5) * weight + bias


def gradients(q: Tensor, k: Tensor, v: Tensor, ct: Tensor) -> list[Tensor]:
    """Of attention's operands."""
    return (q.scaled_dot_product_attention(k, v) * ct).sum().gradient(q, k, v)


KERNELS: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    "attention forward": lambda q, k, v: q.scaled_dot_product_attention(k, v),
    "attention backward": gradients,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": layer_norm,
    "elementwise chain": chain(Tensor.tanh),
}


def kernel(kind: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """A call that ends when its results are there."""
    tensors = [Tensor(a).contiguous().realize() for a in arrays]

    @TinyJit
    def compiled(*operands: Tensor) -> list[Tensor]:
        results = KERNELS[kind](*operands)
        results = [results] if isinstance(results, Tensor) else list(results)
        results[0].realize(*results[1:])
        return results

    def run() -> list[Tensor]:
        results = compiled(*tensors)
        Device[Device.DEFAULT].synchronize()
        return results

    return run


def values(results: list[Tensor]) -> list[np.ndarray]:
    """Results of a call as NumPy's."""
    return [r.numpy() for r in results]
