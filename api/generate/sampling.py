"""The next token, chosen on the device: greedy, temperature, top-k, top-p, min-p and penalty.

The cut of top-k and top-p is a threshold of scores, found by search: each round counts, or adds up,
what lies above a few thresholds at once. So a large vocabulary is never sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

import eggpu as eg
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array

_DEPTH = 30.0  # scores this far below the largest are never drawn: their probability is below 1e-13
_STREAM = 0x9E3779B9  # between the keys of rows with the same seed
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
    """The options as device values, a row a text; those without effect in any are left out of the
    program."""

    temperature: Array | None  # f32 (batch, 1), like the next three
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None  # its logarithm
    penalty: Array | None
    seen: Array | None  # bool (batch, vocab): the tokens so far
    key: Array | None  # u32 (batch, 2)
    mixed: bool  # whether some rows may be greedy though others are drawn
    logprobs: bool


def knobs(
    options: Sampling | Sequence[Sampling], texts: Sequence[Sequence[int]], vocab: int, *,
    every: bool = False,
) -> Knobs:  # fmt: skip
    """The device values of options, one for all texts or one each, for texts that begin with these
    tokens. With `every` none is left out, so that one program serves any options."""
    given = [options] * len(texts) if isinstance(options, Sampling) else list(options)
    if len(given) != len(texts):
        raise SamplingError(f"needs options for {len(texts)} texts, got {len(given)}")
    drawn = every or any(s.temperature > 0 for s in given)

    def column(
        value: Callable[[Sampling], float], used: Callable[[Sampling], bool]
    ) -> Array | None:
        if not every and not (drawn and any(map(used, given))):
            return None
        return array(np.array([[value(s)] for s in given], np.float32))

    penalized = every or any(s.repetition_penalty != 1 for s in given)
    penalty = np.array([[s.repetition_penalty] for s in given], np.float32)
    return Knobs(
        temperature=column(lambda s: s.temperature, lambda s: s.temperature > 0),
        top_k=column(lambda s: min(s.top_k or vocab, vocab), lambda s: 0 < s.top_k < vocab),
        top_p=column(lambda s: s.top_p, lambda s: s.top_p < 1),
        min_p=column(lambda s: math.log(s.min_p) if s.min_p else -_DEPTH, lambda s: s.min_p > 0),
        penalty=array(penalty) if penalized else None,
        seen=array(marked(texts, vocab)) if penalized else None,
        key=array(_keys(given)) if drawn else None,
        mixed=every or not all(s.temperature > 0 for s in given),
        logprobs=every or any(s.logprobs for s in given),
    )


def _keys(options: Sequence[Sampling]) -> np.ndarray:
    """The keys of seeds; rows with the same options differ by their number."""
    same: dict[int, int] = {}
    words = []
    for s in options:
        row = same.setdefault(s.seed, 0)
        same[s.seed] += 1
        words.append([s.seed & 0xFFFFFFFF, ((s.seed >> 32) + row * _STREAM) & 0xFFFFFFFF])
    return np.array(words, np.uint32)


def marked(texts: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """bool (texts, vocab): which tokens each text has."""
    marks = np.zeros((len(texts), vocab), bool)
    for row, text in zip(marks, texts, strict=True):
        row[np.asarray(text, np.int64)] = True
    return marks


def choose(logits: Array, k: Knobs, step: Array) -> tuple[Array, Array | None, Knobs]:
    """Tokens (batch,) for logits (batch, vocab), their log-probabilities if asked for, and the
    knobs of the next step. `step` (batch,) is a number that no other step of this text has."""
    scores = logits if k.seen is None else _penalized(logits, k)
    token = eg.argmax(scores, -1) if k.temperature is None or k.mixed else None
    if k.temperature is not None:
        drawn = _drawn(scores, k, step)
        token = drawn if token is None else eg.where(k.temperature[:, 0] > 0, drawn, token)
    assert token is not None
    if k.seen is not None:
        ids = eg.arange(logits.shape[-1]).reshape((1, -1))
        new = k.seen | (ids == token.reshape((-1, 1)))
        k = replace(k, seen=new)
    if not k.logprobs:
        return token, None, k
    picked = eg.take_along_axis(logits, token.reshape((-1, 1)), -1).reshape((-1,))
    return token, picked - eg.logsumexp(logits, -1), k


def _penalized(logits: Array, k: Knobs) -> Array:
    """Scores of seen tokens made smaller (Keskar et al., 2019)."""
    less = eg.where(logits > 0, logits / k.penalty, logits * k.penalty)
    return eg.where(k.seen, less, logits)


def _drawn(scores: Array, k: Knobs, step: Array) -> Array:
    assert k.temperature is not None
    scaled = scores / (
        eg.where(k.temperature > 0, k.temperature, 1.0) if k.mixed else k.temperature
    )
    z = scaled - scaled.max(-1, keepdims=True)
    low = eg.full((z.shape[0], 1), -_DEPTH)
    if k.top_k is not None:
        low = threshold(z, None, k.top_k)
    if k.top_p is not None:
        weight = eg.where(z >= low, eg.exp(z), 0.0)
        low = eg.maximum(low, threshold(z, weight, weight.sum(-1, keepdims=True) * k.top_p))
    if k.min_p is not None:
        low = eg.maximum(low, k.min_p)
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
