"""Legal tilings of the attention kernels on a target, best first: forward, dq, dk with dv, and the
gradient of a bias.

An empty list says that no fused kernel fits, and attention stays two products and a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from .target import Target
from .tile import BUSY_THREADS, Tile, Value, fold, processors, workgroup_budget
from .tile_attention_cpu import (
    BEST_FLOP_PER_NS,
    PLAIN,
    Heads,
    Pass,
    Scores,
    copied,
    cpu_tiles,
    even,
    scores_of,
)
from .tile_attention_rows import gradient_rows

__all__ = ["Pass", "Scores", "attention_candidates", "copied", "rows_of", "scores_of"]


def attention_candidates(
    target: Target,
    step: Pass,
    bh: int,
    tq: int,
    tk: int,
    d: int,
    dv: int,
    count: int = 3,
    kept: int = 1,
    scores: Scores = PLAIN,
) -> list[Tile]:
    """The `count` best tilings of one pass over `bh` heads of `tq` queries and `tk` keys.

    "forward" gives o and the stats of rows, "q" the gradient of q, "kv" those of k and v, "bias"
    that of `kept` biases which the heads share. `scores` says what else is done to scores, and
    which are hidden: on CPUs efficiencies count them as computed, which makes them larger where
    they are skipped.
    """
    if min(bh, tq, tk, d, dv) < 1:
        raise ValueError(
            f"attention needs positive extents, got {bh} x {tq} x {tk}, heads {d}, {dv}"
        )
    if step == "bias":
        tiles = list(_bias_tiles(target, bh, kept, tq, tk, d, dv))
    elif target.kind == "cpu" and target.subgroup > 1:
        return cpu_tiles(target, step, Heads(bh, tq, tk, d, dv), scores)[:count]
    else:
        tiles = list(_shared_tiles(target, step, bh, tq, tk, d, dv))
        if step == "forward":
            tiles += _held_tiles(target, bh, tq, tk, d, dv)
        else:
            tiles += gradient_rows(target, step, bh, tq, tk, d, dv)
    tiles.sort(key=lambda tile: (-tile.efficiency, tile.params))
    return tiles[:count]


def rows_of(tile: Tile) -> int:
    """The rows that a workgroup of llvmpipe has."""
    v = tile.values
    rows = v["TM"] if "TM" in v else v["L"] * (v["QR"] if "QR" in v else v["R"])  # type: ignore[operator]
    assert isinstance(rows, int)
    return rows


# -- the gradient of a bias: a tile of it goes over all heads that share it ------------------------


def _bias_tiles(
    target: Target, bh: int, kept: int, tq: int, tk: int, d: int, dv: int
) -> Iterator[Tile]:
    summed = bh // kept
    if target.loop_limit and summed >= target.loop_limit:
        return
    lanes = target.subgroup if target.kind == "cpu" else 0
    for tile in _bias_lanes(lanes, tq, d, dv) if lanes else _bias_shared(target, tk, d, dv):
        rows, columns = tile.rows, tile.columns
        tiles = kept * ceil(tq / rows) * ceil(tk / columns)
        if tiles > target.max_groups**2:
            continue
        useful = tq / (ceil(tq / rows) * rows) * tk / (ceil(tk / columns) * columns)
        if lanes:
            busy = tiles / even(tiles)
        else:
            busy = min(1.0, tiles * tile.threads / BUSY_THREADS)
        grid = fold(tiles, target.max_groups)
        template = f"attention_bias_{'cpu' if lanes else 'gpu'}.wgsl.j2"
        params = (*tile.params, ("grid", grid))
        rate = min(1.0, tile.rate * useful * busy)
        yield Tile(template, params, grid, (tile.threads, 1, 1), tile.nbytes, rate)


class _Bias(NamedTuple):
    """A tile of a bias' gradient, and its rate when the device is busy and the tile full."""

    rows: int
    columns: int
    threads: int
    params: tuple[tuple[str, Value], ...]
    nbytes: int
    rate: float


# measured nanoseconds of one core
_LOAD4, _MULTIPLY_ADD, _SHUFFLE, _EXP = 18.0, 0.25, 0.3, 14.0


