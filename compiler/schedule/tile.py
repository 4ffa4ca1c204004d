"""Legal tilings of the heavy kernels on a target, best first: pure integers, no WGSL and no device.

A `Tile` names a template and the values that it needs besides the operands. Its efficiency is the share of the
template's best flop rate that the shape can reach; it orders candidates and feeds the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from .target import Target

NVIDIA_WORKGROUP_BYTES = 48 << 10  # more hangs in the NVIDIA driver, without an error


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to run a contraction or an attention kernel.

    `params` are render values of `template` (the grid's among them: `grid`). With `swap`, the operands' values go
    through `templates.swapped` first. With `splits` > 1 the kernel writes [splits, batch, m, n] partial sums, which
    another kernel adds up.
    """

    template: str
    params: tuple[tuple[str, object], ...]
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    workgroup_bytes: int
    efficiency: float
    splits: int = 1
    swap: bool = False

    @property
    def values(self) -> dict[str, object]:
        return dict(self.params)


def fold(groups: int, max_groups: int) -> tuple[int, int, int]:
    """A grid of at least `groups` workgroups within the limit of each dimension; few surplus ones."""
    rows = ceil(groups / max_groups)
    if rows > max_groups:
        raise ValueError(f"a grid needs at most {max_groups}^2 workgroups, got {groups}")
    return (ceil(groups / rows), rows, 1)


def workgroup_budget(target: Target) -> int:
    return min(target.max_workgroup_bytes, NVIDIA_WORKGROUP_BYTES)


def candidates(
    target: Target,
    batch: int,
    m: int,
    n: int,
    k: int,
    a_vec_axis: str = "k",
    b_vec_axis: str = "n",
    count: int = 4,
) -> list[Tile]:
    """The `count` best tilings of c[batch, m, n] = a[batch, m, k] b[batch, k, n], best first; never empty.

    The vector axes are those of `templates.protocol.Axis`.
    """
    if min(batch, m, n, k) < 1:
        raise ValueError(
            f"a contraction needs positive extents, got batch {batch}, {m} x {n} x {k}"
        )
    swapped_axis = {"m": "n", "n": "m", "k": "k", "none": "none"}
    tiles: list[Tile] = []
    for swap in (False, True):
        shape = (batch, n, m, k) if swap else (batch, m, n, k)
        axes = (
            (swapped_axis[b_vec_axis], swapped_axis[a_vec_axis])
            if swap
            else (a_vec_axis, b_vec_axis)
        )
        if target.kind == "cpu" and target.subgroup:
            tiles.extend(_shuffle_tiles(target, *shape, *axes, swap))
        else:
            tiles.extend(_shared_tiles(target, *shape, swap))
            tiles.extend(_row_tiles(target, *shape, axes[1], swap))
    tiles.sort(key=lambda tile: (-tile.efficiency, tile.splits, tile.swap, tile.params))
    return tiles[:count]


# -- llvmpipe: one subgroup a tile -------------------------------------------------------------------------------

# measured nanoseconds of one core for 8 lanes
_LOAD4, _LOAD1, _STORE4, _STORE1 = 23.6, 13.0, 17.0, 9.3
_MULTIPLY_ADD, _SHUFFLE, _GROUP = 0.29, 0.3, 74.0
_BEST_FLOP_PER_NS = 26.0  # of one core
_WORKERS = 4  # groups that should be there for an even share of the threads
_EXTRA_KERNEL = 20_000.0  # adding up the partial sums of split-K


def _shuffle_tiles(
    target: Target, batch: int, m: int, n: int, k: int, a_axis: str, b_axis: str, swap: bool
) -> Iterator[Tile]:
    lanes = target.subgroup
    for rows, width, vectors in _shuffle_shapes(lanes, m, n):
        block = _block_of_k(target, rows, lanes, k, b_axis)
        tiles = batch * ceil(m / rows) * ceil(n / (lanes * width * vectors))
        for splits in _splits(tiles, k, 8, 256):
            if tiles * splits > target.max_groups**2:
                continue
            if target.loop_limit and ceil(k / block / splits) >= target.loop_limit:
                continue
            steps = ceil(k / splits)
            body = _shuffle_ns(lanes, min(rows, m), rows, width, vectors, a_axis, b_axis) * steps
            stores = (
                min(rows, m)
                * vectors
                * (_STORE4 if width == 4 and n % 4 == 0 and not swap else _STORE1 * width)
            )
            waves = ceil(tiles * splits / _WORKERS) * _WORKERS
            spent = waves * (body + stores + _GROUP) + (_EXTRA_KERNEL * 2 if splits > 1 else 0.0)
            efficiency = min(1.0, 2 * batch * m * n * k / _BEST_FLOP_PER_NS / spent)
            grid = fold(tiles * splits, target.max_groups)
            params = dict(
                L=lanes, TM=rows, CW=width, CV=vectors, KU=block, splits=splits, grid=grid
            )
            yield Tile(
                "contract_cpu.wgsl.j2",
                tuple(params.items()),
                grid,
                (lanes, 1, 1),
                0,
                efficiency,
                splits,
                swap,
            )


