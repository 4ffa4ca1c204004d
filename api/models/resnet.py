"""ResNet (He et al., 2015): convolutions with frozen batch norms, basic and bottleneck blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eggpu import nn
from eggpu.compiler.tracing import Array, array
from eggpu.importers.tensors import ModelFileError, Weights
from eggpu.models.config import Config
from eggpu.models.layers import Projection, activation, known_activation, projection

_EPS = 1e-5  # of the batch norms


@dataclass(frozen=True)
class Convolution:
    """A convolution and its batch norm, which is folded into weight and bias."""

    weight: Array
    bias: Array
    stride: int

    def __call__(self, x: Array) -> Array:
        padding = self.weight.shape[-1] // 2
        return nn.conv2d(x, self.weight, self.bias, stride=self.stride, padding=padding)


@dataclass(frozen=True)
class Block:
    """Convolutions with an activation between them, added to a shortcut."""

    layers: tuple[Convolution, ...]
    shortcut: Convolution | None
    activation: str = field(metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        act, y = activation(self.activation), x
        for layer in self.layers[:-1]:
            y = act(layer(y))
        beside = x if self.shortcut is None else self.shortcut(x)
        return act(self.layers[-1](y) + beside)


@dataclass(frozen=True)
class ResNet:
    """Images (batch, channels, h, w) -> logits (batch, classes); features without a classifier."""

    stem: Convolution
    blocks: tuple[Block, ...]
    classifier: Projection | None
    activation: str = field(metadata={"static": True})

    def __call__(self, images: Array) -> Array:
        x = self.features(images)
        pooled = x.mean((2, 3))
        return pooled if self.classifier is None else self.classifier(pooled)

    def features(self, images: Array) -> Array:
        """(batch, channels, h, w) after the last block."""
        x = activation(self.activation)(self.stem(images))
        x = nn.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return x


def from_config(values: Mapping[str, Any], w: Weights) -> ResNet:
    """The model of a Hugging Face folder."""
    c = Config(values, f"{w.where}: config.json")
    w = w.renamed(lambda name: name.removeprefix("resnet."))
    sizes, depths = c.need("hidden_sizes"), c.need("depths")
    kind = c.get("layer_type", "bottleneck")
    act = known_activation(c.get("hidden_act", "relu"))
    if not isinstance(sizes, list) or not isinstance(depths, list) or len(sizes) != len(depths):
        raise ModelFileError(f"{c.where} needs hidden_sizes and depths of one length")
    if kind not in ("basic", "bottleneck") or c.get("downsample_in_bottleneck"):
        raise ModelFileError(
            f"{c.where} has blocks of the kind {kind!r}, or strides at their start"
        )
    width = c.size("embedding_size", 64)
    stem = _convolution(w, "embedder.embedder", c.size("num_channels", 3), width, 7, 2)
    blocks: list[Block] = []
    for stage, (size, depth) in enumerate(zip(sizes, depths)):
        slow = stage > 0 or c.get("downsample_in_first_stage", False)
        for k in range(depth):
            at, stride = f"encoder.stages.{stage}.layers.{k}.", 2 if slow and k == 0 else 1
            blocks.append(_block(w, at, width, size, stride, kind, act))
            width = size
    head = "classifier.1.weight"
    classifier = projection(w, "classifier.1", w[head].shape[0], width) if head in w else None
    return ResNet(stem, tuple(blocks), classifier, act)


def _block(
    w: Weights, at: str, inputs: int, outputs: int, stride: int, kind: str, act: str
) -> Block:
    if kind == "basic":
        shapes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
    else:
        inner = outputs // 4
        shapes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
    layers = [_convolution(w, f"{at}layer.{k}", *shape) for k, shape in enumerate(shapes)]
    changed = inputs != outputs or stride != 1
    shortcut = _convolution(w, f"{at}shortcut", inputs, outputs, 1, stride) if changed else None
    return Block(tuple(layers), shortcut, act)


def _convolution(
    w: Weights, at: str, inputs: int, outputs: int, size: int, stride: int
) -> Convolution:
    weight = w.array(f"{at}.convolution.weight", (outputs, inputs, size, size)).numpy()
    scale, bias, mean, var = (
        w.array(f"{at}.normalization.{n}", (outputs,)).numpy().astype(np.float64)
        for n in ("weight", "bias", "running_mean", "running_var")
    )
    # (x - mean) * scale / sqrt(var + eps) + bias = x * factor + (bias - mean * factor)
    factor = scale / np.sqrt(var + _EPS)
    folded = (weight * factor.reshape(-1, 1, 1, 1)).astype(np.float32)
    return Convolution(array(folded), array((bias - mean * factor).astype(np.float32)), stride)
