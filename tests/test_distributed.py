"""Data-parallel training: shares, groups of threads and processes, several devices, engines."""

from __future__ import annotations

import csv
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import cli, data, distributed, nn, optim
from eggpu.distributed import DataParallel, DistributedError, Group, groups, processes, share
from eggpu.distributed import __main__ as command
from eggpu.runtime import Device
from eggpu.train import Callback, CSVLog, EarlyStopping, Result, Trainer, TrainingError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 6)).astype(np.float32)
Y = (X @ RNG.standard_normal((6, 3))).argmax(1).astype(np.int32)


class Threads:
    """An all-reduce between threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def group(self, rank: int) -> Group:
        def reduce(flat: np.ndarray, how: str) -> None:
            self.given[rank] = flat.copy()
            self.barrier.wait()
            flat[:] = getattr(np, how)(np.stack(self.given), axis=0)
            self.barrier.wait()

        def send(flat: np.ndarray) -> None:
            self.given[rank] = flat.copy()
            self.barrier.wait()
            flat[:] = self.given[0]
            self.barrier.wait()

        return Group(rank, self.size, rank, "threads", reduce, send)

    def run(self, function: Callable[[Group], Any]) -> list[Any]:
        """What the function gives in each thread; its error if it fails in one."""
        out: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            try:
                out[rank] = function(self.group(rank))
            except BaseException as error:  # noqa: BLE001  raised again below
                out[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [v for v in out if isinstance(v, BaseException)]
        errors.sort(key=lambda e: isinstance(e, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return out


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, key=0), *more, nn.relu, nn.Linear(8, 3, key=1))


def loss(model: Any, x: Any, y: Any, key: Any) -> Any:
    logits, model = model.train(x, key=key)
    return nn.cross_entropy(logits, y), model


def evaluation(model: Any, x: Any, y: Any) -> Any:
    return nn.cross_entropy(model(x), y)


def trainer(model: Any, *callbacks: Callback, **how: Any) -> Trainer:
    opt = optim.clipped(optim.adamw(optim.cosine(0.02, steps=20)), norm=0.5)
    batches = data.Batches((X, Y), 16, seed=1)
    valid = data.in_order((X[:20], Y[:20]), 16)
    return Trainer(
        model, loss, opt, batches, valid=valid, evaluation=evaluation, callbacks=callbacks,
        seed=5, **how,
    )  # fmt: skip


def fit(made: Trainer, out: Path, steps: int = 7, **how: Any) -> Result:
    return made.fit(out, steps=steps, quiet=True, log_every=1, **how)


def losses(result: Result) -> list[float]:
    return [value for _, value in result.history.train]


def test_shares_are_equal_parts() -> None:
    batch = {"x": np.arange(12).reshape(6, 2), "n": np.int32(3)}
    parts = [share(batch, k, 3) for k in range(3)]
    np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), batch["x"])
    assert all(p["n"] == 3 for p in parts)
    assert share(eg.array(batch["x"]), 1, 2).shape == (3, 2)
    with pytest.raises(DistributedError, match="a batch of 6 cannot be shared evenly by 4"):
        share(batch, 0, 4)


def test_all_reduce_between_threads() -> None:
    def work(group: Group) -> Any:
        r = group.rank
        tree = {"w": np.full((2, 3), r + 1, np.float32), "b": eg.array(np.float32(10 * r))}
        counts = (np.int32(r + 5), np.array([r == 1]))
        return (
            group.all_reduce(tree), group.all_reduce(tree, "sum"), group.all_reduce(counts, "max"),
            group.broadcast((np.arange(3, dtype=np.int32) + r, np.float32(r))),
        )  # fmt: skip

    for mean, total, largest, sent in Threads(3).run(work):
        np.testing.assert_array_equal(mean["w"].numpy(), np.full((2, 3), 2))
        assert float(mean["b"]) == 10
        assert float(total["b"]) == 30
        assert [largest[0].dtype.name, int(np.asarray(largest[0]))] == ["i32", 7]
        assert largest[1].numpy().tolist() == [True]
        assert sent[0].numpy().tolist() == [0, 1, 2]
        assert float(sent[1]) == 0


def test_a_group_of_one_changes_nothing() -> None:
    group = distributed.init()
    assert (group.rank, group.size, group.engine) == (0, 1, "alone")
    assert float(group.all_reduce(np.float32(2.5))) == 2.5
    group.barrier()
    group.close()
    with pytest.raises(DistributedError, match="the mean over processes needs arrays of floats"):
        group.all_reduce(np.arange(3))
    with pytest.raises(DistributedError, match="needs mean, sum, max or min, got 'median'"):
        group.all_reduce(np.float32(0), "median")
    with pytest.raises(DistributedError, match="needs to be mpi or gloo, got 'nccl'"):
        distributed.init("nccl")


def test_processes_train_as_one_with_the_whole_batch(tmp_path: Path) -> None:
    one = fit(trainer(net()), tmp_path / "one")

    def work(group: Group) -> Result:
        made = trainer(net(), CSVLog(), distributed=group)
        return fit(made, tmp_path / f"rank{group.rank}", eval_every=3)

    both = Threads(2).run(work)
    for result in both:
        np.testing.assert_allclose(losses(result), losses(one), rtol=2e-6)
    expected = nn.state_dict(one.model)
    first, second = (nn.state_dict(r.model) for r in both)
    for name, value in first.items():
        np.testing.assert_allclose(value.numpy(), expected[name].numpy(), 1e-5, 1e-6)
        np.testing.assert_array_equal(value.numpy(), second[name].numpy(), err_msg=name)
    assert sorted(p.name for p in (tmp_path / "rank0").iterdir()) == [
        "checkpoint.safetensors", "log.csv"
    ]  # fmt: skip
    assert list((tmp_path / "rank1").iterdir()) == []  # the first process alone writes


def test_states_move_by_their_mean_and_dropouts_differ(tmp_path: Path) -> None:
    seen: dict[int, Any] = {}

    def work(group: Group) -> Result:
        made = trainer(net(nn.BatchNorm(8), nn.Dropout(0.5)), distributed=group)
        seen[group.rank] = made.task(_run(tmp_path)).number(3)
        return fit(made, tmp_path / f"rank{group.rank}", 2)

    models = [nn.state_dict(r.model) for r in Threads(2).run(work)]
    mean = models[0]["layers.1.running_mean"].numpy()
    assert np.abs(mean).max() > 0
    np.testing.assert_array_equal(mean, models[1]["layers.1.running_mean"].numpy())
    assert [v.tolist() for _, v in sorted(seen.items())] == [[6], [7]]


def _run(out: Path) -> Any:
    from eggpu.train import Run

    return Run(out, 5, quiet=True)


class StopAt(Callback):
    """Stops after a step."""

    def step(self, moment: Any) -> None:
        self.stop = "enough" if moment.step == 3 else ""


@pytest.mark.parametrize("rank", [0, 1])
def test_all_stop_when_one_wants_to(rank: int, tmp_path: Path) -> None:
    """By a callback of the first process, or by a wish of another one."""

    def work(group: Group) -> Result:
        made = trainer(net(), StopAt(), distributed=group)
        if rank == 0:
            return fit(made, tmp_path / str(group.rank))
        run = _run(tmp_path / str(group.rank))
        task = made.task(run)
        assert not task.agree(False)
        assert task.agreed(9, stopped=group.rank == 1) == 0
        assert task.agreed(9 + group.rank, stopped=False) == 9
        assert task.agree(group.rank == 1)
        return Result(3, False, None, run.checkpoint, task.model, 0.0)  # type: ignore[arg-type]

    assert [r.steps for r in Threads(2).run(work)] == [3, 3]


def test_a_run_in_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(steps: int, resume: Path | None) -> Callable[[Group], Result]:
        return lambda group: fit(
            trainer(net(nn.Dropout(0.2)), distributed=group), tmp_path, steps, resume=resume
        )

    whole = Threads(2).run(run(6, None))[0]
    first = Threads(2).run(run(4, None))[0]
    rest = Threads(2).run(run(6, first.checkpoint))[0]
    assert losses(first) + losses(rest) == losses(whole)


def test_a_loss_that_is_not_finite_ends_all(tmp_path: Path) -> None:
    def work(group: Group) -> Result:
        made = trainer(net(), EarlyStopping(3), distributed=group)
        made.batches = data.Batches((X * np.float32(np.inf), Y), 16)
        return fit(made, tmp_path)

    with pytest.raises(TrainingError, match=r"the loss is nan at step 1; .* in one process"):
        Threads(2).run(work)


@pytest.mark.skipif("shader-f16" not in eg.device().target.features, reason="needs f16")
def test_mixed_precision_in_processes(tmp_path: Path) -> None:
    one = fit(trainer(net(), precision="mixed"), tmp_path / "one")

    def work(group: Group) -> tuple[Result, Trainer]:
        made = trainer(net(), precision="mixed", distributed=group)
        return fit(made, tmp_path / f"rank{group.rank}"), made

    (first, made), (second, _) = Threads(2).run(work)
    np.testing.assert_allclose(losses(first), losses(one), rtol=2e-3)
    assert losses(first) == losses(second)
    assert any("f16" in text for text in made.step.gradient.wgsl.values())
    assert not any("f16" in text for text in made.step.update.wgsl.values())
    assert float(made.state.scale) >= 256


def test_two_devices_train_as_one_with_the_whole_batch(tmp_path: Path, second: Device) -> None:
    devices = (eg.device(), second)
    one = fit(trainer(net()), tmp_path / "one")
    made = trainer(net(), devices=devices)
    before = [d.counters.copy() for d in devices]
    two = fit(made, tmp_path / "two")
    assert all(d.counters.since(b)["dispatches"] > 50 for d, b in zip(devices, before))
    np.testing.assert_allclose(losses(two), losses(one), rtol=2e-6)
    assert eg.device() is devices[0]
    copies = [nn.state_dict(m) for m in (two.model, made.step._copies[0][0])]
    for name, value in copies[0].items():
        np.testing.assert_array_equal(value.numpy(), copies[1][name].numpy(), err_msg=name)


def test_a_step_of_ones_own_over_devices(second: Device) -> None:
    opt = optim.sgd(0.1, momentum=0.9)

    def gradient(model: Any, state: Any, x: Any, y: Any, factor: Any) -> Any:
        value, grads = eg.value_and_grad(evaluation)(model, x, y)
        return value * factor, model, grads

    def update(model: Any, state: Any, grads: Any, factor: Any) -> Any:
        return opt.update(model, state, eg.tree_map(lambda g: g * factor, grads))

    def run(devices: Any) -> list[float]:
        step = DataParallel(gradient, update, devices=devices, name="own")
        model, out = net(), []
        state = opt.init(model)
        for i in range(4):
            if i == 2:  # a model that is not the one given last is copied anew
                model = nn.load_state_dict(model, nn.state_dict(net()))
            model, state, value = step(model, state, X, Y, np.float32(2))
            out.append(float(value))
        assert step.compile_seconds > 0
        assert len(step.plan.kernels) > 3
        return out

    np.testing.assert_allclose(run((eg.device(), second)), run(()), rtol=2e-6)
    step = DataParallel(gradient, update, devices=(eg.device(), second))
    with pytest.raises(DistributedError, match="a batch of 47 cannot be shared evenly by 2"):
        step(net(), opt.init(net()), X[:47], Y[:47], np.float32(1))


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    hidden = ("torch", "mpi4py")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a)
    )
    assert cli.main(["train", "mlp", "--data-parallel", "2"]) == 2
    text = capsys.readouterr().err
    assert "needs an engine for its all-reduce: MPI (pip install 'eggpu[mpi]'" in text
    assert "gloo (pip install torch" in text
    for name, launcher in (("mpi4py", "OMPI_COMM_WORLD_SIZE"), ("torch", "WORLD_SIZE")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setenv(launcher, "2")
    with pytest.raises(DistributedError, match="training under mpirun needs mpi4py"):
        distributed.init()
    with pytest.raises(DistributedError, match="gloo needs torch"):
        distributed.init("gloo")


def test_flags_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--data-parallel", "0"], ["--devices", "0,first"]):
        with pytest.raises(SystemExit):
            cli.main(["train", "mlp", *flags])
    text = capsys.readouterr().err
    assert "needs a number of processes, got '0'" in text
    assert "needs numbers with commas between them, got '0,first'" in text


def test_the_command_takes_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["train", "mlp", "--hidden", "8", "--steps", "3", "--log-every", "1", "--quiet"]
    for name, flags in (("one", ["--batch", "32"]), ("two", ["--batch", "16", "--devices", "0,0"])):
        assert cli.main([*common, *flags, "--out", str(tmp_path / name)]) == 0
    np.testing.assert_allclose(csv_losses(tmp_path / "two"), csv_losses(tmp_path / "one"), 3e-6)
    assert cli.main([*common, "--devices", "0,99", "--out", str(tmp_path)]) == 2
    assert "no device has the index or a name with '99'" in capsys.readouterr().err


def test_processes_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "assert os.environ['WORLD_SIZE'] == '2' and sys.argv[1:] == ['a']\n"
        "sys.exit(3) if rank else time.sleep(60)\n"
    )
    started = time.monotonic()
    monkeypatch.setattr(processes, "_PATIENCE", 0.3)
    assert processes.launch(2, [str(script), "a"], "gloo") == 3
    assert time.monotonic() - started < 30
    with pytest.raises(DistributedError, match="needs at least 1 process, got 0"):
        processes.launch(0, [str(script)])


def test_processes_write_whole_lines(tmp_path: Path) -> None:
    """Also where each writes a line in two pieces, and the last one without its end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "for file in (sys.stdout, sys.stderr):\n"
        "    for k in range(20):\n"
        "        file.write(f'{os.environ[\"RANK\"]}: {k} '); file.flush(); time.sleep(0.003)\n"
        "        file.write('of 20\\n'); file.flush()\n"
        "sys.stdout.write('' if int(os.environ['RANK']) else 'end')\n"
    )
    done = _started("gloo", [str(script)])
    whole = [f"{rank}: {k} of 20" for rank in (0, 1) for k in range(20)]
    assert sorted(done.stderr.splitlines()) == sorted(whole), done.stderr
    assert sorted(done.stdout.replace("end", "").splitlines()) == sorted(whole), done.stdout
    assert done.stdout.count("end") == 1
    assert done.returncode == 0


