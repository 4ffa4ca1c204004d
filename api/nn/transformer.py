"""Transformers: attention, feed-forward, the pre-norm block, and GPT (Radford et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from eggpu.compiler.errors import ShapeMismatch, TraceError, TypeMismatch
from eggpu.compiler.library import nn as F
from eggpu.compiler.library import random
from eggpu.compiler.library.indexing import take_along_axis
from eggpu.compiler.library.math import gelu, silu
from eggpu.compiler.library.shaping import broadcast_to
from eggpu.compiler.tracing import Array, array
from eggpu.nn import initial
from eggpu.nn.attention import STD as _STD
from eggpu.nn.attention import MultiHeadAttention
from eggpu.nn.initial import Key
from eggpu.nn.layers import Embedding, LayerNorm, Linear
from eggpu.nn.module import Module


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
class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, 2020)."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self, width: int, hidden: int, *, key: Key,
        std: float = _STD, output_std: float | None = None,
    ) -> None:  # fmt: skip
        first, second, third = initial.keys(key, 3)
        last = std if output_std is None else output_std
        self._set(
            gate=Linear(width, hidden, False, key=first, std=std),
            up=Linear(width, hidden, False, key=second, std=std),
            down=Linear(hidden, width, False, key=third, std=last),
        )

    def __call__(self, x: Array) -> Array:
        return self.down(silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Block(Module):
    """The pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    In training `dropout` of the attention weights and of what is added to x are dropped.
    """

    norm1: LayerNorm
    attention: MultiHeadAttention
    norm2: LayerNorm
    feed_forward: FeedForward
    dropout: float

    def __init__(
        self, width: int, heads: int, *, key: Key, hidden: int | None = None, causal: bool = True,
        std: float = _STD, output_std: float | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        first, second = initial.keys(key, 2)
        stds = {"std": std, "output_std": output_std}
        how: dict[str, Any] = {"causal": causal, "dropout": dropout, **stds}
        self._set(
            norm1=LayerNorm(width),
            attention=MultiHeadAttention(width, heads, key=first, **how),
            norm2=LayerNorm(width),
            feed_forward=FeedForward(width, hidden or 4 * width, key=second, **stds),
            dropout=float(dropout),
        )

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, Self]:
        """The result with dropout; needs a key unless `dropout` is 0."""
        if not self.dropout:
            return self(x), self
        scores, first, second = _needed(key, 3)
        y = self.attention(self.norm1(x), dropout_key=scores)
        x = x + F.dropout(y, self.dropout, first)
        return x + F.dropout(self.feed_forward(self.norm2(x)), self.dropout, second), self


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EncoderBlock(Block):
    """The pre-norm block in which every place sees every other."""

    def __init__(
        self, width: int, heads: int, *, key: Key, hidden: int | None = None, std: float = _STD,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            width, heads, key=key, hidden=hidden, causal=False, std=std, dropout=dropout
        )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class DecoderBlock(Module):
    """The pre-norm block of an encoder-decoder (Vaswani et al., 2017).

    Causal self-attention, attention to the encoder's `context`, feed-forward; each added to x.
    """

    norm1: LayerNorm
    attention: MultiHeadAttention
    norm2: LayerNorm
    cross: MultiHeadAttention
    norm3: LayerNorm
    feed_forward: FeedForward

    def __init__(
        self, width: int, heads: int, *, key: Key, hidden: int | None = None,
        from_width: int | None = None,
    ) -> None:  # fmt: skip
        first, second, third = initial.keys(key, 3)
        self._set(
            norm1=LayerNorm(width),
            attention=MultiHeadAttention(width, heads, key=first),
            norm2=LayerNorm(width),
            cross=MultiHeadAttention(width, heads, key=second, causal=False, from_width=from_width),
            norm3=LayerNorm(width),
            feed_forward=FeedForward(width, hidden or 4 * width, key=third),
        )

    def __call__(self, x: Array, context: Array) -> Array:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm2(x), context)
        return x + self.feed_forward(self.norm3(x))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GPT(Module):
    """A causal language model: tokens (..., t) -> logits (..., t, vocab), t at most `context`.

    Learned positions, pre-norm blocks, a head of its own. Weights start as GPT-2's do: deviation
    0.02, the layers that add to the residual 0.02 / sqrt(2 * layers), biases 0. In training
    `dropout` of the embeddings and in every block is dropped.
    """

    tokens: Embedding
    positions: Embedding
    blocks: tuple[Block, ...]
    norm: LayerNorm
    head: Linear
    context: int
    dropout: float

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, context: int, key: Key,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        if layers < 0:
            raise ShapeMismatch(f"GPT needs at least 0 layers, got {layers}")
        token, position, head, *each = initial.keys(key, 3 + layers)
        residual = _STD / math.sqrt(2 * max(layers, 1))
        self._set(
            tokens=Embedding(vocab, width, key=token, std=_STD),
            positions=Embedding(context, width, key=position, std=_STD),
            blocks=tuple(
                Block(width, heads, key=k, output_std=residual, dropout=dropout) for k in each
            ),
            norm=LayerNorm(width),
            head=Linear(width, vocab, key=head, std=_STD),
            context=context,
            dropout=float(dropout),
        )

    def __call__(self, tokens: Array) -> Array:
        x = self._embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def train(self, tokens: Array, *, key: Array | None = None) -> tuple[Array, Self]:
        """The logits with dropout; needs a key unless `dropout` is 0."""
        if not self.dropout:
            return self(tokens), self
        first, *each = _needed(key, 1 + len(self.blocks))
        x = F.dropout(self._embedded(tokens), self.dropout, first)
        for block, own in zip(self.blocks, each, strict=True):
            x, _ = block.train(x, key=own)
        return self.head(self.norm(x)), self

    def _embedded(self, tokens: Array) -> Array:
        tokens = array(tokens)
        if tokens.ndim < 1 or tokens.dtype.kind not in "iu":
            raise TypeMismatch(f"GPT needs integer tokens (..., t), got {tokens.type}")
        length = tokens.shape[-1]
        if length > self.context:
            limit = f"{self.context} tokens, its context"
            raise ShapeMismatch(f"GPT needs at most {limit}, got {length}")
        return self.tokens(tokens) + self.positions.weight[:length]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BERT(Module):
    """A masked language model (Devlin et al., 2018): tokens (n, t), t at most `context`.

    `model(tokens)` gives logits (n, t, vocab), `model(tokens, places)` only those at `places`
    (n, k): (n, k, vocab). Pre-norm blocks, weights that start as GPT's.
    """

    tokens: Embedding
    positions: Embedding
    blocks: tuple[EncoderBlock, ...]
    norm: LayerNorm
    head: Linear
    context: int

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, context: int, key: Key
    ) -> None:
        if layers < 0:
            raise ShapeMismatch(f"BERT needs at least 0 layers, got {layers}")
        token, position, head, *each = initial.keys(key, 3 + layers)
        self._set(
            tokens=Embedding(vocab, width, key=token, std=_STD),
            positions=Embedding(context, width, key=position, std=_STD),
            blocks=tuple(EncoderBlock(width, heads, key=k, std=width**-0.5) for k in each),
            norm=LayerNorm(width),
            head=Linear(width, vocab, key=head, std=_STD),
            context=context,
        )

    def __call__(self, tokens: Array, places: Array | None = None) -> Array:
        tokens = array(tokens)
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise TypeMismatch(f"BERT needs integer tokens (n, t), got {tokens.type}")
        length = tokens.shape[-1]
        if length > self.context:
            limit = f"{self.context} tokens, its context"
            raise ShapeMismatch(f"BERT needs at most {limit}, got {length}")
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        if places is not None:
            n, k = array(places).shape
            index = broadcast_to(array(places).reshape((n, k, 1)), (n, k, x.shape[-1]))
            x = take_along_axis(x, index, 1)
        return self.head(self.norm(x))


def _needed(key: Array | None, count: int) -> list[Array]:
    """Keys of a key that training with dropout cannot do without."""
    if key is None:
        raise TraceError("dropout needs a key in training: model.train(x, key=key)")
    return [random.fold_in(key, i) for i in range(count)]
