"""How kernels over rows run: one kernel, or two for each reduction when there are few long rows.

The shapes follow compiler/codegen/geometry.py, which these estimates are of.
"""

from __future__ import annotations

from typing import NamedTuple

from ..schedule.target import Target
from .graph import Pattern

BUSY_ROWS = {"cpu": 16, "gpu": 64}  # rows that are enough for one kernel
SEQUENTIAL = {"cpu": 4096, "gpu": 64}  # steps of one thread that cost less than two kernels more
RESERVE = 256  # loop iterations kept below a target's limit
FULL_ROWS = 16  # threads of a GPU for each of its profile's rows that read at full speed


class RowPlan(NamedTuple):
    """`used` is the share of the device that the rows keep busy."""

    launches: int
    used: float
    staged: bool


def row_plan(
    pattern: Pattern, levels: int, stores: bool, target: Target, staged: bool | None = None
) -> RowPlan:
    """The kernels for `levels` dependent reductions, after which elements are stored or not;
    `staged` says whether there are two for each reduction, where both ways are possible."""
    along = not pattern.last_kept
    cpu = target.kind == "cpu"
    wide = pattern.run >= 4 and (pattern.run % 4 == 0 or (along and cpu))
    units = pattern.rows // 4 if wide and not along else pattern.rows
    steps = pattern.length // 4 if wide and along else pattern.length
    threads = 1 if cpu else _threads(units, steps, along, target)
    trips = -(-steps // threads)
    passes = levels + stores
    iterations = trips * passes + trips * passes // 64 + RESERVE
    fits = not target.loop_limit or iterations <= target.loop_limit
    enough = units >= BUSY_ROWS[target.kind] or trips * passes <= SEQUENTIAL[target.kind]
    if not fits or (not enough if staged is None else staged):
        return RowPlan(2 * levels + stores, 1.0, True)
    many = target.profile.rows if cpu else target.profile.rows * FULL_ROWS
    return RowPlan(1, min(1.0, max(1, units) * threads / many), False)


def _threads(units: int, steps: int, along: bool, target: Target) -> int:
    """Threads a row on a GPU."""
    most = min(256, target.max_invocations)
    if along:
        threads = _power(-(-steps // 4), most)
        while threads < most and threads < steps and units * threads < 1 << 15:
            threads *= 2
        return threads
    together, threads = _power(units, 32), 1
    while threads * together < most and threads * 4 < steps:
        if threads >= 8 and units * threads >= 1 << 15:
            break
        threads *= 2
    return threads


def _power(n: int, most: int) -> int:
    """The least power of two that is at least n, up to `most`."""
    return min(most, 1 << max(0, n - 1).bit_length())
