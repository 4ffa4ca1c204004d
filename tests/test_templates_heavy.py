"""Contraction templates, and e^x, on the device against NumPy in float64, at odd shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

import numpy as np
import pytest
import wgpu

from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.tile import Tile, candidates, fold
from eggpu.compiler.schedule.tile_rows import ROWS
from eggpu.templates import render, swapped

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

# -- contraction ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    batch: int
    m: int
    n: int
    k: int
    a_order: tuple[int, int, int] = (0, 1, 2)  # (0, 2, 1): stored transposed
    b_order: tuple[int, int, int] = (0, 1, 2)
    scalar: bool = False  # no vector access at all

    @property
    def a_axis(self) -> str:
        axis = "mk"[self.a_order[-1] - 1]
        return "none" if self.scalar or (self.m if axis == "m" else self.k) % 4 else axis

    @property
    def b_axis(self) -> str:
        axis = "kn"[self.b_order[-1] - 1]
        return "none" if self.scalar or (self.n if axis == "n" else self.k) % 4 else axis


def check_product(device: wgpu.GPUDevice, product: Product, tile: Tile) -> None:
    """c = (2 a + 1) b + 3 with the affine maps inlined; with split-K, 3 is added to every part."""
    p, rng = product, np.random.default_rng(0)
    a = rng.standard_normal((p.batch, p.m, p.k), dtype=np.float32)
    b = rng.standard_normal((p.batch, p.k, p.n), dtype=np.float32)
    operands = {
        "a": Operand("a", a, p.a_order, p.a_axis != "none", "{0} * 2.0 + 1.0"),
        "b": Operand("b", b, p.b_order, p.b_axis != "none"),
    }

    def load(
        name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
    ) -> str:
        return operands[name].load(result, coords, vec, axis)

    vec = p.n % 4 == 0 and not p.scalar
    shape = (tile.splits * p.batch, p.m, p.n)
    values = {
        "header": bindings(list(operands.values()), [("c", vec)]),
        "load": load,
        "store": store_to("c", shape, vec, "{0} + 3.0"),
        "batch": p.batch, "M": p.m, "N": p.n, "K": p.k,
        "a_vec_axis": p.a_axis, "b_vec_axis": p.b_axis, "store_vec": 4 if vec else 1,
    }  # fmt: skip
    if tile.swap:
        values = swapped(values)
    wide = a.astype(np.float64) * 2 + 1
    want = wide @ b.astype(np.float64) + 3 * tile.splits
    scale = np.abs(wide) @ np.abs(b).astype(np.float64) + 3
    for folded in (False, True) if tile.template == "contract_cpu.wgsl.j2" else (None,):
        more = {} if folded is None else {"folded": folded}
        code = render(tile.template, **values, **more, **tile.values)
        (c,) = run(device, code, [o.stored() for o in operands.values()], [prod(shape)], tile.grid)
        got = c.reshape(tile.splits, p.batch, p.m, p.n).astype(np.float64).sum(0)
        assert np.max(np.abs(got - want) / scale) < 2e-6


def tile_of(
    template: str, groups: int, splits: int = 1, swap: bool = False, **params: object
) -> Tile:
    grid = fold(groups, 65535)
    values = {**params, "splits": splits, "grid": grid}
    return Tile(template, tuple(values.items()), grid, (1, 1, 1), 0, 0.0, splits, swap)


LAYOUTS = [
    ((0, 1, 2), (0, 1, 2)),
    ((0, 1, 2), (0, 2, 1)),
    ((0, 2, 1), (0, 1, 2)),
    ((0, 2, 1), (0, 2, 1)),
]
SHAPES = [(2, 37, 45, 29), (1, 40, 36, 20), (3, 5, 7, 3)]


@pytest.mark.parametrize("orders", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("rows", "width", "vectors", "block", "splits", "swap"),
    [
        (16, 4, 1, 4, 1, False), (16, 4, 2, 4, 2, False), (8, 1, 1, 8, 3, True),
        (4, 4, 1, 8, 1, False), (2, 1, 1, 16, 1, True), (1, 4, 1, 32, 1, False),
    ],
)  # fmt: skip
def test_contract_cpu(
    device: wgpu.GPUDevice, shape: tuple[int, ...], orders: tuple[tuple[int, int, int], ...],
    rows: int, width: int, vectors: int, block: int, splits: int, swap: bool,
) -> None:  # fmt: skip
    batch, m, n, k = shape
    product = Product(batch, m, n, k, *orders)
    tm, tn = (n, m) if swap else (m, n)
    groups = batch * splits * ceil(tm / rows) * ceil(tn / (8 * width * vectors))
    params = {"L": 8, "TM": rows, "CW": width, "CV": vectors, "KU": block}
    check_product(device, product, tile_of("contract_cpu.wgsl.j2", groups, splits, swap, **params))


@pytest.mark.parametrize("orders", LAYOUTS[:2])
@pytest.mark.parametrize("shape", [(2, 37, 45, 29), (1, 57, 36, 20), (1, 76, 33, 24)])
def test_contract_cpu_in_even_tiles(
    device: wgpu.GPUDevice, shape: tuple[int, ...], orders: tuple[tuple[int, int, int], ...]
) -> None:
    batch, m, n, k = shape
    product = Product(batch, m, n, k, *orders)
    groups = batch * 2 * ceil(n / 32)
    params = {"L": 8, "TM": ceil(m / 2), "CW": 4, "CV": 1, "KU": 4}
    check_product(device, product, tile_of("contract_cpu.wgsl.j2", groups, **params))


@pytest.mark.parametrize("orders", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("bm", "bn", "bk", "tm", "tn", "stages", "splits", "a_steps", "b_steps", "unroll"),
    [
        (32, 32, 8, 4, 4, 1, 1, False, False, 1), (32, 16, 8, 8, 8, 2, 2, False, True, 2),
        (16, 16, 16, 2, 4, 2, 1, True, False, 4), (64, 128, 32, 8, 8, 1, 1, True, True, 2),
    ],
)  # fmt: skip
def test_contract_gpu(
    device: wgpu.GPUDevice, shape: tuple[int, ...], orders: tuple[tuple[int, int, int], ...],
    bm: int, bn: int, bk: int, tm: int, tn: int, stages: int, splits: int,
    a_steps: bool, b_steps: bool, unroll: int,
) -> None:  # fmt: skip
    batch, m, n, k = shape
    groups = batch * splits * ceil(m / bm) * ceil(n / bn)
    params = {"BM": bm, "BN": bn, "BK": bk, "TM": tm, "TN": tn, "stages": stages}
    params |= {"a_steps": a_steps, "b_steps": b_steps, "unroll": unroll}
    product = Product(batch, m, n, k, *orders)
    check_product(device, product, tile_of("contract_gpu.wgsl.j2", groups, splits, **params))


@pytest.mark.parametrize("orders", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 45, 29), (1, 4, 36, 20), (1, 1, 260, 516)])
@pytest.mark.parametrize(("across", "along", "splits"), [(8, 8, 1), (1, 32, 2), (16, 1, 1)])
def test_contract_row_gpu(
    device: wgpu.GPUDevice, shape: tuple[int, ...], orders: tuple[tuple[int, int, int], ...],
    across: int, along: int, splits: int,
) -> None:  # fmt: skip
    batch, m, n, k = shape
    groups = batch * splits * ceil(n / (4 * across))
    tile = tile_of("contract_row_gpu.wgsl.j2", groups, splits, CX=across, KY=along)
    check_product(device, Product(batch, m, n, k, *orders), tile)


@pytest.mark.parametrize("target", [LLVMPIPE, FLOOR, NVIDIA], ids=["cpu", "floor", "nvidia"])
@pytest.mark.parametrize(
    "product",
    [
        Product(1, 33, 10, 65), Product(2, 1, 130, 40, b_order=(0, 2, 1)), Product(1, 1, 1, 1000),
        Product(1, 64, 64, 64, scalar=True), Product(1, 50, 2, 24), Product(5, 1, 1, 1),
    ],
)  # fmt: skip
def test_best_candidates_are_right(
    device: wgpu.GPUDevice, target: Target, product: Product
) -> None:
    p = product
    tiles = candidates(target, p.batch, p.m, p.n, p.k, p.a_axis, p.b_axis, count=20)
    for tile in [t for t in tiles if t.template != ROWS][:2]:  # see test_row_products
        check_product(device, product, tile)


def test_long_sums_stay_within_the_loop_limit(device: wgpu.GPUDevice) -> None:
    # 300,000 steps of 4 would be 75,000 iterations: llvmpipe ends loops after 65,535 without a word
    product = Product(1, 3, 4, 300_000)
    (tile,) = candidates(LLVMPIPE, 1, 3, 4, 300_000, count=1)
    check_product(device, product, tile)


def test_folded_grids_compute_each_tile_once(device: wgpu.GPUDevice) -> None:
    tiny = replace(LLVMPIPE, max_groups=5)
    (tile,) = candidates(tiny, 3, 40, 70, 16, count=1)
    assert tile.grid[1] > 1
    check_product(device, Product(3, 40, 70, 16), tile)


# -- the library -------------------------------------------------------------


def test_exp_is_accurate(device: wgpu.GPUDevice) -> None:
    x = np.concatenate([
        np.linspace(-104, 88.7, 60_001), np.linspace(-1, 1, 10_001), [0.0, -0.0, 200.0, -200.0],
    ]).astype(np.float32)  # fmt: skip
    x = x[: x.size // 4 * 4]
    code = """
        @group(0) @binding(0) var<storage, read> x_in: array<vec4<f32>>;
        @group(0) @binding(1) var<storage, read_write> y_out: array<vec4<f32>>;
        @group(0) @binding(2) var<storage, read_write> z_out: array<vec4<f32>>;
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
          if (id.x < arrayLength(&x_in)) {
            let x = x_in[id.x];
            y_out[id.x] = eg_exp4(x);
            z_out[id.x] = vec4<f32>(eg_exp(x.x), eg_exp(x.y), eg_exp(x.z), eg_exp(x.w));
          }
        }
    """ + render("lib/exp.wgsl.j2")
    four, one = run(device, code, [x], [x.size, x.size], (ceil(x.size / 256), 1, 1))
    np.testing.assert_array_equal(four, one)
    with np.errstate(over="ignore"):
        want = np.exp(x.astype(np.float64))
    finite = want < np.finfo(np.float32).max
    ulp = np.spacing(np.maximum(want[finite], 1e-45).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(four[finite] - want[finite]) / ulp) < 1.5
    assert np.all(np.isinf(four[~finite]))
