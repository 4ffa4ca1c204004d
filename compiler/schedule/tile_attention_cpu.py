"""Tilings of attention on llvmpipe, with what each one takes: a lane a row, or two products of
tiles. Both are priced in the same ns, and by the size of their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple, Protocol

from .target import Target
from .tile import Tile, Value, fold

Pass = Literal["forward", "q", "kv", "bias"]

# Products of a pass: how often a row of the head's two sizes (d, dv) takes part.
PRODUCTS: dict[Pass, tuple[int, int]] = {
    "forward": (1, 1),
    "q": (2, 1),
    "kv": (2, 2),
    "bias": (1, 1),
}


class Attributes(Protocol):
    """What the ops of attention say of their scores."""

    @property
    def causal(self) -> bool: ...
    @property
    def offset(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def softcap(self) -> float: ...
    @property
    def extras(self) -> tuple[str, ...]: ...
    @property
    def empty(self) -> str: ...


class Scores(NamedTuple):
    """What becomes of scores, as far as kernels and their times depend on it; all of them are seen
    unless something is said."""

    causal: bool = False
    offset: int = 0
    window: int = 0
    softcap: bool = False
    extras: int = 0  # masks and biases
    empty: str = "zero"

    @property
    def plain(self) -> bool:
        """Whether scores are products, of which at most causal ones are hidden, and every query
        has a key."""
        more = self.extras or self.window or self.softcap
        return not more and (not self.causal or self.offset >= 0)


PLAIN = Scores()


def scores_of(op: Attributes) -> Scores:
    """What an op of attention, or of its gradients, does to scores."""
    cap = bool(op.softcap)
    return Scores(op.causal, op.offset, op.window, cap, len(op.extras), op.empty)


@dataclass(frozen=True, slots=True)
class Heads:
    """`bh` heads of `tq` queries and `tk` keys, of `d` and `dv` elements."""

    bh: int
    tq: int
    tk: int
    d: int
    dv: int

    def flops(self, step: Pass) -> int:
        """Of a pass, all scores counted."""
        on_d, on_dv = PRODUCTS[step]
        return 2 * self.bh * self.tq * self.tk * (on_d * self.d + on_dv * self.dv)


def cpu_tiles(target: Target, step: Pass, heads: Heads, scores: Scores) -> list[Tile]:
    """The tilings of a pass on llvmpipe, best first: the fastest, unless one of which the driver
    compiles less code is hardly slower.
    """
    if step == "forward":
        found = list(_forward_lanes(target, heads, scores))
        if scores.plain:
            found += _product_tiles(target, heads, scores)
    else:
        found = list(_gradient_lanes(target, step, heads, scores))
        if scores.plain:
            found += _gradient_products(target, step, heads, scores)
    most = target.max_groups**2
    legal = [way for way in found if way.code <= _MOST_CODE and way.groups <= most]
    legal.sort(key=_rank)
    near = [way for way in legal if _rank(way) <= _NOISE * _rank(legal[0])]
    near.sort(key=lambda way: way.code)
    return [_tile(target, step, heads, way) for way in (*near, *legal[len(near) :])]


# -- prices: nanoseconds of one core for 8 lanes; wider vectors take proportionally longer --------

BEST_FLOP_PER_NS = 64.0  # of one core, more than any tiling reaches
_WORKERS = 4  # groups that should be there for an even share of the threads
_WORTH_A_COPY = 1200  # loads by a whole subgroup, from where on images save something
_COPY = 0.17  # a byte that one thread copies to an image, while the others wait
# a lane a row, forward: a group, a quad of its row loaded and stored; of each score its weight, the
# load of a mask or bias, a cap; four elements of columns that lie in buffers, not in images; an
# element of a column handed round, and multiplied by a row
_GROUP, _QUAD, _EXP, _EXTRA, _CAP, _FROM_BUFFER = 360.0, 49.0, 6.8, 30.0, 6.0, 53.0
_HANDED, _MULTIPLY = 0.14, 0.334
# gradients: a group, quads of rows loaded from images and stored; an element of a column handed
# round, and multiplied by a row; a weight; a vector that a turn reads beyond those that are near
_GRADIENT_GROUP, _GRADIENT_LOAD, _GRADIENT_STORE = 290.0, 51.0, 27.0
_GRADIENT_SPREAD, _GRADIENT_MULTIPLY, _GRADIENT_EXP = 0.244, 0.186, 1.6
_NEAR, _BEYOND = 576, 0.345
# what unfused products are priced at, where heads are many, over what they take
_AS_PRODUCTS = 1.12
# products of tiles: a group, a row stored, an element of a score or of a result, of a score where a
# row of queries is handed round, the softmax of a row, four elements from images and from buffers
_TILE_GROUP, _TILE_ROW, _SUM, _SPREAD, _SOFTMAX = 375.0, 49.0, 0.77, 0.9, 20.0
_IMAGE, _BUFFER = 7.5, 29.5
# of gradients: four elements of a row loaded or stored, an element that lanes add up, the weights
# of a row and what follows, four elements of columns from images, what queries have as columns
_ROW_FOUR, _GRADIENT_SUM, _GRADIENT_WEIGHTS, _COLUMN_FOUR, _STATS = 35.0, 0.889, 20.0, 4.7, 217.0

# -- code: instructions times values of rows that live across them --------------------------------

_MOST_CODE = 14_000_000  # which llvmpipe compiles for 10 s
_SECOND_OF_CODE = 1_400_000
_FIRST_SECONDS = 0.2
_WORTH_A_SECOND = 0.05  # of a kernel's time, that a second of compilation should save
_NOISE = 1.04  # times that are told apart by nothing
_FORWARD_TEXT = 4.3  # a pair of elements
_GRADIENT_TEXT, _GRADIENT_HELD = 1200, 2.4  # an element multiplied, a pair of elements held
_LANE_ROWS = (1, 2, 3, 4)
_MOST_ROWS = 32  # of a tile of products: 64 are 5 % faster and take four times as long to compile


def _seconds(code: int) -> float:
    """What llvmpipe takes to compile: its allocator of registers looks at each value that lives at
    each instruction."""
    return _FIRST_SECONDS + code / _SECOND_OF_CODE


class _Way(NamedTuple):
    """A tiling: its rows, its time, its code."""

    template: str
    params: tuple[tuple[str, Value], ...]
    groups: int
    spent: float
    code: int


def _rank(way: _Way) -> float:
    return way.spent * (1 + _WORTH_A_SECOND * _seconds(way.code))


def _tile(target: Target, step: Pass, heads: Heads, way: _Way) -> Tile:
    grid = fold(way.groups, target.max_groups)
    spent = way.spent * (1.0 if step == "forward" else _AS_PRODUCTS)
    efficiency = heads.flops(step) / BEST_FLOP_PER_NS / spent
    lanes = target.subgroup
    return Tile(way.template, (*way.params, ("grid", grid)), grid, (lanes, 1, 1), 0, efficiency)


def copied(lanes: int, tiles: int, bh: int, columns: int, elements: int) -> bool:
    """Whether the columns that each of a head's `tiles` loads whole, `elements` of each, are worth
    copies in images."""
    return tiles > 1 and bh * tiles * ceil(columns / lanes) * elements // 4 >= _WORTH_A_COPY


@lru_cache(maxsize=4096)
def visited(step: Pass, scores: Scores, rows: int, block: int, tq: int, tk: int) -> int:
    """The blocks of columns that all tiles of so many rows of a head look at: hidden ones are
    skipped."""
    in_all, columns = (tk, tq) if step == "kv" else (tq, tk)
    tops = range(0, in_all, rows)
    skips = scores.empty == "zero" if step == "kv" else step == "q" or scores.empty != "mean"
    if not skips or not (scores.causal or scores.window):
        return len(tops) * ceil(columns / block)
    ranges = (_columns(step, scores, top, rows, columns) for top in tops)
    return sum(max(0, ceil(end / block) - start // block) for start, end in ranges)


def _columns(step: Pass, scores: Scores, top: int, rows: int, columns: int) -> tuple[int, int]:
    """The columns that the rows from `top` on see, from the first one to the one after the last."""
    start, end, offset, window = 0, columns, scores.offset, scores.window
    if step == "kv":
        if scores.causal:
            start = max(0, top - offset)
        if window:
            end = min(end, max(0, top + rows - 1 + window - offset))
        return start, end
    if scores.causal:
        end = min(end, max(0, top + rows + offset))
    if window:
        start = max(0, top + offset + 1 - window)
    return start, end


def even(groups: int) -> int:
    """Groups that take as long, when threads share them out."""
    return ceil(groups / _WORKERS) * _WORKERS


# -- a lane a row ----------------------------------------------------------------------------------


def _forward_lanes(target: Target, heads: Heads, scores: Scores) -> Iterator[_Way]:
    lanes, bh, tq, tk = target.subgroup, heads.bh, heads.tq, heads.tk
    # a turn has four keys
    if target.loop_limit and ceil(tk / lanes) * (lanes // 4 + 3) >= target.loop_limit:
        return
    size, quads = heads.d + heads.dv, ceil(heads.d / 4) + ceil(heads.dv / 4)
    for rows in _LANE_ROWS:
        if (rows - 1) * lanes >= tq:
            return
        tiles = ceil(tq / (lanes * rows))
        blocks = visited("forward", scores, rows * lanes, lanes, tq, tk) / tiles
        each = size * _HANDED + rows * (size * _MULTIPLY + _EXP + _more(scores))
        once = _GROUP + rows * quads * _QUAD
        images = target.images and copied(lanes, tiles, bh, tk, size)
        if not images:
            once += blocks * quads * _FROM_BUFFER
        spent = even(bh * tiles) * (blocks * lanes * each + once) * lanes / 8
        spent += images * _COPY * 4 * bh * tk * size
        code = int(_FORWARD_TEXT * rows * (rows + 3) * size**2)
        params = (("L", lanes), ("QR", rows))
        yield _Way("attention_cpu.wgsl.j2", params, bh * tiles, spent, code)


def _gradient_lanes(target: Target, step: Pass, heads: Heads, scores: Scores) -> Iterator[_Way]:
    lanes, bh = target.subgroup, heads.bh
    in_all, columns = (heads.tk, heads.tq) if step == "kv" else (heads.tq, heads.tk)
    # a turn has two columns
    if target.loop_limit and ceil(columns / lanes) * (lanes // 2 + 3) >= target.loop_limit:
        return
    size, results = heads.d + heads.dv, heads.d + (heads.dv if step == "kv" else 0)
    work = size + results
    for rows in _LANE_ROWS:
        if (rows - 1) * lanes >= in_all:
            return
        tiles = ceil(in_all / (lanes * rows))
        blocks = visited(step, scores, rows * lanes, lanes, heads.tq, heads.tk) / tiles
        held = rows * work + 2 * size  # rows, their results, and columns at two places
        each = work * _GRADIENT_SPREAD + max(0, held - _NEAR) * _BEYOND
        each += rows * (work * _GRADIENT_MULTIPLY + _GRADIENT_EXP + _more(scores))
        once = _GRADIENT_GROUP + rows * ceil(results / 4) * _GRADIENT_STORE
        once += rows * ceil(size / 4) * _GRADIENT_LOAD
        if not (target.images and copied(lanes, tiles, bh, columns, size)):
            once += (rows + blocks) * ceil(size / 4) * (_BUFFER - _IMAGE)
        spent = even(bh * tiles) * (blocks * lanes * each + once) * lanes / 8
        code = int(_GRADIENT_TEXT * work * (1 + rows) + _GRADIENT_HELD * (work * rows) ** 2)
        params = (("L", lanes), ("R", rows), ("grad", step))
        yield _Way("attention_bwd_cpu.wgsl.j2", params, bh * tiles, spent, code)


def _more(scores: Scores) -> float:
    """What becomes of a score besides."""
    return scores.extras * _EXTRA + scores.softcap * _CAP


# -- products of tiles -----------------------------------------------------------------------------


def _evenly(lanes: int, size: int) -> bool:
    """Whether fours of a row of queries are spread evenly over lanes, or lanes over them."""
    fours = size // 4
    return fours % lanes == 0 or lanes % fours == 0


def _product_tiles(target: Target, heads: Heads, scores: Scores) -> Iterable[_Way]:
    """A subgroup has TM rows, a lane four keys, or four elements of queries and of the result."""
    lanes, d, dv = target.subgroup, heads.d, heads.dv
    keys = 4 * lanes
    if lanes < 4 or lanes & (lanes - 1) or d % 4 or dv % 4:
        return
    blocks_in_all, columns = ceil(heads.tk / keys), ceil(dv / keys)
    turns = dv if keys % dv == 0 else keys * columns  # elements of the result that lanes add up
    if target.loop_limit and blocks_in_all * (d // 4 + lanes + 3) >= target.loop_limit:
        return
    for rows in range(lanes, _MOST_ROWS + 1, lanes):
        if rows - lanes >= heads.tq:
            return
        tiles = ceil(heads.tq / rows)
        images = target.images and copied(lanes, tiles, heads.bh, heads.tk, d + dv)
        load = _IMAGE if images else _BUFFER
        once = _TILE_GROUP + rows * columns * _TILE_ROW
        if _evenly(lanes, d):
            loads = d + turns
            block, once = d * _SUM, once + rows * ceil(d / keys) * load
        else:
            loads = d + rows * d / 4 / lanes + turns
            block = d * _SPREAD
        block = loads * load + rows * (block + _SOFTMAX + turns * _SUM)
        blocks = visited("forward", scores, rows, keys, heads.tq, heads.tk) / tiles
        spent = even(heads.bh * tiles) * (blocks * block + once) * lanes / 8
        spent += images * _COPY * 4 * heads.bh * (heads.tk * (d + dv) + heads.tq * d)
        # of a row: 4 products of scores, 4 of each column, softmax; sums, scores and results live
        code = rows * (102 + 16 * columns) * rows * (8 + 4 * columns)
        params = (("L", lanes), ("TM", rows))
        yield _Way("attention_tile_cpu.wgsl.j2", params, heads.bh * tiles, spent, code)


def _gradient_products(target: Target, step: Pass, heads: Heads, scores: Scores) -> Iterable[_Way]:
    """A subgroup has TM rows, a lane four columns, or four elements of rows and of results."""
    lanes, d = target.subgroup, heads.d
    block = 4 * lanes
    if lanes < 4 or lanes & (lanes - 1) or d % 4 or d != heads.dv or not _evenly(lanes, d):
        return
    in_all, columns = (heads.tk, heads.tq) if step == "kv" else (heads.tq, heads.tk)
    products, parts = sum(PRODUCTS[step]), ceil(d / block)
    turns = products * min(d // 4, lanes) + 3
    if target.loop_limit and ceil(columns / block) * turns >= target.loop_limit:
        return
    skipped = scores._replace(empty="zero")  # every query has a key
    for rows in range(lanes, _MOST_ROWS + 1, lanes):
        if rows - lanes >= in_all:
            return
        tiles = ceil(in_all / rows)
        near = target.images and copied(lanes, tiles, heads.bh, columns, 2 * d)
        away = 0.0 if near else _BUFFER - _IMAGE
        each = products * d * (_COLUMN_FOUR + away + rows * _GRADIENT_SUM)
        each += rows * _GRADIENT_WEIGHTS + (step == "kv") * _STATS
        once = rows * parts * (products * _ROW_FOUR + 2 * away)
        blocks = visited(step, skipped, rows, block, heads.tq, heads.tk) / tiles
        spent = even(heads.bh * tiles) * (blocks * each + once) * lanes / 8
        # of a row: the loops' products, weights; its operands, scores and results live
        code = rows * (120 + 34 * products * parts) * rows * (2 + products * parts)
        params = (("L", lanes), ("TM", rows), ("grad", step))
        yield _Way("attention_bwd_tile_cpu.wgsl.j2", params, heads.bh * tiles, spent, code)
