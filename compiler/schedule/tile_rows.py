"""Tilings of products with few rows: what counts is reading the wide operand once; and how kernels
over rows lie on a GPU, for the kernels and for what they are expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import TYPE_CHECKING

from .target import Target

if TYPE_CHECKING:
    from .tile import Product, Tile

ROWS = "contract_rows.wgsl.j2"
MOST_ROWS = 8  # that share kernels
MOST_PACKED_ROWS = 8  # of a product with a packed matrix
MOST_SUMS = 32  # of a lane, or kernels take long to compile
SUBGROUPS = 264  # that keep a large GPU busy
PACKED = 0.75  # words an element, below which several are in a word

# of kernels over rows on a GPU
WIDEST = 1024  # threads of a workgroup
INLINE = 8  # steps of a row that are written out instead of looped over
INLINE_WIDEST = 16  # the same for the largest workgroups: a row stays in their registers
WANTED = 256  # workgroups where rows are in segments

# of kernels over rows on a CPU
MOST_ENDS = 6  # elements of a row that are in no vec4 of its own, each of which a lane has
HELD = 16  # steps of a lane that shares rows that are written out: they stay on its stack
FEWEST = 4  # lanes of a row, or each lane has a row of its own
EACH = 2  # steps of a lane that sharing rows is worth
FEW_ROWS = 64  # below which lanes with rows of their own leave threads idle
BUSY_SHARED = 2  # rows that lanes share that are enough for one kernel
BUSY_ROWS = {"cpu": 16, "gpu": 64}  # rows that are enough, on any device

# measured nanoseconds of one core for 8 lanes
_LOAD4, _LOAD1, _STORE = 26.0, 13.0, 10.0
_MULTIPLY_ADD, _SHUFFLE, UNPACK, _GROUP = 0.3, 0.5, 0.6, 150.0


def shares_rows(target: Target, rows: Sequence[int], result: Sequence[int]) -> bool:
    """Whether products of `rows` (..., m, k) with matrices can be one kernel on a target, which
    then also computes statistics of the rows."""
    *lead, m, k = rows
    few = prod(lead) == 1 and 1 <= m <= MOST_ROWS and k % 4 == 0 and k > 0 and result[-1] > 0
    return few and has_subgroups(target)


def has_subgroups(target: Target) -> bool:
    """Whether kernels may use subgroups of a known size."""
    return target.subgroup > 1 and (target.kind == "cpu" or "subgroup" in target.features)


def lane_tiles(target: Target, product: Product) -> Iterator[Tile]:
    """Tilings for GPUs where elements of the wide operand along k lie together: a subgroup has some
    columns."""
    from .tile import Tile, fold

    p = product
    if p.m > MOST_ROWS or p.k % 4 or p.b_axis == "n" or not has_subgroups(target):
        return
    for each in (1, 2, 4):
        tiles = p.batch * ceil(p.n / each)
        if tiles > target.max_groups**2:
            continue
        grid = fold(tiles, target.max_groups)
        busy = min(1.0, tiles / SUBGROUPS)
        yield Tile(
            template=ROWS,
            params=(
                ("L", target.subgroup),
                ("R", each),
                ("fours", False),
                ("splits", 1),
                ("grid", grid),
            ),
            grid=grid,
            workgroup=(target.subgroup, 1, 1),
            workgroup_bytes=0,
            efficiency=0.3 * busy * (1 - 0.2 / each),
            swap=p.swap,
        )


def row_tiles(target: Target, product: Product) -> Iterator[Tile]:
    """Tilings for at most MOST_ROWS rows, where four elements of k lie together."""
    from .tile import BEST_FLOP_PER_NS, Tile, fold, split_counts

    p, lanes = product, target.subgroup
    most = MOST_PACKED_ROWS if p.words[1] < PACKED else MOST_ROWS
    if p.m > most or p.k % 4:
        return
    fours = p.b_axis == "n"
    for each in (4, 8) if fours else (1, 2, 4):
        if each * p.m > MOST_SUMS:
            break
        tiles = p.batch * ceil(p.n / (lanes * each))
        for splits in split_counts(tiles, 8, p.k, 256):
            loops = ceil(p.k / (4 * lanes) / splits)
            if (target.loop_limit and loops >= target.loop_limit) or (
                tiles * splits > target.max_groups**2
            ):
                continue
            grid = fold(tiles * splits, target.max_groups)
            spent = _spent(p, each, fours, tiles, splits, lanes)
            yield Tile(
                template=ROWS,
                params=(
                    ("L", lanes),
                    ("R", each),
                    ("fours", fours),
                    ("splits", splits),
                    ("grid", grid),
                ),
                grid=grid,
                workgroup=(lanes, 1, 1),
                workgroup_bytes=0,
                efficiency=min(1.0, p.flops / BEST_FLOP_PER_NS / spent),
                splits=splits,
                swap=p.swap,
            )


def _spent(p: Product, each: int, fours: bool, tiles: int, splits: int, lanes: int) -> float:
    """Nanoseconds of one core, idle threads counted."""
    steps, words = 4 * lanes, p.words[1]
    if fours:
        load = steps * each / 4 * _LOAD4
    elif words < PACKED:
        load = each * (steps * words / 4 * _LOAD4 + _LOAD1 + steps * UNPACK)
    elif p.b_axis == "k":
        load = each * steps / 4 * _LOAD4
    else:
        load = each * steps * _LOAD1
    block = load + p.m * (_LOAD4 + steps * (_SHUFFLE + each * _MULTIPLY_ADD))
    groups = ceil(tiles * splits / 4) * 4
    group = ceil(p.k / steps / splits) * block + p.m * each * _STORE + _GROUP
    return groups * group * lanes / 8 + (40_000.0 if splits > 1 else 0.0)


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


def begin_within(rows: int, length: int, threads: int) -> bool:
    """Whether rows begin within a vec4: of lanes of a CPU, `threads` of which share a row, each
    takes whole vec4s in it, then one of the single elements at both of its ends."""
    uneven = length % 4 > 0 and rows * length % 4 == 0
    return uneven and threads >= MOST_ENDS and ceil(length // 4 / threads) + 1 > HELD


def power(n: int, most: int) -> int:
    """The least power of two that is at least n, up to `most`."""
    return min(most, 1 << max(0, n - 1).bit_length())
