"""The models and kernels of the comparison in eager PyTorch on the CPU, by its own defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peers_data import Arrays, Batches, GPTSize, MLPSize
from peers_known import PRODUCTS, THREADS, chain
from torch import Tensor


class Trainer:
    """Weights and an optimizer between steps; `advance` as in bench/peers.py."""

    def __init__(self, task: str, weights: Arrays, batches: Batches, threads: int) -> None:
        torch.set_num_threads(threads)
        self.forward = mlp if task == "mlp" else gpt
        self.weights = {name: parameter(name, value) for name, value in weights.items()}
        every = list(self.weights.values())
        if task == "mlp":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(every, MLPSize().lr)
        else:
            self.optimizer = torch.optim.AdamW(every, GPTSize().lr, weight_decay=0.0)
        self.batches = [tuple(torch.from_numpy(v) for v in batch) for batch in batches]
        self.done = 0

    def advance(self) -> Tensor:
        """One step; its loss."""
        x, y = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.weights, x, y.long())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def parameter(name: str, value: object) -> Tensor:
    """A weight; matrices of products lie as torch wants them, (outputs, inputs)."""
    found = torch.tensor(value)
    product = found.ndim == 2 and not name.startswith(("tokens", "positions"))
    return (found.T.contiguous() if product else found).requires_grad_()


def mlp(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The loss of the perceptron."""
    return F.cross_entropy(linear(p, "layers.1", F.relu(linear(p, "layers.0", x))), y)


def gpt(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The loss of the language model."""
    size = GPTSize()
    h = F.embedding(x.long(), p["tokens.weight"]) + p["positions.weight"]
    for k in range(size.layers):
        h = h + attention(p, f"blocks.{k}.attention", norm(p, f"blocks.{k}.norm1", h), size.heads)
        up = linear(p, f"blocks.{k}.feed_forward.up", norm(p, f"blocks.{k}.norm2", h))
        h = h + linear(p, f"blocks.{k}.feed_forward.down", F.gelu(up, approximate="tanh"))
    logits = linear(p, "head", norm(p, "norm", h))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def attention(p: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    """Causal, by torch's fused kernel."""
    q, k, v = (
        linear(p, f"{name}.{part}", x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(p, f"{name}.output", out.transpose(1, 2).flatten(2))


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def gradients(q: Tensor, k: Tensor, v: Tensor, ct: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward of attention."""
    heads = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(F.scaled_dot_product_attention(*heads), heads, ct)


KERNELS: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    "attention forward": F.scaled_dot_product_attention,
    "attention backward": gradients,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
    "elementwise chain": chain(torch.tanh),
}


def kernel(kind: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """A call on two threads."""
    torch.set_num_threads(THREADS)
    tensors = [torch.from_numpy(a) for a in arrays]
    return lambda: KERNELS[kind](*tensors)


def values(results: Any) -> list[np.ndarray]:
    """Results of a call as NumPy's."""
    return [r.numpy() for r in ([results] if isinstance(results, Tensor) else results)]
