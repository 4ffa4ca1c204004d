"""The trainer: same losses after resuming, callbacks that fire, and the op that made a NaN."""

from __future__ import annotations

import csv
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.checkpoints import read_metadata
from eggpu.train import (
    Best,
    Callback,
    CSVLog,
    EarlyStopping,
    LossCurve,
    Moment,
    Result,
    TensorBoard,
    Trainer,
    TrainingError,
    find_not_finite,
)
from eggpu.train.events import crc32c

RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 6)).astype(np.float32)
Y = (X @ RNG.standard_normal((6, 3))).argmax(1).astype(np.int32)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8, key=0), nn.BatchNorm(8), nn.relu, nn.Dropout(0.2), nn.Linear(8, 3, key=1)
    )


def loss(model: Any, x: Any, y: Any, key: Any) -> Any:
    logits, model = model.train(x, key=key)
    return nn.cross_entropy(logits, y), model


def evaluation(model: Any, x: Any, y: Any) -> Any:
    return nn.cross_entropy(model(x), y)


def accuracy(model: Any, x: Any, y: Any) -> Any:
    return (model(x).argmax(-1) == y).astype("f32").mean()


def make(*callbacks: Callback, source: Any = None, **changes: Any) -> Trainer:
    how: dict[str, Any] = {
        "valid": data.in_order((X[:20], Y[:20]), 16), "evaluation": evaluation,
        "metrics": {"accuracy": accuracy}, "callbacks": callbacks, "seed": 5,
    }  # fmt: skip
    source = source or data.Batches((X, Y), 16, seed=1)
    return Trainer(net(), loss, optim.ema(optim.adamw(0.01), 0.9), source, **(how | changes))


def fit(trainer: Trainer, out: Path, steps: int, **changes: Any) -> Result:
    how: dict[str, Any] = {"quiet": True, "log_every": 1, "save_every": 4, "eval_every": 3}
    return trainer.fit(out, steps=steps, **(how | changes))


def test_a_resumed_run_gives_the_same_losses_bit_for_bit(tmp_path: Path) -> None:
    whole = fit(make(), tmp_path / "whole", 9)
    first = fit(make(), tmp_path / "part", 5)
    rest = fit(make(), tmp_path / "part", 9, resume=first.checkpoint)
    assert first.history.train + rest.history.train == whole.history.train
    assert rest.history.valid[-1] == whole.history.valid[-1]
    expected = nn.state_dict(whole.model)
    for name, value in nn.state_dict(rest.model).items():
        np.testing.assert_array_equal(value.numpy(), expected[name].numpy(), err_msg=name)
    assert not np.array_equal(expected["layers.1.running_mean"].numpy(), np.zeros(8))


class Interrupting:
    """Batches; making batch 6 asks the process to stop."""

    def __init__(self) -> None:
        self.inner = data.Batches((X, Y), 16, seed=1)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> Any:
        if i == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return self.inner[i]


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    whole = fit(make(), tmp_path / "whole", 9)
    part = fit(make(source=Interrupting()), tmp_path / "part", 9)
    assert part.interrupted
    assert 3 <= part.steps <= 7
    rest = fit(make(), tmp_path / "part", 9, resume=part.checkpoint)
    assert part.history.train + rest.history.train == whole.history.train


def test_it_learns_by_epochs_and_evaluates(tmp_path: Path) -> None:
    trainer = make()
    before = trainer.evaluate()
    result = trainer.fit(tmp_path, epochs=12, quiet=True)
    after = trainer.evaluate()
    assert result.steps == 36
    assert [step for step, _ in result.history.valid] == list(range(3, 37, 3))
    assert after["loss"] < before["loss"] - 0.2
    assert after["accuracy"] > before["accuracy"]
    logits = trainer.model(X[:20]).numpy()  # uneven batches weigh by their examples
    assert abs(after["accuracy"] - (logits.argmax(1) == Y[:20]).mean()) < 1e-6


class Recorder(Callback):
    """Notes every call, and stops after a step."""

    def __init__(self, last: int) -> None:
        self.calls: list[Any] = []
        self.last = last

    def begin(self, moment: Moment) -> None:
        self.calls.append(("begin", moment.step, moment.names))

    def step(self, moment: Moment) -> None:
        self.calls.append(("step", moment.step, moment.loss))
        if moment.step == self.last:
            self.stop = "enough"

    def valid(self, moment: Moment) -> None:
        self.calls.append(("valid", moment.step, moment.values))

    def end(self, result: Result) -> None:
        self.calls.append(("end", result.steps, None))


