"""Trains a small multilayer perceptron on scikit-learn's handwritten digits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn
from eggpu.data import Digits
from eggpu.distributed import share
from eggpu.train import report
from eggpu.train.loop import fit
from eggpu.train.progress import display
from eggpu.train.run import Result, Run, not_negative, positive, settings
from eggpu.train.task import Batch, Task, initial_state, training_step

STEPS, MINUTES = 600, 1.0  # whichever ends first, unless told otherwise


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """The model, the batches and the optimizer."""

    hidden: int = 128
    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "hidden", "batch", "lr", "clip")
        not_negative(self, "seed", "weight_decay")


def loss(model: nn.MLP, x: eg.Array, y: eg.Array) -> eg.Array:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def train_mlp(changes: Mapping[str, Any] | None = None, *, run: Run) -> Result:
    """Train an MLP on handwritten digits; see train_gpt for `changes` and `run`."""
    config, saved = settings(MLPConfig, "mlp", changes or {}, run, ("hidden",))
    run = run.limited(saved.get("steps") or STEPS, MINUTES)
    digits = data.digits(config.seed)
    task = _task(config, digits, run)
    task.resume(run)
    task.model, task.state = run.group.broadcast((task.model, task.state))
    shown = display(run.silent)
    count = nn.count_parameters(task.model)
    shown.say(f"MLP, {count:,} parameters, on {run.machines}")
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    about = report.write_report(task, result, run, "MLP", ("guessing", math.log(10)))
    right = accuracy(result.model, digits)
    shown.say(
        f"\nafter {result.steps} steps in {result.seconds:.1f} s: validation loss "
        f"{result.valid:.4f} (guessing: {math.log(10):.4f}), {right:.1%} of unseen digits right\n\n"
        f"{about}"
    )
    return result


def accuracy(model: nn.MLP, digits: Digits) -> float:
    """The share of validation digits that the model tells right."""
    guesses = eg.compile(lambda model, x: model(x).argmax(-1), name="mlp_guess")
    return float(np.mean(np.asarray(guesses(model, digits.valid_x)) == digits.valid_y))


def _task(config: MLPConfig, digits: Digits, run: Run) -> Task:
    model = nn.MLP((64, config.hidden, 10), key=config.seed)
    compiled, whole = eg.compile(loss, name="mlp_loss"), config.batch * run.parts

    def batch(i: int) -> Batch:
        generator = np.random.default_rng((config.seed, i))
        rows = generator.integers(0, len(digits.train_x), whole)
        both = digits.train_x[rows], digits.train_y[rows]
        return share(both, run.group.rank, run.group.size)

    return Task(
        step=training_step(
            loss,
            lr=config.lr,
            weight_decay=config.weight_decay,
            clip=config.clip,
            name="mlp",
            run=run,
        ),
        evaluate=lambda model: float(compiled(model, digits.valid_x, digits.valid_y)),
        batch=batch,
        model=model,
        state=initial_state(model),
        config={"mlp": dataclasses.asdict(config), "steps": run.steps},
        items=whole,
        unit="digits",
        group=run.group,
    )
