"""Kernels with several results. Only rewrite rules make these ops; their NumPy meaning is the
oracle of their lowerings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch
from ..ir import Kind, Node, Op, make
from ..types import TupleType, Type, f32

EXTRAS = {"none": (), "mask": ("mask",), "bias": ("bias",), "both": ("mask", "bias")}
EMPTIES = ("zero", "nan", "mean")  # what a row without keys gives
# what hidden scores count as for the mean, and the maximum of no scores: as float32 has them
EMPTY, LOWEST = float(np.float32(-1e30)), float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Get(Op):
    """The `index`-th result of a kernel with several."""

    index: int
    name = "get"
    kind = Kind.GET

    def infer(self, x: TupleType) -> Type:  # type: ignore[override]
        return x.items[self.index]

    def evaluate(self, x: Sequence[np.ndarray]) -> np.ndarray:  # type: ignore[override]
        return x[self.index]

    def stripped(self, operands: Sequence[Node]) -> Node | None:
        return operands[0].op.item(operands[0], self.index)


@dataclass(frozen=True)
class AttentionBase(Op):
    """Attributes of attention. Key j is visible to query i when

    causal:     j <= i + offset              (offset 0: top-left; Tk - Tq: bottom-right)
    window > 0: j > i + offset - window      (besides causal)
    extra:      "mask": the bool operand holds; "bias": the operand is added to the scaled scores;
    "both": a mask, then a bias; "none"
    """

    scale: float
    causal: bool
    offset: int
    window: int
    softcap: float  # 0: none; else cap * tanh(score / cap) before mask and bias
    extra: str

    @property
    def kind(self) -> Kind:
        return Kind.TUPLE

    @property
    def extras(self) -> tuple[str, ...]:
        """What each of the last operands is."""
        return EXTRAS[self.extra]

    @property
    def operand_names(self) -> tuple[str, ...]:
        """What reports call the operands that not every attention has, "" for the others."""
        return ("", "", "", *self.extras)

    def places(self, rows: int) -> np.ndarray:
        """Which query each row is."""
        return np.arange(rows)

    def scores(
        self, q: np.ndarray, k: np.ndarray, extra: Sequence[np.ndarray], hidden: float = -math.inf
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(scores before softcap, scores that are `hidden` where a key is not visible, visible)."""
        raw = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(self.scale)
        s = self.softcap * np.tanh(raw / self.softcap) if self.softcap else raw
        i, j = self.places(q.shape[-2])[:, None] + self.offset, np.arange(k.shape[-2])[None]
        visible = np.ones(s.shape, bool)
        if self.causal:
            visible &= j <= i
        if self.window:
            visible &= j > i - self.window
        if self.extra in ("mask", "both"):
            visible &= extra[0]
        if self.extra in ("bias", "both"):
            s = s + extra[-1]
        return raw, np.where(visible, s, hidden).astype(q.dtype), visible

    def check(self, q: Type, k: Type, v: Type, extra: Sequence[Type]) -> None:
        known = self.extra in EXTRAS and getattr(self, "empty", "zero") in EMPTIES
        fits = (
            known
            and q.rank >= 2
            and q.rank == k.rank == v.rank
            and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
            and q.shape[-1] == k.shape[-1]
            and k.shape[-2] == v.shape[-2]
            and q.dtype == k.dtype == v.dtype
            and len(extra) == len(self.extras)
            and all(e.shape == (*q.shape[:-1], k.shape[-2]) for e in extra)
        )
        if not fits:
            raise ShapeMismatch(
                f"{self.name} needs q (..., t, d), k (..., s, d), v (..., s, e) and "
                f"{self.extra}, got {q}, {k}, {v}, {list(extra)}"
            )