def test_processes_end_when_nobody_reads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from eggpu import script\n"
        "def main(steps: int = 1) -> None:\n"
        "    while True:\n"
        "        print('line', flush=True)\n"
        "script.run(main)\n"
    )
    code = (
        "from eggpu.distributed import launch\n"
        f"raise SystemExit(launch(2, {[str(script)]!r}, 'gloo'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.wait(60) == 141


SMALL = [
    "train", "gpt", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16",
    "--steps", "6", "--log-every", "1", "--length", "3",
]  # fmt: skip


def csv_losses(out: Path) -> list[float]:
    with (out / "loss.csv").open(encoding="utf-8") as file:
        return [float(row["train"]) for row in csv.DictReader(file)]


@pytest.mark.models
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_two_processes_train_a_gpt_as_one_with_the_double_batch(
    engine: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch" if engine == "gloo" else "mpi4py")
    one, two = tmp_path / "one", tmp_path / "two"
    assert cli.main([*SMALL, "--batch", "8", "--out", str(one), "--quiet"]) == 0
    argv = ["-m", "eggpu", *SMALL, "--batch", "4", "--out", str(two), "--data-parallel", "2"]
    done = _started(engine, argv)
    assert done.returncode == 0, done.stderr
    assert f"in 2 processes ({engine})" in done.stdout
    assert done.stdout.count("after 6 steps") == 1
    np.testing.assert_allclose(csv_losses(two), csv_losses(one), rtol=3e-6)
    assert (two / "checkpoint.safetensors").is_file()


def _started(engine: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """`python *argv` in processes of one engine, from a process without torch or MPI loaded."""
    code = (
        "import sys\nfrom eggpu.distributed import launch\n"
        f"sys.exit(launch(2, {argv!r}, {engine!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.models
@pytest.mark.timeout(400)
def test_ctrl_c_ends_all_processes_with_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    argv = ["train", "mlp", "--steps", "1000000", "--out", str(tmp_path), "--data-parallel", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eggpu", *argv], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            next(line for line in process.stdout if "compiled in" in line)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            rest = process.stdout.read()
            assert process.wait(120) == 130
        finally:
            process.kill()
    assert "go on with --resume" in rest
    assert (tmp_path / "checkpoint.safetensors").is_file()


@pytest.mark.models
@pytest.mark.timeout(200)
def test_a_script_in_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nfrom eggpu import distributed\n"
        "group = distributed.init()\n"
        "mean = group.all_reduce({'w': np.full(3, group.rank, np.float32)})\n"
        "print(group.rank, group.size, mean['w'].numpy().tolist())\ngroup.close()\n"
    )
    command = [sys.executable, "-m", "eggpu.distributed", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 [0.5, 0.5, 0.5]", "1 2 [0.5, 0.5, 0.5]"]


def test_the_launcher_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    usage = "usage: python -m eggpu.distributed N SCRIPT [ARGUMENT...]\n"
    assert capsys.readouterr().out.startswith(usage)
    for argv in ([], ["2"], ["two", "script.py"]):
        assert command.main(argv) == 2
        assert capsys.readouterr().err == usage


def test_the_launcher_tells_the_engine() -> None:
    assert groups._launcher({}) is None
    assert groups._launcher({"PMI_SIZE": "2"}) == "mpi"
    torchrun = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "1")
    assert groups._launcher(torchrun) == "gloo"
    assert groups._launcher({groups.RENDEZVOUS: "x", "PMIX_RANK": "0"}) == "gloo"
