"""Which arrays lanes of llvmpipe store one after the other, at addresses that all of them share:
see compiler/codegen/lanes.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .target import Target

FEATURES = ("immediates", "shader-int64", "subgroup")
PAIR = 8  # elements of a store
_WORDS = ("f32", "i32", "u32", "bool")  # types whose elements are words in memory
LARGE = 1 << 16  # elements that are worth a longer text, which is no part of a merged kernel
LONG = 1 << 25  # multiplications of a product that are worth it, whose text is twice as long
SHARE = 0.4  # of the time of other stores
WRITTEN = 64  # vec4s of a row that a lane stores, or kernels take seconds to translate


def can_store(target: Target, arrays: Sequence[tuple[str, int]]) -> bool:
    """Whether arrays of (dtype, elements) may be stored so on a target."""
    able = target.kind == "cpu" and target.rated().images
    able = able and set(FEATURES) <= set(target.features)
    fits = all(dtype in _WORDS and n % PAIR == 0 for dtype, n in arrays)
    return able and fits and target.subgroup >= 2


def in_turn(target: Target, size: int, results: int) -> bool:
    """Whether kernels without reductions had better store so, of as many results of `size`
    elements."""
    return size % (4 * max(1, target.subgroup)) == 0 and size * results >= LARGE


def lanes_of_row(subgroup: int, rows: int, length: int, results: int) -> int:
    """How many lanes have a row together, if they store `results` values of each of its elements
    one after the other; 0 if they cannot."""
    steps, rest = divmod(length, 4)
    lanes = math.gcd(steps, subgroup)
    if rest or lanes < 2 or rows % (subgroup // lanes):
        return 0
    return lanes if 0 < results * steps // lanes <= WRITTEN else 0
