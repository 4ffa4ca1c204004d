"""The plain layers: products, tables and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library import nn as F
from eggpu.compiler.library.math import relu
from eggpu.compiler.tracing import Array
from eggpu.nn import initial
from eggpu.nn.initial import Key
from eggpu.nn.module import Module


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Linear(Module):
    """x @ weight + bias, with weight (inputs, outputs).

    Weights and bias start uniform in ±1/sqrt(inputs), as PyTorch's do; with `std` the weights are
    normal numbers of that deviation and the bias is 0.
    """

    weight: Array
    bias: Array | None

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, *, key: Key, std: float | None = None
    ) -> None:
        _sizes("Linear", inputs, outputs)
        for_weight, for_bias = initial.keys(key, 2)
        bound, shape = 1 / math.sqrt(inputs), (inputs, outputs)
        if std is None:
            weight = initial.uniform(for_weight, shape, bound)
            offset = initial.uniform(for_bias, (outputs,), bound) if bias else None
        else:
            weight = initial.normal(for_weight, shape, std)
            offset = initial.zeros((outputs,)) if bias else None
        self._set(weight=weight, bias=offset)

    def __call__(self, x: Array) -> Array:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Embedding(Module):
    """A table (count, width) whose rows are read by integer ids; it starts as normal numbers."""

    weight: Array

    def __init__(self, count: int, width: int, *, key: Key, std: float = 1.0) -> None:
        _sizes("Embedding", count, width)
        self._set(weight=initial.normal(key, (count, width), std))

    def __call__(self, ids: Array) -> Array:
        return F.embedding(ids, self.weight)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) over the last axis, times weight plus bias."""

    weight: Array
    bias: Array | None
    eps: float

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        _sizes("LayerNorm", width)
        offset = initial.zeros((width,)) if bias else None
        self._set(weight=initial.ones((width,)), bias=offset, eps=eps)

    def __call__(self, x: Array) -> Array:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight."""

    weight: Array
    eps: float

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        _sizes("RMSNorm", width)
        self._set(weight=initial.ones((width,)), eps=eps)

    def __call__(self, x: Array) -> Array:
        return F.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MLP(Module):
    """Linear layers with an activation between them: MLP((784, 256, 10), key=0)."""

    layers: tuple[Linear, ...]
    activation: Callable[[Array], Array]

    def __init__(
        self, sizes: Sequence[int], key: Key, activation: Callable[[Array], Array] = relu
    ) -> None:
        if len(sizes) < 2:
            raise ShapeMismatch(f"MLP needs at least two sizes, got {list(sizes)}")
        each = initial.keys(key, len(sizes) - 1)
        pairs = zip(sizes, sizes[1:], each)
        layers = tuple(Linear(a, b, key=k) for a, b, k in pairs)
        self._set(layers=layers, activation=activation)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def _sizes(name: str, *sizes: int) -> None:
    if any(n < 1 for n in sizes):
        came = " and ".join(map(str, sizes))
        raise ShapeMismatch(f"{name} needs sizes of at least 1, got {came}")
