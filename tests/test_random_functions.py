"""Random numbers: the same key gives the same numbers, compiled or not, in any shape, and they have
their distribution."""

from __future__ import annotations

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu import random as er
from eggpu.compiler.errors import ShapeMismatch

KEY = er.key(7)
N = 20_000


def every(key):
    a, b = er.split(key)
    return (
        er.uniform(a, (3, 5)),
        er.uniform(a, (7,), -2.0, 3.0),
        er.bernoulli(b, 0.3, (11,)),
        er.randint(a, (13,), -5, 9),
        er.split(key, 3),
        er.fold_in(key, 5),
        er.permutation(b, 17),
        er.permutation(b, eg.arange(10).reshape(5, 2)),
        er.uniform(a, ()),
        er.uniform(a, (0, 3)),
        er.categorical(a, eg.zeros((4, 6))),
    )


@pytest.mark.parametrize("optimize", [True, False])
def test_the_device_gives_the_interpreter_s_numbers(optimize):
    for got, want in zip(eg.compile(every, optimize=optimize)(KEY), every(KEY), strict=True):
        np.testing.assert_array_equal(got, want)
    got = eg.compile(lambda k: er.normal(k, (5, 7)), optimize=optimize)(KEY).numpy()
    np.testing.assert_allclose(got, er.normal(KEY, (5, 7)), rtol=1e-5, atol=1e-6)


def test_keys_make_numbers():
    again = er.uniform(er.key(7), (100,)).numpy()
    np.testing.assert_array_equal(er.uniform(KEY, (100,)).numpy(), again)
    a, b = er.split(KEY)
    others = [
        er.uniform(k, (100,)).numpy()
        for k in (a, b, er.fold_in(KEY, 1), er.fold_in(KEY, 2), er.key(8))
    ]
    for k, x in enumerate([again, *others]):
        assert all(not np.array_equal(x, y) for y in others[k:])
    assert len({tuple(k) for k in np.asarray(er.split(KEY, 1000)).tolist()}) == 1000


def test_distributions():
    uniform, normal = er.uniform(KEY, (N,), -1.0, 3.0).numpy(), er.normal(KEY, (N,)).numpy()
    assert uniform.min() >= -1
    assert uniform.max() < 3
    assert abs(uniform.mean() - 1) < 0.05
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    assert abs((normal**3).mean()) < 0.1
    assert abs(er.bernoulli(KEY, 0.3, (N,)).numpy().mean() - 0.3) < 0.02
    counts = np.bincount(er.randint(KEY, (N,), 2, 7).numpy(), minlength=7)
    assert not counts[:2].any()
    assert counts[2:].min() > 0.9 * N / 5
    logits = eg.broadcast_to(np.log(np.array([0.1, 0.2, 0.7], np.float32)), (N, 3))
    share = np.bincount(er.categorical(KEY, logits).numpy(), minlength=3) / N
    np.testing.assert_allclose(share, [0.1, 0.2, 0.7], atol=0.02)


def test_keys_a_row_draw_what_each_key_draws_alone():
    keys = er.split(KEY, 3)
    logits = er.normal(er.key(1), (3, 50))
    steps = np.array([4, 9, 4], np.int32)

    def drawn(keys, logits, steps):
        return er.categorical(er.fold_in(keys, steps), logits), er.fold_in(keys, 5)

    tokens, folded = eg.compile(drawn)(keys, logits, steps)
    for k in range(3):
        alone = er.categorical(er.fold_in(keys[k], int(steps[k])), logits[k])
        assert int(tokens.numpy()[k]) == int(alone.numpy())
        np.testing.assert_array_equal(folded.numpy()[k], er.fold_in(keys[k], 5).numpy())
    with pytest.raises(ShapeMismatch, match="a key a row"):
        er.categorical(keys, logits[:2])


def test_a_permutation_has_every_number_once():
    order = er.permutation(KEY, 1001).numpy()
    assert sorted(order.tolist()) == list(range(1001))
    assert order.tolist() != list(range(1001))


def test_dropout_keeps_the_mean_and_has_the_gradient_of_its_mask():
    x = np.ones((100, 200), np.float32)
    out, grad = eg.compile(
        lambda x, k: (nn.dropout(x, 0.25, k), eg.grad(lambda x: nn.dropout(x, 0.25, k).sum())(x))
    )(x, KEY)
    assert abs(out.numpy().mean() - 1) < 0.02
    assert set(np.unique(out)) == {0, np.float32(1 / 0.75)}
    np.testing.assert_array_equal(out, grad)


def test_what_is_no_key_is_refused():
    with pytest.raises(eg.TypeMismatch, match=r"a random key is a u32\[2\]"):
        er.uniform(np.zeros(2, np.float32), (3,))
    with pytest.raises(eg.TypeMismatch, match="0 < high - low"):
        er.randint(KEY, (3,), 5, 5)
