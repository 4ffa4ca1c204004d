"""Attention's gradients with rows in registers, on the device against NumPy in float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import wgpu

from eggpu.compiler.schedule.target import FLOOR
from eggpu.compiler.schedule.tile_attention import attention_candidates
from eggpu.compiler.schedule.tile_attention_rows import gradient_rows

sys.path.insert(0, str(Path(__file__).parent))
from template_runs import gpu_device  # noqa: F401
from test_templates_attention import (
    MASKS,
    Heads,
    check_attention,
    check_rows_below_a_huge_bias,
)

SUBGROUPS = replace(FLOOR, subgroup=8, features=("subgroup",), max_workgroup_bytes=48 << 10)
SMALL = replace(SUBGROUPS, max_invocations=32)  # the driver compiles every thread of a group
STEPS = ("q", "kv")


def tiles(heads, step, target=SMALL):
    return list(gradient_rows(target, step, heads.bh, heads.tq, heads.tk, heads.d, heads.dv))


@pytest.mark.parametrize("kwargs", MASKS, ids=lambda kwargs: "-".join(kwargs) or "plain")
@pytest.mark.parametrize("step", STEPS)
def test_masks(device: wgpu.GPUDevice, step, kwargs) -> None:
    heads = Heads(2, 29, 37, 10, 36, **kwargs)
    found = tiles(heads, step)
    for tile in (found[0], found[-1]):
        check_attention(device, heads, step, tile)


@pytest.mark.parametrize("empty", ["nan", "mean"])
@pytest.mark.parametrize("step", STEPS)
def test_rows_without_keys(device: wgpu.GPUDevice, step, empty) -> None:
    kwargs = {"mask": True, "causal": True, "window": 5, "softcap": 2.0}
    heads = Heads(1, 21, 40, 8, 12, empty=empty, **kwargs)
    check_attention(device, heads, step, tiles(heads, step)[0])


@pytest.mark.parametrize("step", STEPS)
def test_rows_below_a_huge_bias(device: wgpu.GPUDevice, step) -> None:
    heads = Heads(2, 29, 37, 16, 36, bias=True, causal=True, offset=4)
    check_rows_below_a_huge_bias(device, heads, step, tiles(heads, step)[0])


@pytest.mark.parametrize("sizes", [(4, 4), (64, 64), (24, 20), (128, 128), (7, 13)])
@pytest.mark.parametrize("step", STEPS)
def test_sizes_of_heads(device: wgpu.GPUDevice, step, sizes) -> None:
    heads = Heads(1, 40, 33, *sizes, causal=True)
    found = tiles(heads, step)
    assert found
    check_attention(device, heads, step, found[0])
    check_attention(device, heads, step, found[-1])


def test_large_heads_of_many_rows_are_held_in_registers() -> None:
    target = replace(SUBGROUPS, subgroup=32, max_invocations=1024)
    for step in STEPS:
        best = attention_candidates(target, step, 96, 1024, 1024, 64, 64)[0]
        assert best.template == "attention_bwd_rows_gpu.wgsl.j2"
        assert (best.values["TX"], best.values["TY"]) == (2, 64)
    assert not list(
        gradient_rows(FLOOR, "kv", 1, 64, 64, 64, 64)
    )  # no shuffles: too many registers
