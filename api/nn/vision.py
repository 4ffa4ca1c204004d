"""Small image models: a residual network (He et al., 2016) and a vision transformer."""

from __future__ import annotations

from dataclasses import dataclass

from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library import random
from eggpu.compiler.library.math import relu
from eggpu.compiler.library.shaping import broadcast_to, concatenate
from eggpu.compiler.tracing import Array
from eggpu.nn import initial
from eggpu.nn.containers import Dropout
from eggpu.nn.conv import Conv2d
from eggpu.nn.initial import Key
from eggpu.nn.layers import LayerNorm, Linear
from eggpu.nn.module import Module
from eggpu.nn.norm import BatchNorm
from eggpu.nn.transformer import EncoderBlock


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ResidualBlock(Module):
    """relu(x + bn(conv(relu(bn(conv(x)))))); with a stride, x goes through a convolution too."""

    conv1: Conv2d
    bn1: BatchNorm
    conv2: Conv2d
    bn2: BatchNorm
    shortcut: Conv2d | None

    def __init__(self, inputs: int, outputs: int, *, key: Key, stride: int = 1) -> None:
        first, second, third = initial.keys(key, 3)
        other = stride > 1 or inputs != outputs
        self._set(
            conv1=Conv2d(inputs, outputs, 3, key=first, stride=stride, padding=1, bias=False),
            bn1=BatchNorm(outputs),
            conv2=Conv2d(outputs, outputs, 3, key=second, padding=1, bias=False),
            bn2=BatchNorm(outputs),
            shortcut=Conv2d(inputs, outputs, 1, key=third, stride=stride) if other else None,
        )

    def __call__(self, x: Array) -> Array:
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(self._beside(x) + y)

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, ResidualBlock]:
        """The result in training, and the block with its statistics moved."""
        y, bn1 = self.bn1.train(self.conv1(x))
        y, bn2 = self.bn2.train(self.conv2(relu(y)))
        return relu(self._beside(x) + y), self.replace(bn1=bn1, bn2=bn2)

    def _beside(self, x: Array) -> Array:
        return x if self.shortcut is None else self.shortcut(x)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ResNet(Module):
    """(n, channels, h, w) -> (n, classes): a convolution, residual blocks, the mean of all places.

    Each block after the first halves height and width and doubles `width`.
    """

    conv: Conv2d
    bn: BatchNorm
    blocks: tuple[ResidualBlock, ...]
    head: Linear

    def __init__(
        self, channels: int, classes: int, *, key: Key, width: int = 16, blocks: int = 3
    ) -> None:
        if blocks < 1:
            raise ShapeMismatch(f"ResNet needs at least 1 block, got {blocks}")
        first, last, *each = initial.keys(key, 2 + blocks)
        widths = [width * 2**i for i in range(blocks)]
        before = [width, *widths[:-1]]
        pairs = enumerate(zip(before, widths, each, strict=True))
        self._set(
            conv=Conv2d(channels, width, 3, key=first, padding=1, bias=False),
            bn=BatchNorm(width),
            blocks=tuple(ResidualBlock(a, b, key=k, stride=1 + (i > 0)) for i, (a, b, k) in pairs),
            head=Linear(widths[-1], classes, key=last),
        )

    def __call__(self, x: Array) -> Array:
        x = relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, ResNet]:
        """The result in training, and the model with its statistics moved."""
        x, bn = self.bn.train(self.conv(x))
        x, blocks = relu(x), []
        for block in self.blocks:
            x, block = block.train(x)
            blocks.append(block)
        return self.head(x.mean((2, 3))), self.replace(bn=bn, blocks=tuple(blocks))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ViT(Module):
    """(n, channels, size, size) -> (n, classes) (Dosovitskiy et al., 2020).

    Patches as tokens behind a class token, learned positions, pre-norm blocks; the head reads the
    class token.
    """

    patches: Conv2d
    token: Array
    positions: Array
    dropout: Dropout
    blocks: tuple[EncoderBlock, ...]
    norm: LayerNorm
    head: Linear

    def __init__(
        self, channels: int, size: int, classes: int, *, key: Key, patch: int = 2, layers: int = 4,
        width: int = 64, heads: int = 4, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        if size % patch:
            raise ShapeMismatch(f"ViT needs a size that its patch divides, got {size} and {patch}")
        first, second, third, last, *each = initial.keys(key, 4 + layers)
        count = (size // patch) ** 2
        self._set(
            patches=Conv2d(channels, width, patch, key=first, stride=patch),
            token=initial.normal(second, (1, 1, width), 0.02),
            positions=initial.normal(third, (1, count + 1, width), 0.02),
            dropout=Dropout(dropout),
            blocks=tuple(
                EncoderBlock(width, heads, key=k, std=width**-0.5, dropout=dropout) for k in each
            ),
            norm=LayerNorm(width),
            head=Linear(width, classes, key=last),
        )

    def __call__(self, x: Array) -> Array:
        x = self._embedded(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, ViT]:
        """The result in training, with dropout of the patches and in every block."""
        first, *each = [
            None if key is None else random.fold_in(key, i) for i in range(1 + len(self.blocks))
        ]
        x, _ = self.dropout.train(self._embedded(x), key=first)
        for block, own in zip(self.blocks, each, strict=True):
            x, _ = block.train(x, key=own)
        return self.head(self.norm(x)[:, 0]), self

    def _embedded(self, x: Array) -> Array:
        n, width = x.shape[0], self.token.shape[-1]
        x = self.patches(x).reshape((n, width, -1)).swapaxes(1, 2)
        return concatenate([broadcast_to(self.token, (n, 1, width)), x], 1) + self.positions
