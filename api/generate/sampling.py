"""The next token, chosen on the device: greedy, temperature, top-k, top-p, min-p and penalty.

The cut of top-k and top-p is a threshold of scores, found by search: each round counts, or adds up,
what lies above a few thresholds at once. So a large vocabulary is never sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import eggpu as eg
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array

_DEPTH = 30.0  # scores this far below the largest are never drawn: their probability is below 1e-13
_WAYS, _ROUNDS = 8, 8  # thresholds a round; 30 / 8^8 is near the spacing of float32


class SamplingError(EggpuError, ValueError):
    """An option of sampling is out of range."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. temperature 0 takes the likeliest, of equal ones the first.

    top_k 0, top_p 1, min_p 0 and repetition_penalty 1 leave everything as it is. They apply in this
    order, after the temperature, as in Hugging Face's transformers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf,
             "more than 0"),
        )  # fmt: skip
        for name, value, holds, need in checks:
            if not holds:
                raise SamplingError(f"{name} needs a number {need}, got {value}")


@dataclass(frozen=True)
class Knobs:
    """The options as device values; those without effect are left out of the program."""

    temperature: Array | None
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    penalty: Array | None
    seen: Array | None  # bool (batch, vocab): the tokens so far
    key: Array | None
    logprobs: bool


def knobs(s: Sampling, texts: Sequence[Sequence[int]], vocab: int) -> Knobs:
    """The device values of options, for texts that begin with these tokens."""
    drawn = s.temperature > 0

    def number(value: float, used: bool) -> Array | None:
        return array(np.float32(value)) if used else None

    seen = array(marked(texts, vocab)) if s.repetition_penalty != 1 else None
    return Knobs(
        temperature=number(s.temperature, drawn),
        top_k=number(min(s.top_k, vocab), drawn and 0 < s.top_k < vocab),
        top_p=number(s.top_p, drawn and s.top_p < 1),
        min_p=number(math.log(s.min_p) if s.min_p else 0, drawn and s.min_p > 0),
        penalty=number(s.repetition_penalty, seen is not None),
        seen=seen,
        key=array(np.array([s.seed & 0xFFFFFFFF, (s.seed >> 32) & 0xFFFFFFFF], np.uint32))
        if drawn
        else None,
        logprobs=s.logprobs,
    )


def marked(texts: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """bool (texts, vocab): which tokens each text has."""
    marks = np.zeros((len(texts), vocab), bool)
    for row, text in zip(marks, texts, strict=True):
        row[np.asarray(text, np.int64)] = True
    return marks


def choose(logits: Array, k: Knobs, step: Array) -> tuple[Array, Array | None, Knobs]:
    """Tokens (batch,) for logits (batch, vocab), their log-probabilities if asked for, and the
    knobs of the next step. `step` is a number that no other step of this text has."""
    scores = logits if k.seen is None else _penalized(logits, k)
    token = eg.argmax(scores, -1) if k.temperature is None else _drawn(scores, k, step)
    if k.seen is not None:
        ids = eg.arange(logits.shape[-1]).reshape((1, -1))
        new = k.seen | (ids == token.reshape((-1, 1)))
        k = Knobs(k.temperature, k.top_k, k.top_p, k.min_p, k.penalty, new, k.key, k.logprobs)
    if not k.logprobs:
        return token, None, k
    picked = eg.take_along_axis(logits, token.reshape((-1, 1)), -1).reshape((-1,))
    return token, picked - eg.logsumexp(logits, -1), k


def _penalized(logits: Array, k: Knobs) -> Array:
    """Scores of seen tokens made smaller (Keskar et al., 2019)."""
    less = eg.where(logits > 0, logits / k.penalty, logits * k.penalty)
    return eg.where(k.seen, less, logits)


def _drawn(scores: Array, k: Knobs, step: Array) -> Array:
    scaled = scores / k.temperature
    z = scaled - scaled.max(-1, keepdims=True)
    low = eg.full((z.shape[0], 1), -_DEPTH)
    if k.top_k is not None:
        low = threshold(z, None, low * 0.0 + k.top_k)
    if k.top_p is not None:
        weight = eg.where(z >= low, eg.exp(z), 0.0)
        low = eg.maximum(low, threshold(z, weight, weight.sum(-1, keepdims=True) * k.top_p))
    if k.min_p is not None:
        low = eg.maximum(low, low * 0.0 + k.min_p)
    kept = eg.where(z >= low, z, -np.inf)
    assert k.key is not None
    return eg.random.categorical(eg.random.fold_in(k.key, step), kept, -1)


def threshold(z: Array, weight: Array | None, goal: Array) -> Array:
    """The largest t (batch, 1), to within 2e-6, with `goal` of weight (or 1 each) on z >= t.

    z (batch, n) is at most 0; -30 is taken where no t will do.
    """
    low, width = goal * 0.0 - _DEPTH, _DEPTH
    steps = eg.arange(_WAYS).astype("f32").reshape((1, _WAYS))
    wide = z.reshape((z.shape[0], 1, z.shape[1]))
    each = 1.0 if weight is None else weight.reshape(wide.shape)
    for _ in range(_ROUNDS):
        width /= _WAYS
        levels = low + steps * width
        above = eg.where(wide >= levels.reshape((-1, _WAYS, 1)), each, 0.0).sum(-1)
        enough = (above >= goal).astype("f32").sum(-1, keepdims=True)
        low = low + eg.maximum(enough - 1.0, 0.0) * width
    return low


def probabilities(logits: np.ndarray, s: Sampling, seen: Sequence[int] = ()) -> np.ndarray:
    """What `choose` draws from, in NumPy by sorting: for tests and explanations."""
    x = np.asarray(logits, np.float64).copy()
    if s.repetition_penalty != 1:
        at = np.asarray(sorted(set(seen)), np.int64)
        x[at] = np.where(x[at] > 0, x[at] / s.repetition_penalty, x[at] * s.repetition_penalty)
    if s.temperature == 0:
        return np.eye(len(x))[int(x.argmax())]
    x /= s.temperature
    p = np.exp(x - x.max())
    if s.top_k:
        p[x < np.sort(x)[-min(s.top_k, len(x))]] = 0
    if s.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s.top_p * p.sum()]] = 0
    if s.min_p:
        p[p < s.min_p * p.max()] = 0
    return p / p.sum()
