"""Trains image models on scikit-learn's handwritten digits: CNN, ResNet, ViT, autoencoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.data import Batch, Batches, Digits, in_order
from eggpu.train import report
from eggpu.train.callbacks import Best, CSVLog
from eggpu.train.loop import fit
from eggpu.train.pictures import grid, write_png
from eggpu.train.progress import display
from eggpu.train.run import Result, Run, TrainingError, below_one, not_negative, positive, settings
from eggpu.train.trainer import Trainer

STEPS = {"cnn": 600, "resnet": 600, "vit": 1500, "autoencoder": 800}  # unless told otherwise
_SIDE, _CLASSES = 8, 10


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Batches and optimizer."""

    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        names = [f.name for f in dataclasses.fields(self)]
        positive(self, *(n for n in names if n not in ("seed", "dropout", "weight_decay")))
        not_negative(self, *(n for n in ("seed", "dropout", "weight_decay") if n in names))
        below_one(self, *(n for n in ("dropout", "average") if n in names))


@dataclass(frozen=True, slots=True)
class CNNConfig(ImageConfig):
    """Three convolutions with batch norms, and a linear layer."""

    channels: int = 16
    dropout: float = 0.25

    def model(self) -> nn.Sequential:
        """Untrained."""
        c, side = self.channels, _SIDE // 2
        first, second, third, last = range(self.seed, self.seed + 4)
        return nn.Sequential(
            nn.Conv2d(1, c, 3, key=first, padding=1), nn.BatchNorm(c), nn.relu,
            nn.Conv2d(c, 2 * c, 3, key=second, padding=1), nn.BatchNorm(2 * c), nn.relu,
            nn.MaxPool2d(2),
            nn.Conv2d(2 * c, 2 * c, 3, key=third, padding=1), nn.BatchNorm(2 * c), nn.relu,
            nn.Flatten(), nn.Dropout(self.dropout),
            nn.Linear(2 * c * side * side, _CLASSES, key=last),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResNetConfig(ImageConfig):
    """Residual blocks, each of half the size and twice the channels of the one before."""

    channels: int = 16
    blocks: int = 3

    def model(self) -> nn.ResNet:
        """Untrained."""
        return nn.ResNet(1, _CLASSES, key=self.seed, width=self.channels, blocks=self.blocks)


@dataclass(frozen=True, slots=True)
class ViTConfig(ImageConfig):
    """A vision transformer on patches."""

    lr: float = 6e-3
    layers: int = 2
    width: int = 32
    heads: int = 4
    patch: int = 2
    dropout: float = 0.0

    def model(self) -> nn.ViT:
        """Untrained."""
        return nn.ViT(
            1, _SIDE, _CLASSES, key=self.seed, patch=self.patch, layers=self.layers,
            width=self.width, heads=self.heads, dropout=self.dropout,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AutoencoderConfig(ImageConfig):
    """Convolutions down to a few numbers, and transposed ones back to the picture."""

    lr: float = 5e-3
    channels: int = 16
    code: int = 16

    def model(self) -> nn.Sequential:
        """Untrained."""
        c, side, s = self.channels, _SIDE // 4, self.seed
        return nn.Sequential(
            nn.Conv2d(1, c, 3, key=s, stride=2, padding=1), nn.relu,
            nn.Conv2d(c, 2 * c, 3, key=s + 1, stride=2, padding=1), nn.relu,
            nn.Flatten(), nn.Linear(2 * c * side * side, self.code, key=s + 2),
            nn.Linear(self.code, 2 * c * side * side, key=s + 3), nn.relu,
            lambda x: x.reshape((x.shape[0], 2 * c, side, side)),
            nn.ConvTranspose2d(2 * c, c, 4, key=s + 4, stride=2, padding=1), nn.relu,
            nn.ConvTranspose2d(c, 1, 4, key=s + 5, stride=2, padding=1), nn.sigmoid,
        )  # fmt: skip


CONFIGS: dict[str, type[Any]] = {
    "cnn": CNNConfig, "resnet": ResNetConfig, "vit": ViTConfig, "autoencoder": AutoencoderConfig,
}  # fmt: skip


def classification(model: Any, x: Any, y: Any, key: Any) -> Any:
    """Nats a digit in training, and the model after it."""
    logits, model = model.train(x, key=key)
    return nn.cross_entropy(logits, y), model


def held_out(model: Any, x: Any, y: Any) -> Any:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def accuracy(model: Any, x: Any, y: Any) -> Any:
    """The share of digits told right."""
    return (model(x).argmax(-1) == y).astype("f32").mean()


def reconstruction(model: Any, x: Any) -> Any:
    """The mean squared error of a pixel."""
    return nn.mse_loss(model(x), x)


def shifted(batch: Batch, generator: np.random.Generator) -> Batch:
    """Each image moved by up to one pixel each way."""
    x, *rest = batch
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moves = generator.integers(0, 3, (len(x), 2))
    h, w = x.shape[2:]
    out = [p[:, a : a + h, b : b + w] for p, (a, b) in zip(padded, moves, strict=True)]
    return (np.stack(out), *rest)


def train_images(name: str, changes: Mapping[str, Any] | None = None, *, run: Run) -> Result:
    """Train a model of CONFIGS on handwritten digits; see train_gpt for `changes` and `run`."""
    if name not in CONFIGS:
        raise TrainingError(f"there is no model {name}; there are {', '.join(CONFIGS)}")
    kind = CONFIGS[name]
    trained = {f.name for f in dataclasses.fields(ImageConfig)}
    fixed = [f.name for f in dataclasses.fields(kind) if f.name not in trained - {"seed"}]
    config, saved = settings(kind, name, changes or {}, run, fixed)
    if run.steps is None:
        run = dataclasses.replace(run, steps=saved.get("steps") or STEPS[name])
    digits = data.digits(config.seed)
    make = _autoencoder if name == "autoencoder" else _classifier
    trainer = make(name, config, digits, run)
    task = trainer.task(run)
    shown = display(run.silent)
    count = nn.count_parameters(trainer.model)
    shown.say(f"{name}, {count:,} parameters, on {run.machines}")
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    trainer.model, trainer.state = task.model, task.state
    baseline = None if name == "autoencoder" else ("guessing", math.log(_CLASSES))
    about = report.write_report(task, result, run, name, baseline)
    values = trainer.evaluate()
    told = f"validation loss {values['loss']:.4f}"
    if "accuracy" in values:
        told += f", {values['accuracy']:.1%} of unseen digits right"
    else:
        told += f", pictures in {_draw(trainer.model, digits, run)}"
    shown.say(f"\nafter {result.steps} steps in {result.seconds:.1f} s: {told}\n\n{about}")
    return result


def _classifier(name: str, config: Any, digits: Digits, run: Run) -> Trainer:
    pairs = _images(digits.train_x), digits.train_y
    source = Batches(pairs, config.batch * run.parts, seed=config.seed, change=shifted)
    return Trainer(
        config.model(), classification, _optimizer(config, run), source,
        valid=in_order((_images(digits.valid_x), digits.valid_y), 120), evaluation=held_out,
        metrics={"accuracy": accuracy}, callbacks=(Best(), CSVLog()), **options(name, config, run),
    )  # fmt: skip


def _autoencoder(name: str, config: Any, digits: Digits, run: Run) -> Trainer:
    source = Batches((_images(digits.train_x),), config.batch * run.parts, seed=config.seed)
    return Trainer(
        config.model(), reconstruction, _optimizer(config, run), source,
        valid=in_order((_images(digits.valid_x),), 120), callbacks=(Best(), CSVLog()),
        **options(name, config, run),
    )  # fmt: skip


def options(name: str, config: Any, run: Run) -> dict[str, Any]:
    """What every example tells its trainer besides model, loss and data."""
    kept = {name: dataclasses.asdict(config), "steps": run.steps}
    return {
        "seed": config.seed, "unit": "digits", "config": kept, "name": name,
        "distributed": run.group, "devices": run.devices,
    }  # fmt: skip


def _optimizer(config: Any, run: Run) -> Any:
    assert run.steps is not None
    schedule: Callable[..., Any] = optim.cosine(
        config.lr, steps=run.steps, warmup=run.steps // 20, floor=config.lr * 0.02
    )
    adamw = optim.adamw(schedule, weight_decay=config.weight_decay)
    return optim.clipped(optim.groups(adamw, {"*bias": {"weight_decay": 0.0}}), norm=1.0)


def _images(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, 1, _SIDE, _SIDE)


def _draw(model: Any, digits: Digits, run: Run) -> str:
    """Sixteen unseen digits above what the model makes of them."""
    shown = _images(digits.valid_x[:16])
    again = eg.compile(lambda model, x: model(x), name="autoencoder_pictures")(model, shown)
    both = np.concatenate([shown, np.asarray(again)])[:, 0]
    return str(write_png(run.out / "pictures.png", grid(both, 16)))
