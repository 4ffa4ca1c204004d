"""Tilings of attention's gradients on a GPU with rows in registers.

A few threads have a row: its operands and its results. Columns are staged, and all threads read the
same element at once, so that reading takes no longer than the arithmetic: a row that takes part in
four products is worth its registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from .target import Target
from .tile import BUSY_THREADS, Tile, Value, fold, workgroup_budget

_THREADS_OF_A_ROW = (1, 2, 4, 8)
_THREADS = (128, 64, 32)  # of a workgroup: more leave registers of a processor unused
_COLUMNS = (32, 16)  # staged at a time
_AT_ONCE = 4  # columns that a thread has under way
_REGISTERS = 128  # of a thread, for rows of operands and results
# measured on an H200 with heads of 64, 2 threads a row, by the efficiency of tiles in memory there;
# what more threads a row, which add up products, and fewer rows, which stage as much, leave of it
_RATE = {"q": 0.57, "kv": 0.58}
_RATE_OF_THREADS = {1: 1.0, 2: 1.0, 4: 0.72, 8: 0.5}
_STAGING_ROWS = 37
_FEWER_COLUMNS = 0.94


def gradient_rows(
    target: Target, step: Literal["q", "kv"], bh: int, tq: int, tk: int, d: int, dv: int
) -> Iterator[Tile]:
    """The tilings of a pass over `bh` heads of `tq` queries and `tk` keys that fit a target."""
    rows_in_all, columns = (tk, tq) if step == "kv" else (tq, tk)
    for across in _THREADS_OF_A_ROW:
        if across > max(1, target.subgroup):
            return
        wide, wide_v = (ceil(n / (4 * across)) * 4 * across for n in (d, dv))
        results = wide + wide_v if step == "kv" else wide
        if (wide + wide_v + results) // across > _REGISTERS:
            continue
        padded = (d / wide + dv / wide_v) / 2
        for threads in _THREADS:
            rows = threads // across
            tiles = bh * ceil(rows_in_all / rows)
            if threads > target.max_invocations or tiles > target.max_groups**2:
                continue
            useful = rows_in_all / (ceil(rows_in_all / rows) * rows) * padded
            busy = min(1.0, tiles * threads / BUSY_THREADS)
            staging = rows / (rows + _STAGING_ROWS) * (64 + _STAGING_ROWS) / 64
            rate = _RATE[step] * _RATE_OF_THREADS[across] * useful * busy * min(1.0, staging)
            each = 4 * (wide + wide_v) + (16 if step == "kv" else 0)  # bytes of a column
            staged = next((c for c in _COLUMNS if c * each <= workgroup_budget(target)), 0)
            if not staged:
                continue
            rate *= columns / (ceil(columns / staged) * staged)
            rate *= 1.0 if staged == _COLUMNS[0] else _FEWER_COLUMNS
            grid = fold(tiles, target.max_groups)
            params: tuple[tuple[str, Value], ...] = (
                ("TX", across), ("TY", rows), ("BC", staged), ("U", _AT_ONCE),
                ("grad", step), ("grid", grid), ("shuffle", across > 1),
            )  # fmt: skip
            template = "attention_bwd_rows_gpu.wgsl.j2"
            yield Tile(template, params, grid, (threads, 1, 1), staged * each, min(1.0, rate))
