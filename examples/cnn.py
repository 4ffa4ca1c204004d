"""A convolutional network on handwritten digits: 98 % of unseen ones right in a minute or so.

python examples/cnn.py --help
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eggpu import data, nn, optim, script
from eggpu.train import Best, Trainer


def loss(model: Any, x: Any, y: Any, key: Any) -> Any:
    """Nats a digit in training, and the model with its statistics moved."""
    logits, model = model.train(x, key=key)
    return nn.cross_entropy(logits, y), model


def held_out(model: Any, x: Any, y: Any) -> Any:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def accuracy(model: Any, x: Any, y: Any) -> Any:
    """The share of digits told right."""
    return (model(x).argmax(-1) == y).astype("f32").mean()


def main(steps: int = 300, out: Path = Path("runs/example-cnn")) -> float:
    """Train, and give the accuracy on unseen digits."""
    digits = data.digits()
    x, unseen = (v.reshape(-1, 1, 8, 8) for v in (digits.train_x, digits.valid_x))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, key=0, padding=1), nn.BatchNorm(16), nn.relu, nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, key=1, padding=1), nn.BatchNorm(32), nn.relu, nn.Flatten(),
        nn.Dropout(0.25), nn.Linear(512, 10, key=2),
    )  # fmt: skip
    trainer = Trainer(
        model, loss, optim.adamw(optim.cosine(3e-3, steps=steps)),
        data.Batches((x, digits.train_y), 64), valid=data.in_order((unseen, digits.valid_y), 120),
        evaluation=held_out, metrics={"accuracy": accuracy}, callbacks=[Best()],
    )  # fmt: skip
    trainer.fit(out, steps=steps)
    right = trainer.evaluate()["accuracy"]
    print(f"{right:.1%} of unseen digits right")
    return right


if __name__ == "__main__":
    script.run(main)
