"""Layers one after the other, and the layers without parameters: pooling, dropout, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from eggpu.compiler.errors import ShapeMismatch, TraceError
from eggpu.compiler.library import nn as F
from eggpu.compiler.library import random
from eggpu.compiler.library import spatial as S
from eggpu.compiler.tracing import Array
from eggpu.nn.conv import Size, each
from eggpu.nn.module import SETTING, Module


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Sequential(Module):
    """Modules and functions, each applied to the result of the one before."""

    layers: tuple[Any, ...]

    def __init__(self, *layers: Module | Callable[[Array], Array]) -> None:
        self._set(layers=tuple(layers))

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = layer(x)
        return x

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, Sequential]:
        """The result in training, and the layers after it; layer i gets key folded with i."""
        after: list[Any] = []
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Module):
                x = layer(x)
            else:
                own = None if key is None else random.fold_in(key, i)
                x, layer = layer.train(x, key=own)
            after.append(layer)
        return x, Sequential(*after)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Dropout(Module):
    """In training zeroes each element with probability `p` and divides the others by 1 - p."""

    p: float

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout needs 0 <= p <= 1, got {p}")
        self._set(p=float(p))

    def __call__(self, x: Array, key: Array | None = None) -> Array:
        return x if key is None else F.dropout(x, self.p, key)

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, Dropout]:
        """`x` with elements dropped; needs a key unless p is 0."""
        if key is None and self.p > 0:
            raise TraceError("Dropout needs a key in training: model.train(x, key=key)")
        return self(x, key), self


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Flatten(Module):
    """(n, ...) -> (n, all the rest)."""

    def __init__(self) -> None:
        """Nothing to set."""

    def __call__(self, x: Array) -> Array:
        return x.reshape((x.shape[0], math.prod(x.shape[1:])))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Pool(Module):
    """The largest or mean element of each window of (n, c, *spatial)."""

    function: ClassVar[tuple[Callable[..., Array]]]  # in a tuple, or it would become a method
    axes: ClassVar[int]

    size: tuple[int, ...] = field(metadata=SETTING)
    stride: tuple[int, ...] = field(metadata=SETTING)
    padding: tuple[int, ...] = field(metadata=SETTING)

    def __init__(self, size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        sizes = each(size, self.axes, "size")
        self._set(
            size=sizes,
            stride=sizes if stride is None else each(stride, self.axes, "stride"),
            padding=each(padding, self.axes, "padding"),
        )

    def __call__(self, x: Array) -> Array:
        return self.function[0](x, self.size, self.stride, self.padding)


class MaxPool1d(_Pool):
    """The largest element of each window of (n, c, w)."""

    function, axes = (S.max_pool1d,), 1


class MaxPool2d(_Pool):
    """The largest element of each window of (n, c, h, w)."""

    function, axes = (S.max_pool2d,), 2


class MaxPool3d(_Pool):
    """The largest element of each window of (n, c, d, h, w)."""

    function, axes = (S.max_pool3d,), 3


class AvgPool1d(_Pool):
    """The mean of each window of (n, c, w); padding counts as zeros."""

    function, axes = (S.avg_pool1d,), 1


class AvgPool2d(_Pool):
    """The mean of each window of (n, c, h, w); padding counts as zeros."""

    function, axes = (S.avg_pool2d,), 2


class AvgPool3d(_Pool):
    """The mean of each window of (n, c, d, h, w); padding counts as zeros."""

    function, axes = (S.avg_pool3d,), 3


@dataclass(frozen=True, init=False, repr=False, eq=False)
class AdaptiveAvgPool(Module):
    """Means of `size` cells that cover the spatial axes evenly; as many axes as numbers."""

    size: tuple[int, ...] = field(metadata=SETTING)

    def __init__(self, *size: int) -> None:
        if not 1 <= len(size) <= 3 or min(size) < 1:
            raise ShapeMismatch(f"AdaptiveAvgPool needs 1 to 3 sizes above 0, got {list(size)}")
        self._set(size=tuple(size))

    def __call__(self, x: Array) -> Array:
        pools = (S.adaptive_avg_pool1d, S.adaptive_avg_pool2d, S.adaptive_avg_pool3d)
        return pools[len(self.size) - 1](x, self.size)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Upsample(Module):
    """(n, c, *spatial) enlarged by a whole factor, "nearest" or "bilinear"."""

    scale: int
    mode: str

    def __init__(self, scale: int, mode: str = "nearest") -> None:
        self._set(scale=scale, mode=mode)

    def __call__(self, x: Array) -> Array:
        return S.upsample(x, self.scale, self.mode)
