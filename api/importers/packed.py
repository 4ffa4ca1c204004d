"""Weights that stay packed on the device: u32 words, dequantized where they are used."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.ir import Node
from eggpu.compiler.library.convert import wrap
from eggpu.compiler.ops import broadcast, iota, packed, reshape, slice_
from eggpu.compiler.ops import full as full_node
from eggpu.compiler.tracing import Array, array
from eggpu.compiler.types import u32
from eggpu.importers.formats import FORMATS, words

FLOATS = {"F16": packed.unpack_half, "BF16": packed.unpack_bfloat}


@dataclass(frozen=True)
class Packed:
    """A matrix (rows, columns) in a block format, or in 16-bit floats, held as u32 words.

    `dequantize()` is traced from shifts, masks and movement, so that the compiler computes it
    inside whatever reads the matrix: products, products of a row, gathers of rows.
    """

    planes: tuple[Array, ...]  # (rows, columns * bits / 32) each
    scales: Array | None  # float16 pairs: (d, m) of a block, or d of two blocks
    steps: Array | None  # codes of scales within superblocks
    lows: Array | None  # codes of minima
    format: str
    shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        given = (*self.planes, self.scales, self.steps, self.lows)
        return sum(a.type.nbytes for a in given if a is not None)

    def __repr__(self) -> str:
        return f"Packed({self.format}[{self.shape[0]}, {self.shape[1]}])"

    def rows(self, start: int, stop: int) -> Packed:
        """Some of the rows."""
        given = (self.scales, self.steps, self.lows)
        planes = tuple(array(p.numpy()[start:stop]) for p in self.planes)
        scales, steps, lows = (None if a is None else array(a.numpy()[start:stop]) for a in given)
        return Packed(planes, scales, steps, lows, self.format, (stop - start, self.shape[1]))

    def dequantize(self) -> Array:
        """The matrix as f32 (rows, columns)."""
        if self.format in FLOATS:
            return wrap(FLOATS[self.format](*_spread(self.planes[0].node, 16, self.shape)))
        f = FORMATS[self.format]
        code, weight = None, 1
        for plane, bits in zip(self.planes, f.planes, strict=True):
            part = packed.field[bits](*_spread(plane.node, bits, self.shape))
            code = part if code is None else code + part * float(weight)
            weight <<= bits
        assert code is not None
        if f.bias:
            code = code - float(f.bias)
        scale, low = self._scales()
        value = code * _repeated(scale, f.group, self.shape)
        return wrap(value if low is None else value + _repeated(low, f.group, self.shape))

    def _scales(self) -> tuple[Node, Node | None]:
        """The scale and what is added, for each group of each row."""
        f = FORMATS[self.format]
        rows, columns = self.shape
        blocks = (rows, columns // f.block)
        assert self.scales is not None
        held = self.scales.node
        if f.minimum:
            d, m = (packed.unpack_half(held, full_node(k, blocks, u32)) for k in range(2))
        else:
            d, m = packed.unpack_half(*_spread(held, 16, blocks)), None
        if not f.superblocks:
            return d, m
        groups = (rows, columns // f.group)
        assert self.steps is not None
        step = packed.field[f.step_bits](*_spread(self.steps.node, f.step_bits, groups))
        step = step - float(f.step_bias) if f.step_bias else step
        scale = _repeated(d, f.block // f.group, groups) * step
        if m is None or self.lows is None:
            return scale, None
        low = packed.field[f.step_bits](*_spread(self.lows.node, f.step_bits, groups))
        return scale, -(_repeated(m, f.block // f.group, groups) * low)


def _spread(held: Node, bits: int, shape: tuple[int, int]) -> tuple[Node, Node]:
    """The word that holds each element of `shape`, of `bits` bits, and the element's place."""
    rows, each = shape[0], 32 // bits
    wide = _repeated(held, each, (rows, held.shape[1] * each))  # the last word may be part full
    if wide.shape != shape:
        wide = slice_(wide, (0, 0), shape)
    return wide, iota(shape, 1, u32)


def _repeated(x: Node, times: int, shape: tuple[int, int]) -> Node:
    """Each column of x `times` times."""
    rows, columns = x.shape
    return reshape(broadcast(reshape(x, (rows, columns, 1)), (rows, columns, times)), shape)


def pack(data: np.ndarray, format_: str, shape: tuple[int, int]) -> Packed:
    """The bytes of a GGUF tensor of `shape` (rows, columns) packed for the device."""
    rows, columns = shape
    if format_ in FLOATS:
        held = words(np.ascontiguousarray(data).view("<u2").reshape(shape), 16)
        return Packed((array(held),), None, None, None, format_, shape)
    f = FORMATS[format_]
    if columns % f.block:
        raise ShapeMismatch(
            f"{format_} needs rows of a multiple of {f.block} elements, got {list(shape)}"
        )
    parts = f.apart(np.ascontiguousarray(data).view(np.uint8).reshape(-1, f.nbytes))
    planes, shift = [], 0
    codes = parts.codes.reshape(shape)
    for bits in f.planes:
        planes.append(array(words((codes >> np.uint8(shift)) & np.uint8((1 << bits) - 1), bits)))
        shift += bits
    blocks = (rows, columns // f.block)
    if f.minimum:
        assert parts.m is not None
        scales = parts.d.astype("<u4") | (parts.m.astype("<u4") << np.uint32(16))
        scales = scales.reshape(blocks)
    else:
        scales = words(parts.d.reshape(blocks), 16)
    steps, lows = (
        None if p is None else array(words(p.reshape(rows, -1), f.step_bits))
        for p in (parts.steps, parts.lows)
    )
    return Packed(tuple(planes), array(scales), steps, lows, format_, shape)
