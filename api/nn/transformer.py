"""Transformers: attention, feed-forward, the pre-norm block, and GPT (Radford et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eggpu.compiler.errors import ShapeMismatch, TypeMismatch
from eggpu.compiler.library import nn as F
from eggpu.compiler.library.math import gelu
from eggpu.compiler.tracing import Array, array
from eggpu.nn import initial
from eggpu.nn.initial import Key
from eggpu.nn.layers import Embedding, LayerNorm, Linear
from eggpu.nn.module import Module

_STD = 0.02  # of GPT-2's initial weights


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MultiHeadAttention(Module):
    """Self-attention: (..., t, width) -> (..., t, width), causal unless told otherwise.

    Weights start as normal numbers with deviation `std`, those of the output with `output_std`.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    heads: int
    causal: bool

    def __init__(
        self, width: int, heads: int, *, key: Key, causal: bool = True,
        std: float = _STD, output_std: float | None = None,
    ) -> None:  # fmt: skip
        if heads < 1 or width % heads:
            came = f"width {width} and {heads} heads"
            raise ShapeMismatch(f"attention needs a width that its heads divide, got {came}")
        q, k, v, o = initial.keys(key, 4)
        self._set(
            query=Linear(width, width, key=q, std=std),
            key=Linear(width, width, key=k, std=std),
            value=Linear(width, width, key=v, std=std),
            output=Linear(width, width, key=o, std=std if output_std is None else output_std),
            heads=heads,
            causal=causal,
        )

    def __call__(self, x: Array) -> Array:
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(q, k, v, causal=self.causal)
        return self.output(heads.swapaxes(-3, -2).reshape(x.shape))

    def _split(self, x: Array) -> Array:
        """(..., t, width) as (..., heads, t, width / heads)."""
        *batch, t, width = x.shape
        return x.reshape((*batch, t, self.heads, width // self.heads)).swapaxes(-3, -2)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class FeedForward(Module):
    """Two linear layers with GELU (tanh form) between them."""

    up: Linear
    down: Linear

    def __init__(
        self, width: int, hidden: int, *, key: Key,
        std: float = _STD, output_std: float | None = None,
    ) -> None:  # fmt: skip
        first, second = initial.keys(key, 2)
        self._set(
            up=Linear(width, hidden, key=first, std=std),
            down=Linear(hidden, width, key=second, std=std if output_std is None else output_std),
        )

    def __call__(self, x: Array) -> Array:
        return self.down(gelu(self.up(x), "tanh"))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Block(Module):
    """The pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    norm1: LayerNorm
    attention: MultiHeadAttention
    norm2: LayerNorm
    feed_forward: FeedForward

    def __init__(
        self, width: int, heads: int, *, key: Key, hidden: int | None = None, causal: bool = True,
        std: float = _STD, output_std: float | None = None,
    ) -> None:  # fmt: skip
        first, second = initial.keys(key, 2)
        stds = {"std": std, "output_std": output_std}
        self._set(
            norm1=LayerNorm(width),
            attention=MultiHeadAttention(width, heads, key=first, causal=causal, **stds),
            norm2=LayerNorm(width),
            feed_forward=FeedForward(width, hidden or 4 * width, key=second, **stds),
        )

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GPT(Module):
    """A causal language model: tokens (..., t) -> logits (..., t, vocab), t at most `context`.

    Learned positions, pre-norm blocks, a head of its own. Weights start as GPT-2's do: deviation
    0.02, the layers that add to the residual 0.02 / sqrt(2 * layers), biases 0.
    """

    tokens: Embedding
    positions: Embedding
    blocks: tuple[Block, ...]
    norm: LayerNorm
    head: Linear
    context: int

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, context: int, key: Key
    ) -> None:
        if layers < 0:
            raise ShapeMismatch(f"GPT needs at least 0 layers, got {layers}")
        token, position, head, *each = initial.keys(key, 3 + layers)
        residual = _STD / math.sqrt(2 * max(layers, 1))
        self._set(
            tokens=Embedding(vocab, width, key=token, std=_STD),
            positions=Embedding(context, width, key=position, std=_STD),
            blocks=tuple(Block(width, heads, key=k, output_std=residual) for k in each),
            norm=LayerNorm(width),
            head=Linear(width, vocab, key=head, std=_STD),
            context=context,
        )

    def __call__(self, tokens: Array) -> Array:
        tokens = array(tokens)
        if tokens.ndim < 1 or tokens.dtype.kind not in "iu":
            raise TypeMismatch(f"GPT needs integer tokens (..., t), got {tokens.type}")
        length = tokens.shape[-1]
        if length > self.context:
            limit = f"{self.context} tokens, its context"
            raise ShapeMismatch(f"GPT needs at most {limit}, got {length}")
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