def test_without_validation_batches_nothing_is_said_of_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(valid=(), metrics={})
    result = fit(trainer, tmp_path, 7, quiet=False)
    assert result.history.valid == []
    assert "step 7/7" in (text := capsys.readouterr().out)
    assert "validation" not in text
    assert "nan" not in text


def test_callbacks_fire_in_order_and_can_stop(tmp_path: Path) -> None:
    recorder = Recorder(last=4)
    result = fit(make(recorder), tmp_path, 9)
    names = [(name, step) for name, step, _ in recorder.calls]
    assert names == [
        ("begin", 0), ("step", 1), ("step", 2), ("step", 3), ("valid", 3), ("step", 4),
        ("valid", 4), ("end", 4),
    ]  # fmt: skip
    assert recorder.calls[0][2] == ("loss", "accuracy")
    assert [(s, v) for n, s, v in recorder.calls if n == "step"] == result.history.train
    assert set(recorder.calls[4][2]) == {"loss", "accuracy"}


def moment(step: int, value: float, out: Path, saved: list[Path]) -> Moment:
    return Moment(step, out, ("loss",), None, None, saved.append, values={"loss": value})


def test_early_stopping_and_the_best_checkpoint(tmp_path: Path) -> None:
    stopping, best, saved = EarlyStopping(2, change=0.1), Best(), []
    for step, value in enumerate((1.0, 0.5, 0.45, 0.6)):
        for callback in (stopping, best):
            callback.valid(moment(step, value, tmp_path, saved))
        if step == 2:  # what a checkpoint remembers goes on counting
            other = EarlyStopping(2, change=0.1)
            other.recall(stopping.remembered())
            stopping = other
    assert stopping.stop == "loss did not better 0.5000 at step 1 in 2 validations"
    assert saved == [tmp_path / "best.safetensors"] * 3
    assert (best.best, best.best_step) == (0.45, 2)
    larger = EarlyStopping(1, metric="accuracy", larger=True)
    with pytest.raises(TrainingError, match="no validation gives accuracy; there are loss"):
        larger.valid(moment(0, 1.0, tmp_path, saved))


def test_a_run_keeps_its_best_and_stops_early(tmp_path: Path) -> None:
    source = data.Batches((X, RNG.permutation(Y)), 16)  # nothing to learn for the validation
    trainer = make(EarlyStopping(2), Best(), source=source)
    result = fit(trainer, tmp_path, 200, eval_every=2)
    assert result.steps < 200
    values = dict(result.history.valid)
    best = read_metadata(tmp_path / "best.safetensors").step
    assert values[best] == min(values.values())
    assert result.steps - best >= 4
    assert read_metadata(result.checkpoint).config["callbacks"][0]["best_step"] == best


def test_the_log_goes_on_when_a_run_is_resumed(tmp_path: Path) -> None:
    first = fit(make(CSVLog()), tmp_path, 5)
    rest = fit(make(CSVLog()), tmp_path, 7, resume=first.checkpoint)
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "loss", "valid_loss", "valid_accuracy"]
    losses = [(int(r["step"]), float(r["loss"])) for r in rows if r["loss"]]
    assert losses == first.history.train + rest.history.train
    assert [int(r["step"]) for r in rows if r["valid_loss"]] == [3, 5, 6, 7]


def records(path: Path) -> list[bytes]:
    """The records of an event file, with their checksums tested."""
    data, at, out = path.read_bytes(), 0, []

    def checked(part: bytes, crc: bytes) -> None:
        low = (struct.unpack("<I", crc)[0] - 0xA282EAD8) & 0xFFFFFFFF
        assert crc32c(part) == (low >> 17 | low << 15) & 0xFFFFFFFF

    while at < len(data):
        size = struct.unpack_from("<Q", data, at)[0]
        checked(data[at : at + 8], data[at + 8 : at + 12])
        out.append(data[at + 12 : at + 12 + size])
        checked(out[-1], data[at + 12 + size : at + 16 + size])
        at += 16 + size
    return out