def _shuffle_shapes(lanes: int, m: int, n: int) -> Iterator[tuple[int, int, int]]:
    """(rows, columns a vector, vectors a lane): more than covers the matrix only in the last step up."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        if rows > 8 and rows >= 2 * m:
            break
        for width, vectors in ((1, 1), (4, 1), (4, 2)):
            if vectors == 2 and (rows > 32 or n < 8 * lanes):
                continue
            yield rows, width, vectors


def _block_of_k(target: Target, rows: int, lanes: int, k: int, b_axis: str) -> int:
    """Steps a block: what one load of a covers; a whole cache line of b where its rows are far apart."""
    block = max(4, 4 * lanes // rows)
    if b_axis == "k" and k >= 1024 and rows > 4:
        block = max(block, 16)
    while target.loop_limit and ceil(k / block) >= target.loop_limit // 2 and block < 64:
        block *= 2
    return block


def _shuffle_ns(
    lanes: int, used: int, rows: int, width: int, vectors: int, a_axis: str, b_axis: str
) -> float:
    """Nanoseconds of one step of k in one tile."""
    vector_a = a_axis == "k" or (a_axis == "m" and rows >= 4)
    loads_a = rows / lanes / 4 * (_LOAD4 if vector_a else 4 * _LOAD1)
    if b_axis == "k":
        loads_b = vectors * width / 4 * _LOAD4
    elif width == 4 and b_axis == "n":
        loads_b = vectors * _LOAD4
    else:
        loads_b = vectors * width * _LOAD1
    # two vectors a lane: more accumulators than the stack serves at full speed
    spills = 1.25 if vectors == 2 and used > 16 else 1.0
    return loads_a + loads_b + spills * used * (_SHUFFLE + width * vectors * _MULTIPLY_ADD)


def _splits(tiles: int, k: int, wanted: int, least: int) -> list[int]:
    """1, and the powers of 2 that bring the tiles up to `wanted` while each split keeps `least` steps of k."""
    splits = [1]
    while tiles * splits[-1] < wanted and k // (2 * splits[-1]) >= least:
        splits.append(2 * splits[-1])
    return splits


# -- shared memory: one workgroup a tile ---------------------------------------------------------------------------

# rows, columns, steps of k; rows and columns a thread; staged blocks
_SHARED = (
    (128, 128, 8, 16, 8, 2),
    (128, 128, 8, 8, 8, 2),
    (128, 128, 16, 8, 8, 1),
    (128, 64, 16, 8, 8, 1),
    (64, 128, 16, 8, 8, 1),
    (64, 64, 16, 8, 4, 2),
    (64, 64, 16, 4, 4, 1),
    (32, 64, 16, 4, 4, 1),
    (64, 32, 16, 4, 4, 1),
    (32, 32, 16, 4, 4, 1),
    (16, 64, 16, 2, 4, 1),
    (64, 16, 16, 4, 4, 1),
    (16, 16, 16, 2, 4, 1),
)
_BUSY_THREADS = 128 * 256  # that fill a large GPU


def _shared_tiles(target: Target, batch: int, m: int, n: int, k: int, swap: bool) -> Iterator[Tile]:
    if swap:
        return  # tiles are as good both ways, and stores along n are vectors
    for bm, bn, bk, tm, tn, stages in _SHARED:
        threads = bm // tm * (bn // tn)
        nbytes = 4 * stages * bk * (bm + 4 + bn + 4)
        if threads > target.max_invocations or nbytes > workgroup_budget(target):
            continue
        tiles = batch * ceil(m / bm) * ceil(n / bn)
        reuse = tm * tn / (tm + tn)
        for splits in _splits(tiles * threads, k, _BUSY_THREADS, 128):
            if tiles * splits > target.max_groups**2:
                continue
            busy = min(1.0, tiles * splits * threads / _BUSY_THREADS)
            useful = batch * m * n / (tiles * bm * bn)
            steps = k / splits / (ceil(k / splits / bk) * bk + 2 * bk)
            efficiency = (
                reuse / (reuse + 2.5) * useful * steps * busy * (0.8 if splits > 1 else 1.0)
            )
            grid = fold(tiles * splits, target.max_groups)
            params = dict(
                BM=bm, BN=bn, BK=bk, TM=tm, TN=tn, stages=stages, splits=splits, grid=grid
            )
            yield Tile(
                "contract_gpu.wgsl.j2",
                tuple(params.items()),
                grid,
                (threads, 1, 1),
                nbytes,
                efficiency,
                splits,
            )


def _row_tiles(
    target: Target, batch: int, m: int, n: int, k: int, b_axis: str, swap: bool
) -> Iterator[Tile]:
    """For at most 4 rows: bound by reading b once, so what counts is how many threads read."""
    if m > 4:
        return
    for across, along in (
        ((4, 32), (2, 64), (1, 128)) if b_axis == "k" else ((8, 16), (16, 8), (8, 32))
    ):
        threads = across * along
        nbytes = 16 * m * threads
        if threads > target.max_invocations or nbytes > workgroup_budget(target):
            continue
        tiles = batch * ceil(n / (4 * across))
        for splits in _splits(tiles * threads, k, _BUSY_THREADS, 16 * along):
            if tiles * splits > target.max_groups**2:
                continue
            busy = min(1.0, tiles * splits * threads / _BUSY_THREADS)
            useful = batch * n / (tiles * 4 * across) * k / (ceil(k / (4 * along)) * 4 * along)
            efficiency = 0.3 * useful * busy * (0.8 if splits > 1 else 1.0)
            grid = fold(tiles * splits, target.max_groups)
            params = dict(CX=across, KY=along, splits=splits, grid=grid)
            yield Tile(
                "contract_row_gpu.wgsl.j2", tuple(params.items()), grid, (threads, 1, 1), nbytes, efficiency,
                splits, swap,
            )  # fmt: skip
