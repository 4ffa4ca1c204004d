"""Norms over channels: groups of them, and batches with running statistics as a state."""

from __future__ import annotations

from dataclasses import dataclass, field

from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library import nn as F
from eggpu.compiler.tracing import Array
from eggpu.nn import initial
from eggpu.nn.module import STATE, Module


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GroupNorm(Module):
    """Normalizes groups of channels of (n, c, *spatial), times weight plus bias."""

    weight: Array
    bias: Array
    groups: int
    eps: float

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        if groups < 1 or channels < 1 or channels % groups:
            came = f"{channels} channels and {groups} groups"
            raise ShapeMismatch(f"GroupNorm needs channels that its groups divide, got {came}")
        weight, bias = initial.ones((channels,)), initial.zeros((channels,))
        self._set(weight=weight, bias=bias, groups=groups, eps=eps)

    def __call__(self, x: Array) -> Array:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BatchNorm(Module):
    """Normalizes each channel of (n, c, *spatial), times weight plus bias.

    `bn(x)` uses the running statistics; `y, bn = bn.train(x)` those of the batch, and `bn` comes
    back with the running ones moved by `momentum`. Optimizers leave running statistics alone.
    """

    weight: Array
    bias: Array
    running_mean: Array = field(metadata=STATE)
    running_var: Array = field(metadata=STATE)
    momentum: float
    eps: float

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        if channels < 1:
            raise ShapeMismatch(f"BatchNorm needs at least 1 channel, got {channels}")
        self._set(
            weight=initial.ones((channels,)),
            bias=initial.zeros((channels,)),
            running_mean=initial.zeros((channels,)),
            running_var=initial.ones((channels,)),
            momentum=momentum,
            eps=eps,
        )

    def __call__(self, x: Array) -> Array:
        return self._normalized(x, False)[0]

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, BatchNorm]:
        """The result over the batch, and the module with its running statistics moved."""
        out, mean, var = self._normalized(x, True)
        return out, self.replace(running_mean=mean, running_var=var)

    def _normalized(self, x: Array, training: bool) -> tuple[Array, Array, Array]:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            training=training, momentum=self.momentum, eps=self.eps,
        )  # fmt: skip
