"""A multilayer perceptron on handwritten digits, with a training step written out.

python examples/mlp.py --help
"""

from __future__ import annotations

from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim, script


def loss(model: Any, x: Any, y: Any) -> Any:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def main(steps: int = 600) -> float:
    """Train, and give the accuracy on unseen digits."""
    digits = data.digits()
    batches = data.Batches((digits.train_x, digits.train_y), 64)
    model, optimizer = nn.MLP((64, 128, 10), key=0), optim.adamw(3e-3)

    @eg.compile(donate=("model", "state"))
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = eg.value_and_grad(loss)(model, x, y)
        model, state = optimizer.update(model, state, grads)
        return model, state, value

    state = optimizer.init(model)
    for i in range(steps):
        model, state, value = step(model, state, *batches[i])
        if i % 100 == 0:
            print(f"step {i}: {float(value):.3f} nats a digit")
    guess = eg.compile(lambda model, x: model(x).argmax(-1))
    right = float(np.mean(np.asarray(guess(model, digits.valid_x)) == digits.valid_y))
    print(f"{right:.1%} of unseen digits right")
    return right


if __name__ == "__main__":
    script.run(main)
