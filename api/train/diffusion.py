"""Trains a denoising diffusion model that draws handwritten digits (Ho et al., 2020)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.data import Batches, Digits, in_order
from eggpu.train import report
from eggpu.train.callbacks import CSVLog
from eggpu.train.images import ImageConfig, options
from eggpu.train.loop import fit
from eggpu.train.pictures import grid, write_png
from eggpu.train.progress import display
from eggpu.train.run import Result, Run, settings
from eggpu.train.trainer import Trainer

STEPS = 2000  # unless told otherwise
_SIDE, _CLASSES, _WAVES = 8, 10, 16
_ROWS = 8  # of the picture: drawn digits of each class


@dataclass(frozen=True, slots=True)
class DiffusionConfig(ImageConfig):
    """A residual network on pixels, told the noise and the digit."""

    batch: int = 128
    lr: float = 3e-3
    width: int = 192
    layers: int = 4
    average: float = 0.99  # decay of the averaged weights that draw
    denoise: int = 40  # steps from noise to a digit

    def model(self) -> Denoiser:
        """Untrained."""
        return Denoiser(_SIDE * _SIDE, _CLASSES, self.width, self.layers, key=self.seed)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Denoiser(nn.Module):
    """Noisy pixels (n, size), times (n,) from 0 to 1 and classes (n,) -> velocities (n, size).

    The velocity is a * noise - s * pixels for a = cos(pi t / 2), s = sin(pi t / 2) (Salimans and
    Ho, 2022).
    """

    first: nn.Linear
    time: nn.Linear
    label: nn.Embedding
    norms: tuple[nn.LayerNorm, ...]
    blocks: tuple[nn.MLP, ...]
    last: nn.Linear

    def __init__(self, size: int, classes: int, width: int, layers: int, key: Any) -> None:
        one, two, three, four, *each = nn.initial.keys(key, 4 + layers)
        self._set(
            first=nn.Linear(size, width, key=one),
            time=nn.Linear(2 * _WAVES, width, key=two),
            label=nn.Embedding(classes, width, key=three, std=0.5),
            norms=tuple(nn.LayerNorm(width) for _ in range(layers + 1)),
            blocks=tuple(nn.MLP((width, 2 * width, width), k, nn.silu) for k in each),
            last=nn.Linear(width, size, key=four, std=0.01),
        )

    def __call__(self, x: eg.Array, t: eg.Array, label: eg.Array) -> eg.Array:
        waves = t.reshape((-1, 1)) * eg.exp(eg.linspace(0.0, math.log(100.0), _WAVES))
        told = self.time(eg.concatenate([eg.sin(waves), eg.cos(waves)], 1)) + self.label(label)
        h = self.first(x)
        for norm, block in zip(self.norms, self.blocks):
            h = h + block(norm(h) + told)
        return self.last(self.norms[-1](h))


def velocity_loss(model: Denoiser, x: Any, y: Any, key: Any) -> Any:
    """The mean squared error of velocities, at random times."""
    times, noise = (eg.random.fold_in(key, k) for k in range(2))
    t = eg.random.uniform(times, (x.shape[0],))
    e = eg.random.normal(noise, x.shape)
    a, s = _turn(t.reshape((-1, 1)))
    return nn.mse_loss(model(a * x + s * e, t, y), a * e - s * x)


def held_out(model: Denoiser, x: Any, y: Any) -> Any:
    """The same at times and noise that never change."""
    return velocity_loss(model, x, y, eg.random.key(0))


def draw(model: Denoiser, labels: np.ndarray, steps: int, seed: int = 0) -> np.ndarray:
    """Pixels (n, size) from 0 to 1 of new digits, each denoised in `steps` steps (DDIM)."""

    def denoised(model: Denoiser, x: Any, t: Any, after: Any, labels: Any) -> Any:
        v = model(x, eg.broadcast_to(t, labels.shape), labels)
        (a, s), (b, r) = _turn(t), _turn(after)
        pixels = eg.clip(a * x - s * v, -1.0, 1.0)
        noise = (x - a * pixels) / s
        return b * pixels + r * noise

    step = eg.compile(denoised, name="diffusion_draw")
    x: Any = np.random.default_rng(seed).standard_normal((len(labels), _SIDE * _SIDE))
    x, labels = x.astype(np.float32), labels.astype(np.int32)
    times = np.linspace(1, 0, steps + 1, dtype=np.float32)
    for t, after in pairwise(times):
        x = step(model, x, t, after, labels)
    return (np.asarray(x) + 1) / 2


def recognized(pixels: np.ndarray, labels: np.ndarray, digits: Digits) -> float:
    """The share whose nearest training digits, three of them, mostly show what they should."""
    far = (pixels**2).sum(1)[:, None] - 2 * pixels @ digits.train_x.T + (digits.train_x**2).sum(1)
    near = digits.train_y[np.argsort(far, axis=1, kind="stable")[:, :3]]
    return float(np.mean([np.bincount(n, minlength=10).argmax() for n in near] == labels))


def train_diffusion(changes: Mapping[str, Any] | None = None, *, run: Run) -> Result:
    """Train a model that draws digits; see train_gpt for `changes` and `run`."""
    config, saved = settings(
        DiffusionConfig, "diffusion", changes or {}, run, ("seed", "width", "layers")
    )
    if run.steps is None:
        run = dataclasses.replace(run, steps=saved.get("steps") or STEPS)
    digits = data.digits(config.seed)
    trainer = _trainer(config, digits, run)
    task, shown = trainer.task(run), display(run.silent)
    count = nn.count_parameters(trainer.model)
    shown.say(f"diffusion, {count:,} parameters, on {run.machines}")
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    about = report.write_report(task, result, run, "diffusion", unit="squared error")
    labels = np.tile(np.arange(_CLASSES), _ROWS)
    pixels = draw(task.state.average, labels, config.denoise, config.seed)
    picture = grid(pixels.reshape(-1, _SIDE, _SIDE), _CLASSES, zoom=6)
    path = write_png(run.out / "pictures.png", picture)
    right = recognized(pixels, labels, digits)
    shown.say(
        f"\nafter {result.steps} steps in {result.seconds:.1f} s: validation loss "
        f"{result.valid:.4f}, {right:.1%} of the drawn digits recognized, pictures in {path}\n\n"
        f"{about}"
    )
    return result


def _trainer(config: DiffusionConfig, digits: Digits, run: Run) -> Trainer:
    assert run.steps is not None
    rows = [(2 * x - 1, y) for x, y in ((digits.train_x, digits.train_y),
                                        (digits.valid_x, digits.valid_y))]  # fmt: skip
    schedule = optim.cosine(config.lr, steps=run.steps, warmup=run.steps // 20)
    adamw = optim.adamw(schedule, b2=0.99, weight_decay=config.weight_decay)
    return Trainer(
        config.model(), velocity_loss, optim.ema(optim.clipped(adamw, norm=1.0), config.average),
        Batches(rows[0], config.batch * run.parts, seed=config.seed),
        valid=in_order(rows[1], 120), evaluation=held_out, callbacks=(CSVLog(),),
        **options("diffusion", config, run),
    )  # fmt: skip


def _turn(t: Any) -> tuple[Any, Any]:
    """How much of the pixels and of the noise there is at time t."""
    return eg.cos(t * (math.pi / 2)), eg.sin(t * (math.pi / 2))
