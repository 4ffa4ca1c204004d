"""Kernels over rows whose lanes store one after the other: which do, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.codegen import geometry, lanes
from eggpu.compiler.schedule.lanes import FEATURES, can_store
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.tracing import array


def _norm(x: Any, w: Any, b: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered * eg.rsqrt(variance + 1e-5) * w + b


def _run(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[Any]]:
    compiled = eg.compile(f, cache=False, **options)
    out = compiled(*args)
    return out, list(compiled.plan.kernels)


def _in_turn(kernels: list[Any]) -> list[bool]:
    return ["var<immediate>" in k.wgsl for k in kernels]


def _expects(columns: int) -> bool:
    """Whether the device of the tests has this form, for rows of so many elements."""
    target = eg.device().target
    able = can_store(target, [("f32", 8)])
    trips = columns // 4 // np.gcd(columns // 4, target.subgroup or 1)
    return able and columns % 8 == 0 and columns >= 16 and trips <= 64


SHAPES = (
    (64, 8), (32, 16), (32, 24), (128, 32), (5, 64), (33, 128), (16, 96), (2, 3, 160), (1, 256),
    (7, 768), (20, 1024), (9, 2048), (3, 4096), (12, 100), (8, 36), (3, 130), (2, 4160),
    (70000, 16),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_agrees_with_float64(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) + 3).astype(np.float32)
    w, b = rng.standard_normal((2, shape[-1])).astype(np.float32)
    got, kernels = _run(_norm, x, w, b)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    wanted = centered / np.sqrt(centered.var(-1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-5, atol=2e-5)
    members = eg.device().target.subgroup // np.gcd(
        shape[-1] // 4, eg.device().target.subgroup or 1
    )
    whole = int(np.prod(shape[:-1])) % max(members, 1) == 0
    if _expects(shape[-1]) and whole:
        assert any(_in_turn(kernels))
    if shape[-1] % 8 or not whole:
        assert not any(_in_turn(kernels))


def test_several_results_and_results_of_rows() -> None:
    x = np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)

    def f(x: Any) -> Any:
        e = eg.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True), e, (x * 2).sum(-1), x > x.mean(-1, keepdims=True)

    (p, e, s, above), _ = _run(f, x)
    wide = x.astype(np.float64)
    exps = np.exp(wide - wide.max(-1, keepdims=True))
    np.testing.assert_allclose(p, exps / exps.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(e, exps, rtol=1e-5)
    np.testing.assert_allclose(s, wide.sum(-1) * 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(above, x > x.mean(-1, keepdims=True))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float16", "bool"])
def test_results_of_other_types(dtype: str) -> None:
    x = np.random.default_rng(2).integers(0, 50, (32, 64)).astype(np.float32)

    def f(x: Any) -> Any:
        return (x.max(-1, keepdims=True) - x).astype(dtype)

    got, kernels = _run(f, x)
    np.testing.assert_array_equal(np.asarray(got), (x.max(-1, keepdims=True) - x).astype(dtype))
    if _expects(64):
        assert _in_turn(kernels) == [dtype != "float16"]


def test_a_donated_array_is_written_over() -> None:
    x = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    wanted = np.exp(x.astype(np.float64))
    wanted /= wanted.sum(-1, keepdims=True)
    given = array(x)
    compiled = eg.compile(lambda x: nn.softmax(x, -1), cache=False, donate=("x",))
    np.testing.assert_allclose(np.asarray(compiled(given)), wanted, rtol=1e-5, atol=1e-7)
    assert compiled.plan.donated == (0,)


def test_transposed_results_and_operands() -> None:
    x = np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32)

    def f(x: Any, y: Any) -> Any:
        p = nn.softmax(x + y.T, -1)
        return p, p.T

    (p, q), _ = _run(f, x, np.ascontiguousarray(x.T))
    wanted = np.exp(2 * x.astype(np.float64))
    wanted /= wanted.sum(-1, keepdims=True)
    np.testing.assert_allclose(p, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(q, wanted.T, rtol=1e-5, atol=1e-7)


def test_gradients_of_a_layer_norm() -> None:
    rng = np.random.default_rng(5)
    x, ct = rng.standard_normal((2, 64, 128)).astype(np.float32)
    w, b = rng.standard_normal((2, 128)).astype(np.float32)

    def loss(parts: Any, ct: Any) -> Any:
        return (_norm(*parts) * ct).sum()

    got, _ = _run(lambda x, w, b, ct: eg.grad(loss)((x, w, b), ct), x, w, b, ct)
    d, c = x.astype(np.float64), ct.astype(np.float64)
    centered = d - d.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(centered.var(-1, keepdims=True) + 1e-5)
    n, g = centered * scale, c * w
    dx = scale * (g - g.mean(-1, keepdims=True) - n * (g * n).mean(-1, keepdims=True))
    for a, wanted in zip(got, (dx, (c * n).sum(0), c.sum(0)), strict=True):
        np.testing.assert_allclose(np.asarray(a), wanted, rtol=1e-4, atol=1e-4)


def test_lanes_are_neighbours_or_not() -> None:
    from eggpu.compiler.codegen.statements import LANE, V
    from eggpu.compiler.index import index, variable

    row, thread = variable("row", 10), variable("thread", 4)
    each = lanes.Lanes(tuple({"thread": index(i)} for i in range(4)))
    places = each.places(row * 16 + thread * 4 + V, LANE)
    assert places == [row * 2, row * 2 + 1]
    assert each.places(row * 12 + thread * 4 + V, LANE) is None  # a row begins between two pairs
    assert each.places(thread * 40 + V, LANE) is None


def test_only_llvmpipe_and_words() -> None:
    from dataclasses import replace

    able = replace(LLVMPIPE, features=FEATURES)
    assert can_store(able, [("f32", 64), ("i32", 8)])
    assert not can_store(able, [("f32", 60)])
    assert not can_store(able, [("f16", 64)])
    assert not can_store(LLVMPIPE, [("f32", 64)])  # without shader-int64
    assert not can_store(replace(able, images=False), [("f32", 64)])
    assert [lanes.digits(n) for n in (1, 32, 33, 1024, 1025)] == [1, 1, 2, 2, 3]


def test_a_form_is_found_for_whole_rows_only() -> None:
    def form(rows: int, columns: int, outputs: int = 1) -> geometry.Geometry | None:
        pattern = ((False, rows), (True, columns))
        plain = geometry.geometry(pattern, LLVMPIPE, passes=2)
        shared = plain if plain.shared else geometry.other_geometry(pattern, LLVMPIPE, 2)
        assert shared is not None
        return geometry.in_turn(shared, outputs, True)

    found = form(64, 256)
    assert found is not None
    assert found.T == LLVMPIPE.subgroup
    assert found.copies == found.R == 2  # of four vec4s a lane each
    assert form(64, 100) is None  # 25 steps are shared by no lanes
    assert form(63, 16) is None  # two rows a subgroup, and an odd number of rows
    assert form(64, 2048, outputs=2) is None  # too much text
