"""How kernels over rows run: one kernel, or two for each reduction when there are few long rows.

These are estimates of compiler/codegen/geometry.py; what both need to know is in tile_rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ..schedule.target import Target
from ..schedule.tile_rows import (
    BUSY_ROWS,
    BUSY_SHARED,
    EACH,
    FEW_ROWS,
    FEWEST,
    HELD,
    INLINE,
    INLINE_WIDEST,
    WIDEST,
    begin_within,
    has_subgroups,
    power,
    row_threads,
)
from .graph import Pattern

SEQUENTIAL = {"cpu": 4096, "gpu": 32}  # steps of one thread that cost less than two kernels more
RESERVE = 256  # loop iterations kept below a target's limit
# on a GPU: threads for each of its profile's rows that would read at full speed if nothing else
# held them up, and how far below that as many are (an H200: 1,024 read 80 to 95 GB/s, 65,536 2,200)
FULL_ROWS, HELD_UP = 72, 0.8
SPREAD_ROWS = 512  # threads of a GPU for each of its profile's rows that compute at full speed


class RowPlan(NamedTuple):
    """`used` is the share of the device's bandwidth that the rows reach, `spread` that of its
    arithmetic; with `held`, a row is read and each of its elements is computed once. With `fours`
    lanes of a CPU read and write vec4s."""

    launches: int
    used: float
    staged: bool
    held: bool = False
    spread: float = 1.0
    fours: bool = True


def row_plan(
    pattern: Pattern,
    levels: int,
    stores: bool,
    target: Target,
    staged: bool | None = None,
    in_turn: bool = False,
) -> RowPlan:
    """The kernels for `levels` dependent reductions, after which elements are stored or not;
    `staged` says whether there are two for each reduction, where both ways are possible. With
    `in_turn` lanes that share rows store one after the other."""
    along = not pattern.last_kept
    cpu = target.kind == "cpu"
    wide = pattern.run >= 4 and (pattern.run % 4 == 0 or (along and cpu))
    units = pattern.rows // 4 if wide and not along else pattern.rows
    steps = pattern.length // 4 if wide and along else pattern.length
    passes = levels + stores
    worth = (passes > 1 and steps >= EACH * target.subgroup) or units < FEW_ROWS
    able = cpu and along and steps >= FEWEST and has_subgroups(target)
    lanes = power(steps, target.subgroup)  # of a row that lanes of a CPU share
    within = able and wide and begin_within(pattern.rows, pattern.length, lanes)
    alone = able and (worth or within)
    shared = in_turn or alone
    together = 1
    if cpu:
        threads = lanes if shared else 1
    else:
        threads, together = row_threads(target, units, steps, along)
    trips = -(-steps // threads)
    held = in_turn or (shared and trips + bool(pattern.length % 4) <= HELD)
    even = (pattern.length if along else pattern.run) % 4 == 0
    iterations = trips * passes + trips * passes // 64 + RESERVE
    fits = not target.loop_limit or iterations <= target.loop_limit
    busy = BUSY_SHARED if shared else BUSY_ROWS[target.kind]
    written_out = not cpu and trips <= (INLINE_WIDEST if threads == WIDEST else INLINE)
    enough = (
        written_out or -(-units // together) >= busy or trips * passes <= SEQUENTIAL[target.kind]
    )
    if not fits or (not enough if staged is None else staged):
        return RowPlan(2 * levels + stores, 1.0, True, fours=even)
    rate = max(1, units) * threads / target.profile.rows
    if cpu:
        return RowPlan(1, min(1.0, rate), False, held, min(1.0, rate), even or within)
    used = rate / FULL_ROWS / (1 + HELD_UP * rate / FULL_ROWS)
    return RowPlan(1, min(1.0, used), False, held, min(1.0, rate / SPREAD_ROWS))
