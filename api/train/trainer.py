"""Trains any model with any loss: one compiled step, validation, callbacks, exact resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.checkpoints import load_checkpoint, save_checkpoint
from eggpu.compiler import pytree
from eggpu.data import Batch, Source
from eggpu.distributed import DataParallel, Group, share
from eggpu.optim import Optimizer, Scaled, ScaledState, scaled
from eggpu.runtime import Device
from eggpu.train.callbacks import Callback, Moment
from eggpu.train.loop import fit
from eggpu.train.nans import first_not_finite
from eggpu.train.progress import Display, display
from eggpu.train.run import Result, Run, TrainingError
from eggpu.train.task import Task


class Trainer:
    """A model with its loss, optimizer and batches.

    `loss(model, *batch)` is a scalar, or `(scalar, model)` when the model has states that move. A
    parameter `key` of it gets random numbers of the seed and the step. `evaluation` (by default the
    loss) and `metrics` are means over a batch, taken over all `valid` batches. A run of the same
    seed gives the same losses to the last bit, also when it was resumed.

    Each process of `distributed` (see `eggpu.distributed.init`), and each of its `devices`, takes
    an equal share of every batch; only the first process calls callbacks and writes.

    With `precision="mixed"` the step keeps activations as f16 (see Options) and the loss is
    multiplied by a factor that adapts (optim.scaled); it needs a device with shader-f16.

    >>> trainer = Trainer(model, loss, optim.adamw(1e-3), data.Batches((x, y), 64), valid=valid)
    >>> result = trainer.fit("runs/first", epochs=5)
    """

    def __init__(
        self, model: Any, loss: Callable[..., Any], optimizer: Optimizer, batches: Source, *,
        valid: Sequence[Batch] = (), evaluation: Callable[..., eg.Array] | None = None,
        metrics: Mapping[str, Callable[..., eg.Array]] | None = None,
        callbacks: Sequence[Callback] = (), seed: int = 0, unit: str = "examples",
        config: Mapping[str, Any] | None = None, name: str = "model",
        distributed: Group | None = None, devices: Sequence[Device] = (),
        precision: Literal["float32", "mixed"] = "float32",
    ) -> None:  # fmt: skip
        if precision == "mixed" and not isinstance(optimizer, Scaled):
            optimizer = scaled(optimizer)
        self.model, self.optimizer, self.batches, self.valid = model, optimizer, batches, valid
        self.state = optimizer.init(model)
        self.callbacks, self.unit, self.config = tuple(callbacks), unit, dict(config or {})
        self.group, self.devices = distributed or Group(), tuple(devices)
        self.step: Any
        if self.group.size > 1 or len(self.devices) > 1:
            gradient = loss_and_gradient(loss, seed)
            self.step = DataParallel(
                gradient, optimizer.update, self.group, self.devices, name, precision=precision
            )
        else:
            step = training_step(loss, optimizer, seed)
            self.step = eg.compile(
                step, donate=("model", "state"), name=f"{name}_step", precision=precision
            )
        self.means = {"loss": evaluation or loss, **(metrics or {})}
        self._evaluate = eg.compile(_evaluation(self.means), name=f"{name}_valid")

    def evaluate(self, batches: Sequence[Batch] | None = None) -> dict[str, float]:
        """Loss and metrics over batches (the validation ones), each weighed by its examples."""
        chosen = self.valid if batches is None else batches
        if not chosen:
            return {}
        sizes = [len(batch[0]) for batch in chosen]
        found = [self._evaluate(self.model, batch) for batch in chosen]
        names = list(self.means)
        rows = [[float(one[n]) for n in names] for one in found]
        means = np.average(np.array(rows, np.float64), axis=0, weights=sizes)
        return dict(zip(names, map(float, means), strict=True))

    def fit(
        self, out: str | Path, *, steps: int | None = None, epochs: int | None = None,
        resume: str | Path | None = None, quiet: bool = False, shown: Display | None = None,
        **limits: Any,
    ) -> Result:  # fmt: skip
        """Train for so many steps or epochs in all; `limits` are further fields of Run.

        `out` gets checkpoint.safetensors. Ctrl-C ends the run after the step under way, with a
        checkpoint. Raises TrainingError, which names the op, when the loss is not finite.
        """
        if steps is None and epochs is not None:
            steps = epochs * len(self.batches)
        if steps is None and limits.get("minutes") is None:
            raise TrainingError("fit needs steps, epochs or minutes")
        limits.setdefault("eval_every", len(self.batches))
        source = None if resume is None else Path(resume)
        run = Run(Path(out), steps, quiet=quiet, resume=source, **limits)
        task = self.task(run)
        result = fit(task, run, shown or display(quiet or self.group.rank > 0))
        self.model, self.state = task.model, task.state
        for callback in self.told:
            callback.end(result)
        return result

    @property
    def told(self) -> tuple[Callback, ...]:
        """The callbacks of this process: all in the first one, none in the others."""
        return () if self.group.rank else self.callbacks

    def part(self, i: int) -> Any:
        """This process's share of batch i."""
        return share(self.batches[i], self.group.rank, self.group.size)

    def task(self, run: Run) -> Task:
        """The run's task, resumed if it resumes."""
        task = _TrainerTask(
            step=self.step, evaluate=self._unused, batch=self.part,
            model=self.model, state=self.state, config=dict(self.config), group=self.group,
            items=len(self.batches[0][0]), unit=self.unit, trainer=self, run=run,
        )  # fmt: skip
        task.resume(run)
        task.model, task.state = self.group.broadcast((task.model, task.state))
        return task

    @staticmethod
    def _unused(model: Any) -> float:
        raise AssertionError("a trainer's task validates by its trainer")


