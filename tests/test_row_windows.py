"""Slices and updates whose rows begin at places of their own."""

from __future__ import annotations

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library.updates import dynamic_slice, dynamic_update_slice

SHAPE, PART = (3, 2, 10, 4), (3, 2, 2, 4)
RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=SHAPE).astype(np.float32), RNG.normal(size=PART).astype(np.float32)
STARTS = np.array([[0, 7, 0], [0, 0, 0], [0, 3, 0]], np.int32)


def written(x, new, starts):
    out = x.copy()
    for row, part, (_, s, _) in zip(out, new, starts):
        row[:, s : s + part.shape[1]] = part
    return out


@pytest.mark.parametrize("optimize", [True, False])
def test_each_row_is_written_in_its_place(optimize):
    f = eg.compile(dynamic_update_slice, donate=("x",), optimize=optimize, cache=False)
    np.testing.assert_array_equal(f(X, NEW, STARTS).numpy(), written(X, NEW, STARTS))
    (kernel,) = [k for k in f.plan.kernels if k.updates]
    assert kernel.bytes_written == NEW.nbytes  # the rest of x is not touched
    assert sum(k.bytes_written for k in f.plan.kernels) < X.nbytes


def test_starts_out_of_range_are_moved_into_it():
    starts = np.array([[0, 99, 0], [0, -5, 0], [0, 8, 3]], np.int32)
    inside = np.array([[0, 8, 0], [0, 0, 0], [0, 8, 0]], np.int32)
    got = eg.compile(dynamic_update_slice)(X, NEW, starts).numpy()
    np.testing.assert_array_equal(got, written(X, NEW, inside))
    part = eg.compile(lambda x, s: dynamic_slice(x, s, PART))(X, starts).numpy()
    want = [X[k, :, s : s + 2] for k, (_, s, _) in enumerate(inside)]
    np.testing.assert_array_equal(part, want)


def test_gradients_of_rows():
    weight = RNG.normal(size=SHAPE).astype(np.float32)

    def loss(x, new, starts):
        return (dynamic_update_slice(x, new, starts) * weight).sum()

    dx, dnew = eg.compile(lambda x, n, s: eg.grad(loss, argnums=(0, 1))(x, n, s))(X, NEW, STARTS)
    np.testing.assert_allclose(dx.numpy(), written(weight, np.zeros_like(NEW), STARTS), rtol=1e-6)
    want = [weight[k, :, s : s + 2] for k, (_, s, _) in enumerate(STARTS)]
    np.testing.assert_allclose(dnew.numpy(), want, rtol=1e-6)
    small = RNG.normal(size=PART).astype(np.float32)
    back = eg.grad(lambda x: (dynamic_slice(x, STARTS, PART) * small).sum())(X)
    np.testing.assert_allclose(back.numpy(), written(np.zeros_like(X), small, STARTS), rtol=1e-6)


def test_starts_that_do_not_fit():
    with pytest.raises(ShapeMismatch, match="a start and a size for each axis"):
        dynamic_update_slice(X, NEW, STARTS[:2])
    with pytest.raises(ShapeMismatch, match="a start and a size for each axis"):
        dynamic_update_slice(X, NEW[:2], STARTS)
