"""Numbers packed in u32 words: bit fields and two 16-bit floats a word, for quantized weights.

Each takes the word and a place: a number of fields from the lowest bits on, modulo those of a word.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir import Node
from .elementwise import declare


def _field(bits: int) -> Callable[..., Node]:
    def numpy(word: np.ndarray, place: np.ndarray) -> np.ndarray:
        shift = (place * np.uint32(bits)) & np.uint32(31)
        return ((word >> shift) & np.uint32((1 << bits) - 1)).astype(np.float32)

    wgsl = f"eg_field{{v}}({{0}}, {{1}}, {bits}u)"
    return declare(
        f"field_{bits}",
        wgsl,
        numpy,
        arity=2,
        takes="u",
        result="f32",
        cost=4,
        periods=(0, 32 // bits),
    )


def _bfloat(word: np.ndarray, place: np.ndarray) -> np.ndarray:
    bits = (word >> ((place & np.uint32(1)) * np.uint32(16))) << np.uint32(16)
    return bits.astype(np.uint32).view(np.float32)


def _half(word: np.ndarray, place: np.ndarray) -> np.ndarray:
    bits = (word >> ((place & np.uint32(1)) * np.uint32(16))) & np.uint32(0xFFFF)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


field = {bits: _field(bits) for bits in (1, 2, 4, 8)}
unpack_half = declare(
    "unpack_half",
    "eg_half{v}({0}, {1})",
    _half,
    arity=2,
    takes="u",
    result="f32",
    cost=2,
    periods=(0, 2),
)
unpack_bfloat = declare(
    "unpack_bfloat",
    "eg_bfloat{v}({0}, {1})",
    _bfloat,
    arity=2,
    takes="u",
    result="f32",
    cost=2,
    periods=(0, 2),
)
