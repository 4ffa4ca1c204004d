"""Attention of a few rows over many keys, as in decoding with a cache of keys and values.

Three kernels compute it, one op each; rules make them beside `Attention`, and cost chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch
from ..types import TupleType, Type, i32
from .fused import AttentionBase, probabilities

MOST_ROWS = 16  # of queries that share a head's keys
MOST_PHASE_KEYS = 1 << 16  # scores of a row that the kernel with phases keeps
FILLED = 0.5  # of the keys in a cache count, on average over a sequence that fills it


@dataclass(frozen=True)
class DecodeBase(AttentionBase):
    """(q, k, v[, first, end][, mask][, bias]) -> (output (..., t, e),): besides `AttentionBase`,

    group:   query heads that share the keys: row r is query r % (t // group) of one of them
    bounded: key j counts where first <= j < end, which are i32 (..., t, 1) and read from memory:
             the kernel reads no other keys
    empty:   what a row without keys gives: "zero"; "nan", as plain softmax of -inf; or the "mean"
             of all values, as softmax of one huge negative number (bounded rows without masks)
    """

    group: int
    bounded: bool
    empty: str

    @property
    def computes_operands(self) -> bool:
        """What it reads may be computed inside the kernel: every key is read once."""
        return True

    @property
    def operand_names(self) -> tuple[str, ...]:
        bounds = ("first", "end") if self.bounded else ()
        return ("", "", "", *bounds, *self.extras)

    @property
    def read_share(self) -> float:
        """The share of the keys and values that the kernel reads, as the cost model takes it."""
        return FILLED if self.bounded else 1.0

    def places(self, rows: int) -> np.ndarray:
        """Which query each row is."""
        return np.arange(rows) % (rows // self.group)

    def infer(self, q: Type, k: Type, v: Type, *rest: Type) -> TupleType:
        bounds, extra = rest[: 2 * self.bounded], rest[2 * self.bounded :]
        self.check(q, k, v, extra)
        column = (*q.shape[:-1], 1)
        if any(b.shape != column or b.dtype is not i32 for b in bounds) or (
            len(bounds) != 2 * self.bounded
        ):
            needed = f"bounds i32{list(column)}"
            raise ShapeMismatch(f"{self.name} of q {q} needs {needed}, got {list(bounds)}")
        if self.empty == "mean" and (self.extra != "none" or self.causal or not self.bounded):
            raise ShapeMismatch(f"{self.name} of means needs bounds and no other mask")
        if self.group < 1 or q.shape[-2] % self.group:
            raise ShapeMismatch(f"{self.name} needs rows that {self.group} heads divide, got {q}")
        return TupleType((Type((*q.shape[:-1], v.shape[-1]), q.dtype),))

    def evaluate(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray
    ) -> tuple[np.ndarray]:
        bounds, extra = rest[: 2 * self.bounded], rest[2 * self.bounded :]
        with np.errstate(all="ignore"):
            _, s, _ = self.scores(q, k, extra)
            if bounds:
                j = np.arange(k.shape[-2])
                s = np.where((bounds[0] <= j) & (j < bounds[1]), s, -math.inf).astype(q.dtype)
            p, total, _ = probabilities(s)
            if self.empty == "mean":
                none = bounds[0].clip(0, s.shape[-1]) >= bounds[1].clip(0, s.shape[-1])
                p = np.where(none, 1 / s.shape[-1], p)
            elif self.empty == "nan":
                p = np.where(total == 0, math.nan, p)
            return (np.matmul(p.astype(q.dtype), v).astype(q.dtype),)

    def flops(self, result: TupleType, q: Type, k: Type, v: Type, *rest: Type) -> int:  # type: ignore[override]
        pairs = math.prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (q.shape[-1] + v.shape[-1])


@dataclass(frozen=True)
class AttentionOnline(DecodeBase):
    """A workgroup a head; maximum, sum and output are kept while it walks along the keys."""

    name = "attention_online"


@dataclass(frozen=True)
class AttentionPhases(DecodeBase):
    """A workgroup a head; scores to memory, then their softmax, then the sum of the values."""

    name = "attention_phases"


@dataclass(frozen=True)
class AttentionSplit(DecodeBase):
    """Several workgroups a head, each for its part of the keys; a second kernel joins the parts."""

    name = "attention_split"


DECODE = (AttentionOnline, AttentionPhases, AttentionSplit)
