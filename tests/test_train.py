"""Training: what a run leaves behind, how it ends, and how it goes on."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eggpu import data, nn
from eggpu.checkpoints import CheckpointError, load_checkpoint, read_metadata
from eggpu.train import (
    MLPConfig,
    Result,
    Run,
    TrainingError,
    loop,
    mlp,
    progress,
    report,
    train_gpt,
    train_lstm,
    train_mlp,
)
from eggpu.train.sample import sample_text
from eggpu.train.task import Task
from eggpu.train.text import Writing

SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4}


def run(out: Path, steps: int | None = 20, **changes: Any) -> Run:
    return dataclasses.replace(Run(out, steps, log_every=5, eval_every=10), **changes)


class Watched(Task):
    """A task that does something before each step."""

    before: Callable[[int], None]

    def advance(self, i: int, total: float) -> Any:
        self.before(i)
        return super().advance(i, total)


@pytest.fixture
def task() -> Callable[..., Task]:
    """A small task that may do something before step i."""
    digits = data.digits()

    def make(before: Callable[[int], None] = lambda i: None) -> Task:
        made = mlp._task(MLPConfig(hidden=8, batch=16), digits, Run(Path("unused")))
        out = Watched(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})
        out.before = before
        return out

    return make


def test_a_gpt_learns_writes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    out, writing = tmp_path / "run", Writing(prompt="the ", length=20)
    changes = SMALL | {"lr": 0.02}
    result = train_gpt(changes, [tmp_path / "text.txt"], run=run(out, 60), writing=writing)
    corpus = data.corpus([tmp_path / "text.txt"])
    assert result.valid < corpus.unigram_entropy - 0.3
    assert [step for step, _ in result.history.valid] == [10, 20, 30, 40, 50, 60]
    text = capsys.readouterr().out
    assert f"unigram entropy {corpus.unigram_entropy:.4f}" in text
    assert "step 60/60  loss " in text
    assert f"checkpoint   {out / 'checkpoint.safetensors'}" in text
    written = (out / "sample.txt").read_text()
    assert written.startswith("the ")
    assert len(written) == 4 + 20 + 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "loss.csv").read_text().splitlines()[1].startswith("1,")
    assert (out / "dump" / "4-plan.txt").is_file()
    assert "profile of gpt_step" in (out / "profile.txt").read_text()
    metadata = read_metadata(result.checkpoint)
    assert metadata.step == 60
    assert metadata.config["characters"] == corpus.vocabulary.characters


def test_an_lstm_learns_and_writes_on_from_its_state(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    out, writing = tmp_path / "run", Writing(prompt="the ", length=20)
    changes = {"layers": 1, "width": 8, "hidden": 24, "context": 16, "batch": 8, "lr": 0.02}
    text = [tmp_path / "text.txt"]
    result = train_lstm(changes, text, run=run(out, 60, quiet=True), writing=writing)
    assert result.valid < data.corpus(text).unigram_entropy - 0.3
    assert (out / "sample.txt").read_text().startswith("the ")
    more = run(tmp_path / "more", 62, quiet=True, resume=result.checkpoint)
    assert train_lstm(run=more, writing=writing).steps == 62
    with pytest.raises(TrainingError, match="has hidden 24, which cannot become 32"):
        train_lstm({"hidden": 32}, run=more)
    tokens = np.arange(12, dtype=np.int32).reshape(1, 12) % 7
    whole, parts, state = result.model(tokens).numpy(), [], None
    for part in (tokens[:, :5], tokens[:, 5:]):
        logits, state = result.model.step(part, state)
        parts.append(logits.numpy())
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_two_runs_of_one_seed_are_the_same(tmp_path: Path) -> None:
    changes = {"hidden": 8, "batch": 16}
    first = train_mlp(changes, run=run(tmp_path / "first", 20, quiet=True))
    second = train_mlp(changes, run=run(tmp_path / "second", 20, quiet=True))
    assert first.history == second.history


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, task: Any) -> None:
    whole = loop.fit(task(), run(tmp_path / "whole"), progress.Quiet())

    def interrupt(i: int) -> None:
        if i == 7:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    part = run(tmp_path / "part")
    stopped = loop.fit(task(interrupt), part, progress.Quiet())
    assert (stopped.interrupted, stopped.steps) == (True, 8)
    assert signal.getsignal(signal.SIGINT) is before
    resumed = task()
    resumed.resume(dataclasses.replace(part, resume=stopped.checkpoint))
    assert resumed.start == 8
    result = loop.fit(resumed, part, progress.Quiet())
    assert (result.interrupted, result.steps) == (False, 20)
    names = nn.named_parameters(whole.model)
    for name, value in nn.named_parameters(result.model).items():
        np.testing.assert_array_equal(value.numpy(), names[name].numpy(), err_msg=name)
    assert result.valid == whole.valid


def test_batches_are_made_ahead_on_a_thread_that_ends(tmp_path: Path, task: Any) -> None:
    made, seen, watched = threading.Event(), [], task()
    batch, threads = watched.batch, threading.active_count()

    def noted(i: int) -> Any:
        seen.append((i, threading.current_thread() is threading.main_thread()))
        if i == 4:
            made.set()
        return batch(i)

    def before(i: int) -> None:
        assert i != 2 or made.wait(30)  # the batch of step 4 is made before step 2

    watched.batch, watched.before = noted, before
    loop.fit(watched, run(tmp_path, 6), progress.Quiet())
    assert [i for i, _ in seen[:6]] == [0, 1, 2, 3, 4, 5]
    assert not any(main for _, main in seen)
    assert threading.active_count() == threads


def test_an_error_of_a_batch_comes_at_its_step(tmp_path: Path, task: Any) -> None:
    watched, threads = task(), threading.active_count()
    batch, steps = watched.batch, []

    def missing(i: int) -> Any:
        if i == 3:
            raise OSError("file of batch 3 is missing")
        return batch(i)

    watched.batch, watched.before = missing, steps.append
    with pytest.raises(OSError, match="file of batch 3 is missing"):
        loop.fit(watched, run(tmp_path), progress.Quiet())
    assert steps == [0, 1, 2, 3]
    assert threading.active_count() == threads


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path, task: Any) -> None:
    def interrupt(i: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(task(interrupt), run(tmp_path), progress.Quiet())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, task: Any) -> None:
    broken: Task = task()
    batch = broken.batch
    broken.batch = lambda i: (batch(i)[0] * np.float32(np.nan if i >= 6 else 1), batch(i)[1])
    limits = run(tmp_path, save_every=4)
    with pytest.raises(TrainingError, match=r"loss is nan at step 8: try a lower --lr; the last"):
        loop.fit(broken, limits, progress.Quiet())
    tree = {"model": broken.model, "state": broken.state}
    tree, metadata = load_checkpoint(limits.checkpoint, tree)
    assert metadata.step == 4
    assert all(np.isfinite(v.numpy()).all() for v in nn.named_parameters(tree).values())


def test_losses_of_a_resumed_run_follow_those_of_its_folder(tmp_path: Path) -> None:
    def steps(out: Path) -> list[int]:
        rows = (out / "loss.csv").read_text().splitlines()[1:]
        return [int(row.partition(",")[0]) for row in rows]

    first = train_mlp({"hidden": 8}, run=run(tmp_path / "a", 4, quiet=True))
    before = (tmp_path / "a" / "loss.csv").read_text()
    assert steps(tmp_path / "a")[-1] == 4
    elsewhere = train_mlp(run=run(tmp_path / "b", 6, quiet=True, resume=first.checkpoint))
    assert steps(tmp_path / "b")[0] == elsewhere.history.train[0][0] == 5
    train_mlp(run=run(tmp_path / "a", 6, quiet=True, resume=first.checkpoint))
    after = (tmp_path / "a" / "loss.csv").read_text()
    assert after.startswith(before)
    assert after[len(before) :] == (tmp_path / "b" / "loss.csv").read_text().partition("\n")[2]


def test_a_run_goes_on_where_it_ended_and_not_with_another_model(tmp_path: Path) -> None:
    first = train_mlp({"hidden": 8}, run=run(tmp_path / "a", 4, quiet=True))
    more = run(tmp_path / "b", 6, quiet=True, resume=first.checkpoint)
    assert train_mlp({"lr": 1e-4}, run=more).steps == 6
    assert read_metadata(more.checkpoint).config["mlp"]["lr"] == 1e-4
    assert read_metadata(more.checkpoint).config["mlp"]["hidden"] == 8
    with pytest.raises(TrainingError, match="has hidden 8, which cannot become 9"):
        train_mlp({"hidden": 9}, run=more)
    with pytest.raises(TrainingError, match="has 6 steps already; ask for more with --steps"):
        train_mlp(run=dataclasses.replace(more, resume=more.checkpoint))
    with pytest.raises(CheckpointError, match="is no checkpoint of `eggpu train gpt`"):
        train_gpt(run=more)


def test_a_run_with_a_time_limit_ends_in_time(tmp_path: Path, task: Any) -> None:
    shown: list[progress.Status] = []

    class Recorder(progress.Quiet):
        def show(self, status: progress.Status) -> None:
            shown.append(status)

    seconds = 1.5
    limits = run(tmp_path, None, minutes=seconds / 60, eval_every=10**6)
    result = loop.fit(task(), limits, Recorder())
    assert 0.5 * seconds < result.seconds < 2 * seconds
    assert shown[-1].step == shown[-1].total == result.steps
    assert not math.isfinite(shown[0].rate)
    assert shown[-1].rate > 0


def test_steps_bound_a_run_with_a_time_limit(tmp_path: Path, task: Any) -> None:
    result = loop.fit(task(), run(tmp_path, 15, minutes=10.0), progress.Quiet())
    assert result.steps == 15


def test_samples_are_reproducible() -> None:
    vocabulary = data.Vocabulary("abc")
    model = nn.GPT(vocabulary.size, 1, 8, 1, context=5, key=0)
    texts = [sample_text(model, vocabulary, prompt="ab", length=9, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 11
    assert set(texts[0]) <= set("abc")
    cold = [
        sample_text(model, vocabulary, prompt="a", length=3, temperature=0, seed=s) for s in (1, 2)
    ]
    assert cold[0] == cold[1]


def test_without_matplotlib_the_curve_is_named_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    history = loop.History([(1, 2.0)], [])
    said = report.draw_losses(history, tmp_path / "loss.png", "t", ("guessing", 2.3))
    assert said == "no loss curve: it needs matplotlib (pip install 'eggpu[train]')"


def test_displays() -> None:
    status = progress.Status(5, 10, 1.25, 1234.5, "tokens", 61.0)
    assert status.text == "loss 1.2500  1,234 tokens/s  1:01 left"
    assert dataclasses.replace(status, rate=math.nan).text == "loss 1.2500"
    plain = io.StringIO()
    shown = progress.display(False, Console(file=plain, width=40))
    for step in (5, 6, 10):
        shown.show(dataclasses.replace(status, step=step))
    shown.say("[a] line that is longer than the width of the console")
    lines = plain.getvalue().splitlines()
    assert lines[0] == f"step 5/10  {status.text}"
    assert lines[1] == f"step 10/10  {status.text}"
    assert lines[2] == "[a] line that is longer than the width of the console"
    terminal = io.StringIO()
    shown = progress.display(False, Console(file=terminal, force_terminal=True, width=100))
    shown.show(status)
    shown.show(dataclasses.replace(status, total=20))
    shown.close()
    assert "5/20" in terminal.getvalue()
    assert "1,234 tokens/s" in terminal.getvalue()
    assert isinstance(progress.display(True), progress.Quiet)


def test_a_result_without_validation_has_no_loss(tmp_path: Path) -> None:
    result = Result(0, True, loop.History(), tmp_path, None, 0.0)
    assert math.isnan(result.valid)
