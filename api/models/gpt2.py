"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import eggpu as eg
from eggpu.compiler.tracing import Array, array
from eggpu.importers.tensors import Weights
from eggpu.models.attention import join_heads, split_heads
from eggpu.models.cache import Cache, Place, attend, visible, written
from eggpu.models.config import Config
from eggpu.models.layers import (
    LayerNorm,
    Projection,
    Table,
    activation,
    known_activation,
    layer_norm,
    table,
)


@dataclass(frozen=True)
class Settings:
    """Sizes of a model, by the names that generation asks for."""

    vocab: int
    width: int
    hidden: int
    heads: int
    context: int
    layers: tuple[int, ...]  # a number a layer
    eps: float
    activation: str

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Layer:
    """Attention and feed-forward, each on a norm of the residual."""

    norm1: LayerNorm
    fused: Projection  # query, key and value
    output: Projection
    norm2: LayerNorm
    up: Projection
    down: Projection

    def heads(self, x: Array, heads: int) -> list[Array]:
        """Queries, keys and values (batch, heads, t, head size)."""
        wide = self.fused(self.norm1(x))
        width = x.shape[-1]
        return [split_heads(wide[..., k * width : (k + 1) * width], heads) for k in range(3)]

    def rest(self, x: Array, heads: Array, kind: str) -> Array:
        """The residual after attention and feed-forward."""
        x = x + self.output(join_heads(heads))
        return x + self.down(activation(kind)(self.up(self.norm2(x))))


@dataclass(frozen=True)
class GPT2:
    """tokens (batch, t) -> logits (batch, t, vocab)."""

    embedding: Table
    positions: Table
    layers: tuple[Layer, ...]
    norm: LayerNorm
    settings: Settings = field(metadata={"static": True})

    def __call__(self, tokens: Array) -> Array:
        """Logits of every position, without a cache."""
        s = self.settings
        x = self.embedding(tokens) + self.positions(eg.arange(tokens.shape[1]))
        for layer in self.layers:
            q, k, v = layer.heads(x, s.heads)
            heads = attend(q, k, v, None, scale=1 / math.sqrt(s.head_size), causal=True)
            x = layer.rest(x, heads, s.activation)
        return self.logits(self.norm(x))

    def step(self, tokens: Array, cache: Cache, place: Place) -> tuple[Array, Cache]:
        """Hidden values (batch, t, width) of new tokens after those in the cache, and the next
        cache."""
        s, count = self.settings, tokens.shape[1]
        x = self.embedding(tokens) + self.positions(place.positions(count))
        mask = visible(place, count, cache.context)
        keys, values = [], []
        for number, layer in enumerate(self.layers):
            q, k, v = layer.heads(x, s.heads)
            held_k, held_v = cache.layer(number)
            keys.append(written(held_k, k, place))
            values.append(written(held_v, v, place))
            k, v = place.held(keys[-1]), place.held(values[-1])
            heads = attend(q, k, v, mask, scale=1 / math.sqrt(s.head_size))
            x = layer.rest(x, heads, s.activation)
        return self.norm(x), Cache(tuple(keys), tuple(values))

    def logits(self, hidden: Array) -> Array:
        """Scores of all tokens for hidden values (..., width)."""
        return self.embedding.attend(hidden)


def from_config(values: Mapping[str, Any], w: Weights) -> GPT2:
    """The model of a Hugging Face folder."""
    c = Config(values, f"{w.where}: config.json")
    width, context = c.size("n_embd"), c.size("n_positions", 1024)
    s = Settings(
        vocab=c.size("vocab_size"), width=width, hidden=c.size("n_inner", 4 * width),
        heads=c.size("n_head"), context=context, layers=tuple(range(c.layers("n_layer"))),
        eps=c.number("layer_norm_epsilon", 1e-5),
        activation=known_activation(c.get("activation_function", "gelu_new")),
    )  # fmt: skip
    w = w.renamed(lambda name: name.removeprefix("transformer."))
    return GPT2(
        table(w, "wte", s.vocab, width), table(w, "wpe", context, width),
        tuple(_layer(s, w, f"h.{k}.") for k in s.layers),
        layer_norm(w, "ln_f", width, s.eps), s,
    )  # fmt: skip


def _layer(s: Settings, w: Weights, at: str) -> Layer:
    def turned(name: str, outputs: int, inputs: int) -> Projection:
        """A layer whose weight the file has as (inputs, outputs)."""
        weight = w.array(f"{at}{name}.weight", (inputs, outputs)).numpy()
        return Projection(array(weight.T.copy()), w.array(f"{at}{name}.bias", (outputs,)))

    return Layer(
        layer_norm(w, f"{at}ln_1", s.width, s.eps),
        turned("attn.c_attn", 3 * s.width, s.width),
        turned("attn.c_proj", s.width, s.width),
        layer_norm(w, f"{at}ln_2", s.width, s.eps),
        turned("mlp.c_fc", s.hidden, s.width),
        turned("mlp.c_proj", s.width, s.hidden),
    )