def test_event_files_for_tensorboard(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # of RFC 3720
    result = fit(make(TensorBoard()), tmp_path, 1)
    version, loss_, *valid = records(next((tmp_path / "events").iterdir()))
    assert version[9:] == b"\x1a\x0dbrain.Event:2"
    # wall time, step 1, and a summary of 1 value: its tag and an f32
    summary = loss_[11:]
    assert loss_[9:11] == b"\x10\x01"
    assert summary[:2] == b"\x2a\x13"
    assert summary[2:4] == b"\x0a\x11"
    assert summary[4:16] == b"\x0a\x0atrain/loss"
    value = struct.unpack("<f", summary[17:])[0]
    assert value == np.float32(result.history.train[0][1])
    assert [b"valid/loss" in valid[0], b"valid/accuracy" in valid[1]] == [True, True]


@pytest.mark.models
def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as reading

    result = fit(make(TensorBoard()), tmp_path, 300, log_every=100, eval_every=300)
    found = reading.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    events = found.Scalars("train/loss")
    assert [(e.step, np.float32(e.value)) for e in events] == [
        (step, np.float32(v)) for step, v in result.history.train
    ]


def test_a_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(make(LossCurve("curve.png", "digits")), tmp_path, 3)
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TrainingError, match="a loss curve needs matplotlib: pip install"):
        fit(make(LossCurve()), tmp_path, 1)


def test_a_nan_is_traced_to_the_op_that_made_it(tmp_path: Path) -> None:
    model = nn.Linear(6, 3, key=0)

    def bad(model: Any, x: Any, y: Any) -> Any:
        return eg.log(model(x) - y.reshape((16, 1))).mean()

    source = data.Batches((X, np.where(Y > 5, 1, -9).astype(np.float32)), 16, shuffle=False)
    source.data.arrays[1][35] = 100.0  # type: ignore[attr-defined]
    trainer = Trainer(model, bad, optim.sgd(1e-3), source)
    with pytest.raises(TrainingError) as error:
        fit(trainer, tmp_path, 6, save_every=2)
    told = str(error.value)
    assert "the loss is nan at step 3" in told
    assert "in step 3 log at " in told
    assert "test_trainer.py:" in told
    assert "made the first NaN: f32[16, 3] of sub f32[16, 3] from -10" in told
    assert read_metadata(tmp_path / "checkpoint.safetensors").step == 2


@pytest.mark.parametrize(
    ("function", "x", "op", "made"),
    [
        (lambda x: eg.sqrt(x).sum(), [1.0, -1.0], "sqrt", "NaN"),
        (lambda x: eg.exp(x) * 2.0, [1.0, 100.0], "exp", "infinity"),
        (lambda x: eg.exp(x) - eg.exp(x + 1.0), [100.0], "exp", "infinity"),
        (lambda x: x * 1.0 + 1.0, [np.nan], "input arg0", "NaN"),
    ],
)
def test_the_first_op_is_named(function: Callable[..., Any], x: Any, op: str, made: str) -> None:
    found = find_not_finite(function, np.array(x, np.float32))
    assert found is not None
    assert (found.op, found.made) == (op, made)


def test_masks_and_what_a_choice_hides_are_not_blamed() -> None:
    x = np.array([-1.0, 4.0], np.float32)
    assert find_not_finite(lambda x: eg.where(x > 0, eg.log(x), 0.0).sum(), x) is None
    attend = nn.scaled_dot_product_attention
    q = RNG.standard_normal((1, 4, 8)).astype(np.float32)
    found = find_not_finite(lambda q: attend(q, q, eg.log(q), causal=True), q)
    assert found is not None
    assert (found.op, found.made) == ("log", "NaN")


def test_scaled_losses_are_reported_as_they_are(tmp_path: Path) -> None:
    plain = fit(make(), tmp_path / "plain", 3)
    optimizer = optim.scaled(optim.ema(optim.adamw(0.01), 0.9), initial=2.0**10)
    source = data.Batches((X, Y), 16, seed=1)
    trainer = Trainer(net(), loss, optimizer, source, seed=5)
    found = fit(trainer, tmp_path / "scaled", 3)
    np.testing.assert_allclose(
        [v for _, v in found.history.train], [v for _, v in plain.history.train], rtol=1e-5
    )


def test_a_run_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="fit needs steps, epochs or minutes"):
        make().fit(tmp_path)
