"""BERT (Devlin et al., 2018), and sentence embeddings from it such as MiniLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import eggpu as eg
from eggpu.compiler.tracing import Array
from eggpu.importers.tensors import Weights
from eggpu.models.attention import Attention, attention
from eggpu.models.config import Config
from eggpu.models.layers import (
    LayerNorm,
    Projection,
    Table,
    activation,
    known_activation,
    layer_norm,
    projection,
    table,
)


@dataclass(frozen=True)
class Settings:
    """Sizes of an encoder."""

    vocab: int
    width: int
    hidden: int
    heads: int
    layers: int
    context: int
    eps: float
    activation: str


@dataclass(frozen=True)
class Layer:
    """Attention, then feed-forward, each added and normed."""

    attention: Attention
    norm1: LayerNorm
    up: Projection
    down: Projection
    norm2: LayerNorm

    def __call__(self, x: Array, mask: Array, s: Settings) -> Array:
        x = self.norm1(x + self.attention(x, s.heads, mask))
        return self.norm2(x + self.down(activation(s.activation)(self.up(x))))


@dataclass(frozen=True)
class Bert:
    """tokens and mask (batch, t), true for tokens that count -> hidden (batch, t, width)."""

    words: Table
    positions: Table
    types: Table
    norm: LayerNorm
    layers: tuple[Layer, ...]
    settings: Settings = field(metadata={"static": True})

    def __call__(self, tokens: Array, mask: Array, types: Array | None = None) -> Array:
        batch, t = tokens.shape
        kinds = eg.zeros((batch, t), "i32") if types is None else types
        x = self.words(tokens) + self.positions(eg.arange(t)) + self.types(kinds)
        x = self.norm(x)
        seen = mask.reshape((batch, 1, 1, t))
        for layer in self.layers:
            x = layer(x, seen, self.settings)
        return x

    def embed(self, tokens: Array, mask: Array) -> Array:
        """One vector of length 1 a text: the mean over its tokens, normalized."""
        weight = mask.astype("f32").reshape((*mask.shape, 1))
        total = (self(tokens, mask) * weight).sum(1)
        mean = total / eg.maximum(weight.sum(1), 1e-9)
        return mean / eg.maximum(eg.sqrt((mean * mean).sum(-1, keepdims=True)), 1e-12)


def from_config(values: Mapping[str, Any], w: Weights) -> Bert:
    """The model of a Hugging Face folder."""
    c = Config(values, f"{w.where}: config.json")
    s = Settings(
        vocab=c.size("vocab_size"), width=c.size("hidden_size"), hidden=c.size("intermediate_size"),
        heads=c.size("num_attention_heads"), layers=c.layers("num_hidden_layers"),
        context=c.size("max_position_embeddings", 512), eps=c.number("layer_norm_eps", 1e-12),
        activation=known_activation(c.get("hidden_act", "gelu")),
    )  # fmt: skip
    w = w.renamed(lambda name: name.removeprefix("bert."))
    return Bert(
        table(w, "embeddings.word_embeddings", s.vocab, s.width),
        table(w, "embeddings.position_embeddings", s.context, s.width),
        table(w, "embeddings.token_type_embeddings", c.size("type_vocab_size", 2), s.width),
        layer_norm(w, "embeddings.LayerNorm", s.width, s.eps),
        tuple(_layer(s, w, f"encoder.layer.{k}.") for k in range(s.layers)),
        s,
    )


def _layer(s: Settings, w: Weights, at: str) -> Layer:
    names = ("self.query", "self.key", "self.value", "output.dense")
    return Layer(
        attention(w, [f"{at}attention.{n}" for n in names], s.width),
        layer_norm(w, f"{at}attention.output.LayerNorm", s.width, s.eps),
        projection(w, f"{at}intermediate.dense", s.hidden, s.width),
        projection(w, f"{at}output.dense", s.width, s.hidden),
        layer_norm(w, f"{at}output.LayerNorm", s.width, s.eps),
    )  # fmt: skip
