"""Tilings of attention on llvmpipe as two products of tiles, for long rows without masks."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from .target import Target
from .tile import Tile, fold

TEMPLATE = "attention_tile_cpu.wgsl.j2"
_MOST_ROWS = 32  # of a tile: 64 are 5 % faster and take four times as long to compile
_BLOCKS = 4  # of keys that there should be, or too many scores of a tile count for nothing

# measured nanoseconds of one core for 8 lanes, in these kernels; wider vectors take proportionally
# longer
_PRODUCT, _LOAD4, _ROW, _TURN, _STORE, _GROUP = 1.25, 3.0, 28.0, 0.4, 30.0, 200.0
_BEST_FLOP_PER_NS = 40.0  # of one core
_WORKERS = 4  # groups that should be there for an even share of the threads


def product_tiles(target: Target, bh: int, tq: int, tk: int, d: int, dv: int) -> Iterator[Tile]:
    """Tilings for `bh` heads of `tq` queries and `tk` keys: a subgroup has TM rows, a lane four
    keys, then four elements of the result. Faster than a row a lane where they are offered.
    """
    lanes = target.subgroup
    keys = 4 * lanes
    if lanes < 4 or lanes & (lanes - 1) or d % 4 or dv % keys or tk < _BLOCKS * keys:
        return
    blocks, columns = ceil(tk / keys), dv // keys
    loops = blocks * (d // 4 + lanes + 3)
    for rows in range(lanes, _MOST_ROWS + 1, lanes):
        tiles = bh * ceil(tq / rows)
        if tiles > target.max_groups**2 or (target.loop_limit and loops >= target.loop_limit):
            continue
        scores = d * rows * _PRODUCT + (d + rows * d / 4 / lanes) * _LOAD4
        turns = rows * (keys * columns * _PRODUCT + lanes * _TURN) + keys * columns * _LOAD4
        block = scores + rows * _ROW + turns
        waves = ceil(tiles / _WORKERS) * _WORKERS
        spent = waves * (blocks * block + rows * _STORE + _GROUP) * lanes / 8
        flops = 2 * bh * tq * tk * (d + dv)
        grid = fold(tiles, target.max_groups)
        params = (("L", lanes), ("TM", rows), ("grid", grid))
        efficiency = min(1.0, flops / _BEST_FLOP_PER_NS / spent)
        yield Tile(TEMPLATE, params, grid, (lanes, 1, 1), 0, efficiency)
