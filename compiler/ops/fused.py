"""Kernels with several results. Only rewrite rules make these ops; their NumPy meaning is the
oracle of their lowerings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch
from ..ir import Kind, Node, Op, make
from ..types import TupleType, Type

EMPTY = -1e30  # the log-sum-exp of no scores


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
    "none"
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

    def places(self, rows: int) -> np.ndarray:
        """Which query each row is."""
        return np.arange(rows)

    def scores(
        self, q: np.ndarray, k: np.ndarray, extra: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores before softcap, masked scores): -inf where a key is not visible."""
        raw = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(self.scale)
        s = self.softcap * np.tanh(raw / self.softcap) if self.softcap else raw
        i, j = self.places(q.shape[-2])[:, None] + self.offset, np.arange(k.shape[-2])[None]
        if self.causal:
            s = np.where(j <= i, s, -math.inf)
        if self.window:
            s = np.where(j > i - self.window, s, -math.inf)
        if self.extra == "mask":
            s = np.where(extra[0], s, -math.inf)
        elif self.extra == "bias":
            s = s + extra[0]
        return raw, s.astype(q.dtype)

    def check(self, q: Type, k: Type, v: Type, extra: Sequence[Type]) -> None:
        fits = (
            q.rank >= 2
            and q.rank == k.rank == v.rank
            and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
            and q.shape[-1] == k.shape[-1]
            and k.shape[-2] == v.shape[-2]
            and q.dtype == k.dtype == v.dtype
            and len(extra) == (self.extra != "none")
            and all(e.shape == (*q.shape[:-1], k.shape[-2]) for e in extra)
        )
        if not fits:
            raise ShapeMismatch(
                f"{self.name} needs q (..., t, d), k (..., s, d), v (..., s, e), got {q}, {k}, {v}"
            )


def probabilities(s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(probabilities, their sum before division, the maximum) of rows of masked scores; a row of
    -inf has probabilities 0."""
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return np.where(total == 0, 0, e / np.where(total == 0, 1, total)), total, top


@dataclass(frozen=True)
class Attention(AttentionBase):
    """(q, k, v[, mask or bias]) -> (output (..., t, e), log-sum-exp of the scores (..., t, 1)).

    A row without visible keys gives output 0 and log-sum-exp -1e30: finite, so that no score minus
    it is NaN.
    """

    name = "attention"

    def infer(self, q: Type, k: Type, v: Type, *extra: Type) -> TupleType:
        self.check(q, k, v, extra)
        return TupleType(
            (Type((*q.shape[:-1], v.shape[-1]), q.dtype), Type((*q.shape[:-1], 1), q.dtype))
        )

    def evaluate(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *extra: np.ndarray) -> tuple:
        with np.errstate(all="ignore"):
            _, s = self.scores(q, k, extra)
            p, total, top = probabilities(s)
            lse = np.where(total == 0, EMPTY, np.log(total) + top)
            return np.matmul(p, v).astype(q.dtype), lse.astype(q.dtype)

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *extra: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (q.shape[-1] + v.shape[-1]) // (2 if self.causal else 1)


@dataclass(frozen=True)
class AttentionBackward(AttentionBase):
    """(q, k, v, log-sum-exp, delta, cotangent[, mask or bias]) -> cotangents of q, k, v.

    delta (..., t, 1) is the row sum of cotangent * output. With p = exp(scores - lse):
    dv = p^T ct;  ds = p * (ct v^T - delta);  dq = scale * ds k;  dk = scale * ds^T q.
    """

    name = "attention_backward"

    def infer(
        self, q: Type, k: Type, v: Type, lse: Type, delta: Type, ct: Type, *extra: Type
    ) -> TupleType:
        self.check(q, k, v, extra)
        column = (*q.shape[:-1], 1)
        if lse.shape != column or delta.shape != column or ct.shape != (*q.shape[:-1], v.shape[-1]):
            raise ShapeMismatch(
                f"{self.name} got log-sum-exp {lse}, delta {delta}, cotangent {ct} for q {q}, v {v}"
            )
        return TupleType((q, k, v))

    def evaluate(self, q, k, v, lse, delta, ct, *extra):  # noqa: ANN001, ANN002, ANN201
        with np.errstate(all="ignore"):
            raw, s = self.scores(q, k, extra)
            p = np.where(np.isneginf(s), 0, np.exp(s - lse))
            ds = p * (np.matmul(ct, np.swapaxes(v, -1, -2)) - delta)
            if self.softcap:
                ds = ds * (1 - np.tanh(raw / self.softcap) ** 2)
            ds = (ds * self.scale).astype(q.dtype)
            t = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
            return np.matmul(ds, k), np.matmul(t(ds), q), np.matmul(t(p), ct).astype(q.dtype)

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *rest: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]) // (2 if self.causal else 1)


def get(x: Node, index: int) -> Node:
    """One result of a kernel with several."""
    return make(Get(index), x)