def _bias_lanes(lanes: int, tq: int, d: int, dv: int) -> Iterator[_Bias]:
    quads = ceil(d / 4) + ceil(dv / 4)
    for rows in (1, 2, 3, 4):
        if rows > 1 and (rows - 1) * lanes >= tq:
            break
        loads = quads * (1 + rows) * _LOAD4 + lanes * (d + dv) * _SHUFFLE
        each = lanes * ((d + dv) * _MULTIPLY_ADD + _EXP)
        flops = 2 * rows * lanes * lanes * (d + dv)
        rate = flops / BEST_FLOP_PER_NS / (loads + rows * each)
        yield _Bias(rows * lanes, lanes, lanes, (("L", lanes), ("R", rows)), 0, rate)


def _bias_shared(target: Target, tk: int, d: int, dv: int) -> Iterator[_Bias]:
    for br, bc, tm, tn in _SHAPES:
        threads = br // tm * (bc // tn)
        if threads > target.max_invocations or 3 * tm * tn > _REGISTERS:
            continue
        for dc in (64, 32, 16, 8):
            nbytes = 4 * dc * (br + bc + 8)
            if (dc >= 2 * max(d, dv) and dc > 8) or nbytes > workgroup_budget(target):
                continue
            padded = (d / (ceil(d / dc) * dc) + dv / (ceil(dv / dc) * dc)) / 2
            reuse = tm * tn / (tm + tn)
            rate = reuse / (reuse + 2.0) * padded * _CHUNK_GAIN[dc] * br / (br + 8)
            params = (("TM", tm), ("TN", tn), ("DC", dc), ("BR", br), ("BC", bc))
            yield _Bias(br, bc, threads, params, nbytes, rate)


# -- shared memory: a workgroup a tile -----------------------------------------------------------

# rows, columns; rows and columns a thread
_SHAPES = (
    (64, 32, 4, 4),
    (64, 64, 4, 8),
    (32, 32, 4, 4),
    (32, 32, 2, 4),
    (16, 32, 2, 4),
    (16, 16, 2, 4),
)
# of gradients by the elements of a head staged at a time: an NVIDIA GPU writes loops of 16 out
_CHUNK_GAIN = {64: 0.8, 32: 0.78, 16: 1.0, 8: 0.75}
_REGISTERS = 160  # of scores and accumulators a thread


def _shared_tiles(
    target: Target, step: Pass, bh: int, tq: int, tk: int, d: int, dv: int
) -> Iterator[Tile]:
    rows_in_all, columns = (tk, tq) if step == "kv" else (tq, tk)
    for br, bc, tm, tn in _SHAPES:
        across = bc // tn
        threads = br // tm * across
        if threads > target.max_invocations:
            continue
        tiles = bh * ceil(rows_in_all / br)
        if tiles > target.max_groups**2:
            continue
        useful = rows_in_all / (ceil(rows_in_all / br) * br) * columns / (ceil(columns / bc) * bc)
        if step == "forward":
            busy = _busy(target, tiles, threads)
        else:
            busy = min(1.0, tiles * threads / BUSY_THREADS)
        reuse = tm * tn / (tm + tn)
        for dc, vc, nbytes in _chunks(target, step, br, bc, tm, tn, d, dv):
            padded = (d / (ceil(d / dc) * dc) + dv / (ceil(dv / vc) * vc)) / 2
            barriers, reloads = _staged(step, br, tm * tn, dc, vc, d, dv)
            efficiency = reuse / (reuse + 2.0) * useful * busy * padded * barriers * reloads
            grid = fold(tiles, target.max_groups)
            params: dict[str, Value] = {"TM": tm, "TN": tn, "DC": dc, "VC": vc, "grid": grid}
            if step == "forward":
                params |= {"BQ": br, "BK": bc, "shuffle": target.subgroup >= across}
                template = "attention_gpu.wgsl.j2"
            else:
                params |= {"BR": br, "BC": bc, "grad": step}
                template = "attention_bwd_gpu.wgsl.j2"
            yield Tile(template, tuple(params.items()), grid, (threads, 1, 1), nbytes, efficiency)


def _busy(target: Target, tiles: int, threads: int) -> float:
    """The share of a GPU that forward tiles keep busy: of its processors some may have none, and
    one with few threads waits for memory."""
    used = min(1.0, tiles / processors(target))
    warps = tiles * threads / 32 / (processors(target) * used)
    return used * min(1.0, warps / (warps + 8) * 1.5)


