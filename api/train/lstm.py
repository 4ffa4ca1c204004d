"""Trains a small LSTM on text, character by character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.data import Vocabulary
from eggpu.nn.initial import Key, keys
from eggpu.train.run import Result, Run, not_negative, positive
from eggpu.train.sample import draw
from eggpu.train.text import TextModel, Writing, train_text

_SHAPE = ("layers", "width", "hidden")


@dataclass(frozen=True, slots=True)
class LSTMConfig:
    """The model, the batches and the optimizer."""

    layers: int = 2
    width: int = 64
    hidden: int = 128
    context: int = 64
    batch: int = 16
    lr: float = 5e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, *_SHAPE, "context", "batch", "lr", "clip")
        not_negative(self, "seed", "weight_decay")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LSTMLanguageModel(nn.Module):
    """Scores of the next token for each one: an embedding, an LSTM, a linear layer.

    Tokens (batch, steps) give logits (batch, steps, vocab). `step` goes on from a state.
    """

    tokens: nn.Embedding
    lstm: nn.LSTM
    head: nn.Linear

    def __init__(self, vocab: int, layers: int, width: int, hidden: int, *, key: Key) -> None:
        for_tokens, for_lstm, for_head = keys(key, 3)
        self._set(
            tokens=nn.Embedding(vocab, width, key=for_tokens),
            lstm=nn.LSTM(width, hidden, layers, batch_first=True, key=for_lstm),
            head=nn.Linear(hidden, vocab, key=for_head),
        )

    def __call__(self, tokens: eg.Array) -> eg.Array:
        return self.step(tokens, None)[0]

    def step(
        self, tokens: eg.Array, state: tuple[eg.Array, eg.Array] | None
    ) -> tuple[eg.Array, tuple[eg.Array, eg.Array]]:
        """(logits, state after the tokens), from the state before them; None is the first one."""
        out, state = self.lstm(self.tokens(tokens), state)
        return self.head(out), state


def write_text(
    model: LSTMLanguageModel, vocabulary: Vocabulary, *, prompt: str = "\n", length: int = 300,
    temperature: float = 0.8, seed: int = 0,
) -> str:  # fmt: skip
    """`prompt` and what the model writes after it, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest character. The state goes from character to character.
    """
    step = eg.compile(lambda model, token, state: model.step(token, state), name="lstm_logits")
    generator = np.random.default_rng(seed)
    ids = list(vocabulary.encode(prompt or "\n"))
    shape = (model.lstm.num_layers, 1, model.lstm.hidden_size)
    state: Any = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    read = 0
    for _ in range(length):
        for token in ids[read:]:
            logits, state = step(model, np.array([[token]], np.int32), state)
        read = len(ids)
        row = np.asarray(logits)[0, 0]
        ids.append(draw(row, vocabulary.unknown, temperature, generator))
    return vocabulary.decode(ids)


def _build(config: LSTMConfig, characters: int) -> LSTMLanguageModel:
    shape = {name: getattr(config, name) for name in _SHAPE}
    return LSTMLanguageModel(vocab=characters, **shape, key=config.seed)


KIND = TextModel(
    "lstm", "LSTM", LSTMConfig, _SHAPE, _build, write_text,
    "{layers} layers, width {width}, hidden {hidden}, context {context}",
)  # fmt: skip


def train_lstm(
    changes: Mapping[str, Any] | None = None, text: Sequence[str | Path] = (), *,
    run: Run, writing: Writing | None = None,
) -> Result:  # fmt: skip
    """Train an LSTM on the text of files and folders (Python's own library when there are none).

    `changes` are the fields of LSTMConfig that differ from the defaults, or from the checkpoint's
    when the run resumes one. Each window of `context` characters starts from a state of 0.
    Everything is written to `run.out`.
    """
    return train_text(KIND, changes or {}, text, run, writing or Writing())
