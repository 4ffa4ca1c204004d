"""An LSTM that writes text, trained with carried states: each window goes on where the last one
ended.

python examples/lstm.py --help
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim, script
from eggpu.train.lstm import LSTMLanguageModel, write_text

BATCH, WINDOW, HIDDEN = 16, 32, 96


def loss(model: Any, tokens: Any, targets: Any, state: Any) -> Any:
    """Nats a character, and the state after the window."""
    logits, state = model.step(tokens, state)
    return nn.cross_entropy(logits, targets), state


def windows(ids: np.ndarray, steps: int) -> Any:
    """Windows of BATCH places in the text, each the continuation of the one before."""
    width, least = len(ids) // BATCH, WINDOW + 2
    if width < least:
        raise data.DataError(f"needs {BATCH * least} characters to train on, got {len(ids)}")
    rows = ids[: BATCH * width].reshape(BATCH, width)
    for step in range(steps):
        start = step * WINDOW % (width - WINDOW - 1)
        part = rows[:, start : start + WINDOW + 1]
        yield np.ascontiguousarray(part[:, :-1]), np.ascontiguousarray(part[:, 1:])


def main(steps: int = 400, files: tuple[str, ...] = ()) -> float:
    """Train, print what the model writes, and give the loss of the last steps."""
    corpus = data.corpus([Path(f) for f in files])
    model = LSTMLanguageModel(corpus.vocabulary.size, 1, 32, HIDDEN, key=0)
    optimizer = optim.adamw(optim.cosine(1e-2, steps=steps))

    @eg.compile(donate=("model", "memory", "state"))
    def step(model: Any, memory: Any, tokens: Any, targets: Any, state: Any) -> Any:
        (value, state), grads = eg.value_and_grad(loss, has_aux=True)(model, tokens, targets, state)
        model, memory = optimizer.update(model, memory, optim.clip_by_global_norm(grads, 1.0))
        return model, memory, state, value

    memory, losses = optimizer.init(model), []
    state = (eg.zeros((1, BATCH, HIDDEN)), eg.zeros((1, BATCH, HIDDEN)))
    for i, (tokens, targets) in enumerate(windows(corpus.train, steps)):
        model, memory, state, value = step(model, memory, tokens, targets, state)
        losses.append(value)
        if i % 50 == 0:
            print(f"step {i}: {float(value):.3f} nats a character")
    last = float(np.mean([float(v) for v in losses[-20:]]))
    print(f"{last:.3f} nats a character; the model writes:")
    print(write_text(model, corpus.vocabulary, length=200, seed=1))
    return last


if __name__ == "__main__":
    script.run(main)
