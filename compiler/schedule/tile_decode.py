"""Tilings of attention for a few rows of queries, and what they take by the cost model.

A workgroup walks along keys at a rate of its own (`Profile.decode`); as many as make up the
device's bandwidth run at once. So few heads leave a device idle unless their keys are split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Literal

from .target import Target
from .tile import Tile, Value, fold, workgroup_budget

Form = Literal["online", "phases", "split"]
FORMS: dict[str, Form] = {
    "attention_online": "online", "attention_phases": "phases", "attention_split": "split",
}  # fmt: skip

SIDE_BY_SIDE = "attention_decode_cpu.wgsl.j2"
THREADS = 256  # of a workgroup on a GPU
_REGISTERS = 112  # floats of a thread on a GPU: queries and results
_SCORES = 16  # of a thread at a time on a GPU
_LANE_FLOATS = 1024  # of 8 lanes on llvmpipe, divided by 8: more takes seconds to compile
_MOST_LOADS = 64  # in the text of a kernel for llvmpipe, which takes long to translate each
_LEAST_KEYS = 64  # of a part of the keys
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# measured on llvmpipe, in times of 16 bytes at a profile's rate: loading four elements from a
# buffer and from an image, arithmetic of a row with them, a score's part of softmax; first where a
# lane has keys of its own, then where lanes share each; and what phases do with a score
_OWN, _SHARED = (1.25, 0.45, 0.25, 1.2), (0.75, 0.25, 0.11, 0.3)
_SCORE_MEMORY = 7.5
_REACHED = 0.74  # of its rate with keys in images, which attention's tiles of queries read too
_GROUP_NS = 4000.0  # llvmpipe: to start a workgroup and to join its threads' results
# measured on a GPU, ns: a step of a workgroup waits for keys, then for values, and longer for each
# vector that a thread has under way; what a row beyond the first adds; its start and its end
_STEP_NS, _VECTOR_NS = 700.0, 20.0
_ROW_NS, _ROW_VECTOR_NS = 200.0, 15.0
_ENDS_NS, _ROW_ENDS_NS = 500.0, 600.0
_BESIDE = 0.15  # of waiting or reading, what the other does not hide
_RESIDENT = 4  # workgroups that one processor of a GPU runs at once


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of keys in all, rows of queries each, keys, sizes of a head of q and k, and of v."""

    heads: int
    rows: int
    keys: int
    d: int
    dv: int


