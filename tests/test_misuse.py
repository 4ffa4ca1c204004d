"""What a user asks for by mistake gives one error that says what was needed and what came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.checkpoints import CheckpointError
from eggpu.compiler.errors import CompileError, IRError, TraceError
from eggpu.runtime import DonatedError
from eggpu.train import Trainer

X = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "half"}, "precision is 'float32' or 'mixed', got 'half'"),
        ({"optimise": False}, "compile has no option optimise; there are"),
        ({"precision": None}, "precision is 'float32' or 'mixed', got None"),
        ({"max_memory": 0}, "max_memory needs a number of bytes above 0, got 0"),
        ({"max_memory": "1G"}, "max_memory needs a number of bytes above 0, got '1G'"),
        ({"max_memory": 1.5}, "max_memory needs a number of bytes above 0, got 1.5"),
        ({"max_memory": True}, "max_memory needs a number of bytes above 0, got True"),
        ({"tune": "no"}, "tune needs True or False, got 'no'"),
        ({"relaxed": 1}, "relaxed needs True or False, got 1"),
        ({"donate": ("y",)}, "donate names 'y', but <lambda> has the parameters x"),
        ({"donate": -1}, "donate names -1, but <lambda> has the parameters x"),
        ({"force": "attention"}, r"force needs a tuple, such as \('attention',\), got 'attention'"),
        ({"without": "attention"}, "without needs a tuple"),
        ({"rules": ("attention",)}, "rules needs objects of eggpu.rules.Rule, got 'attention'"),
    ],
)
def test_options_are_told_where_they_are_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises((CompileError, TraceError), match=message):
        eg.compile(lambda x: x, **options)


def test_positions_are_told_when_the_arguments_are_known() -> None:
    with pytest.raises(TraceError, match="donate names argument 1, but once has 1"):
        eg.compile(lambda x: x + 1, donate=1, name="once", cache=False)(X)
    with pytest.raises(TraceError, match="fetch names result 'x', but once has 1"):
        eg.compile(lambda x: x + 1, fetch=("x",), name="once", cache=False)(X)
    every = eg.compile(lambda *xs: [x + 1 for x in xs], donate=(0, 1), cache=False)
    assert len(every(X, X)) == 2


def test_a_limit_may_be_a_number_of_numpy() -> None:
    assert eg.Options(max_memory=np.int64(1 << 20)) == eg.Options(max_memory=1 << 20)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_limit_that_nothing_fits(optimize: bool) -> None:
    step = eg.compile(lambda x: x + 1, max_memory=1, optimize=optimize, cache=False)
    with pytest.raises(CompileError, match=r"max_memory=1 bytes: .* least found.* is 256$"):
        step(X)


def test_an_array_that_left_its_loop() -> None:
    kept = []

    def body(carry: Any, row: Any) -> Any:
        kept.append(carry * 2)
        return carry + row, row

    def leaks(x: Any) -> Any:
        eg.scan(body, eg.zeros(4), x)
        return x + kept[0]

    with pytest.raises(IRError, match="an array of another trace is used"):
        eg.compile(leaks, cache=False)(X)


@pytest.mark.parametrize(
    "changes", [{"optimizer": optim.sgd(0.1)}, {"optimizer": optim.lion(0.1)}, {"width": 5}]
)
def test_a_checkpoint_of_another_run_loses_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    def trainer(optimizer: Any = None, width: int = 6) -> Trainer:
        batches = data.Batches((X, np.zeros(8, np.int32)), 8)
        loss = lambda model, x, y: nn.cross_entropy(model(x), y)  # noqa: E731
        model = nn.MLP((4, width, 2), key=0)
        return Trainer(model, loss, optimizer or optim.adamw(0.1), batches)

    saved = trainer().fit(tmp_path, steps=2, quiet=True).checkpoint
    before = saved.read_bytes()
    with pytest.raises(CheckpointError) as error:
        trainer(**changes).fit(tmp_path, steps=4, quiet=True, resume=saved)
    text = str(error.value)
    assert "the state does not fit what it is loaded into\n" in text
    assert text.endswith("was it saved with another model, optimizer or precision?")
    assert saved.read_bytes() == before
    assert trainer().fit(tmp_path, steps=4, quiet=True, resume=saved).steps == 4


def test_a_loaded_plan_takes_only_its_types(tmp_path: Path) -> None:
    twice = eg.compile(lambda x, n: x * 2 + n, name="twice", cache=False)
    twice(X, np.int32(1))
    twice.save(tmp_path / "twice.json")
    loaded = eg.load(tmp_path / "twice.json")
    (out,) = loaded(eg.array(X), np.int32(1))
    assert (out.numpy() == 3).all()
    with pytest.raises(TypeError, match=r"twice needs x: f32\[8, 4\], got i32\[8, 4\]"):
        loaded(X.astype(np.int32), np.int32(1))
    with pytest.raises(TypeError, match=r"twice needs x: f32\[8, 4\], got f32\[4, 8\]"):
        loaded(X.T, np.int32(1))
    with pytest.raises(TypeError, match=r"twice needs 2 arrays \(x: .*, n: i32\[\]\), got 1"):
        loaded(X)


@pytest.mark.parametrize(
    "made", [lambda x: (x.sum(), x), lambda x: {"loss": x.sum()}, lambda x: None]
)
def test_gradients_of_several_results_are_refused(made):
    with pytest.raises(eg.TraceError, match=r"scalar result, got a .*has_aux=True"):
        eg.grad(made)(np.ones(3, np.float32))


def _read_before(values: np.ndarray) -> eg.Array:
    made = eg.put(values)
    _ = made.numpy()
    return made


@pytest.mark.parametrize(
    "made",
    [
        eg.array,
        lambda values: eg.array(values - 1) + 1,
        eg.put,
        _read_before,
        lambda values: eg.compile(lambda x: x * 1.5)(values / 1.5),
    ],
    ids=["of the host", "expression", "on the device", "read before", "result"],
)
@pytest.mark.parametrize("written", [True, False])
def test_a_donated_array_is_gone_wherever_its_value_was(made: Any, written: bool) -> None:
    x = made(np.arange(4, dtype=np.float32))
    later = x * 3  # holds the value that x had, where the host had it
    if written:
        grow = eg.compile(lambda x: x + 1, donate="x", cache=False, name="grow")
    else:
        grow = eg.compile(lambda x: x.sum(), donate="x", cache=False, name="grow")
    result = grow(x)
    message = "argument 0 of grow was donated to it and holds no value now; use the value that the"
    for read in (
        lambda: x.numpy(), lambda: np.asarray(x), lambda: x.tolist(), lambda: x[0], lambda: x + 1,
        lambda: [*x], lambda: eg.copy(x), lambda: eg.put(x), lambda: eg.array(x).numpy(),
        lambda: grow(x), lambda: eg.compile(lambda y: y + x, cache=False)(1.0),
    ):  # fmt: skip
        with pytest.raises(DonatedError, match=message):
            _ = read()
    assert repr(x) == "Array(f32[4], donated)"
    assert (x.shape, str(x.dtype), len(x)) == ((4,), "f32", 4)
    assert later.numpy().tolist() == [0, 3, 6, 9]
    assert np.sum(result.numpy()) == (10 if written else 6)


def test_host_memory_of_numpy_stays_readable() -> None:
    x = np.arange(4, dtype=np.float32)
    grow = eg.compile(lambda x: x + 1, donate="x", cache=False)
    assert grow(x).numpy().tolist() == [1, 2, 3, 4]
    assert grow(x).numpy().tolist() == [1, 2, 3, 4]
    assert x.tolist() == [0, 1, 2, 3]
