"""ViT (Dosovitskiy et al., 2020): an image as a row of patches, pre-norm blocks, a class token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import eggpu as eg
from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.tracing import Array
from eggpu.importers.tensors import Weights
from eggpu.models.attention import Attention, attention
from eggpu.models.config import Config
from eggpu.models.layers import (
    LayerNorm,
    Projection,
    activation,
    known_activation,
    layer_norm,
    projection,
)


@dataclass(frozen=True)
class Settings:
    """Sizes of an image model."""

    width: int
    hidden: int
    heads: int
    layers: int
    image: int
    patch: int
    channels: int
    eps: float
    activation: str


@dataclass(frozen=True)
class Layer:
    """Attention and feed-forward, each on a norm of the residual."""

    norm1: LayerNorm
    attention: Attention
    norm2: LayerNorm
    up: Projection
    down: Projection

    def __call__(self, x: Array, s: Settings) -> Array:
        x = x + self.attention(self.norm1(x), s.heads)
        return x + self.down(activation(s.activation)(self.up(self.norm2(x))))


@dataclass(frozen=True)
class ViT:
    """Images (batch, channels, size, size) -> logits (batch, classes); hidden values without a
    classifier."""

    patches: Projection
    token: Array
    positions: Array
    layers: tuple[Layer, ...]
    norm: LayerNorm
    classifier: Projection | None
    settings: Settings = field(metadata={"static": True})

    def __call__(self, images: Array) -> Array:
        x = self.hidden(images)
        return x if self.classifier is None else self.classifier(x[:, 0])

    def hidden(self, images: Array) -> Array:
        """(batch, 1 + patches, width), the class token first."""
        s = self.settings
        batch = images.shape[0]
        if images.shape[1:] != (s.channels, s.image, s.image):
            need = (s.channels, s.image, s.image)
            raise ShapeMismatch(f"ViT needs images (batch, {need}), got {images.type}")
        side = s.image // s.patch
        cut = images.reshape((batch, s.channels, side, s.patch, side, s.patch))
        rows = cut.transpose((0, 2, 4, 1, 3, 5)).reshape((batch, side * side, -1))
        token = eg.broadcast_to(self.token, (batch, 1, s.width))
        x = eg.concatenate([token, self.patches(rows)], 1) + self.positions
        for layer in self.layers:
            x = layer(x, s)
        return self.norm(x)


def from_config(values: Mapping[str, Any], w: Weights) -> ViT:
    """The model of a Hugging Face folder."""
    c = Config(values, f"{w.where}: config.json")
    s = Settings(
        width=c.size("hidden_size"), hidden=c.size("intermediate_size"),
        heads=c.size("num_attention_heads"), layers=c.layers("num_hidden_layers"),
        image=c.size("image_size", 224), patch=c.size("patch_size", 16),
        channels=c.size("num_channels", 3), eps=c.number("layer_norm_eps", 1e-12),
        activation=known_activation(c.get("hidden_act", "gelu")),
    )  # fmt: skip
    w = w.renamed(lambda name: name.removeprefix("vit."))
    count, name = (s.image // s.patch) ** 2, "embeddings.patch_embeddings.projection"
    kernel = w.array(f"{name}.weight", (s.width, s.channels, s.patch, s.patch))
    patches = Projection(
        eg.array(kernel.numpy().reshape(s.width, -1)), w.array(f"{name}.bias", (s.width,))
    )
    head = "classifier.weight"
    return ViT(
        patches,
        w.array("embeddings.cls_token", (1, 1, s.width)),
        w.array("embeddings.position_embeddings", (1, count + 1, s.width)),
        tuple(_layer(s, w, f"encoder.layer.{k}.") for k in range(s.layers)),
        layer_norm(w, "layernorm", s.width, s.eps),
        projection(w, "classifier", w[head].shape[0], s.width) if head in w else None,
        s,
    )


def _layer(s: Settings, w: Weights, at: str) -> Layer:
    names = ("attention.query", "attention.key", "attention.value", "output.dense")
    return Layer(
        layer_norm(w, f"{at}layernorm_before", s.width, s.eps),
        attention(w, [f"{at}attention.{n}" for n in names], s.width),
        layer_norm(w, f"{at}layernorm_after", s.width, s.eps),
        projection(w, f"{at}intermediate.dense", s.hidden, s.width),
        projection(w, f"{at}output.dense", s.width, s.hidden),
    )  # fmt: skip