def _staged(
    step: Pass, br: int, scores: int, dc: int, vc: int, d: int, dv: int
) -> tuple[float, float]:
    """The shares of the rate that barriers, and reading the columns again, leave when `dc` and `vc`
    elements of a head are staged at a time."""
    if step == "forward":
        barriers = 1 / (1 + 0.05 * (ceil(d / dc) + ceil(dv / vc) - 2))
        return barriers, br / (br + 2) * (0.92 if dc < d else 1.0)
    barriers = _CHUNK_GAIN[dc] / (1 + 0.05 * (ceil(dv / vc) - 1))
    barriers *= 0.7 if scores > 16 else 1.0  # two products with so many a thread: fewer threads
    return barriers, br / (br + 8)


def _chunks(
    target: Target, step: Pass, br: int, bc: int, tm: int, tn: int, d: int, dv: int
) -> Iterator[tuple[int, int, int]]:
    """(elements of a head staged for a score, elements staged for an output, bytes) that fit."""
    across = bc // tn
    for dc in (64, 32, 16, 8):
        if dc >= 2 * max(d, dv) and dc > 8:
            continue
        for vc in (128, 64, 32, 16):
            if vc % (4 * across) or (vc >= 2 * max(d, dv) and vc > 4 * across):
                continue
            nbytes = 4 * (dc * (br + 4) + dc * (bc + 4) + bc * vc + bc * (br + 4))
            outputs = {
                "forward": ceil(dv / vc),
                "q": ceil(d / vc),
                "kv": ceil(d / vc) + ceil(dv / vc),
            }
            scores = tm * tn * (1 if step == "forward" else 2)
            if nbytes > workgroup_budget(target):
                continue
            if tm * outputs[step] * vc // across + scores > _REGISTERS:
                continue
            yield dc, vc, nbytes


# -- shared memory: whole rows of heads in it ------------------------------------------------------

# few results a thread, so that many threads share a processor: 8 by 8 takes half as long again
_HELD_SHAPES = ((64, 64, 4, 4), (32, 32, 4, 4), (16, 32, 4, 4), (16, 16, 2, 4))
# over tiles of chunks, once a processor has so many groups to take turns, and where it has none
_HELD_GAIN, _HELD_GROUPS, _HELD_ALONE = 1.69, 6, 0.4


def _held_tiles(target: Target, bh: int, tq: int, tk: int, d: int, dv: int) -> Iterator[Tile]:
    for br, bc, tm, tn in _HELD_SHAPES:
        across = bc // tn
        threads = br // tm * across
        shuffle = target.subgroup >= across
        nbytes = _held_bytes(br, bc, across, d, dv, shuffle)
        registers = tm * (_padded(dv, across) // across + tn) + 4 * max(tn, dv // across)
        tiles = bh * ceil(tq / br)
        if nbytes > workgroup_budget(target) or registers > _REGISTERS:
            continue
        if threads > target.max_invocations or tiles > target.max_groups**2:
            continue
        useful = tq / (ceil(tq / br) * br) * tk / (ceil(tk / bc) * bc)
        useful *= (d / _padded(d, across) + dv / _padded(dv, across)) / 2
        reuse = tm * tn / (tm + tn)
        share = min(1.0, tiles / (_HELD_GROUPS * processors(target)))
        gain = _HELD_ALONE + (_HELD_GAIN - _HELD_ALONE) * share
        rate = gain * reuse / (reuse + 2.0) * useful * _busy(target, tiles, threads)
        efficiency = min(1.0, rate * br / (br + 2))
        grid = fold(tiles, target.max_groups)
        params: tuple[tuple[str, Value], ...] = (
            ("TM", tm), ("TN", tn), ("grid", grid), ("BQ", br), ("BK", bc), ("shuffle", shuffle),
        )  # fmt: skip
        yield Tile("attention_held_gpu.wgsl.j2", params, grid, (threads, 1, 1), nbytes, efficiency)


def _padded(size: int, across: int) -> int:
    """Elements of a line that holds `size` and that `across` threads share in fours."""
    return ceil(size / (4 * across)) * 4 * across


def _held_bytes(br: int, bc: int, across: int, d: int, dv: int, shuffle: bool) -> int:
    """Workgroup memory, as the template declares it."""
    line = ceil(d / 4) * 4
    partial = 0 if shuffle else br * across
    return 4 * (br * line + max(bc * line, br * bc) + bc * _padded(dv, across) + partial)
