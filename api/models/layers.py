"""What pretrained models are built of: products and tables over packed weights, and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eggpu import nn
from eggpu.compiler.library.indexing import take
from eggpu.compiler.library.linalg import matmul
from eggpu.compiler.tracing import Array, array
from eggpu.importers.packed import Packed
from eggpu.importers.tensors import Matrix, ModelFileError, Weights


def dense(matrix: Matrix) -> Array:
    """A matrix as f32; of a packed one the traced dequantization."""
    return matrix.dequantize() if isinstance(matrix, Packed) else matrix


@dataclass(frozen=True)
class Projection:
    """x weight^T + bias, with weight (outputs, inputs) as model files have it."""

    weight: Matrix
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        out = matmul(x, dense(self.weight).T)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class Table:
    """Rows by integer ids, and the product with all of them (tied output weights)."""

    weight: Matrix

    def __call__(self, ids: Array) -> Array:
        return take(dense(self.weight), ids, 0)

    def attend(self, x: Array) -> Array:
        return matmul(x, dense(self.weight).T)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) times weight plus bias."""

    weight: Array
    bias: Array | None
    eps: float

    def __call__(self, x: Array) -> Array:
        return nn.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) times weight."""

    weight: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        return nn.rms_norm(x, self.weight, self.eps)


def projection(w: Weights, name: str, outputs: int, inputs: int) -> Projection:
    """The layer `name`: its weight, and its bias where there is one."""
    bias = f"{name}.bias"
    weight = w.matrix(f"{name}.weight", (outputs, inputs))
    return Projection(weight, w.array(bias, (outputs,)) if bias in w else None)


def table(w: Weights, name: str, count: int, width: int) -> Table:
    """The table `name`."""
    return Table(w.matrix(f"{name}.weight", (count, width)))


def layer_norm(w: Weights, name: str, width: int, eps: float) -> LayerNorm:
    """The norm `name`."""
    bias = f"{name}.bias"
    found = w.array(bias, (width,)) if bias in w else None
    return LayerNorm(w.array(f"{name}.weight", (width,)), found, eps)


def rms_norm(w: Weights, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """The norm `name`; `offset` is added to its weight."""
    weight = w.array(f"{name}.weight", (width,))
    return RMSNorm(array(weight.numpy() + np.float32(offset)) if offset else weight, eps)


def split(p: Projection, sizes: Sequence[int]) -> list[Projection]:
    """The parts of a fused layer, by outputs."""
    out, at = [], 0
    for n in sizes:
        weight = p.weight
        part = weight.rows(at, at + n) if isinstance(weight, Packed) else weight[at : at + n]
        bias = None if p.bias is None else array(p.bias.numpy()[at : at + n])
        out.append(Projection(part if isinstance(part, Packed) else array(part.numpy()), bias))
        at += n
    return out


def _gelu_tanh(x: Array) -> Array:
    return nn.gelu(x, "tanh")


def _quick_gelu(x: Array) -> Array:
    return x * nn.sigmoid(x * 1.702)


_ACTIVATIONS = {
    "silu": nn.silu, "gelu": nn.gelu, "relu": nn.relu,
    "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh, "gelu_fast": _gelu_tanh,
    "quick_gelu": _quick_gelu, "tanh": nn.tanh,
}  # fmt: skip


def activation(name: str) -> Callable[[Array], Array]:
    """The activation that a config names."""
    return _ACTIVATIONS[name]


def known_activation(name: Any) -> str:
    """The name, if it is that of an activation. Raises ModelFileError for others."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelFileError(f"the activation {name!r:.60} is not known; known are {known}")
    return name
