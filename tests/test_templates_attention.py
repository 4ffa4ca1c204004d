"""Attention templates on the device against NumPy in float64, at odd shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import wgpu
from numpy.typing import NDArray

from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.tile import Tile
from eggpu.compiler.schedule.tile_attention import Pass, Scores, attention_candidates
from eggpu.templates import render

sys.path.insert(0, str(Path(__file__).parent))
from template_runs import (  # noqa: F401
    NVIDIA,
    Array,
    Operand,
    bindings,
    gpu_device,
    run,
    store_to,
    with_values,
)

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Heads:
    """A case of attention. Key j is allowed to query i if i + offset - window < j <= i + offset."""

    bh: int
    tq: int
    tk: int
    d: int
    dv: int
    causal: bool = False
    offset: int = 0
    window: int | None = None
    softcap: float | None = None
    mask: bool = False
    bias: bool = False
    scalar: bool = False
    empty: str = "zero"
    shared: int = 1  # heads side by side that share a bias, of which the gradient is the sum

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.tq)
        shapes = {
            "q": (self.tq, self.d), "k": (self.tk, self.d), "v": (self.tk, self.dv),
            "do": (self.tq, self.dv), "bias": (self.tq, self.tk),
        }  # fmt: skip
        arrays: dict[str, Array] = {
            name: rng.standard_normal((self.bh, *shape), dtype=np.float32)
            for name, shape in shapes.items()
        }
        mask = rng.random((self.bh, self.tq, self.tk)) < 0.7
        mask[:, 0] = False  # a row that may attend nobody
        return arrays | {"mask": mask}

    def reference(self, x: dict[str, Array]) -> dict[str, NDArray[np.float64]]:
        q, k, v, do = (x[name].astype(np.float64) for name in ("q", "k", "v", "do"))
        i, j = np.arange(self.tq)[:, None], np.arange(self.tk)
        allowed = np.ones((self.bh, self.tq, self.tk), bool)
        allowed &= (j <= i + self.offset) | (not self.causal)
        if self.window is not None:
            allowed &= j > i + self.offset - self.window
        if self.mask:
            allowed &= x["mask"].astype(bool)
        scale = self.d**-0.5
        s, slope = scale * q @ k.swapaxes(1, 2), 1.0
        if self.softcap is not None:
            t = np.tanh(s / self.softcap)
            s, slope = self.softcap * t, 1 - t * t
        hidden = -1e30 if self.empty == "mean" else -np.inf
        if self.bias:
            s = (s.astype(np.float32) + x["bias"]).astype(np.float64)  # as a huge bias rounds it
        s = np.where(allowed, s, hidden)
        with np.errstate(invalid="ignore", divide="ignore"):
            top = s.max(-1, keepdims=True)
            e = np.exp(s - top)
            z = e.sum(-1, keepdims=True)
            p = e / z
            stats = np.concatenate([np.maximum(top, LOWEST), 1 / z], -1)
        if self.empty == "zero":
            some = allowed.any(-1, keepdims=True)
            p, stats = np.where(some, p, 0), np.where(some, stats, [LOWEST, 0])
        o = p @ v
        delta = (do * o).sum(-1)
        change = np.where(allowed, p * (do @ v.swapaxes(1, 2) - delta[..., None]), 0)
        ds = np.where(allowed, change * slope * scale, 0)
        return {
            "o": o, "stats": stats, "delta": delta,
            "dq": ds @ k, "dk": ds.swapaxes(1, 2) @ q, "dv": p.swapaxes(1, 2) @ do,
            "ds": change.reshape(-1, self.shared, self.tq, self.tk).sum(1),
        }  # fmt: skip

    def vec(self, name: str) -> bool:
        sizes = {"q": self.d, "k": self.d, "v": self.dv, "o": self.dv, "do": self.dv}
        sizes |= {"dq": self.d, "dk": self.d, "dv": self.dv, "ds": self.tk}
        return name in sizes and sizes[name] % 4 == 0 and not self.scalar


RESULTS = {"forward": ("o", "stats"), "q": ("dq",), "kv": ("dk", "dv"), "bias": ("ds",)}
STEPS = tuple(RESULTS)


def check_attention(
    device: wgpu.GPUDevice,
    heads: Heads,
    step: str,
    tile: Tile,
    arrays: dict[str, Array] | None = None,
    want: dict[str, NDArray[np.float64]] | None = None,
) -> None:
    arrays = arrays or heads.arrays()
    want = want or heads.reference(arrays)
    arrays |= {name: want[name].astype(np.float32) for name in ("stats", "delta")}
    names = ["q", "k", "v"] + ([] if step == "forward" else ["do", "stats", "delta"])
    names += ["mask"] * heads.mask + ["bias"] * heads.bias
    operands = {
        name: Operand(name, arrays[name], tuple(range(arrays[name].ndim)), heads.vec(name))
        for name in names
    }

    def load(
        name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
    ) -> str:
        return operands[name].load(result, coords, vec, axis)

    results = RESULTS[step]
    values = {
        "header": bindings(list(operands.values()), [(name, heads.vec(name)) for name in results]),
        "load": load, "BH": heads.bh, "TQ": heads.tq, "TK": heads.tk, "D": heads.d, "DV": heads.dv,
        "scale": heads.d**-0.5, "causal": heads.causal, "offset": heads.offset,
        "window": heads.window, "softcap": heads.softcap,
        "has_mask": heads.mask, "has_bias": heads.bias, "empty": heads.empty,
        "KEPT": heads.bh // heads.shared, "SUMMED": heads.shared,
        "head": f"kept * {heads.shared}u + each",
    }  # fmt: skip
    values |= {f"{name}_vec": heads.vec(name) for name in (*names, *results)}
    for name in results:
        values[f"store_{name}"] = store_to(name, want[name].shape, heads.vec(name))
    code = render(tile.template, **values, **tile.values)
    inputs = [operand.stored() for operand in operands.values()]
    got = run(device, code, inputs, [want[name].size for name in results], tile.grid)
    for name, result in zip(results, got):
        value, expected = result.reshape(want[name].shape).astype(np.float64), want[name]
        if name == "stats":
            np.testing.assert_allclose(value[..., 1], expected[..., 1], rtol=4e-6)
            value, expected = value[..., 0], expected[..., 0]
            empty = ~(np.abs(expected) < 1e29)
            np.testing.assert_allclose(value[empty], expected[empty], rtol=1e-6)
            value, expected = value[~empty], expected[~empty]
        undefined = np.isnan(expected)
        assert np.array_equal(undefined, np.isnan(value)), name
        value, expected = value[~undefined], expected[~undefined]
        largest = np.abs(expected).max(initial=1e-3)
        assert np.max(np.abs(value - expected), initial=0.0) < 4e-6 * largest, name


def attention_tile(target: Target, heads: Heads, step: str, **changes: object) -> Tile:
    h = heads
    kept = h.bh // h.shared
    scores = Scores(h.causal, h.offset, h.window or 0, bool(h.softcap), h.mask + h.bias, h.empty)
    shape = h.bh, h.tq, h.tk, h.d, h.dv
    tiles = attention_candidates(target, step, *shape, count=99, kept=kept, scores=scores)
    best = next(t for t in tiles if "rows" not in t.template)  # see test_attention_rows.py
    return with_values(best, **changes)


MASKS = [
    {}, {"causal": True}, {"causal": True, "offset": 8}, {"causal": True, "offset": -5},
    {"causal": True, "window": 6, "offset": 3}, {"window": 9}, {"mask": True}, {"bias": True},
    {"softcap": 2.0}, {"mask": True, "bias": True, "causal": True, "softcap": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((2, 29, 130, 12, 32), {}), ((1, 16, 128, 4, 32), {}),
        ((2, 37, 131, 8, 64), {"causal": True}),
        ((1, 150, 129, 8, 32), {"causal": True, "offset": 3}),
        ((2, 19, 20, 8, 12), {"causal": True}), ((1, 17, 40, 12, 44), {}),
        # lanes with several fours of a query, with one, lanes that share them; the same of results
        ((2, 21, 70, 64, 8), {"causal": True}), ((1, 18, 33, 32, 64), {}),
        ((2, 16, 64, 16, 16), {}), ((1, 9, 96, 16, 4), {"causal": True, "offset": 2}),
        ((2, 10, 35, 4, 8), {}),
    ],
)  # fmt: skip
def test_attention_as_products_of_tiles(
    device: wgpu.GPUDevice, shape: tuple[int, ...], kwargs: dict[str, object], scalar: bool,
    rows: int,
) -> None:  # fmt: skip
    heads = Heads(*shape, scalar=scalar, **kwargs)  # pyright: ignore[reportArgumentType]
    found = attention_candidates(LLVMPIPE, "forward", *shape, count=99)
    (tile,) = (t for t in found if t.values.get("TM") == rows)
    assert tile.template == "attention_tile_cpu.wgsl.j2"
    check_attention(device, heads, "forward", tile)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("step", ["q", "kv"])
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        # lanes with a four of a row, with several, lanes that share them
        ((2, 29, 130, 32), {}), ((1, 21, 37, 64), {}), ((2, 64, 16, 16), {}), ((1, 9, 35, 4), {}),
        ((2, 37, 131, 32), {"causal": True, "empty": "nan"}),
        ((1, 150, 70, 16), {"causal": True, "offset": 3, "empty": "mean"}),
        ((2, 70, 75, 8), {"causal": True, "offset": 40}),
        ((1, 33, 64, 64), {"causal": True}),
    ],
)  # fmt: skip
def test_gradients_of_attention_as_products_of_tiles(
    device: wgpu.GPUDevice, step: Pass, shape: tuple[int, ...], kwargs: dict[str, object],
    scalar: bool, rows: int,
) -> None:  # fmt: skip
    shape = (*shape, shape[-1])
    heads = Heads(*shape, scalar=scalar, **kwargs)  # pyright: ignore[reportArgumentType]
    found = attention_candidates(LLVMPIPE, step, *shape, count=99)
    (tile,) = (t for t in found if t.values.get("TM") == rows)
    assert tile.template == "attention_bwd_tile_cpu.wgsl.j2"
    check_attention(device, heads, step, tile)


@pytest.mark.parametrize("kwargs", MASKS, ids=lambda kwargs: "-".join(kwargs) or "plain")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("target", [LLVMPIPE, FLOOR], ids=["cpu", "gpu"])
def test_attention(
    device: wgpu.GPUDevice, target: Target, step: str, kwargs: dict[str, object]
) -> None:
    heads = Heads(2, 29, 37, 10, 36, **kwargs)  # pyright: ignore[reportArgumentType]
    check_attention(device, heads, step, attention_tile(target, heads, step))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mask": True, "bias": True, "softcap": 2.0},
        {"mask": True, "causal": True, "window": 5, "shared": 2},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
@pytest.mark.parametrize("empty", ["nan", "mean"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("target", [LLVMPIPE, FLOOR, NVIDIA], ids=["cpu", "gpu", "held"])
def test_attention_of_rows_without_keys(
    device: wgpu.GPUDevice, target: Target, step: str, empty: str, kwargs: dict[str, object]
) -> None:
    if target is NVIDIA and step != "forward":
        return  # has templates of its own for the forward pass only
    heads = Heads(2, 29, 37, 12, 36, empty=empty, **kwargs)  # pyright: ignore[reportArgumentType]
    check_attention(device, heads, step, attention_tile(target, heads, step))


@pytest.mark.parametrize("shared", [2, 6])
@pytest.mark.parametrize("target", [LLVMPIPE, FLOOR], ids=["cpu", "gpu"])
def test_the_gradient_of_a_shared_bias(device: wgpu.GPUDevice, target: Target, shared: int) -> None:
    heads = Heads(6, 21, 40, 8, 4, bias=True, causal=True, offset=10, shared=shared)
    arrays = heads.arrays()
    arrays["bias"] = np.repeat(arrays["bias"][::shared], shared, 0)
    check_attention(device, heads, "bias", attention_tile(target, heads, "bias"), arrays)


@pytest.mark.parametrize("step", ["forward", "q", "kv"])
def test_attention_without_vector_access(device: wgpu.GPUDevice, step: str) -> None:
    heads = Heads(1, 18, 20, 12, 8, causal=True, offset=2, scalar=True)
    for target in (LLVMPIPE, FLOOR):
        check_attention(device, heads, step, attention_tile(target, heads, step))


@pytest.mark.parametrize("step", ["forward", "q", "kv"])
def test_attention_with_large_heads_in_chunks(device: wgpu.GPUDevice, step: str) -> None:
    heads = Heads(1, 20, 40, 256, 160, causal=True, offset=20)
    check_attention(device, heads, step, attention_tile(FLOOR, heads, step))


def test_attention_row_maxima_by_shuffles(device: wgpu.GPUDevice) -> None:
    heads = Heads(1, 40, 50, 16, 32, causal=True, offset=10)
    tile = attention_tile(NVIDIA, heads, "forward", shuffle=True)
    check_attention(device, heads, "forward", tile)


@pytest.mark.parametrize("step", ["forward", "q", "kv"])
def test_a_bias_of_the_lowest_float_masks(device: wgpu.GPUDevice, step: str) -> None:
    heads = Heads(1, 8, 16, 8, 8, bias=True)
    arrays = heads.arrays()
    bias = arrays["bias"]
    bias[0, :, ::2] = bias[0, 3] = np.finfo(np.float32).min
    want = replace(heads, mask=True).reference(arrays | {"mask": bias > -1e38})
    for target in (LLVMPIPE, FLOOR):
        tile = attention_tile(target, heads, step)
        check_attention(device, heads, step, tile, arrays, want)


def check_rows_below_a_huge_bias(
    device: wgpu.GPUDevice, heads: Heads, step: str, tile: Tile
) -> None:
    """Scores are exact: a maximum of 1e5 leaves them their fractions, one of -1e9 nothing else."""
    arrays = heads.arrays()
    for name in ("q", "k", "bias"):
        arrays[name] = np.round(arrays[name] * 4) / np.float32(4)
    arrays["bias"][:, ::3] = -1e9
    arrays["bias"][:, 1::3] += np.float32(1e5)
    check_attention(device, heads, step, tile, arrays)


@pytest.mark.parametrize("empty", ["zero", "nan", "mean"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("target", [LLVMPIPE, FLOOR, NVIDIA], ids=["cpu", "gpu", "held"])
def test_rows_below_a_huge_bias(
    device: wgpu.GPUDevice, target: Target, step: str, empty: str
) -> None:
    if target is NVIDIA and step != "forward":
        return  # has templates of its own for the forward pass only
    heads = Heads(2, 29, 37, 16, 36, bias=True, causal=True, offset=4, empty=empty)
    tile = attention_tile(target, heads, step)
    check_rows_below_a_huge_bias(device, heads, step, tile)
