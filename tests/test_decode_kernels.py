"""Attention of a few rows, its three kernels on the device against NumPy in float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.codegen import decode as codegen
from eggpu.compiler.ir import Graph, Node, make
from eggpu.compiler.ops import broadcast, cast, reshape, swap
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.ops.decode import DECODE
from eggpu.compiler.ops.fused import get
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.selection import Group
from eggpu.compiler.schedule.target import LLVMPIPE, Target
from eggpu.compiler.schedule.tile_decode import SIDE_BY_SIDE, Shape, decode_tile, decode_tiles
from eggpu.compiler.types import bool_, f16, f32, i32
from eggpu.runtime import Device, open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import GPU_SUBGROUPS, TARGETS, check, given, run, values

# small workgroups, since the driver compiles every thread of a group
ALL = {n: t if t.kind == "cpu" else replace(t, max_invocations=32) for n, t in TARGETS.items()}
FORMS = {op.name: op for op in DECODE}


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


@pytest.fixture(params=ALL)
def target(request: pytest.FixtureRequest) -> Target:
    return ALL[request.param]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def attend(form: str, q: Node, k: Node, v: Node, *rest: Node, **changes: object) -> Node:
    """One form's result for operands and attributes."""
    plain = {"scale": q.shape[-1] ** -0.5, "causal": False, "offset": 0, "window": 0}
    plain |= {"softcap": 0.0, "extra": "none", "group": 1, "bounded": False, "empty": "zero"}
    return get(make(FORMS[form](**{**plain, **changes}), q, k, v, *rest), 0)


def heads(lead: tuple[int, ...], rows: int, keys: int, d: int, dv: int) -> tuple[Node, ...]:
    return given(0, (*lead, rows, d)), given(1, (*lead, keys, d)), given(2, (*lead, keys, dv))


@pytest.mark.parametrize(
    ("keys", "lead", "rows", "d"),
    [
        (1, (2,), 1, 64),
        (63, (1, 3), 3, 40),
        (65, (3,), 2, 24),
        (1000, (2,), 1, 32),
    ],
)
def test_lengths_and_head_sizes(device, target, form, keys, lead, rows, d):
    q, k, v = heads(lead, rows, keys, d, d)
    check(device, target, [q, k, v], [attend(form, q, k, v)], tol=3e-6)


@pytest.mark.parametrize(("d", "dv"), [(96, 128), (7, 5), (10, 36), (40, 260)])
def test_other_head_sizes(device, target, form, d, dv):
    q, k, v = heads((2,), 1, 37, d, dv)
    shape = Shape(2, 1, 37, d, dv)
    if decode_tile(target, form.removeprefix("attention_"), shape) is None:
        assert form != "attention_phases", "the kernel with phases takes heads of any size"
        return
    check(device, target, [q, k, v], [attend(form, q, k, v)], tol=3e-6)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_in_unequal_parts(device, monkeypatch, rows):
    q, k, v = heads((1,), 15, 19, 64, 64)
    target = ALL["gpu"]
    tiles = decode_tiles(target, "online", Shape(1, 15, 19, 64, 64))
    tiles = [t for t in tiles if t.values["RB"] == rows]
    monkeypatch.setattr(codegen, "decode_tiles", lambda *_: tiles)
    check(device, target, [q, k, v], [attend("attention_online", q, k, v)], tol=3e-6)


BOUNDS = {
    "some keys": ([[2], [0]], [[9], [37]]),
    "one key": ([[4], [36]], [[5], [37]]),
    "no keys": ([[4], [20]], [[4], [3]]),
    "beyond the keys": ([[-7], [30]], [[2**31 - 1], [40]]),
    "of one row only": ([[5], [0]], [[5], [1]]),
}


@pytest.mark.parametrize(
    ("name", "empty"),
    [*((name, "zero") for name in BOUNDS), ("no keys", "nan"), ("no keys", "mean")],
)
def test_only_keys_within_bounds_count(device, target, form, name, empty):
    q, k, v = heads((2,), 2, 37, 16, 16)
    bounds = given(3, (2, 2, 1), i32), given(4, (2, 2, 1), i32)
    first, end = (np.array([b, b[::-1]], np.int32) for b in BOUNDS[name])
    args = [*map(values, (q, k, v)), first, end]
    out = attend(form, q, k, v, *bounds, bounded=True, empty=empty)
    check(device, target, [q, k, v, *bounds], [out], args, tol=3e-6)


def test_what_lies_beyond_the_bounds_is_not_read(device, target, form):
    q, k, v = heads((1,), 1, 70, 16, 16)
    bounds = given(3, (1, 1, 1), i32), given(4, (1, 1, 1), i32)
    args = [*map(values, (q, k, v)), np.array([[[3]]], np.int32), np.array([[[67]]], np.int32)]
    clean = [a.copy() for a in args]
    for held in args[1:3]:
        held[:, :3] = held[:, 67:] = np.nan
    out = attend(form, q, k, v, *bounds, bounded=True)
    graph = Graph("test", (q, k, v, *bounds), (out,))
    (got,), _ = run(device, graph, [Group((out,), (q, k, v, *bounds))], args, target)
    (want,) = evaluate(graph, clean, np.float64)
    np.testing.assert_allclose(got, want, atol=3e-6)


KINDS = {
    "mask": {"extra": "mask"},
    "bias": {"extra": "bias"},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.7},
    "causal": {"causal": True, "offset": 17},
    "causal, none seen": {"causal": True, "offset": -2},
    "window": {"causal": True, "offset": 30, "window": 9},
    "group": {"causal": True, "offset": 20, "group": 2},
    "all": {
        "causal": True,
        "offset": 30,
        "window": 21,
        "group": 2,
        "softcap": 3.0,
        "extra": "mask",
    },
}


