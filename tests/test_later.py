"""Results that nobody looks into are not put together, and behave as if they were."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.runtime import DeviceBuffer
from eggpu.runtime.errors import DonatedError, KernelError


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all buffers that are made."""
    sizes: list[int] = []
    init = DeviceBuffer.__init__

    def counted(self: Any, device: Any, storage: Any, nbytes: int, *rest: Any) -> None:
        sizes.append(nbytes)
        init(self, device, storage, nbytes, *rest)

    monkeypatch.setattr(DeviceBuffer, "__init__", counted)
    return sizes


def test_steps_hand_memory_on_without_a_buffer_for_each_value(made: list[int]) -> None:
    train = eg.compile(step, donate=("m",))
    x = eg.put(X)
    m, _ = train(model(), x)
    assert train._current().executable.cycle == 2
    made.clear()
    for n in range(2, 6):
        m, loss = train(m, x)
        assert float(loss) == 32 * n * 2**n
    assert made == [4] * 4  # the losses
    np.testing.assert_array_equal(m.weight.numpy(), np.full((4, 4), 6.0))
    assert sorted(made) == [4] * 4 + [16, 64]


def test_values_handed_on_are_gone_where_they_were(made: list[int]) -> None:
    train = eg.compile(step, donate=("m",))
    first, _ = train(model(), X)
    second, _ = train(first, X)
    third, _ = train(second, X)
    for old in (first, second):
        with pytest.raises(DonatedError, match=r"argument [01] of step was donated"):
            train(old, X)
        with pytest.raises(DonatedError, match="argument 1 of step was donated"):
            old.inner.scale.numpy()
    np.testing.assert_array_equal(third.inner.scale.numpy(), np.full(4, 16.0))


def test_looks_between_steps_change_nothing() -> None:
    train = eg.compile(step, donate=("m",))
    show = eg.compile(lambda m: m.weight.sum() + m.inner.scale.sum())
    m, _ = train(model(), X)
    for n in range(2, 9):
        if n % 3 == 0:
            assert float(show(m)) == 16 * n + 4 * 2**n
        if n % 4 == 0:
            assert m.weight.numpy()[0, 0] == n
        m, loss = train(m, X)
        assert float(loss) == 32 * n * 2**n


def test_a_tree_from_elsewhere_comes_between() -> None:
    train = eg.compile(step, donate=("m",))
    one, _ = train(model(), X)
    other, _ = train(model(), X)
    one, _ = train(one, X)
    mixed = Model(one.weight, 3, other.inner)
    mixed, loss = train(mixed, X)
    assert float(loss) == 32 * 3 * 4.0
    assert float(train(mixed, X)[1]) == 32 * 4 * 8.0


def test_memory_that_was_handed_on_comes_back() -> None:
    train = eg.compile(step, donate=("m",))
    pool = eg.device().pool

    def free() -> int:
        gc.collect()
        pool._collect()
        return pool.free

    m, old = model(), []
    for _ in range(3):
        m, loss = train(m, X)
        float(loss)
    before = free()
    for _ in range(5):
        old.append(m)
        m, loss = train(m, X)
        float(loss)
    assert free() == before
    del m
    assert free() == before + 2 * 256  # also while trees are held that are gone
    assert len(old) == 5


def test_a_call_that_fails_takes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    train = eg.compile(step, donate=("m",))
    m, _ = train(model(), X)
    m, _ = train(m, X)
    executable = train._current().executable

    def fail(*_: Any) -> None:
        raise KernelError("no")

    with monkeypatch.context() as patch:
        patch.setattr(type(executable), "_submit", fail)
        with pytest.raises(KernelError):
            train(m, X)
    assert float(train(m, X)[1]) == 32 * 3 * 2**3


def test_results_that_are_fetched_or_alone_have_buffers() -> None:
    both = eg.compile(step, donate=("m",), fetch=(0, 1))
    m, _ = both(model(), X)
    m, loss = both(m, X)
    np.testing.assert_array_equal(m.weight.numpy(), np.full((4, 4), 3.0))
    both(m, X)
    np.testing.assert_array_equal(m.weight.numpy(), np.full((4, 4), 3.0))  # the host has it
    assert float(loss) == 256.0
    alone = eg.compile(lambda x: x + 1.0, donate=("x",))
    y = alone(eg.put(X))
    assert alone._current().executable.cycle == 1
    np.testing.assert_array_equal(alone(y).numpy(), X + 2)


def test_leaves_of_other_kinds_with_the_same_type() -> None:
    train = eg.compile(step, donate=("m",))
    m, _ = train(model(), X)
    kinds = [X, X.astype(np.float64), X.T.copy().T, eg.put(X), eg.array(X), X]
    for n, x in enumerate(kinds, 2):
        m, loss = train(m, x)
        assert float(loss) == 32 * n * 2**n
    assert train.programs == 1
    m, loss = train(m, X.astype(np.float16))
    assert train.programs == 2
    assert float(train(m, X)[1]) == 32 * 9 * 2**9
    assert train.programs == 2


def test_arrays_alone_take_the_short_way_and_all_else_the_long_one() -> None:
    double = eg.compile(lambda a, b: a + b)
    x, y = (eg.array(np.full(3, v, np.float32)) for v in (1.0, 2.0))
    for _ in range(3):
        assert double(x, y).numpy().tolist() == [3.0, 3.0, 3.0]
    assert double._again((x, y)) is not None
    assert double(np.ones(3, np.float32), y).numpy().tolist() == [3.0, 3.0, 3.0]
    assert double(x, 4.0).numpy().tolist() == [5.0, 5.0, 5.0]
    assert double.programs == 2
    assert double(x, y).numpy().tolist() == [3.0, 3.0, 3.0]
    other = double(eg.array(np.arange(2, dtype=np.int32)), eg.array(np.arange(2, dtype=np.int32)))
    assert (other.numpy().dtype, other.numpy().tolist()) == (np.int32, [0, 2])
    taken = eg.compile(lambda a, b: a * b, donate=(0,))
    assert taken(x, y).numpy().tolist() == [2.0, 2.0, 2.0]
    for _ in range(2):
        with pytest.raises(DonatedError, match="argument 0 of"):
            double(x, y)
