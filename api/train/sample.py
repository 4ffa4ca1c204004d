"""Text written by a trained model, one character after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.data import Vocabulary


def sample_text(
    model: nn.GPT, vocabulary: Vocabulary, *, prompt: str = "\n", length: int = 300,
    temperature: float = 0.8, seed: int = 0,
) -> str:  # fmt: skip
    """`prompt` and what the model writes after it, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest character. The model sees the last `model.context` characters.
    """
    logits = eg.compile(lambda model, tokens: model(tokens), name="gpt_logits")
    generator = np.random.default_rng(seed)
    ids = list(vocabulary.encode(prompt or "\n"))
    for _ in range(length):
        seen = ids[-model.context :]
        window = np.zeros((1, model.context), np.int32)
        window[0, : len(seen)] = seen
        row = np.asarray(logits(model, window))[0, len(seen) - 1]
        ids.append(draw(row, vocabulary.unknown, temperature, generator))
    return vocabulary.decode(ids)


def draw(row: Any, unknown: int, temperature: float, generator: np.random.Generator) -> int:
    """A character by the scores of all; never the one that stands for unknown ones."""
    scores = np.array(row, np.float64)
    if len(scores) > 1:
        scores[unknown] = -np.inf  # it would write what cannot be read
    if temperature <= 0:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / temperature)
    return int(generator.choice(len(weights), p=weights / weights.sum()))
