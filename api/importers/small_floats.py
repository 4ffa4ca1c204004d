"""Floats of 8 bits and fewer: all their values, by code."""

from __future__ import annotations

import numpy as np


def _values(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Sign, exponent and mantissa from the highest bit on; exponent 0 has no leading 1."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    sign = code >> (exponent_bits + mantissa_bits)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    whole = np.ldexp(1 + mantissa, exponent - bias)
    value = np.where(exponent > 0, whole, np.ldexp(mantissa, 1 - bias))
    return np.where(sign, -value, value).astype(np.float32)


def _with(values: np.ndarray, special: dict[int, float]) -> np.ndarray:
    for code, value in special.items():
        values[code] = value
    return values


def _powers() -> np.ndarray:
    """E8M0 of the microscaling formats: powers of 2 from 2^-127, a subnormal of f32, to 2^127."""
    return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


_INFINITIES = {0x7C: np.inf, 0xFC: -np.inf}
_NANS = dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), np.nan)

# By safetensors' names. FNUZ: no infinities, one NaN in the place of -0.
SMALL_FLOATS = {
    "F8_E4M3": _with(_values(4, 3, 7), {0x7F: np.nan, 0xFF: np.nan}),
    "F8_E5M2": _with(_values(5, 2, 15), _INFINITIES | _NANS),
    "F8_E4M3FNUZ": _with(_values(4, 3, 8), {0x80: np.nan}),
    "F8_E5M2FNUZ": _with(_values(5, 2, 16), {0x80: np.nan}),
    "F8_E8M0": _powers(),
    "F6_E2M3": _values(2, 3, 1),
    "F6_E3M2": _values(3, 2, 3),
    "F4": _values(2, 1, 1),
}
