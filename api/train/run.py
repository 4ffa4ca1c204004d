"""What a run is told and what it comes to: settings, limits, losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import eggpu as eg
from eggpu.checkpoints import CheckpointError, read_metadata
from eggpu.compiler.errors import EggpuError
from eggpu.distributed import Group
from eggpu.runtime import Device

Config = TypeVar("Config")


class TrainingError(EggpuError):
    """A run that cannot start or go on."""


@dataclass(frozen=True, slots=True)
class Run:
    """Where a run writes to, how long it takes, and how often it looks up.

    With `minutes` it ends then, with the learning rate at its end; `steps` is then an upper bound.
    Each process of `group` and each of its `devices` (the current one when there are none) takes
    an equal share of every batch.
    """

    out: Path
    steps: int | None = None
    minutes: float | None = None
    quiet: bool = False
    resume: Path | None = None
    log_every: int = 10
    eval_every: int = 250
    save_every: int = 500
    profile: str | None = None  # show every kernel's time; a path gets a trace for ui.perfetto.dev
    group: Group = field(default_factory=Group)
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "minutes", "log_every", "eval_every", "save_every"):
            if getattr(self, name) is not None:
                positive(self, name)

    @property
    def parts(self) -> int:
        """Equal parts that each batch is taken in."""
        return self.group.size * max(1, len(self.devices))

    @property
    def parallel(self) -> bool:
        """Whether batches are shared."""
        return self.parts > 1

    @property
    def first(self) -> bool:
        """Whether this is the process that shows and writes."""
        return self.group.rank == 0

    @property
    def silent(self) -> bool:
        """Whether this process prints nothing."""
        return self.quiet or not self.first

    @property
    def machines(self) -> str:
        """Devices and processes, in words."""
        name = self.devices[0].target.name if self.devices else eg.device().target.name
        each = f"{len(self.devices)} devices, the first {name}" if len(self.devices) > 1 else name
        group = self.group
        return f"{each}, in {group.size} processes ({group.engine})" if group.size > 1 else each

    @property
    def checkpoint(self) -> Path:
        """Where the model and the optimizer's state are saved."""
        return self.out / "checkpoint.safetensors"

    def limited(self, steps: int, minutes: float) -> Run:
        """This run, with `steps` steps and `minutes` at most if it was given no limit."""
        free = self.steps is None and self.minutes is None
        return dataclasses.replace(self, steps=steps, minutes=minutes) if free else self


@dataclass(slots=True)
class History:
    """Losses by step: of training batches, and of validation."""

    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    steps: int
    interrupted: bool
    history: History
    checkpoint: Path
    model: Any
    seconds: float  # of training, without compiling

    @property
    def valid(self) -> float:
        """The last validation loss."""
        return self.history.valid[-1][1] if self.history.valid else math.nan


def positive(settings: Any, *names: str) -> None:
    """Raise TrainingError unless these fields are above 0."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise TrainingError(f"{name.replace('_', '-')} must be above 0, got {value}")


def not_negative(settings: Any, *names: str) -> None:
    """Raise TrainingError unless these fields are 0 or above."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise TrainingError(f"{name.replace('_', '-')} must be 0 or above, got {value}")


def below_one(settings: Any, *names: str) -> None:
    """Raise TrainingError unless these fields, shares of something, are below 1."""
    for name in names:
        value = getattr(settings, name)
        if not value < 1:
            raise TrainingError(f"{name.replace('_', '-')} must be below 1, got {value}")


def settings(
    kind: type[Config], name: str, changes: Mapping[str, Any], run: Run, fixed: Sequence[str]
) -> tuple[Config, dict[str, Any]]:
    """`kind` with `changes` from its defaults or from what the run resumes, and all that was saved.

    `fixed` fields belong to the saved model and cannot change.
    """
    if run.resume is None:
        return kind(**changes), {}
    saved = read_metadata(run.resume).config
    try:
        config = kind(**saved[name])
    except (KeyError, TypeError):
        raise CheckpointError(f"{run.resume} is no checkpoint of `eggpu train {name}`") from None
    for key in fixed:
        kept = getattr(config, key)
        if changes.get(key, kept) != kept:
            came = f"{key} {kept}, which cannot become {changes[key]}"
            raise TrainingError(f"{run.resume} has {came}")
    return dataclasses.replace(config, **changes), saved  # type: ignore[type-var]
