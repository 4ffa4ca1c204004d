"""Multi-head attention: self or cross, causal, grouped heads, rotary positions or ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from eggpu.compiler.errors import ShapeMismatch, TypeMismatch
from eggpu.compiler.library import nn as F
from eggpu.compiler.library.shaping import arange
from eggpu.compiler.tracing import Array, array
from eggpu.nn.initial import Key, keys
from eggpu.nn.layers import Linear
from eggpu.nn.module import Module

STD = 0.02  # of GPT-2's initial weights


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MultiHeadAttention(Module):
    """(..., t, width) -> (..., t, width), of `x` to itself or to a `context` (..., s, from_width).

    `kv_heads` divide `heads` (grouped heads, Ainslie et al., 2023). `rope` is the base of rotary
    positions (Su et al., 2021); `alibi` adds -slope * distance to the scores (Press et al., 2022).
    Weights start as normal numbers with deviation `std`, those of the output with `output_std`.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    heads: int
    kv_heads: int
    causal: bool
    rope: float | None
    alibi: bool
    dropout: float

    def __init__(
        self, width: int, heads: int, *, key: Key, causal: bool = True, kv_heads: int | None = None,
        from_width: int | None = None, rope: float | None = None, alibi: bool = False,
        dropout: float = 0.0, bias: bool = True, std: float = STD, output_std: float | None = None,
    ) -> None:  # fmt: skip
        if heads < 1 or width % heads:
            came = f"width {width} and {heads} heads"
            raise ShapeMismatch(f"attention needs a width that its heads divide, got {came}")
        fewer = heads if kv_heads is None else kv_heads
        if fewer < 1 or heads % fewer:
            came = f"{heads} and {fewer}"
            raise ShapeMismatch(f"attention needs heads that its kv_heads divide, got {came}")
        q, k, v, o = keys(key, 4)
        source, narrow = from_width or width, width // heads * fewer
        last = std if output_std is None else output_std
        self._set(
            query=Linear(width, width, bias, key=q, std=std),
            key=Linear(source, narrow, bias, key=k, std=std),
            value=Linear(source, narrow, bias, key=v, std=std),
            output=Linear(width, width, bias, key=o, std=last),
            heads=heads,
            kv_heads=fewer,
            causal=causal,
            rope=None if rope is None else float(rope),
            alibi=alibi,
            dropout=float(dropout),
        )

    def __call__(
        self, x: Array, context: Array | None = None, mask: Array | None = None, *,
        dropout_key: Array | None = None,
    ) -> Array:  # fmt: skip
        """Attend from `x` to `context`, or to itself.

        `mask` is bool (True: visible) or a float bias, broadcast to (..., heads, t, s).
        """
        source = x if context is None else context
        q = _split(self.query(x), self.heads)
        k, v = (_split(layer(source), self.kv_heads) for layer in (self.key, self.value))
        if self.rope is not None:
            q, k = (F.rope(a, arange(a.shape[-2]), self.rope) for a in (q, k))
        heads = F.scaled_dot_product_attention(
            q, k, v, self._biased(mask, q.shape[-2], k.shape[-2]), causal=self.causal,
            dropout=0.0 if dropout_key is None else self.dropout, key=dropout_key,
        )  # fmt: skip
        return self.output(heads.swapaxes(-3, -2).reshape(x.shape))

    def _biased(self, mask: Array | None, t: int, s: int) -> Array | None:
        """`mask` and ALiBi's bias together."""
        if not self.alibi:
            return mask
        bias = alibi_bias(self.heads, t, s)
        if mask is None:
            return bias
        if array(mask).dtype.kind != "f":
            raise TypeMismatch(f"attention with ALiBi needs a float mask, got {array(mask).type}")
        return bias + mask


def alibi_bias(heads: int, t: int, s: int) -> Array:
    """(heads, t, s): -slope * |i - j|, with the slopes 2^(-8 h / heads) of h = 1 ... heads."""
    slopes = array([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
    distance = abs(arange(t).reshape((t, 1)) - arange(s).reshape((1, s))).astype("f32")
    return distance * -slopes.reshape((heads, 1, 1))


def _split(x: Array, heads: int) -> Array:
    """(..., t, heads * size) as (..., heads, t, size)."""
    *batch, t, width = x.shape
    return x.reshape((*batch, t, heads, width // heads)).swapaxes(-3, -2)