def loss_and_gradient(loss: Callable[..., Any], seed: int) -> Any:
    """(model, state, number, batch) -> (loss, model, gradients); the model with states moved."""
    keyed = "key" in inspect.signature(loss).parameters

    def gradient(model: Any, state: Any, number: Any, batch: Any) -> Any:
        key = eg.random.key(seed)
        more = {"key": eg.random.fold_in(key, number.reshape(()))} if keyed else {}

        def scaled(model: Any) -> Any:
            out = loss(model, *batch, **more)
            value, moved = out if isinstance(out, tuple) else (out, model)
            factor = state.scale if isinstance(state, ScaledState) else None
            return value if factor is None else value * factor, (value, moved)

        (_, (value, moved)), grads = eg.value_and_grad(scaled, has_aux=True)(model)
        return value, moved, grads

    return gradient


def training_step(loss: Callable[..., Any], optimizer: Optimizer, seed: int) -> Any:
    """(model, state, number, batch) -> (model, state, loss): loss, gradients and update."""
    gradient = loss_and_gradient(loss, seed)

    def step(model: Any, state: Any, number: Any, batch: Any) -> Any:
        value, moved, grads = gradient(model, state, number, batch)
        new, state = optimizer.update(moved, state, grads)
        return new, state, value

    return step


def _evaluation(means: Mapping[str, Callable[..., Any]]) -> Any:
    def evaluate(model: Any, batch: Any) -> dict[str, Any]:
        found = {name: function(model, *batch) for name, function in means.items()}
        return {name: v[0] if isinstance(v, tuple) else v for name, v in found.items()}

    return evaluate


