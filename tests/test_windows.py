"""Windows written over a part of a stored value: in place, or after a copy of what is read on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.errors import IRError
from eggpu.compiler.library.updates import dynamic_update_slice
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.schedule.verify import verify_plan

SHAPE, PART = (2, 3, 64, 8), (2, 3, 1, 8)


def arrays(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=SHAPE).astype(dtype), rng.normal(size=PART).astype(dtype)


def written(x: np.ndarray, part: np.ndarray, at: int) -> np.ndarray:
    out = x.copy()
    out[:, :, at : at + part.shape[2]] = part
    return out


def update(x: Any, part: Any, at: Any) -> Any:
    return dynamic_update_slice(x, part, [0, 0, at, 0])


def compiled(f: Callable[..., Any], donate: tuple[str, ...], optimize: bool) -> Any:
    return eg.compile(f, donate=donate, optimize=optimize, cache=False)


def moved(plan: Any) -> int:
    return sum(k.bytes_written for k in plan.kernels)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("at", [0, 5, 63])
def test_a_donated_value_is_written_in_its_place(optimize: bool, at: int) -> None:
    f = compiled(lambda x, part, at: update(x, part * 2, at), ("x",), optimize)
    x, part = arrays()
    np.testing.assert_array_equal(f(x, part, np.int32(at)).numpy(), written(x, part * 2, at))
    (kernel,) = [k for k in f.plan.kernels if k.updates]
    assert kernel.bytes_written == 4 * part.size
    assert moved(f.plan) < 4 * x.size, "the whole value is written"


@pytest.mark.parametrize("optimize", [True, False])
def test_a_value_that_is_not_donated_is_copied_first(optimize: bool) -> None:
    f = compiled(update, (), optimize)
    x, part = arrays()
    np.testing.assert_array_equal(f(x, part, np.int32(7)).numpy(), written(x, part, 7))
    assert moved(f.plan) >= 4 * x.size


@pytest.mark.parametrize("optimize", [True, False])
def test_the_old_value_can_still_be_read(optimize: bool) -> None:
    """A product of old and new value needs both, a sum of the old one only comes first."""

    def both(x: Any, part: Any, at: Any) -> Any:
        y = update(x, part, at)
        return y, y * x, x.sum(-2)

    f = compiled(both, ("x",), optimize)
    x, part = arrays()
    y, product, total = f(x, part, np.int32(9))
    want = written(x, part, 9)
    np.testing.assert_array_equal(y.numpy(), want)
    np.testing.assert_allclose(product.numpy(), want * x, rtol=1e-6)
    np.testing.assert_allclose(total.numpy(), x.sum(-2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimize", [True, False])
def test_what_is_written_may_come_from_the_old_value(optimize: bool) -> None:
    """Neighbours shift over one another: read and written places overlap."""

    def shift(x: Any, at: Any) -> Any:
        part = eg.dynamic_slice(x, [0, 0, at, 0], (2, 3, 40, 8))
        return update(x, part + 1, at + 1)

    f = compiled(shift, ("x",), optimize)
    x, _ = arrays()
    got = f(x, np.int32(3)).numpy()
    np.testing.assert_allclose(got, written(x, x[:, :, 3:43] + 1, 4), rtol=1e-6)


@pytest.mark.parametrize("optimize", [True, False])
def test_one_window_after_another(optimize: bool) -> None:
    def twice(x: Any, part: Any, at: Any) -> Any:
        return update(update(x, part, at), part * 3, at + 1)

    f = compiled(twice, ("x",), optimize)
    x, part = arrays()
    want = written(written(x, part, 4), part * 3, 5)
    np.testing.assert_array_equal(f(x, part, np.int32(4)).numpy(), want)


def test_windows_of_one_size_are_one_kernel() -> None:
    def two(x: Any, y: Any, part: Any, at: Any) -> Any:
        return update(x, part, at), update(y, -part, at)

    f = compiled(two, ("x", "y"), True)
    x, part = arrays()
    a, b = f(x, x + 1, part, np.int32(2))
    np.testing.assert_array_equal(a.numpy(), written(x, part, 2))
    np.testing.assert_array_equal(b.numpy(), written(x + 1, -part, 2))
    assert len(f.plan.kernels) == 1, [k.name for k in f.plan.kernels]


@pytest.mark.parametrize("shape", [(7,), (1, 5), (3, 4, 6)])
def test_windows_of_odd_sizes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=tuple(2 * n + 1 for n in shape)).astype(np.float32)
    part = rng.normal(size=shape).astype(np.float32)
    start = list(shape)

    def f(x: Any, part: Any, at: Any) -> Any:
        return dynamic_update_slice(x, part, [at + (n - 1) for n in start])

    got = compiled(f, ("x",), True)(x, part, np.int32(1)).numpy()
    want = x.copy()
    want[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))] = part
    np.testing.assert_array_equal(got, want)


def test_the_plan_is_checked() -> None:
    """A window over memory that holds another value is an error."""
    f = compiled(update, (), True)
    x, part = arrays()
    f(x, part, np.int32(7))
    plan = f.plan
    verify_plan(plan, LLVMPIPE)
    window = [k for k in plan.kernels if k.updates]
    with pytest.raises(IRError, match="was not copied to"):
        verify_plan(replace(plan, kernels=tuple(window)), LLVMPIPE)
