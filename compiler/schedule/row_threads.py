"""How kernels over rows lie on a GPU: for the kernels, and for what they are expected to take."""

from __future__ import annotations

from .target import Target

WIDEST = 1024  # threads of a workgroup
INLINE = 8  # steps of a row that are written out instead of looped over
INLINE_WIDEST = 16  # the same for the largest workgroups: a row stays in their registers
WANTED = 256  # workgroups where rows are in segments


def row_threads(
    target: Target, units: int, steps: int, along: bool, segments: int = 1
) -> tuple[int, int]:
    """(Threads a row, rows a workgroup), both powers of two, for `units` rows in `segments` of so
    many steps each, `along` the last axis or across it."""
    most = 1 << min(WIDEST, target.max_invocations).bit_length() - 1
    if along:
        threads = power(-(-steps // 4), min(256, most))
        while threads < min(256, most, steps) and units * segments * threads < 1 << 15:
            threads *= 2
        while threads < most and steps > INLINE * threads:
            threads *= 2
        return threads, min(max(1, 128 // threads), power(units, most))
    # few steps a thread, and eight neighboring units at least: their elements fill lines of memory
    threads = min(power(-(-steps // INLINE), most), max(1, most // 8))
    together = min(power(units, 32), most // threads)
    while together > 8 and units * segments < WANTED * together:
        together //= 2
    return threads, together


def power(n: int, most: int) -> int:
    """The least power of two that is at least n, up to `most`."""
    return min(most, 1 << max(0, n - 1).bit_length())
