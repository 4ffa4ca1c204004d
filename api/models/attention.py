"""Attention as encoders and decoders with as many key heads as query heads have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eggpu.compiler.tracing import Array
from eggpu.importers.tensors import Weights
from eggpu.models.cache import Held, attend
from eggpu.models.layers import Projection, projection


@dataclass(frozen=True)
class Attention:
    """Queries of one sequence over keys and values of the same or another."""

    query: Projection
    key: Projection
    value: Projection
    output: Projection

    def pairs(self, x: Array, heads: int) -> tuple[Array, Array]:
        """Keys and values of a sequence, (batch, heads, t, head size) each."""
        return split_heads(self.key(x), heads), split_heads(self.value(x), heads)

    def over(
        self, x: Array, k: Held, v: Held, heads: int, mask: Array | None = None,
        causal: bool = False,
    ) -> Array:  # fmt: skip
        """x (batch, t, width) looks at keys and values of some sequence."""
        q = split_heads(self.query(x), heads)
        out = attend(q, k, v, mask, scale=1 / math.sqrt(q.shape[-1]), causal=causal)
        return self.output(join_heads(out))

    def __call__(
        self, x: Array, heads: int, mask: Array | None = None, causal: bool = False
    ) -> Array:
        """x looks at itself."""
        return self.over(x, *self.pairs(x, heads), heads, mask, causal)


def attention(w: Weights, names: Sequence[str], width: int) -> Attention:
    """The layers of these names: query, key, value and output."""
    return Attention(*(projection(w, name, width, width) for name in names))


def split_heads(x: Array, heads: int) -> Array:
    """(batch, t, heads * size) as (batch, heads, t, size)."""
    batch, t, width = x.shape
    return x.reshape((batch, t, heads, width // heads)).swapaxes(1, 2)


def join_heads(heads: Array) -> Array:
    """(batch, heads, t, size) as (batch, t, heads * size)."""
    batch, _, t, _ = heads.shape
    return heads.swapaxes(1, 2).reshape((batch, t, -1))
