"""A network that knows handwritten digits learns mirrored ones, by low-rank adapters alone.

python examples/lora.py --help
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim, script
from eggpu.train import Trainer


def loss(model: Any, x: Any, y: Any) -> Any:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def accuracy(model: Any, x: Any, y: Any) -> Any:
    """The share of digits told right."""
    return (model(x).argmax(-1) == y).astype("f32").mean()


def mirrored(x: np.ndarray) -> np.ndarray:
    """Rows of 64 pixels, each picture left to right."""
    return np.ascontiguousarray(x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64))


def train(model: Any, opt: Any, digits: tuple[np.ndarray, ...], steps: int, out: Path) -> Trainer:
    """Train on the first two of four arrays; the others are unseen digits."""
    x, y, *unseen = digits
    trainer = Trainer(
        model, loss, opt, data.Batches((x, y), 64), valid=data.in_order(unseen, 120),
        metrics={"accuracy": accuracy},
    )  # fmt: skip
    trainer.fit(out, steps=steps, quiet=True)
    return trainer


def main(steps: int = 300, out: Path = Path("runs/example-lora")) -> tuple[float, float, float]:
    """Shares of unseen digits told right: as trained, mirrored before, and mirrored after."""
    d = data.digits()
    plain = (d.train_x, d.train_y, d.valid_x, d.valid_y)
    other = (mirrored(d.train_x), d.train_y, mirrored(d.valid_x), d.valid_y)
    base = train(nn.MLP((64, 128, 10), key=0), optim.adamw(3e-3), plain, steps, out / "base")
    right = base.evaluate()["accuracy"]
    before = base.evaluate(data.in_order(other[2:], 120))["accuracy"]

    tuned = nn.add_lora(base.model, rank=8, key=1)
    opt = optim.groups(optim.frozen(), {nn.ADAPTERS: optim.adamw(1e-2)})
    adapted = train(tuned, opt, other, steps, out / "lora")
    merged = nn.merge_lora(adapted.model)  # an MLP like the base
    guesses = eg.compile(lambda model, x: model(x).argmax(-1), name="guess")(merged, other[2])
    after = float(np.mean(guesses.numpy() == d.valid_y))

    state = nn.named_parameters(adapted.model).items()
    size = sum(v.size for n, v in state if "lora_" in n)
    print(f"{right:.1%} of unseen digits right, {before:.1%} of mirrored ones; after training "
          f"{size:,} numbers beside {nn.count_parameters(merged):,}: {after:.1%}")  # fmt: skip
    return right, before, after


if __name__ == "__main__":
    script.run(main)
