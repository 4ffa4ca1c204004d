"""Tilings are legal on every class of device, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.tile import NVIDIA_WORKGROUP_BYTES, candidates, fold
from eggpu.compiler.schedule.tile_attention import Pass, attention_candidates
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
def test_gradients_of_short_heads_own_two_rows_a_lane(step: Pass) -> None:
    """On vectors of 16 lanes too, where one row a lane spreads every column for few products."""
    target = replace(LLVMPIPE, subgroup=16)
    (best,) = attention_candidates(target, step, 32, 64, 64, 32, 32, count=1)
    assert best.values["R"] == 2


def test_plain_attention_of_long_rows_is_products_of_tiles() -> None:
    for lanes in (8, 16):
        target = replace(LLVMPIPE, subgroup=lanes)
        (best,) = attention_candidates(target, "forward", 8, 512, 512, 64, 64, 1, plain=True)
        assert best.template == "attention_tile_cpu.wgsl.j2"
        assert best.values["TM"] == 32
        assert best.grid == (128, 1, 1)
    for shape in ((512, 512, 64, 60), (512, 512, 30, 64), (512, 60, 64, 64)):
        tiles = attention_candidates(LLVMPIPE, "forward", 8, *shape, count=99, plain=True)
        assert {tile.template for tile in tiles} == {"attention_cpu.wgsl.j2"}


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
            each = v["L"] * v["QR" if step == "forward" else "R"]
        elif "rows" in tile.template:
            each = v["TY"]
        else:
            each = v["BQ" if step == "forward" else "BR"]
        assert prod(tile.grid) >= bh * ceil(rows / each)
