"""What happens beside training: early stopping, the best checkpoint, logs."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eggpu.train.curves import draw_losses
from eggpu.train.events import EventFile
from eggpu.train.run import Result, TrainingError


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is: `loss` of the training batch, `values` of a validation (loss, metrics)."""

    step: int
    out: Path
    names: tuple[str, ...]  # of all values that a validation gives
    model: Any
    state: Any
    save: Callable[[Path], None]
    loss: float = math.nan
    values: dict[str, float] = field(default_factory=dict)


class Callback:
    """The base of callbacks: each method is called at its moment and does nothing.

    Set `stop` to a reason to end the run. What `remembered` gives is kept in checkpoints, and comes
    back through `recall` when the run is resumed.
    """

    stop: str = ""

    def begin(self, moment: Moment) -> None:
        """Before the first step."""

    def step(self, moment: Moment) -> None:
        """After a step whose loss was read."""

    def valid(self, moment: Moment) -> None:
        """After a validation."""

    def end(self, result: Result) -> None:
        """After the last step."""

    def remembered(self) -> dict[str, Any]:
        """What to keep in a checkpoint; JSON can hold it."""
        return {}

    def recall(self, remembered: dict[str, Any]) -> None:
        """Take back what was kept."""


class _Watching(Callback):
    """Knows the best value of a metric so far."""

    def __init__(self, metric: str, larger: bool, change: float = 0.0) -> None:
        self.metric, self.larger, self.change = metric, larger, change
        self.best, self.best_step, self.waited = math.nan, -1, 0

    def improved(self, moment: Moment) -> bool:
        """Note a validation; whether it is the best so far."""
        if self.metric not in moment.values:
            found = ", ".join(moment.values)
            raise TrainingError(f"no validation gives {self.metric}; there are {found}")
        value = moment.values[self.metric]
        gain = value - self.best if self.larger else self.best - value
        if math.isnan(self.best) or gain > self.change:
            self.best, self.best_step, self.waited = value, moment.step, 0
            return True
        self.waited += 1
        return False

    def remembered(self) -> dict[str, Any]:
        """The best value, its step, and validations since."""
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "best_step": self.best_step, "waited": self.waited}

    def recall(self, remembered: dict[str, Any]) -> None:
        """Take them back."""
        best = remembered["best"]
        self.best = math.nan if best is None else best
        self.best_step, self.waited = remembered["best_step"], remembered["waited"]


class EarlyStopping(_Watching):
    """Ends the run after `patience` validations that did not better a metric by `change`."""

    def __init__(
        self, patience: int, metric: str = "loss", larger: bool = False, change: float = 0.0
    ) -> None:
        super().__init__(metric, larger, change)
        if patience < 1:
            raise TrainingError(f"early stopping needs a patience of at least 1, got {patience}")
        self.patience = patience

    def valid(self, moment: Moment) -> None:
        """Stop when patience is at its end."""
        if not self.improved(moment) and self.waited >= self.patience:
            best = f"{self.best:.4f} at step {self.best_step}"
            self.stop = f"{self.metric} did not better {best} in {self.patience} validations"


class Best(_Watching):
    """Keeps the checkpoint of the best validation as `best.safetensors`."""

    def __init__(
        self, metric: str = "loss", larger: bool = False, name: str = "best.safetensors"
    ) -> None:
        super().__init__(metric, larger)
        self.name = name

    def valid(self, moment: Moment) -> None:
        """Save if this is the best."""
        if self.improved(moment):
            moment.save(moment.out / self.name)


class CSVLog(Callback):
    """Writes `log.csv`: step, loss, and what validations give. A resumed run goes on in it."""

    def __init__(self, name: str = "log.csv") -> None:
        self.name = name
        self._path = Path(name)
        self._names: tuple[str, ...] = ()

    def begin(self, moment: Moment) -> None:
        """Write the heading, and the rows up to the step that a run resumes from."""
        self._path, self._names = moment.out / self.name, moment.names
        heading = ["step", "loss", *(f"valid_{n}" for n in self._names)]
        kept: list[list[str]] = []
        if moment.step and self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                before = list(csv.reader(file))
            if before[:1] == [heading]:
                kept = [row for row in before[1:] if int(row[0]) <= moment.step]
        with self._path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([heading, *kept])

    def step(self, moment: Moment) -> None:
        """A row with the training loss."""
        self._row([moment.step, moment.loss, *("" for _ in self._names)])

    def valid(self, moment: Moment) -> None:
        """A row with what the validation gave."""
        self._row([moment.step, "", *(moment.values[n] for n in self._names)])

    def _row(self, row: list[Any]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


class TensorBoard(Callback):
    """Writes the curves that TensorBoard shows: `tensorboard --logdir` of the run's folder."""

    def __init__(self, name: str = "events") -> None:
        self.name = name
        self._file: EventFile | None = None

    def begin(self, moment: Moment) -> None:
        """Open a file of its own for this run."""
        self._file = EventFile(moment.out / self.name)

    def step(self, moment: Moment) -> None:
        """The training loss."""
        self._add({"train/loss": moment.loss}, moment.step)

    def valid(self, moment: Moment) -> None:
        """What the validation gave."""
        self._add({f"valid/{name}": v for name, v in moment.values.items()}, moment.step)

    def end(self, result: Result) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _add(self, values: dict[str, float], step: int) -> None:
        assert self._file is not None
        for tag, value in values.items():
            self._file.scalar(tag, value, step)


class LossCurve(Callback):
    """Draws the losses of training and validation as `loss.png`, at the end of the run."""

    def __init__(self, name: str = "loss.png", title: str = "loss", unit: str = "loss") -> None:
        self.name, self.title, self.unit = name, title, unit

    def end(self, result: Result) -> None:
        """Draw. Raises TrainingError when matplotlib is missing."""
        path = result.checkpoint.parent / self.name
        if not draw_losses(result.history, path, self.title, unit=self.unit).startswith("loss"):
            raise TrainingError("a loss curve needs matplotlib: pip install 'eggpu[train]'")