@dataclass(slots=True)
class _TrainerTask(Task):
    """A trainer's run, as the loop sees it."""

    trainer: Trainer = field(kw_only=True)
    run: Run = field(kw_only=True)
    safe: Path | None = None  # the last checkpoint

    def __enter__(self) -> Self:
        self.safe = self.run.resume
        if self.safe is None:
            self.save(self.run.checkpoint, 0)
        for callback in self.trainer.told:
            callback.begin(self._moment(self.start))
        Task.__enter__(self)
        return self

    def given(self, i: int, batch: Any, total: float) -> tuple[Any, ...]:
        """The step's number and batch."""
        return self.number(i), batch

    def number(self, i: int) -> Any:
        """What random numbers of step i come from: another number in each part of the batch."""
        parts = max(1, len(self.trainer.devices))
        whole = parts * self.group.size
        if whole == 1:
            return np.int32(i)
        return np.arange(parts, dtype=np.int32) + np.int32(i * whole + self.group.rank * parts)

    @property
    def stopping(self) -> bool:
        """Whether a callback wants to stop."""
        return any(c.stop for c in self.trainer.told)

    def note(self, step: int, loss: float) -> None:
        """Tell the callbacks."""
        for callback in self.trainer.told:
            callback.step(self._moment(step, loss=loss))

    @property
    def validates(self) -> bool:
        """Whether the trainer has validation batches."""
        return bool(len(self.trainer.valid))

    def validate(self, step: int) -> float:
        """Loss and metrics for the callbacks; the loss. Only the first process needs them."""
        if self.group.rank:
            return float("nan")
        self.trainer.model = self.model
        values = self.trainer.evaluate()
        for callback in self.trainer.told if values else ():
            callback.valid(self._moment(step, values=values))
        return values.get("loss", float("nan"))

    def save(self, path: Path, steps: int) -> None:
        """A checkpoint with the callbacks' memory; TrainingError if a parameter is not finite."""
        arrays = nn.state_dict(self.model)
        if any(not np.isfinite(v.numpy()).all() for v in arrays.values()):
            raise self.broken(steps, float("nan"), self.safe)
        if self.group.rank:
            return
        callbacks = [c.remembered() for c in self.trainer.callbacks]
        tree = {"model": self.model, "state": self.state}
        config = self.config | {"callbacks": callbacks}
        save_checkpoint(path, tree, step=steps, config=config)
        if path == self.run.checkpoint:
            self.safe = path

    def resume(self, run: Run) -> None:
        """Go on from the run's checkpoint, and let callbacks recall."""
        Task.resume(self, run)
        if run.resume is None:
            return
        kept = load_checkpoint(run.resume, {"model": self.model, "state": self.state})[1].config
        for callback, memory in zip(
            self.trainer.callbacks, kept.get("callbacks", ()), strict=False
        ):
            callback.recall(memory)

    def broken(self, step: int, loss: float, saved: Path | None) -> TrainingError:
        """The error for numbers that are not finite, with the op that made the first."""
        what = f"the loss is {loss} at step {step}"
        if self.safe is None:
            return TrainingError(what)
        if self.group.size > 1:  # a step needs all processes, and this may be the only one here
            hint = f"--resume {self.safe} in one process to see which op made it"
            return TrainingError(f"{what}; the last checkpoint is {self.safe}; {hint}")
        tree = {"model": self.model, "state": self.state}
        tree, metadata = load_checkpoint(self.safe, tree)
        if self.ahead is not None:  # the same batches again, from one thread at a time
            self.ahead.close()
        found = self._replay(tree["model"], tree["state"], metadata.step, step)
        return TrainingError(f"{what}; {found}; the last checkpoint is {self.safe}")

    def _replay(self, model: Any, state: Any, start: int, stop: int) -> str:
        """The same steps again, up to the first that gives what is not finite."""
        for i in range(start, stop):
            arguments = self.arguments(i, 0.0)
            given = [np.array(v) for v in pytree.flatten((model, state, *arguments))[0]]
            model, state, loss = self.step(model, state, *arguments)
            leaves = [loss, *nn.state_dict(model).values()]
            if all(np.isfinite(np.asarray(v)).all() for v in leaves):
                continue
            found = first_not_finite(self.step.graph, given)
            if found is None:
                return f"step {i + 1} gives finite numbers in the reference interpreter"
            return f"in step {i + 1} {found}"
        return "the same steps from the last checkpoint gave finite numbers"

    def _moment(
        self, step: int, loss: float = float("nan"), values: dict[str, float] | None = None
    ) -> Moment:
        return Moment(
            step, self.run.out, tuple(self.trainer.means) if self.trainer.valid else (),
            self.model, self.state, lambda path: self.save(path, step), loss, values or {},
        )  # fmt: skip
