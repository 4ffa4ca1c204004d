"""Which arrays lanes of llvmpipe store one after the other, at addresses that all of them share:
see compiler/codegen/lanes.py."""

from __future__ import annotations

from collections.abc import Sequence

from .target import Target

FEATURES = ("immediates", "shader-int64", "subgroup")
PAIR = 8  # elements of a store
_WORDS = ("f32", "i32", "u32", "bool")  # types whose elements are words in memory
LARGE = 1 << 18  # elements that are worth a longer text, which is no part of a merged kernel
SHARE = 0.4  # of the time of other stores


def can_store(target: Target, arrays: Sequence[tuple[str, int]]) -> bool:
    """Whether arrays of (dtype, elements) may be stored so on a target."""
    able = target.kind == "cpu" and target.images and set(FEATURES) <= set(target.features)
    fits = all(dtype in _WORDS and n % PAIR == 0 for dtype, n in arrays)
    return able and fits and target.subgroup >= 2


def in_turn(target: Target, size: int, results: int) -> bool:
    """Whether kernels without reductions had better store so, of as many results of `size`
    elements."""
    return size % (4 * max(1, target.subgroup)) == 0 and size * results >= LARGE