def decode_shape(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> Shape:
    """The shape of a kernel from those of its operands."""
    return Shape(prod(q[:-2]), q[-2], k[-2], q[-1], v[-1])


@lru_cache(maxsize=1024)
def decode_tiles(target: Target, form: Form, shape: Shape) -> tuple[Tile, ...]:
    """The tilings of a form, best first; none where no kernel fits the target."""
    tiles = list(_tiles(target, form, shape))
    tiles.sort(key=lambda tile: decode_ns(target, form, shape, tile))
    return tuple(tiles)


def decode_tile(target: Target, form: Form, shape: Shape) -> Tile | None:
    """The best tiling of a form; None where no kernel fits the target."""
    return next(iter(decode_tiles(target, form, shape)), None)


def decode_ns(
    target: Target, form: Form, s: Shape, tile: Tile, share: float = 1.0, copied: bool = False
) -> float:
    """ns that the kernel takes when `share` of the keys count; its launch is not in it. `copied`
    keys and values are read from images where the target has them."""
    rows = tile.values["RB"]
    assert isinstance(rows, int)
    groups = s.heads * ceil(s.rows / rows) * tile.splits
    keys = s.keys * share / tile.splits
    if target.kind == "gpu":
        return _gpu_ns(target, form, s, tile, groups, keys)
    across = tile.values["TX"]
    assert isinstance(across, int)
    buffer, image, row, score = _OWN if across == 1 else _SHARED
    load = image if copied and target.images else buffer
    vectors = across * (ceil(s.d / (4 * across)) + ceil(s.dv / (4 * across)))
    work = vectors * (load + row * rows) + score * rows
    work += _SCORE_MEMORY * rows * (form == "phases")
    waves = ceil(groups / max(1, round(_workers(target))))
    rate = target.profile.decode * (_REACHED if copied else 1.0)
    return waves * (16.0 * work * keys / rate + _GROUP_NS)


def _workers(target: Target) -> float:
    """Workgroups that make up the device's bandwidth."""
    return max(1.0, target.profile.bandwidth / target.profile.decode)


def _gpu_ns(target: Target, form: Form, s: Shape, tile: Tile, groups: int, keys: float) -> float:
    """A workgroup's steps follow one another, and wait for memory; all groups share its rate."""
    rows, across, along, unroll = (int(tile.values[k]) for k in ("RB", "TX", "TY", "U"))  # type: ignore[call-overload]
    vectors = unroll * (ceil(s.d / 4 / across) + ceil(s.dv / 4 / across))
    step = _STEP_NS + _VECTOR_NS * vectors + (rows - 1) * (_ROW_NS + _ROW_VECTOR_NS * vectors)
    steps = ceil(keys / (along * unroll)) * (2 if form == "phases" else 1)
    workers = _workers(target)
    waiting = steps * step * max(1.0, groups / (_RESIDENT * workers))
    reading = 4.0 * (s.d + s.dv) * keys * max(1.0, groups / workers) / target.profile.decode
    longer, shorter = max(waiting, reading), min(waiting, reading)
    return longer + _BESIDE * shorter + _ENDS_NS + _ROW_ENDS_NS * rows


def _tiles(target: Target, form: Form, s: Shape) -> Iterator[Tile]:
    if min(s.heads, s.rows, s.keys, s.d, s.dv) < 1:
        return
    for tile in _threads(target, form, s):
        if form != "split":
            yield _tile(target, form, s, tile, 1)
            continue
        for splits in _SPLITS:
            if splits == 2 or s.keys >= splits * _LEAST_KEYS:
                yield _tile(target, form, s, tile, splits)


@dataclass(frozen=True, slots=True)
class _Threads:
    rows: int  # of a workgroup
    across: int  # threads that share a key
    along: int  # keys at once
    unroll: int  # keys of a thread at a time
    chunks: tuple[int, int]  # elements of a head at a time, of q and k, and of v
    shuffle: bool
    nbytes: int
    # of a subgroup, which join their results; 1: all rows' are joined in memory; 0: a row at a time
    lanes: int = 0


def _threads(target: Target, form: Form, s: Shape) -> Iterator[_Threads]:
    """The shape of a workgroup: as many rows as registers hold, since each tile of rows reads all
    keys; on a GPU also fewer, since workgroups run side by side."""
    for rows in dict.fromkeys(ceil(s.rows / parts) for parts in range(1, s.rows + 1)):
        if form == "phases" and s.rows % rows:
            continue  # scores of a row are changed in place, so it stands once
        if target.kind == "cpu":
            lanes = (_lanes(target, form, s, rows), _side_by_side(target, form, s, rows))
            found = [threads for threads in lanes if threads is not None]
        else:
            found = list(_shared(target, form, s, rows))
        yield from found
        if found and (target.kind == "cpu" or form == "phases"):
            return


def _lanes(target: Target, form: Form, s: Shape, rows: int) -> _Threads | None:
    """llvmpipe: a lane a key, nothing shared but the results."""
    lanes = target.subgroup or 8
    room = max(4, _LANE_FLOATS * 8 // lanes // rows // 4 * 4)
    if form == "phases":
        chunks = (_even(s.d, room), _even(s.dv, room))
    elif s.d + s.dv <= room or rows * (s.d + s.dv) <= 64:
        chunks = (s.d, s.dv)
    else:
        return None
    width = ceil(chunks[1] / 4) * 4
    nbytes, joined = 4 * lanes * (width + 2 * rows + 1), 0
    if form != "phases":  # all rows at once, in loops: less to compile
        all_rows = 4 * rows * (lanes * (width + 2) + ceil(s.d / 4) * 4)
        if all_rows <= workgroup_budget(target):
            nbytes, joined = all_rows, 1
    trips = ceil(s.keys / lanes)
    passes = ceil(s.d / chunks[0]) + 1 + ceil(s.dv / chunks[1]) if form == "phases" else 1
    slow = target.loop_limit and trips * passes + 4096 > target.loop_limit
    if slow or nbytes > workgroup_budget(target) or (rows > 1 and room < min(64, s.d, s.dv)):
        return None
    return _Threads(rows, 1, lanes, 1, chunks, False, nbytes, joined)


def _side_by_side(target: Target, form: Form, s: Shape, rows: int) -> _Threads | None:
    """llvmpipe: the lanes share each key, so that a load is of neighbors and each lane has little
    of a result."""
    lanes = target.subgroup
    step = 4 * lanes
    if form == "phases" or lanes < 4 or s.d % 4 or s.dv % 4 or "subgroup" not in target.features:
        return None
    chunks = ceil(s.d / step), ceil(s.dv / step)
    loads = lanes * sum(chunks)
    if loads > _MOST_LOADS or rows * (lanes + 8 * sum(chunks)) > _LANE_FLOATS * 8 // lanes:
        return None
    trips = ceil(s.keys / lanes)
    if target.loop_limit and trips + 4096 > target.loop_limit:
        return None
    return _Threads(rows, lanes, 1, lanes, (step * chunks[0], step * chunks[1]), True, 0)


def _even(size: int, room: int) -> int:
    """Elements at a time, a multiple of 4, of a size that is walked in equal steps."""
    steps = ceil(size / room)
    return ceil(size / steps / 4) * 4


def _shared(target: Target, form: Form, s: Shape, rows: int) -> Iterator[_Threads]:
    """A GPU: neighboring threads along a head, so that they read neighboring elements."""
    for across in (8, 16, 4, 32) if target.subgroup else (4, 8, 16):
        shuffle = target.subgroup >= across
        if across > 16 and not shuffle:
            return
        fits = _across(target, form, s, rows, across, shuffle)
        if fits is not None:
            yield fits


def _across(
    target: Target, form: Form, s: Shape, rows: int, across: int, shuffle: bool
) -> _Threads | None:
    """The largest workgroup, and the most keys at a time, that registers and memory allow."""
    step = 4 * across
    chunks = ceil(s.d / step) * step, ceil(s.dv / step) * step
    most = _REGISTERS // rows // 2 * across
    if form == "phases":
        if across < 16 and max(chunks) > 8 * step:
            return None
        room = max(step, most // step * step)
        chunks = min(chunks[0], room), min(chunks[1], room)
    elif sum(chunks) > 2 * most:
        return None
    for unroll in (4, 2, 1):
        for threads in (THREADS, THREADS // 2, THREADS // 4):
            along = min(threads, target.max_invocations) // across
            if along < 1 or rows * unroll > _SCORES:
                continue
            lanes = 0 if form == "phases" else min(target.subgroup, threads) if shuffle else across
            if form == "phases":
                nbytes = 4 * along * chunks[1] + 4 * threads
            else:
                teams = threads // max(lanes, across)
                nbytes = 4 * rows * (teams * (chunks[1] + 2) + chunks[0])
            nbytes += 0 if shuffle else 4 * threads * rows * unroll
            if nbytes <= workgroup_budget(target):
                return _Threads(rows, across, along, unroll, chunks, shuffle, nbytes, lanes)
    return None


def _tile(target: Target, form: Form, s: Shape, t: _Threads, splits: int) -> Tile:
    grid = fold(s.heads * ceil(s.rows / t.rows) * splits, target.max_groups)
    params: dict[str, Value] = {
        "RB": t.rows, "TX": t.across, "TY": t.along, "U": t.unroll, "shuffle": t.shuffle,
        "grid": grid,
    }  # fmt: skip
    if form == "phases":
        params |= {"DC": t.chunks[0], "VC": t.chunks[1]}
        template = "attention_phases.wgsl.j2"
    else:
        params |= {"splits": splits, "lanes": t.lanes}
        side_by_side = target.kind == "cpu" and t.shuffle
        template = SIDE_BY_SIDE if side_by_side else "attention_decode.wgsl.j2"
    threads = (t.across * t.along, 1, 1)
    return Tile(template, tuple(params.items()), grid, threads, t.nbytes, 1.0, splits)
