"""How a row kernel lies on a device: what an invocation does of a row, and whether one kernel can
do it all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..index import Index, flatten, unflatten
from ..schedule.lanes import WRITTEN, lanes_of_row
from ..schedule.space import Pattern, length, rows
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
    WANTED,
    WIDEST,
    begin_within,
    has_subgroups,
    power,
    row_threads,
)

_LANES = 8  # invocations that a CPU without subgroups runs together
_LEAST_GROUPS = 8  # of rows that lanes share
_GROUPS = 4  # of as many invocations, that keep the threads of a CPU busy
_TURNS = 16  # rows that lanes have one after the other, so that operands of columns are read once
# vec4s of a lane, where lanes store one after the other: of rows (one at least), and of two rows
# that share something; more are little faster and take long to translate
_WRITTEN, _TWO = 8, 32
_ABREAST = 4  # subgroups of a workgroup that do so
_UNROLL = 4  # steps of a loop on a gpu that are under way together
_SLACK = 256  # loop iterations kept in reserve below the target's limit
_SEQUENTIAL = 4096  # steps that one invocation does sooner than two kernels more
_WANTED = {"cpu": 1024, "gpu": WANTED}  # invocations (workgroups) where rows are in segments


@dataclass(frozen=True, slots=True)
class Geometry:
    """R rows a workgroup, T threads a row, S segments of a row; a step is one element or one vec4.

    On a CPU the lanes of a subgroup share rows where elements of a row lie together: T lanes a row,
    R rows one after the other; if they store one after the other (see `lanes`), all is written out,
    and the R rows are `copies`. Otherwise an invocation takes `unroll` steps of a row at a time, or
    has `copies` rows, `lanes` units apart: whole cache lines are used at once, which counts where
    rows lie a power of two apart and compete for places in the cache. On a GPU `unroll` steps, T
    apart, are under way at a time.

    along: neighbouring elements of memory belong to one row, so that a vec4 holds four elements of
    a row. across: they belong to neighbouring rows, so that a vec4 holds one element of each of
    four rows.
    """

    pattern: Pattern
    along: bool
    wide: bool  # steps are vec4
    T: int
    R: int
    segments: int
    unroll: int = 1
    copies: int = 1
    lanes: int = _LANES  # invocations that a CPU runs together
    shared: bool = False  # lanes of a CPU have a row together
    abreast: int = 0  # subgroups of a workgroup, if lanes store one after the other

    @property
    def rows(self) -> int:
        return rows(self.pattern)

    @property
    def length(self) -> int:
        return length(self.pattern)

    @property
    def units(self) -> int:
        """Rows, or fours of neighbouring rows."""
        return self.rows // 4 if self.wide and not self.along else self.rows

    @property
    def workers(self) -> int:
        """Invocations on a CPU."""
        return self.units // self.copies * self.segments

    @property
    def steps(self) -> int:
        return self.length // 4 if self.wide and self.along else self.length

    @property
    def tail(self) -> int:
        """Elements of a row after its last vec4."""
        return self.length % 4 if self.wide and self.along else 0

    @property
    def within(self) -> bool:
        """Whether rows begin within a vec4: lanes that share one take the whole vec4s in it, then
        single elements at both of its ends."""
        fours = self.shared and self.tail > 0 and self.segments == 1
        return fours and begin_within(self.rows, self.length, self.T)

    @property
    def share(self) -> int:
        """Steps of a segment."""
        return -(-self.steps // self.segments)

    @property
    def trips(self) -> int:
        """Steps of one thread."""
        return -(-self.share // self.T)

    @property
    def block(self) -> int:
        """Steps that are added up before they join a longer sum, which loses less to rounding."""
        return 64 if self.trips <= 1 << 14 else 256

    @property
    def inline(self) -> bool:
        most = (
            INLINE_WIDEST
            if self.T == WIDEST
            else WRITTEN
            if self.abreast
            else HELD
            if self.shared
            else INLINE
        )
        tail = min(self.tail, 1) if self.shared else self.tail
        return self.segments == 1 and self.trips + tail <= most

    @property
    def workgroups(self) -> int:
        """On a gpu, or where lanes of a CPU share rows."""
        return -(-self.units // (self.R * self.members)) * self.segments

    @property
    def members(self) -> int:
        """Rows that the lanes of a CPU have side by side."""
        return self.lanes // self.T if self.shared else 1

    def flat(self, row: Index, position: Index) -> Index:
        """Where element `position` of row `row` lies in row-major order."""
        kept = iter(unflatten(row, [n for reduced, n in self.pattern if not reduced]))
        within = iter(unflatten(position, [n for reduced, n in self.pattern if reduced]))
        at = [next(within) if reduced else next(kept) for reduced, _ in self.pattern]
        return flatten(at, [n for _, n in self.pattern])


def geometry(pattern: Pattern, target: Target, segments: int = 1, passes: int = 1) -> Geometry:
    """How to run over a pattern in `segments` a row, `passes` times."""
    plain = _plain(pattern, target, segments)
    if target.kind == "cpu":
        return _shared(plain) if _shares(plain, target, passes) else _whole_lines(plain)
    threads, together = row_threads(target, plain.units, plain.share, plain.along, plain.segments)
    found = replace(plain, T=threads, R=together)
    even = found.steps % (segments * threads * _UNROLL) == 0
    return replace(found, unroll=_UNROLL) if even and not found.inline else found


def other_geometry(pattern: Pattern, target: Target, passes: int) -> Geometry | None:
    """The other way of lanes of a CPU with rows, if there are two."""
    plain = _plain(pattern, target, 1)
    if target.kind != "cpu" or not _can_share(plain, target):
        return None
    return _whole_lines(plain) if _shares(plain, target, passes) else _shared(plain)


def _plain(pattern: Pattern, target: Target, segments: int) -> Geometry:
    """One thread a row."""
    along = not pattern or pattern[-1][0]
    run = pattern[-1][1] if pattern else 1
    reduced_runs = sum(reduced for reduced, _ in pattern)
    # where rows do not begin at a vec4, neighbouring threads of a gpu read neighbouring elements
    # instead
    wide = run >= 4 and (run % 4 == 0 or (along and reduced_runs == 1 and target.kind == "cpu"))
    return Geometry(pattern, along, wide, 1, 1, segments, lanes=target.subgroup or _LANES)


def _can_share(g: Geometry, target: Target) -> bool:
    """Whether the lanes of a CPU can have rows together."""
    return has_subgroups(target) and g.along and g.segments == 1 and g.steps >= FEWEST


def _shares(g: Geometry, target: Target, passes: int) -> bool:
    """Whether they had better: they load once what several passes need, and store whole lines."""
    worth = (passes > 1 and g.steps >= EACH * g.lanes) or g.units < FEW_ROWS
    return _can_share(g, target) and (worth or _shared(g).within)


def _shared(g: Geometry) -> Geometry:
    """The same with T lanes a row, and R rows one after the other."""
    g = replace(g, T=power(g.steps, g.lanes), shared=True)
    tiles = -(-g.units // g.members)
    turns = min(_TURNS, max(1, tiles // _LEAST_GROUPS))
    if not g.inline:
        even = g.steps % (g.T * _UNROLL) == 0 and not g.within
        g = replace(g, unroll=_UNROLL if even else 1)
        turns = min(turns, max(1, _SEQUENTIAL // g.trips))
    return replace(g, R=turns)


def in_turn(g: Geometry, outputs: int, columns: bool) -> Geometry | None:
    """The same with lanes that store `outputs` values of each element one after the other; None
    where that cannot be, or is too much text. `columns`: rows read values that they share."""
    threads = lanes_of_row(g.lanes, g.units, g.length, outputs)
    if not (g.shared and g.wide and threads):
        return None
    g = replace(g, T=threads, abreast=1)
    written = outputs * g.trips
    tiles = g.units // g.members
    fits = [n for n in (8, 4, 2, 1) if n * written <= _WRITTEN and tiles % n == 0]
    if columns and _WRITTEN < 2 * written <= _TWO and tiles % 2 == 0:
        fits = [2, *fits]
    rows = next((n for n in fits if tiles // n >= _LEAST_GROUPS), 1)
    abreast = next(n for n in (_ABREAST, 2, 1) if tiles // rows % n == 0)
    return replace(g, R=rows, copies=rows, abreast=abreast)


def _whole_lines(g: Geometry) -> Geometry:
    """The same with steps or copies so that an invocation uses cache lines whole."""
    if g.along:
        even = [
            u
            for u in (4, 2)
            if g.wide and g.steps % u == 0 and (g.segments == 1 or g.share % u == 0)
        ]
        return replace(g, unroll=even[0] if even else 1)
    most = 4 if g.wide else 8
    fits = [c for c in (8, 4, 2) if c <= most and g.units % (g.lanes * c) == 0]
    busy = [c for c in fits if g.units // (g.lanes * c) * g.segments >= _GROUPS]
    return replace(g, copies=busy[0] if busy else 1)


def fits(g: Geometry, passes: int, target: Target) -> bool:
    """Whether one kernel can make `passes` passes over every row."""
    iterations = g.trips * passes if not g.inline else 0
    iterations += iterations // 64
    iterations = (iterations + 1) * g.R if g.shared else iterations
    return not target.loop_limit or iterations + _SLACK <= target.loop_limit


def worthwhile(g: Geometry, passes: int, target: Target) -> bool:
    """Whether one kernel is faster than one with segments and one that combines them, for each
    pass."""
    if target.kind == "gpu":
        short = g.inline or g.trips * passes <= 4 * INLINE
        return short or g.workgroups >= BUSY_ROWS["gpu"]
    busy = BUSY_SHARED if g.shared else BUSY_ROWS["cpu"]
    return g.units >= busy or g.trips * passes <= _SEQUENTIAL


def split(pattern: Pattern, target: Target) -> Geometry:
    """How to run over a pattern in as many segments as keep the device busy and its loops short."""
    plain = _plain(pattern, target, 1)
    whole = _whole_lines(plain) if target.kind == "cpu" else geometry(pattern, target)
    least = 32 if target.kind == "cpu" else INLINE  # steps of a thread
    wanted = -(-_WANTED[target.kind] * whole.R // whole.units)
    segments = min(max(wanted, 1), max(1, whole.steps // (least * whole.T)))
    segments = min(max(segments, -(-whole.trips // 8192)), max(whole.steps, 1))
    # no empty segments
    share = -(-max(whole.steps, 1) // segments)
    return geometry(pattern, target, -(-max(whole.steps, 1) // share))
