"""Convolutions and their transposes, with weights laid out as PyTorch's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library import spatial as S
from eggpu.compiler.tracing import Array
from eggpu.nn import initial
from eggpu.nn.initial import Key
from eggpu.nn.module import SETTING, Module

Size = int | tuple[int, ...]


def each(size: Size, axes: int, what: str) -> tuple[int, ...]:
    """A number for each axis; one number counts for all."""
    out = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(out) != axes:
        raise ShapeMismatch(f"{what} needs {axes} numbers, got {size}")
    return out


def _checked(name: str, inputs: int, outputs: int, groups: int, size: tuple[int, ...]) -> None:
    if min(inputs, outputs, groups, *size) < 1 or inputs % groups or outputs % groups:
        came = f"{inputs}, {outputs}, {groups} groups and size {list(size)}"
        raise ShapeMismatch(f"{name} needs channels that its groups divide, got {came}")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Conv(Module):
    """(n, inputs, *spatial) -> (n, outputs, *spatial), weight (outputs, inputs / groups, *size).

    Weights and bias start uniform in ±1/sqrt(inputs / groups * size), as PyTorch's do. `padding`
    may be "same".
    """

    axes: ClassVar[int]

    weight: Array
    bias: Array | None
    stride: tuple[int, ...] = field(metadata=SETTING)
    padding: tuple[int, ...] | str = field(metadata=SETTING)
    dilation: tuple[int, ...] = field(metadata=SETTING)
    groups: int

    def __init__(
        self, inputs: int, outputs: int, size: Size, *, key: Key, stride: Size = 1,
        padding: Size | str = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        name, d = type(self).__name__, self.axes
        sizes = each(size, d, "size")
        _checked(name, inputs, outputs, groups, sizes)
        shape = (outputs, inputs // groups, *sizes)
        for_weight, for_bias = initial.keys(key, 2)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self._set(
            weight=initial.uniform(for_weight, shape, bound),
            bias=initial.uniform(for_bias, (outputs,), bound) if bias else None,
            stride=each(stride, d, "stride"),
            padding=padding if isinstance(padding, str) else each(padding, d, "padding"),
            dilation=each(dilation, d, "dilation"),
            groups=groups,
        )

    def __call__(self, x: Array) -> Array:
        conv = (S.conv1d, S.conv2d, S.conv3d)[self.axes - 1]
        how = (self.stride, self.padding, self.dilation, self.groups)
        return conv(x, self.weight, self.bias, *how)


class Conv1d(_Conv):
    """A convolution of (n, c, w)."""

    axes = 1


class Conv2d(_Conv):
    """A convolution of (n, c, h, w)."""

    axes = 2


class Conv3d(_Conv):
    """A convolution of (n, c, d, h, w)."""

    axes = 3


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _ConvTranspose(Module):
    """The transpose of a convolution, weight (inputs, outputs / groups, *size), as in PyTorch."""

    axes: ClassVar[int]

    weight: Array
    bias: Array | None
    stride: tuple[int, ...] = field(metadata=SETTING)
    padding: tuple[int, ...] = field(metadata=SETTING)
    output_padding: tuple[int, ...] = field(metadata=SETTING)
    dilation: tuple[int, ...] = field(metadata=SETTING)
    groups: int

    def __init__(
        self, inputs: int, outputs: int, size: Size, *, key: Key, stride: Size = 1,
        padding: Size = 0, output_padding: Size = 0, dilation: Size = 1, groups: int = 1,
        bias: bool = True,
    ) -> None:  # fmt: skip
        name, d = type(self).__name__, self.axes
        sizes = each(size, d, "size")
        _checked(name, inputs, outputs, groups, sizes)
        shape = (inputs, outputs // groups, *sizes)
        for_weight, for_bias = initial.keys(key, 2)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self._set(
            weight=initial.uniform(for_weight, shape, bound),
            bias=initial.uniform(for_bias, (outputs,), bound) if bias else None,
            stride=each(stride, d, "stride"),
            padding=each(padding, d, "padding"),
            output_padding=each(output_padding, d, "output_padding"),
            dilation=each(dilation, d, "dilation"),
            groups=groups,
        )

    def __call__(self, x: Array) -> Array:
        conv = (S.conv_transpose1d, S.conv_transpose2d, S.conv_transpose3d)[self.axes - 1]
        how = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return conv(x, self.weight, self.bias, *how)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of Conv1d."""

    axes = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of Conv2d."""

    axes = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of Conv3d."""

    axes = 3
