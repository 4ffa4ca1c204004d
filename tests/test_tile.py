"""Tilings are legal on every class of device, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.tile import NVIDIA_WORKGROUP_BYTES, Tile, Value, candidates, fold
from eggpu.compiler.schedule.tile_attention import (
    Pass,
    Scores,
    attention_candidates,
    rows_of,
)
from eggpu.compiler.schedule.tile_attention_cpu import BEST_FLOP_PER_NS, visited
from eggpu.compiler.schedule.tile_rows import ROWS

NVIDIA = replace(FLOOR, max_workgroup_bytes=64 << 10, max_invocations=1024, subgroup=32)


@given(
    st.integers(1, 12), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 100_000),
    st.sampled_from([LLVMPIPE, FLOOR, NVIDIA]), st.sampled_from(["k", "m", "none"]),
    st.sampled_from(["k", "n", "none"]),
)  # fmt: skip
@settings(max_examples=150)
def test_candidates_are_legal(
    batch: int, m: int, n: int, k: int, target: Target, a_axis: str, b_axis: str
) -> None:
    tiles = candidates(target, batch, m, n, k, a_axis, b_axis, count=100)
    assert tiles
    for tile in tiles:
        assert tile.workgroup_bytes <= min(target.max_workgroup_bytes, NVIDIA_WORKGROUP_BYTES)
        assert prod(tile.workgroup) <= target.max_invocations
        assert max(tile.grid) <= target.max_groups
        assert 0 < tile.efficiency <= 1
        v, (rows, columns) = tile.values, (n, m) if tile.swap else (m, n)
        if tile.template == ROWS:
            covered = ceil(columns / (v["L"] * v["R"]))
            assert rows <= 8
        elif tile.template == "contract_cpu.wgsl.j2":
            covered = ceil(rows / v["TM"]) * ceil(columns / (v["L"] * v["CW"] * v["CV"]))
            assert ceil(k // v["KU"] / v["splits"]) < target.loop_limit
        elif tile.template == "contract_gpu.wgsl.j2":
            covered = ceil(rows / v["BM"]) * ceil(columns / v["BN"])
        else:
            covered = ceil(columns / (4 * v["CX"]))
        assert prod(tile.grid) >= covered * batch * v["splits"]
    assert [t.efficiency for t in tiles] == sorted((t.efficiency for t in tiles), reverse=True)


@pytest.mark.parametrize("groups", [1, 65535, 65536, 10**6 + 1, 65535**2])
def test_fold_covers_with_few_surplus_groups(groups: int) -> None:
    x, y, z = fold(groups, 65535)
    assert max(x, y, z) <= 65535
    assert groups <= x * y * z < groups + y


def test_fold_refuses_what_no_grid_holds() -> None:
    with pytest.raises(ValueError, match="at most 65535"):
        fold(65535**2 + 1, 65535)


def test_few_tiles_are_split_along_k() -> None:
    (best,) = candidates(LLVMPIPE, 1, 8, 8, 1 << 16, count=1)
    assert best.splits > 1
    assert prod(best.grid) >= 4


def test_large_products_take_large_tiles() -> None:
    (best,) = candidates(LLVMPIPE, 1, 512, 512, 512, count=1)
    assert best.values["TM"] == 32
    assert best.images == "ab"
    (best,) = candidates(replace(LLVMPIPE, images=False), 1, 512, 512, 512, count=1)
    assert best.values["TM"] == 64
    assert best.images == ""
    (best,) = candidates(NVIDIA, 1, 4096, 4096, 4096, count=1)
    assert (best.values["BM"], best.values["BN"]) == (128, 128)


def test_tiles_of_odd_products_are_even() -> None:
    (best,) = candidates(LLVMPIPE, 1, 513, 513, 513, "none", "none", count=1)
    assert best.values["TM"] == 57  # nine tiles
    (best,) = candidates(LLVMPIPE, 1, 516, 512, 512, "m", "n", count=1)
    assert best.values["TM"] == 32  # fours of rows


def test_empty_extents_are_refused() -> None:
    with pytest.raises(ValueError, match="positive extents, got batch 1, 3 x 0 x 4"):
        candidates(LLVMPIPE, 1, 3, 0, 4)
    with pytest.raises(ValueError, match="positive extents"):
        attention_candidates(LLVMPIPE, "forward", 1, 0, 4, 8, 8)


@pytest.mark.parametrize("step", ["q", "kv"])
def test_gradients_of_short_heads_own_several_rows_a_lane(step: Pass) -> None:
    """On vectors of 16 lanes too, where one row a lane spreads every column for few products."""
    target, shape = replace(LLVMPIPE, subgroup=16), (32, 64, 64, 32, 32)
    (best,) = attention_candidates(target, step, *shape, count=1)
    assert best.values["R"] == 2  # with four there is one tile a head, which has no images
    (best,) = attention_candidates(target, step, *shape, count=1, scores=Scores(causal=True))
    assert best.values["R"] == 2  # of four, all see the other side's every block
    (best,) = attention_candidates(target, step, 2, 1024, 1024, 32, 32, count=1)
    assert best.values["R"] >= 3
    odd = attention_candidates(target, step, 32, 64, 64, 96, 96, count=1)[0]
    assert odd.values["R"] == 1  # more is held than the nearest cache has


@pytest.mark.parametrize("step", ["q", "kv"])
def test_gradients_of_wide_heads_are_products_of_tiles(step: Pass) -> None:
    target, products = replace(LLVMPIPE, subgroup=16), "attention_bwd_tile_cpu.wgsl.j2"

    def templates(*shape: int, **scores: Any) -> list[str]:
        found = attention_candidates(target, step, *shape, count=99, scores=Scores(**scores))
        return [t.template for t in found]

    assert templates(8, 512, 512, 64, 64)[0] == products
    assert templates(8, 512, 512, 64, 64, causal=True)[0] == products
    assert templates(8, 128, 128, 128, 128)[0] == products
    assert templates(32, 64, 64, 32, 32, causal=True)[0] != products  # of it half is hidden
    for shape, scores in (
        ((8, 512, 512, 96, 96), {}),  # lanes share fours unevenly
        ((8, 512, 512, 64, 32), {}),
        ((8, 512, 512, 62, 62), {}),
        ((8, 512, 512, 64, 64), {"extras": 1}),
        ((8, 512, 512, 64, 64), {"softcap": True}),
        ((8, 512, 512, 64, 64), {"causal": True, "offset": -1}),  # a query without keys
    ):
        assert products not in templates(*shape, **scores)


PRODUCTS, LANES = "attention_tile_cpu.wgsl.j2", "attention_cpu.wgsl.j2"


def forward(*shape: int, lanes: int = 16, **scores: Any) -> list[Tile]:
    target = replace(LLVMPIPE, subgroup=lanes)
    return attention_candidates(target, "forward", *shape, count=99, scores=Scores(**scores))


def test_attention_on_cpus_is_what_takes_least_by_one_measure() -> None:
    """Products of tiles for wide heads and long rows; a lane a row where few keys are or elements
    and lanes are uneven, and where scores are more than products."""
    best = forward(8, 512, 512, 64, 64)[0]
    assert (best.template, best.values["TM"], best.grid) == (PRODUCTS, 32, (128, 1, 1))
    assert forward(8, 512, 512, 64, 64, lanes=8)[0].template == PRODUCTS
    assert forward(8, 512, 512, 64, 64, causal=True)[0].template == PRODUCTS
    assert forward(2, 1024, 1024, 128, 128)[0].template == PRODUCTS
    assert forward(16, 256, 256, 32, 32, causal=True)[0].template == PRODUCTS
    for shape in ((32, 64, 64, 32, 32), (12, 16, 16, 64, 64), (6, 100, 100, 40, 40)):
        found = forward(*shape, causal=True)
        assert found[0].template == LANES
        assert PRODUCTS in {t.template for t in found}  # and its price is known
    for scores in ({"window": 9}, {"softcap": True}, {"extras": 1}, {"causal": True, "offset": -1}):
        assert {t.template for t in forward(8, 512, 512, 64, 64, **scores)} == {LANES}
    for shape in ((8, 512, 512, 64, 30), (8, 512, 512, 30, 64)):
        assert {t.template for t in forward(*shape)} == {LANES}


def test_the_rate_of_attention_is_that_of_its_best_tiling() -> None:
    """The search measures all of attention by this rate: where the best tiling becomes faster and
    the rate does not, gradients seem slower."""
    shape = 96, 4096, 4096, 64, 64
    rate = 2 * BEST_FLOP_PER_NS * forward(*shape)[0].efficiency  # of two cores
    assert rate == pytest.approx(LLVMPIPE.profile.attention, rel=0.05)


def test_of_tilings_that_take_as_long_the_smaller_code_is_taken() -> None:
    for extras, shape in ((0, (6, 100, 100, 40, 40)), (1, (16, 256, 256, 32, 32))):
        best = forward(*shape, causal=True, extras=extras)[0]
        assert best.values["QR"] == 1
    found = forward(32, 64, 64, 32, 32, causal=True)
    two, one = (next(t for t in found if t.values.get("QR") == n) for n in (2, 1))
    assert two.efficiency > one.efficiency
    assert found[0] is one


def test_code_that_is_compiled_for_long_is_no_candidate() -> None:
    def rows(step: Pass, d: int) -> set[Value]:
        target = replace(LLVMPIPE, subgroup=16)
        found = attention_candidates(
            target, step, 2, 64, 64, d, d, count=99, scores=Scores(extras=1)
        )
        return {t.values["QR" if step == "forward" else "R"] for t in found}

    assert rows("kv", 128) == {1, 2, 3, 4}  # its code has loops
    assert rows("kv", 256) == {1, 2}
    assert rows("kv", 1024) == set()
    assert rows("forward", 256) == {1, 2}  # so has this
    assert rows("forward", 512) == set()
    assert {t.template for t in forward(2, 64, 64, 512, 512)} == {PRODUCTS}  # its code has loops


@given(
    st.integers(1, 200), st.integers(1, 200), st.sampled_from([4, 8, 16]), st.integers(1, 40),
    st.booleans(), st.integers(-30, 30), st.integers(0, 50), st.sampled_from(["zero", "mean"]),
    st.sampled_from(["forward", "q", "kv"]),
)  # fmt: skip
def test_hidden_blocks_are_counted_as_kernels_skip_them(
    tq: int, tk: int, block: int, rows: int, causal: bool, offset: int, window: int, empty: str,
    step: Pass,
) -> None:  # fmt: skip
    """Every block with a score that is seen is counted, and at most one more a tile, of rows past
    the last one too."""
    scores = Scores(causal, offset, window, empty=empty)
    found = visited(step, scores, rows, block, tq, tk)
    in_all, columns = (tk, tq) if step == "kv" else (tq, tk)
    padded = ceil(in_all / rows) * rows
    queries, keys = (columns, padded) if step == "kv" else (padded, columns)
    i, j = np.arange(queries)[:, None] + offset, np.arange(keys)
    seen = np.ones((len(i), len(j)), bool)
    if causal:
        seen &= j <= i
    if window:
        seen &= j > i - window
    if empty == "mean" and step != "q":
        seen[:] = True
    seen = seen.T if step == "kv" else seen

    def blocks(last: int) -> int:
        tiles = (seen[top : min(top + rows, last)].any(0) for top in range(0, padded, rows))
        ends = [(np.argmax(t), columns - 1 - np.argmax(t[::-1])) for t in tiles if t.any()]
        return sum(end // block - start // block + 1 for start, end in ends)

    assert blocks(in_all) <= found <= blocks(padded) + padded // rows


@given(
    st.integers(1, 100), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 256),
    st.integers(1, 256), st.sampled_from([LLVMPIPE, FLOOR, NVIDIA]),
    st.sampled_from(["forward", "q", "kv"]),
)  # fmt: skip
@settings(max_examples=150)
def test_attention_candidates_are_legal(
    bh: int, tq: int, tk: int, d: int, dv: int, target: Target, step: str
) -> None:
    tiles = attention_candidates(target, step, bh, tq, tk, d, dv, count=100)
    assert tiles
    rows = tk if step == "kv" else tq
    for tile in tiles:
        assert tile.workgroup_bytes <= min(target.max_workgroup_bytes, NVIDIA_WORKGROUP_BYTES)
        assert prod(tile.workgroup) <= target.max_invocations
        assert max(tile.grid) <= target.max_groups
        assert 0 < tile.efficiency <= 1
        v = tile.values
        if tile.template.endswith("_cpu.wgsl.j2"):
            each = rows_of(tile)
        elif "rows" in tile.template:
            each = v["TY"]
        else:
            each = v["BQ" if step == "forward" else "BR"]
        assert prod(tile.grid) >= bh * ceil(rows / each)
