"""Counter-based random bits: a pure function of key and counter, the same on every device."""

from __future__ import annotations

import numpy as np

from .elementwise import declare

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(k0: np.ndarray, k1: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """The first word of Threefry-2x32 with 20 rounds (Salmon et al., 2011) of the block (counter,
    0)."""
    with np.errstate(over="ignore"):
        keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
        x, y = counter + k0, k1 + np.zeros_like(counter)
        for block in range(5):
            for r in _ROTATIONS[block % 2]:
                x = x + y
                y = ((y << np.uint32(r)) | (y >> np.uint32(32 - r))) ^ x
            x = x + keys[(block + 1) % 3]
            y = y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x


random_bits = declare(
    "random_bits", "eg_random_bits{v}({0}, {1}, {2})", threefry, arity=3, takes="u", cost=80
)
# bits >> 8 as a float in [0, 1): 24 bits, exact on every device
unit_float = declare(
    "unit_float",
    "eg_unit_float{v}({0})",
    lambda x: (x >> np.uint32(8)).astype(np.float32) * np.float32(2**-24),
    takes="u",
    result="f32",
    cost=2,
)
