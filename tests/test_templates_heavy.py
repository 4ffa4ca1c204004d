"""Contraction and attention templates on the device against NumPy in float64, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np
import pytest
import wgpu
from numpy.typing import NDArray

from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.tile import Tile, candidates, fold
from eggpu.compiler.schedule.tile_attention import Pass, Scores, attention_candidates
from eggpu.compiler.schedule.tile_rows import ROWS
from eggpu.templates import render, swapped

LOWEST = float(np.finfo(np.float32).min)

Array = NDArray[np.generic]
NVIDIA = replace(FLOOR, max_workgroup_bytes=64 << 10, max_invocations=1024, subgroup=32)


@pytest.fixture(scope="module")
def device() -> wgpu.GPUDevice:
    adapters = wgpu.gpu.enumerate_adapters_sync()
    found = [a for a in adapters if a.info["backend_type"] == "Vulkan" and "subgroup" in a.features]
    assert found, "no Vulkan adapter with subgroups: scripts/setup-driver.sh installs one"
    return found[0].request_device_sync(required_features=["subgroup"])


@dataclass(frozen=True)
class Operand:
    """An array as a kernel sees it: stored with its axes in `order`, bound as vec4 or not."""

    name: str
    data: Array  # with logical axes
    order: tuple[int, ...]  # of the stored axes
    vec: bool  # bound as vec4: the last stored axis is contiguous and a multiple of 4
    prologue: str = "{0}"  # applied to each element

    def index(self, coords: tuple[str, ...]) -> str:
        stored = [self.data.shape[axis] for axis in self.order]
        strides = {axis: prod(stored[at + 1 :]) for at, axis in enumerate(self.order)}
        return " + ".join(f"{c} * {strides[axis]}u" for axis, c in enumerate(coords))

    def stored(self) -> Array:
        return np.ascontiguousarray(self.data.transpose(self.order))

    def element(self) -> str:
        return "u32" if self.data.dtype == bool else "vec4<f32>" if self.vec else "f32"

    def load(self, result: str, coords: tuple[str, ...], vec: int, axis: int | None) -> str:
        lines = [f"let {result}_at = {self.index(coords)};"]
        if vec == 4:
            assert self.vec
            assert axis == self.order[-1], "a vector runs along the contiguous axis"
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at / 4u];")
        elif self.vec:
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at / 4u][{result}_at % 4u];")
        else:
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at];")
        value = self.prologue.format(f"{result}_raw")
        lines.append(f"let {result} = {value}{' != 0u' if self.data.dtype == bool else ''};")
        return "\n".join(lines)


def store_to(
    name: str, shape: tuple[int, ...], vec: bool, epilogue: str = "{0}"
) -> Callable[..., str]:
    def store(coords: tuple[str, ...], value: str, width: int = 1) -> str:
        at = " + ".join(f"{c} * {prod(shape[i + 1 :])}u" for i, c in enumerate(coords))
        place = f"{name}_out[at / 4u]" if vec else f"{name}_out[at]"
        if vec and width == 1:
            place += "[at % 4u]"
        assert vec or width == 1
        return f"let at = {at};\nlet result = {epilogue.format(value)};\n{place} = result;"

    return store


def bindings(operands: list[Operand], results: list[tuple[str, bool]]) -> str:
    lines = [
        f"@group(0) @binding({i}) var<storage, read> {o.name}_in: array<{o.element()}>;"
        for i, o in enumerate(operands)
    ]
    lines += [
        f"@group(0) @binding({len(operands) + i}) var<storage, read_write> {name}_out: "
        f"array<{'vec4<f32>' if vec else 'f32'}>;"
        for i, (name, vec) in enumerate(results)
    ]
    return "\n".join(lines)


def run(
    device: wgpu.GPUDevice,
    code: str,
    operands: list[Array],
    sizes: list[int],
    grid: tuple[int, ...],
) -> list[NDArray[np.float32]]:
    """Results of `sizes` float32 each; they start as NaN, so that what is not written shows."""
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    arrays = [a.astype(np.uint32) if a.dtype == bool else a for a in operands]
    arrays += [np.full(size, np.nan, np.float32) for size in sizes]
    buffers = [device.create_buffer_with_data(data=a, usage=usage) for a in arrays]
    module = device.create_shader_module(code=code)
    pipeline = device.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )
    entries = [
        {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
        for i, b in enumerate(buffers)
    ]
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = device.create_command_encoder()
    step = encoder.begin_compute_pass()
    step.set_pipeline(pipeline)
    step.set_bind_group(0, group)
    step.dispatch_workgroups(*grid)
    step.end()
    device.queue.submit([encoder.finish()])
    return [
        np.frombuffer(device.queue.read_buffer(b), np.float32) for b in buffers[len(operands) :]
    ]


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


def with_values(tile: Tile, splits: int | None = None, **changes: object) -> Tile:
    params = tile.values | changes
    return replace(tile, params=tuple(params.items()), splits=splits or tile.splits)


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


# -- attention -----------------------------------------------------------------------------------


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
