"""Symbolic indices equal their values, and simplify where movement undoes movement."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eggpu.compiler.index import flatten, index, unflatten, variable

shapes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), min_size=1, max_size=4)


@given(shapes, st.data())
@settings(deadline=None)
def test_reshape_and_permute_agree_with_numpy(shape, data):
    size = math.prod(shape)
    perm = data.draw(st.permutations(range(len(shape))))
    left = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    at = unflatten(variable("i", size), shape)
    permuted = flatten([at[p] for p in perm], [shape[p] for p in perm])
    again = unflatten(permuted, (left, size // left))
    for i in range(size):
        where = np.unravel_index(i, shape)
        flat = int(np.ravel_multi_index([where[p] for p in perm], [shape[p] for p in perm]))
        assert permuted.evaluate({"i": i}) == flat
        assert [k.evaluate({"i": i}) for k in again] == [
            flat // (size // left),
            flat % (size // left),
        ]
        assert all(k.lo <= k.evaluate({"i": i}) <= k.hi for k in again)


@given(shapes)
@settings(deadline=None)
def test_flatten_undoes_unflatten(shape):
    flat = variable("i", math.prod(shape))
    assert flatten(unflatten(flat, shape), shape) == flat


def test_splitting_heads_and_merging_them_again_is_nothing():
    row, column = variable("row", 64), variable("column", 128)
    flat = flatten([row, column], (64, 128))
    heads = unflatten(flat, (8, 8, 4, 32))
    assert flatten([heads[0], heads[1], heads[2], heads[3]], (8, 8, 4, 32)) == row * 128 + column


def test_coefficient_of_a_lane():
    lane, block = variable("v", 4), variable("b", 16)
    flat = (block * 4 + lane) + 64
    assert flat.coefficient("v") == 1
    assert (flat - lane).divisible(4)
    assert (flat // 8).coefficient("v") == 0  # four consecutive elements lie in one block of eight
    assert (flat // 3).coefficient("v") is None


def test_substitute():
    a, b = variable("a", 8), variable("b", 4)
    assert (a // 4 + a % 4).substitute({"a": b * 2}).evaluate({"b": 3}) == 6 // 4 + 6 % 4
    assert index(5).substitute({"a": b}) == index(5)
