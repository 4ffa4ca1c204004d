"""Labels that name no class are told where the host has them."""

from __future__ import annotations

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn

LOGITS = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
GOOD = np.array([0, 4, 2, 2], np.int32)
BAD = np.array([0, 4, 5, 2], np.int32)


@pytest.mark.parametrize("labels", [BAD, eg.array(BAD)], ids=["numpy", "array"])
@pytest.mark.parametrize("loss", [nn.cross_entropy, nn.nll_loss])
def test_labels_at_hand_are_checked_at_once(loss, labels):
    message = rf"{loss.__name__} needs integers from 0 to 4, got 5 at \[2\]\n  at test_labels"
    with pytest.raises(eg.OutOfRange, match=message):
        loss(LOGITS, labels)
    loss(LOGITS, GOOD)


def step(w, labels):
    return eg.value_and_grad(lambda w: nn.cross_entropy(w * LOGITS, labels))(w)


def test_labels_of_a_call_are_checked_and_named():
    run = eg.compile(step, cache=False)
    good = float(run(LOGITS, GOOD)[0].numpy())
    message = r"got -1 at \[3\] of the argument labels\n  at .*: return .*nn\.cross_entropy"
    with pytest.raises(IndexError, match=message):
        run(LOGITS, np.array([0, 1, 2, -1]))
    with pytest.raises(eg.OutOfRange):
        run(LOGITS, eg.put(BAD))  # on the device, but the host has them too
    assert float(run(LOGITS, GOOD)[0].numpy()) == good
    assert run.recompilations == []


def test_labels_that_are_ignored_are_no_mistake():
    run = eg.compile(lambda x, t: nn.cross_entropy(x, t, ignore_index=-100), cache=False)
    labels = np.array([1, -100, 2, -100], np.int32)
    kept = float(run(LOGITS, labels).numpy())
    np.testing.assert_allclose(kept, float(nn.cross_entropy(LOGITS[::2], labels[::2])), rtol=1e-5)
    with pytest.raises(eg.OutOfRange, match=r"from 0 to 4 or -100, got -1 at \[0\]"):
        run(LOGITS, np.array([-1, -100, 2, 3]))


def test_parts_of_an_argument_are_looked_at_as_the_program_takes_them():
    def next_tokens(logits, tokens):
        return nn.cross_entropy(logits, tokens[:, 1:].reshape((-1,)))

    run = eg.compile(next_tokens, cache=False)
    tokens = np.array([[99, 1, 2], [77, 4, 0]], np.int32)  # what the first are does not matter
    run(LOGITS, tokens)
    tokens[1, 2] = 9
    with pytest.raises(eg.OutOfRange, match=r"got 9 at \[3\] of the argument tokens"):
        run(LOGITS, tokens)


def test_what_only_the_device_has_is_not_read_back():
    run = eg.compile(lambda x, t: nn.cross_entropy(x, t, reduction="none"), cache=False)
    only = eg.compile(lambda t: t + 1, cache=False)(BAD - 1)
    before = eg.device().counters.downloads
    rows = run(LOGITS, only)
    assert eg.device().counters.downloads == before
    assert rows.numpy()[2] == 0


def test_values_that_are_computed_and_those_in_loops_are_left_alone():
    def computed(x, t):
        return nn.cross_entropy(x, eg.clip(t, 0, 4))

    eg.compile(computed, cache=False)(LOGITS, BAD)

    def over(x, t):
        total, _ = eg.scan(
            lambda c, at: (c + nn.cross_entropy(x, at), None), eg.array(np.float32(0)), t
        )
        return total

    eg.compile(over, cache=False)(LOGITS, np.stack([GOOD, GOOD]))


def test_nothing_to_look_at_is_no_mistake():
    empty = nn.cross_entropy(np.zeros((0, 5), np.float32), np.zeros(0, np.int32), reduction="sum")
    assert float(empty) == 0
