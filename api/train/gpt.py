"""Trains a small GPT on text, character by character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eggpu import nn
from eggpu.train.run import Result, Run, not_negative, positive
from eggpu.train.sample import sample_text
from eggpu.train.text import MINUTES as MINUTES
from eggpu.train.text import STEPS as STEPS
from eggpu.train.text import TextModel, Writing, train_text
from eggpu.train.text import loss as loss

_SHAPE = ("layers", "width", "heads", "context")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The model, the batches and the optimizer."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 8
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, *_SHAPE, "batch", "lr", "clip")
        not_negative(self, "seed", "weight_decay")


def _build(config: GPTConfig, characters: int) -> nn.GPT:
    shape = {name: getattr(config, name) for name in _SHAPE}
    return nn.GPT(vocab=characters, **shape, key=config.seed)


KIND = TextModel(
    "gpt", "GPT", GPTConfig, _SHAPE, _build, sample_text,
    "{layers} layers, width {width}, {heads} heads, context {context}",
)  # fmt: skip


def train_gpt(
    changes: Mapping[str, Any] | None = None, text: Sequence[str | Path] = (), *,
    run: Run, writing: Writing | None = None,
) -> Result:  # fmt: skip
    """Train a GPT on the text of files and folders (Python's own library when there are none).

    `changes` are the fields of GPTConfig that differ from the defaults, or from the checkpoint's
    when the run resumes one. Everything is written to `run.out`.
    """
    return train_text(KIND, changes or {}, text, run, writing or Writing())
