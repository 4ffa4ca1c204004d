"""A model in training: one compiled step, batches by number, and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

import eggpu as eg
from eggpu import nn, optim
from eggpu.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from eggpu.data import Prefetch
from eggpu.distributed import DataParallel, Group
from eggpu.nn import StateError
from eggpu.train.run import Run, TrainingError

Batch = tuple[np.ndarray, np.ndarray]  # inputs and targets

_AHEAD = 2  # batches made on a thread


class _Numbered:
    """Batches of a function as a source."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self._batch = batch

    def __getitem__(self, i: int) -> Any:
        return self._batch(i)


@dataclass(slots=True)
class Task:
    """A model in training, and all that the loop needs to know about it."""

    step: Any  # (model, state, inputs, targets, total) -> (model, state, loss), donating two
    evaluate: Callable[[Any], float]
    batch: Callable[[int], Batch]
    model: Any
    state: Any
    config: dict[str, Any]  # kept in checkpoints
    items: int  # in a batch
    unit: str
    start: int = 0
    group: Group = field(default_factory=Group)
    ahead: Prefetch | None = None  # in training: the batches of the next steps

    def advance(self, i: int, total: float) -> eg.Array:
        """Step i of `total`, which follows the one before; its loss, not waited for."""
        assert self.ahead is not None
        assert self.ahead.position == i
        arguments = self.given(i, next(self.ahead), total)
        self.model, self.state, loss = self.step(self.model, self.state, *arguments)
        return loss

    def arguments(self, i: int, total: float) -> tuple[Any, ...]:
        """What step i takes besides model and state."""
        return self.given(i, self.batch(i), total)

    def given(self, i: int, batch: Any, total: float) -> tuple[Any, ...]:
        """What step i takes with this batch."""
        return (*batch, np.float32(total))

    @property
    def stopping(self) -> bool:
        """Whether training has come to its end before its last step."""
        return False

    def agreed(self, total: int, stopped: bool) -> int:
        """Steps in all: 0 when a process wants to stop, else the fewest of `total`."""
        wanted = 0 if stopped or self.stopping else total
        if self.group.size == 1:
            return wanted
        return int(np.asarray(self.group.all_reduce(np.int64(wanted), "min")))

    def agree(self, flag: bool) -> bool:
        """Whether this or another process says so."""
        if self.group.size == 1:
            return flag
        return bool(np.asarray(self.group.all_reduce(np.int64(flag), "max")))

    def note(self, step: int, loss: float) -> None:
        """Told of each training loss that is read."""

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate with."""
        return True

    def validate(self, step: int) -> float:
        """The validation loss after `step` steps; only the first process needs it."""
        return math.nan if self.group.rank else self.evaluate(self.model)

    def broken(self, step: int, loss: float, saved: Path | None) -> TrainingError:
        """The error for a loss that is not a number any more."""
        where = f"; the last checkpoint is {saved}" if saved else ""
        return TrainingError(f"the loss is {loss} at step {step}: try a lower --lr{where}")

    def __enter__(self) -> Self:
        self.ahead = Prefetch(_Numbered(self.batch), self.start, depth=_AHEAD)
        return self

    def __exit__(self, *error: object) -> None:
        if self.ahead is not None:
            self.ahead.__exit__(*error)

    @property
    def compiled(self) -> str:
        """What the compiler made of the step."""
        kernels, size = len(self.step.plan.kernels), self.step.plan.peak_bytes / 2**20
        return f"compiled in {self.step.compile_seconds:.1f} s: {kernels} kernels, {size:.1f} MiB"

    def save(self, path: Path, steps: int) -> None:
        """A checkpoint after `steps` steps, by the first process of several."""
        if self.group.rank:
            return
        tree = {"model": self.model, "state": self.state}
        save_checkpoint(path, tree, step=steps, config=self.config)

    def resume(self, run: Run) -> None:
        """Go on from the run's checkpoint, if it has one."""
        if run.resume is None:
            return
        tree = {"model": self.model, "state": self.state}
        try:
            tree, metadata = load_checkpoint(run.resume, tree)
        except CheckpointError as error:
            if isinstance(error.__cause__, StateError):
                hint = "was it saved with another model, optimizer or precision?"
                raise CheckpointError(f"{error}\n  {hint}") from error
            raise
        self.model, self.state, self.start = tree["model"], tree["state"], metadata.step
        if run.steps is not None and self.start >= run.steps:
            came = f"{run.resume} has {self.start} steps already"
            raise TrainingError(f"nothing to do: {came}; ask for more with --steps")


def training_step(
    loss: Callable[..., eg.Array], *, lr: float, weight_decay: float, clip: float, name: str,
    run: Run | None = None,
) -> Any:  # fmt: skip
    """One program: loss, gradients, clipping, AdamW along a warm cosine over `total` steps.

    Two programs when the run shares its batches.
    """

    def gradient(model: Any, state: Any, inputs: Any, targets: Any, total: Any) -> Any:
        value, grads = eg.value_and_grad(loss)(model, inputs, targets)
        return value, model, grads

    def update(model: Any, state: Any, grads: Any, total: Any) -> Any:
        schedule = optim.cosine(lr, warmup=total * 0.05, steps=total, floor=lr * 0.02)
        optimizer = optim.adamw(schedule, b2=0.99, weight_decay=weight_decay)
        grads = optim.clip_by_global_norm(grads, clip)
        return optimizer.update(model, state, grads)

    def step(model: Any, state: Any, inputs: Any, targets: Any, total: Any) -> Any:
        value, _, grads = gradient(model, state, inputs, targets, total)
        model, state = update(model, state, grads, total)
        return model, state, value

    if run is not None and run.parallel:
        return DataParallel(gradient, update, run.group, run.devices, name)
    return eg.compile(step, donate=("model", "state"), name=f"{name}_step")


def initial_state(model: nn.Module) -> optim.AdamState:
    """The optimizer's state before the first step."""
    return optim.adamw(0.0).init(model)