def beside(q, k, v, extra, bounded):
    """Bounds of keys, a mask or a bias for 2 heads of 4 queries and 37 keys, and values of all."""
    bounds = [given(3, (2, 4, 1), i32), given(4, (2, 4, 1), i32)] if bounded else []
    more = [given(5, (2, 4, 37), f32 if extra == "bias" else bool_)] if extra else []
    args = [*map(values, (q, k, v))]
    if bounded:
        args += [np.array([[[0], [3], [5], [9]]] * 2, np.int32)]
        args += [np.array([[[36], [20], [6], [9]]] * 2, np.int32)]
    return bounds, more, [*args, *map(values, more)]


@pytest.mark.parametrize("name", KINDS)
def test_masks_biases_and_places(device, target, form, name):
    bounded = len(name) % 2 == 0 or name == "all"
    q, k, v = heads((2,), 4, 37, 8, 12)
    extra = KINDS[name].get("extra")
    bounds, more, args = beside(q, k, v, extra, bounded)
    if extra == "mask":
        args[-1][1, 2] = False
    out = attend(form, q, k, v, *bounds, *more, **KINDS[name], bounded=bounded)
    check(device, target, [q, k, v, *bounds, *more], [out], args, tol=3e-6)


@pytest.fixture
def side_by_side(monkeypatch):
    """llvmpipe's kernel in which lanes share each key, whatever it is expected to take."""

    def chosen(target: Target, form: str, shape: Shape):
        found = [t for t in decode_tiles(target, form, shape) if t.template == SIDE_BY_SIDE]
        assert found
        return found

    monkeypatch.setattr(codegen, "decode_tiles", chosen)


@pytest.mark.parametrize("form", ["attention_online", "attention_split"])
@pytest.mark.parametrize("name", [*KINDS, "bounded", "nan", "mean"])
def test_lanes_share_each_key(device, side_by_side, form, name):
    bounded = name in ("bounded", "nan", "mean", "softcap")
    q, k, v = heads((2,), 4, 37, 40, 72)
    changes = {"empty": name} if name in ("nan", "mean") else KINDS.get(name, {})
    bounds, more, args = beside(q, k, v, changes.get("extra"), bounded)
    out = attend(form, q, k, v, *bounds, *more, **changes, bounded=bounded)
    check(device, LLVMPIPE, [q, k, v, *bounds, *more], [out], args, tol=3e-6)


@pytest.mark.parametrize(
    ("keys", "rows", "d", "dv"), [(1, 1, 4, 4), (70, 8, 64, 64), (33, 3, 64, 4)]
)
def test_lanes_share_keys_of_other_sizes(device, side_by_side, keys, rows, d, dv):
    q, k, v = heads((3,), rows, keys, d, dv)
    out = attend("attention_online", q, k, v)
    check(device, LLVMPIPE, [q, k, v], [out], tol=3e-6)
    wide = replace(LLVMPIPE, subgroup=device.target.subgroup)
    check(device, wide, [q, k, v], [out], tol=3e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_special_numbers_where_lanes_share_keys(device, side_by_side, bad, where):
    q, k, v = heads((2,), 2, 37, 8, 8)
    args = [*map(values, (q, k, v))]
    args[where][0, 0, 0] = bad
    out = attend("attention_online", q, k, v)
    check(device, LLVMPIPE, [q, k, v], [out], args, tol=3e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_special_numbers_go_where_they_go_in_numpy(device, form, bad, where):
    q, k, v = heads((2,), 2, 37, 8, 8)
    args = [*map(values, (q, k, v))]
    args[where][0, 0, 0] = bad
    check(device, LLVMPIPE, [q, k, v], [attend(form, q, k, v)], args, tol=3e-6)


def test_what_comes_before_and_after_is_in_the_kernel(device, target, form):
    """Repeated heads, keys turned and halved, a float16 cache; results scaled and turned."""
    q, k, v = given(0, (2, 6, 1, 8)), given(1, (2, 3, 8, 29)), given(2, (2, 3, 29, 8))

    def repeated(x: Node) -> Node:
        shape = x.shape
        wide = broadcast(reshape(x, (2, 3, 1, *shape[2:])), (2, 3, 2, *shape[2:]))
        return reshape(wide, (2, 6, *shape[2:]))

    out = attend(form, q * 2.0, repeated(swap(k) * 0.5), repeated(v))
    kernels = 2 if form == "attention_split" else 1
    outputs = [swap(E.tanh(out))]
    check(device, target, [q, k, v], outputs, tol=3e-6, kernels=kernels)


def test_a_cache_of_half_precision(device, form):
    if "shader-f16" not in device.target.features:
        pytest.fail("lavapipe has float16")
    q, k, v = given(0, (3, 2, 64)), given(1, (3, 70, 64), f16), given(2, (3, 70, 64), f16)
    args = [values(q), values(k).astype(np.float16), values(v).astype(np.float16)]
    out = attend(form, q, cast(k, f32), cast(v, f32))
    check(device, device.target, [q, k, v], [out], args, tol=3e-6)


def test_most_scores_of_the_kernel_with_phases(device):
    """65,536 keys stay below the driver's bound on loops of an invocation."""
    q, k, v = heads((1,), 1, 65_536, 8, 8)
    check(device, LLVMPIPE, [q, k, v], [attend("attention_phases", q, k, v)], tol=2e-5)


def test_shuffles_add_up_scores(device, form):
    q, k, v = heads((2,), 2, 300, 32, 32)
    tile = decode_tile(GPU_SUBGROUPS, form.removeprefix("attention_"), Shape(2, 2, 300, 32, 32))
    assert tile is not None
    assert tile.values["shuffle"]
    check(device, GPU_SUBGROUPS, [q, k, v], [attend(form, q, k, v)], tol=3e-6)
