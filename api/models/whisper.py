"""Whisper (Radford et al., 2022): an encoder of spectrograms, a decoder of text over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import eggpu as eg
from eggpu import nn
from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.tracing import Array
from eggpu.importers.tensors import Weights
from eggpu.models.attention import Attention, attention
from eggpu.models.cache import Cache, Place, visible, written
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
    """Sizes of a model; `layers`, `kv_heads`, `head_size` and `context` are the decoder's."""

    vocab: int
    width: int
    hidden: int
    heads: int
    layers: tuple[int, ...]
    context: int
    mels: int
    frames: int  # positions of the encoder: half of the spectrogram's
    activation: str

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Layer:
    """A block of the encoder, or with `cross` of the decoder."""

    norm1: LayerNorm
    attention: Attention
    norm_cross: LayerNorm | None
    cross: Attention | None
    norm2: LayerNorm
    up: Projection
    down: Projection

    def feed(self, x: Array, s: Settings) -> Array:
        """The residual after the feed-forward."""
        return x + self.down(activation(s.activation)(self.up(self.norm2(x))))

    def look(self, x: Array, heard: tuple[Array, Array], s: Settings) -> Array:
        """The residual after attention over the encoder's keys and values."""
        assert self.cross is not None and self.norm_cross is not None  # noqa: PT018
        return x + self.cross.over(self.norm_cross(x), *heard, s.heads)


@dataclass(frozen=True)
class Whisper:
    """Spectrograms (batch, mels, frames) and tokens (batch, t) -> logits (batch, t, vocab)."""

    convolutions: tuple[tuple[Array, Array], tuple[Array, Array]]
    places: Array  # of the encoder
    encoder: tuple[Layer, ...]
    encoder_norm: LayerNorm
    embedding: Table
    positions: Table
    decoder: tuple[Layer, ...]
    norm: LayerNorm
    settings: Settings = field(metadata={"static": True})

    def __call__(self, features: Array, tokens: Array) -> Array:
        """Logits of every position, without a cache."""
        s = self.settings
        heard = self.hear(features)
        x = self.embedding(tokens) + self.positions(eg.arange(tokens.shape[1]))
        for layer, pair in zip(self.decoder, heard, strict=True):
            x = x + layer.attention(layer.norm1(x), s.heads, causal=True)
            x = layer.feed(layer.look(x, pair, s), s)
        return self.embedding.attend(self.norm(x))

    def encode(self, features: Array) -> Array:
        """Hidden values (batch, frames / 2, width) of spectrograms."""
        s = self.settings
        if features.shape[1:] != (s.mels, 2 * s.frames):
            need = f"(batch, {s.mels}, {2 * s.frames})"
            raise ShapeMismatch(f"Whisper needs spectrograms {need}, got {features.type}")
        (first, bias1), (second, bias2) = self.convolutions
        x = nn.gelu(nn.conv1d(features, first, bias1, padding=1))
        x = nn.gelu(nn.conv1d(x, second, bias2, stride=2, padding=1))
        x = x.swapaxes(1, 2) + self.places
        for layer in self.encoder:
            x = x + layer.attention(layer.norm1(x), s.heads)
            x = layer.feed(x, s)
        return self.encoder_norm(x)

    def hear(self, features: Array) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of what is heard, for each layer of the decoder."""
        heard = self.encode(features)
        crosses = [layer.cross for layer in self.decoder]
        return tuple(c.pairs(heard, self.settings.heads) for c in crosses if c is not None)


@dataclass(frozen=True)
class Listener:
    """The decoder over what was heard: a language model with a cache, for a Generator."""

    model: Whisper
    heard: tuple[tuple[Array, Array], ...]

    @property
    def settings(self) -> Settings:
        return self.model.settings

    def step(self, tokens: Array, cache: Cache, place: Place) -> tuple[Array, Cache]:
        """Hidden values (batch, t, width) of new tokens, and the next cache."""
        s, m, count = self.settings, self.model, tokens.shape[1]
        x = m.embedding(tokens) + m.positions(place.positions(count))
        mask = visible(place, count, cache.context)
        keys, values = [], []
        for number, (layer, pair) in enumerate(zip(m.decoder, self.heard, strict=True)):
            h = layer.norm1(x)
            for held, made, new in zip(
                cache.layer(number), (keys, values), layer.attention.pairs(h, s.heads), strict=True
            ):
                made.append(written(held, new, place))
            k, v = place.held(keys[-1]), place.held(values[-1])
            x = x + layer.attention.over(h, k, v, s.heads, mask)
            x = layer.feed(layer.look(x, pair, s), s)
        return m.norm(x), Cache(tuple(keys), tuple(values))

    def logits(self, hidden: Array) -> Array:
        """Scores of all tokens for hidden values (..., width)."""
        return self.model.embedding.attend(hidden)


def from_config(values: Mapping[str, Any], w: Weights) -> Whisper:
    """The model of a Hugging Face folder."""
    c = Config(values, f"{w.where}: config.json")
    width = c.size("d_model")
    s = Settings(
        vocab=c.size("vocab_size"), width=width, hidden=c.size("encoder_ffn_dim"),
        heads=c.size("encoder_attention_heads"), layers=tuple(range(c.layers("decoder_layers"))),
        context=c.size("max_target_positions", 448), mels=c.size("num_mel_bins", 80),
        frames=c.size("max_source_positions", 1500),
        activation=known_activation(c.get("activation_function", "gelu")),
    )  # fmt: skip
    w = w.renamed(lambda name: name.removeprefix("model."))
    shapes = {"conv1": (width, s.mels, 3), "conv2": (width, width, 3)}
    first, second = (
        (w.array(f"encoder.{n}.weight", shape), w.array(f"encoder.{n}.bias", (width,)))
        for n, shape in shapes.items()
    )
    return Whisper(
        (first, second),
        w.array("encoder.embed_positions.weight", (s.frames, width)),
        tuple(_layer(s, w, f"encoder.layers.{k}.") for k in range(c.layers("encoder_layers"))),
        layer_norm(w, "encoder.layer_norm", width, 1e-5),
        table(w, "decoder.embed_tokens", s.vocab, width),
        table(w, "decoder.embed_positions", s.context, width),
        tuple(_layer(s, w, f"decoder.layers.{k}.") for k in s.layers),
        layer_norm(w, "decoder.layer_norm", width, 1e-5),
        s,
    )


def _layer(s: Settings, w: Weights, at: str) -> Layer:
    def looks(name: str) -> Attention:
        return attention(w, [f"{at}{name}.{p}_proj" for p in ("q", "k", "v", "out")], s.width)

    def norm(name: str) -> LayerNorm:
        return layer_norm(w, f"{at}{name}", s.width, 1e-5)

    decodes = f"{at}encoder_attn.q_proj.weight" in w
    return Layer(
        norm("self_attn_layer_norm"),
        looks("self_attn"),
        norm("encoder_attn_layer_norm") if decodes else None,
        looks("encoder_attn") if decodes else None,
        norm("final_layer_norm"),
        projection(w, f"{at}fc1", s.hidden, s.width),
        projection(w, f"{at}fc2", s.width, s.hidden),
    )
