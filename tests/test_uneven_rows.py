"""Long rows that begin within a vec4 on llvmpipe: whole vec4s, and single elements at both ends."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.codegen.geometry import geometry
from eggpu.compiler.egraph.graph import Pattern as Rows
from eggpu.compiler.egraph.rows import row_plan
from eggpu.compiler.schedule.space import Pattern
from eggpu.compiler.schedule.tile_rows import MOST_ENDS
from eggpu.compiler.tracing import array

SHAPES = ((4, 4097), (8, 4102), (12, 4099), (2, 2, 5, 4111), (40, 2051))


@pytest.fixture(scope="module", autouse=True)
def _shared_rows() -> None:
    """Lanes of the device must share rows."""
    if eg.device().target.kind != "cpu" or eg.device().target.subgroup < MOST_ENDS:
        pytest.skip("lanes share rows on llvmpipe only")


def run(f: Any, *args: Any, **options: Any) -> tuple[Any, str]:
    """The result, and the text of all kernels."""
    compiled = eg.compile(f, cache=False, **options)
    return compiled(*args), "\n".join(k.wgsl for k in compiled.plan.kernels)


def rows(shape: tuple[int, ...]) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) + 1).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_agrees_with_float64(shape: tuple[int, ...]) -> None:
    x = rows(shape)
    got, text = run(lambda x: nn.softmax(x), x)
    e = np.exp(x - x.max(-1, keepdims=True).astype(float))
    np.testing.assert_allclose(np.asarray(got), e / e.sum(-1, keepdims=True), rtol=2e-5)
    assert "j < fours" in text


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_agrees_with_float64(shape: tuple[int, ...]) -> None:
    x = rows(shape)
    w, b = np.random.default_rng(1).standard_normal((2, shape[-1])).astype(np.float32)
    got, text = run(nn.layer_norm, x, w, b)
    wide = x.astype(float)
    centered = wide - wide.mean(-1, keepdims=True)
    wanted = centered / np.sqrt(centered.var(-1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=3e-5, atol=3e-5)
    assert "j < fours" in text


@pytest.mark.parametrize("length", range(4096, 4104))
def test_every_element_counts_once(length: int) -> None:
    """Sums and maxima of integers, which are exact, with the extreme at each place near an end."""
    x = np.arange(8 * length, dtype=np.int32).reshape(8, length) % 101
    places = [0, 1, 2, 3, 4, length - 4, length - 2, length - 1]
    x[range(8), places] = 1000
    (total, most), _ = run(lambda x: (x.sum(-1), x.max(-1)), x)
    assert np.asarray(total).tolist() == x.sum(-1).tolist()
    assert np.asarray(most).tolist() == [1000] * 8


def test_other_types_and_values_of_rows_and_columns() -> None:
    shape = (8, 4099)
    x, mask = rows(shape), np.random.default_rng(1).random(shape) < 0.7
    labels = np.arange(8, dtype=np.int32) * 500

    def loss(x: Any, mask: Any, labels: Any) -> Any:
        x = eg.where(mask, x, -9.0)
        hit = eg.arange(shape[-1]) == labels[:, None]
        return eg.where(hit, x, 0.0).sum(-1) - eg.logsumexp(x, axis=-1), mask.any(-1)

    (got, anywhere), _ = run(loss, x, mask, labels)
    wide = np.where(mask, x, -9.0).astype(float)
    wanted = wide[range(8), labels] - np.log(np.exp(wide).sum(-1))
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5)
    assert np.asarray(anywhere).all()


def test_only_what_lies_as_the_rows_do_is_read_in_vec4s() -> None:
    """An array of as many elements that is read across its rows stays one of single elements."""
    x, y = rows((8, 4099)), rows((4099, 8))
    compiled = eg.compile(lambda x, y: (x + y.T).max(-1), cache=False)
    np.testing.assert_array_equal(np.asarray(compiled(x, y)), (x + y.T).max(-1))
    (kernel,) = compiled.plan.kernels
    names = [compiled.plan.buffers[b.buffer].name for b in kernel.bindings]
    kinds = re.findall(r"var<storage, read> \w+: array<([^;]*)>;", kernel.wgsl)
    assert "j < fours" in kernel.wgsl
    assert dict(zip(names[1:], kinds, strict=True)) == {"x": "vec4<f32>", "y": "f32"}


def test_rows_are_written_over_where_they_were() -> None:
    x = rows((12, 4099))
    step = eg.compile(lambda x: nn.softmax(x), donate=(0,), cache=False)
    ours, wide = array(x), x.astype(float)
    for _ in range(2):
        ours = step(ours)
        e = np.exp(wide - wide.max(-1, keepdims=True))
        wide = e / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(ours), wide, rtol=2e-5)
    assert [step.plan.buffers[b].place for b in step.plan.outputs] == [("input", 0)]


def test_only_long_rows_whose_array_is_whole_vec4s() -> None:
    def within(count: int, length: int) -> bool:
        pattern: Pattern = ((False, count), (True, length))
        return geometry(pattern, eg.device().target, passes=3).within

    assert within(4, 4097)
    assert not within(4, 4096)
    assert not within(5, 4097)
    assert not within(4, 33)


def test_prices_know_which_rows_begin_within() -> None:
    """Those of which lanes take vec4s, as far as single rows are priced for it."""
    target = eg.device().target
    for count in (4, 5, 8, 40, 68):
        for length in (33, 250, 1021, 1023, 2050, 4096, 4097, 4102):
            runs: Pattern = ((False, count), (True, length))
            within = geometry(runs, target, passes=3).within
            plan = row_plan(Rows(count, length, False, length), 2, True, target)
            assert plan.fours == (within or length % 4 == 0), (count, length)