def probabilities(s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(probabilities, their sum before division, the maximum) of rows of masked scores; a row of
    -inf has probabilities 0."""
    top = s.max(-1, keepdims=True).astype(np.result_type(s, np.float32))
    top = np.where(np.isneginf(top), top.dtype.type(LOWEST), top)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    return np.where(total == 0, 0, e / np.where(total == 0, 1, total)), total, top


@dataclass(frozen=True)
class Attention(AttentionBase):
    """(q, k, v[, mask][, bias]) -> (output (..., t, e), stats (..., t, 2)).

    stats are what the gradients need of a row of scores: its maximum, and the reciprocal of the sum
    of exp(score - maximum). Apart, since the logarithm of the sum is lost in a large maximum.

    empty: what a row without visible keys gives:

    "zero"  output 0, and a reciprocal of 0
    "nan"   NaN, as softmax of scores that are all -inf
    "mean"  the mean of the values of its n hidden keys, as softmax of scores of which the hidden
            ones are one huge negative number: a maximum of -1e30 and a reciprocal of 1 / n

    Without visible keys the maximum of "zero" and "nan" is the lowest float: no score minus it is
    NaN.
    """

    empty: str = "zero"
    name = "attention"

    def infer(self, q: Type, k: Type, v: Type, *extra: Type) -> TupleType:
        self.check(q, k, v, extra)
        return TupleType(
            (Type((*q.shape[:-1], v.shape[-1]), q.dtype), Type((*q.shape[:-1], 2), f32))
        )

    def evaluate(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *extra: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        with np.errstate(all="ignore"):
            hidden = EMPTY if self.empty == "mean" else -math.inf
            _, s, _ = self.scores(q, k, extra, hidden)
            p, total, top = probabilities(s)
            none = 0 if self.empty == "zero" else math.nan
            p = np.where(total == 0, none, p)
            stats = np.concatenate([top, np.where(total == 0, none, 1 / total)], -1)
            return np.matmul(p, v).astype(q.dtype), stats

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *extra: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (q.shape[-1] + v.shape[-1]) // (2 if self.causal else 1)


@dataclass(frozen=True)
class GradientBase(AttentionBase):
    """(q, k, v, stats, delta, cotangent[, mask][, bias]) -> gradients; stats and `empty` as in
    `Attention`.

    delta (..., t, 1) is the row sum of cotangent * output. With p = exp(scores - maximum) / sum,
    the gradient of scores after softcap is ds = p * (ct v^T - delta), and 0 where they are hidden.
    """

    empty: str = "zero"

    @property
    def operand_names(self) -> tuple[str, ...]:
        return ("",) * 6 + self.extras

    def fits(
        self, q: Type, k: Type, v: Type, stats: Type, delta: Type, ct: Type, extra: Sequence[Type]
    ) -> None:
        """Raise unless the types are those of attention and its gradient."""
        self.check(q, k, v, extra)
        wanted = [(*q.shape[:-1], n) for n in (2, 1, v.shape[-1])]
        if [x.shape for x in (stats, delta, ct)] != wanted:
            raise ShapeMismatch(
                f"{self.name} got stats {stats}, delta {delta}, cotangent {ct} for q {q}, v {v}"
            )

    def score_gradient(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        stats: np.ndarray,
        delta: np.ndarray,
        ct: np.ndarray,
        extra: Sequence[np.ndarray],
    ) -> tuple[np.ndarray, ...]:
        """(scores before softcap, probabilities, gradient of scores after softcap, visible)."""
        hidden = EMPTY if self.empty == "mean" else -math.inf
        raw, s, visible = self.scores(q, k, extra, hidden)
        p = np.exp(s - stats[..., :1]) * stats[..., 1:]
        ds = np.where(visible, p * (np.matmul(ct, np.swapaxes(v, -1, -2)) - delta), 0)
        return raw, p, ds, visible


@dataclass(frozen=True)
class AttentionBackward(GradientBase):
    """The cotangents of q, k, v: dv = p^T ct;  dq = scale * ds k;  dk = scale * ds^T q."""

    name = "attention_backward"

    def infer(
        self, q: Type, k: Type, v: Type, stats: Type, delta: Type, ct: Type, *extra: Type
    ) -> TupleType:
        self.fits(q, k, v, stats, delta, ct, extra)
        return TupleType((q, k, v))

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v, stats, delta, ct, *extra = operands
        with np.errstate(all="ignore"):
            raw, p, ds, visible = self.score_gradient(q, k, v, stats, delta, ct, extra)
            if self.softcap:
                ds = np.where(visible, ds * (1 - np.tanh(raw / self.softcap) ** 2), 0)
            ds = (ds * self.scale).astype(q.dtype)
            t = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
            return np.matmul(ds, k), np.matmul(t(ds), q), np.matmul(t(p), ct).astype(q.dtype)

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *rest: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]) // (2 if self.causal else 1)


@dataclass(frozen=True)
class AttentionBias(GradientBase):
    """The cotangent of a bias, ds, summed over the `axes` before the last two along which the bias
    is repeated; they stay with length 1.
    """

    axes: tuple[int, ...] = ()
    name = "attention_bias"

    def infer(
        self, q: Type, k: Type, v: Type, stats: Type, delta: Type, ct: Type, *extra: Type
    ) -> TupleType:
        self.fits(q, k, v, stats, delta, ct, extra)
        if any(not 0 <= a < q.rank - 2 for a in self.axes):
            raise ShapeMismatch(f"{self.name} sums over axes before the last two, got {self.axes}")
        lead = [1 if a in self.axes else n for a, n in enumerate(q.shape[:-2])]
        return TupleType((Type((*lead, q.shape[-2], k.shape[-2]), q.dtype),))

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v, stats, delta, ct, *extra = operands
        with np.errstate(all="ignore"):
            _, _, ds, _ = self.score_gradient(q, k, v, stats, delta, ct, extra)
            return (ds.sum(self.axes, keepdims=True).astype(q.dtype),)

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *rest: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (q.shape[-1] + v.shape[-1]) // (2 if self.causal else 1)


def get(x: Node, index: int) -> Node:
    """One result of a kernel with several."""
    return make(Get(index), x)
