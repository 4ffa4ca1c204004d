"""Results that nobody looks into are not put together, and behave as if they were."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.runtime.errors import DonatedError


@dataclass(frozen=True)
class Inner:
    scale: Any


@dataclass(frozen=True)
class Model:
    weight: Any
    power: int = 2
    inner: Any = None

    def __call__(self, x: Any) -> Any:
        return x @ self.weight * self.inner.scale


def model() -> Model:
    weight, scale = np.full((4, 4), 1.0, np.float32), np.full(4, 2.0, np.float32)
    return Model(eg.put(weight), 3, Inner(eg.put(scale)))


def step(m: Model, x: Any) -> tuple[Model, Any]:
    return Model(m.weight + 1.0, m.power, Inner(m.inner.scale * 2.0)), m(x).sum()


X = np.full((2, 4), 1.0, np.float32)


def is_later(tree: Any) -> bool:
    """Whether a tree is still to be put together; asking changes nothing."""
    return type(tree) in pytree._later_kinds


def later() -> Model:
    return eg.compile(step)(model(), X)[0]


def test_steps_pass_trees_on_without_looking_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    train = eg.compile(step, donate=("m",))
    m, loss = train(model(), X)
    assert is_later(m)

    def refuse(*_: Any) -> None:
        raise AssertionError("flattened")

    monkeypatch.setattr(pytree, "flatten_call", refuse)
    losses = [float(loss)]
    for _ in range(3):
        m, loss = train(m, X)
        assert is_later(m)
        losses.append(float(loss))
    assert losses == [64.0, 256.0, 768.0, 2048.0]  # 32 n 2^n
    assert train.programs == 1
    np.testing.assert_array_equal(m.weight.numpy(), np.full((4, 4), 5.0))
    np.testing.assert_array_equal(m.inner.scale.numpy(), np.full(4, 32.0))


def test_a_tree_that_was_looked_into_is_taken_as_well() -> None:
    train = eg.compile(step, donate=("m",))
    m, _ = train(model(), X)
    assert m.weight.shape == (4, 4)
    assert not is_later(m)
    m, loss = train(m, X)
    assert float(loss) == 256.0
    assert is_later(m)


@pytest.mark.parametrize(
    "look",
    [
        lambda m: m.power == 3,
        lambda m: vars(m)["power"] == 3,
        lambda m: m == m,
        lambda m: [f.name for f in fields(m)] == ["weight", "power", "inner"],
        lambda m: replace(m, power=5).power == 5,
        lambda m: repr(m).startswith("Model(weight=Array("),
        lambda m: m(X).shape == (2, 4),
        lambda m: copy.copy(m).inner.scale is not None,
        lambda m: m.__class__ is Model,
        lambda m: isinstance(m, Model) and not isinstance(m, (dict, Inner)),
        lambda m: type(m).__name__ == "Model" and type(m).__qualname__ == "Model",
        lambda m: hash(m.power) == hash(3) and not hasattr(m, "bias"),
    ],
)
def test_looks_find_what_is_there(look: Any) -> None:
    assert look(later())


def test_a_look_makes_a_tree_what_it_is() -> None:
    m = later()
    assert isinstance(m, Model)
    assert is_later(m)  # to ask for its class is no look
    assert m.inner.scale is m.inner.scale
    assert type(m) is Model
    leaves, structure = pytree.flatten(m)
    assert leaves[0] is m.weight
    assert leaves[1] is m.inner.scale
    assert structure == pytree.flatten(model())[1]


def test_flattening_is_no_look() -> None:
    m = later()
    leaves, structure = pytree.flatten(m)
    assert is_later(m)
    assert leaves[0] is m.weight
    assert structure == pytree.flatten(m)[1]


def test_a_tree_to_come_cannot_be_changed() -> None:
    m = later()
    with pytest.raises(FrozenInstanceError):
        m.power = 4  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        later().other = 4  # type: ignore[attr-defined]


def test_a_donated_tree_is_gone_looked_into_or_not() -> None:
    train = eg.compile(step, donate=("m",))
    old, _ = train(model(), X)
    train(old, X)
    assert is_later(old)
    with pytest.raises(DonatedError, match="argument 0 of step was donated"):
        train(old, X)
    with pytest.raises(DonatedError, match="argument 0 of step was donated"):
        old.weight.numpy()
    with pytest.raises(DonatedError, match="argument 0 of step was donated"):
        train(old, X)


def test_other_arguments_are_other_programs() -> None:
    train = eg.compile(step)
    m, _ = train(model(), X)
    wide = np.full((3, 4), 1.0, np.float32)
    assert float(train(m, wide)[1]) == 384.0
    assert train.programs == 2
    assert float(train(m, X)[1]) == 256.0
    assert float(train(m, x=X)[1]) == 256.0
    assert train.programs == 3  # a keyword is another signature
    assert float(train(m, X)[1]) == 256.0
    assert train.programs == 3
    with pytest.raises(TypeError):
        train(m)


def test_a_tree_to_come_is_traced() -> None:
    m = later()
    assert is_later(m)
    value, grads = eg.compile(eg.value_and_grad(lambda m, x: m(x).sum()))(m, X)
    assert float(value) == 256.0
    np.testing.assert_array_equal(grads.inner.scale.numpy(), np.full(4, 16.0))


def test_labels_out_of_range_are_told_in_every_step() -> None:
    def train(m: Inner, labels: Any) -> tuple[Inner, Any]:
        return Inner(m.scale + 1.0), nn.cross_entropy(m.scale * X, labels)

    run = eg.compile(train)
    m = Inner(eg.put(np.arange(4, dtype=np.float32)))
    for _ in range(2):
        m, _ = run(m, np.array([1, 2], np.int32))
    with pytest.raises(eg.OutOfRange):
        run(m, np.array([1, 4], np.int32))


def test_other_containers_are_put_together_at_once() -> None:
    pair = eg.compile(lambda x: {"a": x + 1.0, "b": (x * 2.0, [x])})
    out = pair(X)
    assert sorted(out) == ["a", "b"]
    np.testing.assert_array_equal(out["b"][0].numpy(), X * 2)
    single = eg.compile(lambda m: Inner(m.scale + 1.0))(Inner(eg.put(X)))
    assert is_later(single)
    np.testing.assert_array_equal(single.scale.numpy(), X + 1)


class Strict:
    def __init_subclass__(cls, *, needed: int = 0, **_: Any) -> None:
        if not needed:
            raise TypeError("a class of this kind needs `needed`")


@dataclass(frozen=True)
class Closed(Strict, needed=1):
    value: Any


def test_a_class_of_which_none_can_be_derived() -> None:
    out = eg.compile(lambda c: Closed(c.value + 1.0))(Closed(eg.put(X)))
    assert type(out) is Closed
    np.testing.assert_array_equal(out.value.numpy(), X + 1)


def test_trees_of_numbers_are_pickled() -> None:
    tree = pytree.later(pytree.Structure(Inner, ("scale",), (pytree.LEAF,)), [1.5])
    assert is_later(tree)
    again = pickle.loads(pickle.dumps(tree))
    assert type(again) is Inner
    assert again.scale == 1.5
