"""Block formats of quantized weights: GGUF's blocks taken apart into planes of bits and scales.

That is how they are kept on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks taken apart: `codes` (blocks, elements) without sign, float16 `d` and `m` a block as
    u16, and with superblocks the codes of scales and minima (blocks, groups)."""

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    steps: np.ndarray | None = None
    lows: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """value = scale * (code - bias), plus m with minima.

    With superblocks scale = d * (step - step_bias), and m * low is taken off instead.

    `planes` are the bits of a code from the lowest on; a scale serves `group` elements.
    """

    name: str
    nbytes: int  # of a block
    block: int  # elements of a block
    planes: tuple[int, ...]
    bias: int
    group: int
    minimum: bool
    step_bias: int
    apart: Callable[[np.ndarray], Parts]
    step_bits: int = 8  # of the codes of scales and minima on the device

    @property
    def superblocks(self) -> bool:
        return self.group != self.block


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as bits."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")[:, 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(blocks, n) bytes as (blocks, 2 n) codes: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """(blocks, n) bytes as (blocks, 8 n) bits, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _strided(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Runs of `run` bytes that hold 8 / bits runs of fields, one above the other."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _q4_0(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[:, 2:]), _halves(b, 0))


def _q4_1(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[:, 4:]), _halves(b, 0), _halves(b, 2))


def _q5_0(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4), _halves(b, 0))


def _q5_1(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4), _halves(b, 0), _halves(b, 2))


def _q8_0(b: np.ndarray) -> Parts:
    return Parts(b[:, 2:] ^ np.uint8(128), _halves(b, 0))


def _q2_k(b: np.ndarray) -> Parts:
    scales, codes = b[:, :16], b[:, 16:80]
    return Parts(_strided(codes, 32, 2), _halves(b, 80), _halves(b, 82), scales & 15, scales >> 4)


def _q3_k(b: np.ndarray) -> Parts:
    high, low, scales = b[:, :32], b[:, 32:96], b[:, 96:108]
    steps = _nibbles(scales[:, :8]) | (_strided(scales[:, 8:], 4, 2) << 4)
    return Parts(_strided(low, 32, 2) | (_strided(high, 32, 1) << 2), _halves(b, 108), steps=steps)


def _six_bits(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes as 8 scales and 8 minima of 6 bits."""
    d, m, both = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    steps = np.concatenate([d & 63, (both & 15) | ((d >> 2) & 48)], 1)
    return steps, np.concatenate([m & 63, (both >> 4) | ((m >> 2) & 48)], 1)


def _q4_k(b: np.ndarray) -> Parts:
    steps, lows = _six_bits(b[:, 4:16])
    return Parts(_strided(b[:, 16:], 32, 4), _halves(b, 0), _halves(b, 2), steps, lows)


def _q5_k(b: np.ndarray) -> Parts:
    steps, lows = _six_bits(b[:, 4:16])
    codes = _strided(b[:, 48:], 32, 4) | (_strided(b[:, 16:48], 32, 1) << 4)
    return Parts(codes, _halves(b, 0), _halves(b, 2), steps, lows)


def _q6_k(b: np.ndarray) -> Parts:
    codes = _strided(b[:, :128], 64, 4) | (_strided(b[:, 128:192], 32, 2) << 4)
    return Parts(codes, _halves(b, 208), steps=b[:, 192:208] ^ np.uint8(128))


FORMATS = {
    f.name: f
    for f in (
        Format("Q4_0", 18, 32, (4,), 8, 32, False, 0, _q4_0),
        Format("Q4_1", 20, 32, (4,), 0, 32, True, 0, _q4_1),
        Format("Q5_0", 22, 32, (4, 1), 16, 32, False, 0, _q5_0),
        Format("Q5_1", 24, 32, (4, 1), 0, 32, True, 0, _q5_1),
        Format("Q8_0", 34, 32, (8,), 128, 32, False, 0, _q8_0),
        Format("Q2_K", 84, 256, (2,), 0, 16, True, 0, _q2_k, 4),
        Format("Q3_K", 110, 256, (2, 1), 4, 16, False, 32, _q3_k),
        Format("Q4_K", 144, 256, (4,), 0, 32, True, 0, _q4_k),
        Format("Q5_K", 176, 256, (4, 1), 0, 32, True, 0, _q5_k),
        Format("Q6_K", 210, 256, (4, 2), 32, 16, False, 128, _q6_k),
    )
}


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Rows of fields as rows of u32 words, the first field in the lowest bits, zeros at the end."""
    missing = -fields.shape[1] % (32 // bits)
    if missing:
        fields = np.pad(fields, ((0, 0), (0, missing)))
    if bits == 16:
        return np.ascontiguousarray(fields, "<u2").view("<u4")
    packed = fields[:, :: 8 // bits].copy()
    for i in range(1, 8 // bits):
        packed |= fields[:, i :: 8 // bits] << np.uint8(bits * i)
    return packed.view("<u4")
