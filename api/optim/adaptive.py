"""Optimizers that divide by the size of past gradients: Adam, AdamW, RMSprop, Adafactor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from eggpu.compiler.library import math as M
from eggpu.compiler.library.reductions import mean
from eggpu.compiler.tracing import Array
from eggpu.optim.schedules import Rate, rate
from eggpu.optim.trees import as_float, moments, no_steps, plus_decay, updated


@dataclass(frozen=True)
class AdamState:
    """Updates done, and running means of gradients and their squares, built like the model."""

    step: Array
    first: Any
    second: Any


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015; torch.optim.Adam and AdamW); made by `adam` and `adamw`."""

    lr: Rate
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decoupled: bool  # decay the parameters themselves (AdamW), not their gradients

    def init(self, model: Any) -> AdamState:
        """The state before the first update."""
        return AdamState(no_steps(), moments(model), moments(model))

    def update(self, model: Any, state: AdamState, grads: Any) -> tuple[Any, AdamState]:
        """The model after a step along `grads`, and the next state."""
        lr, step = rate(self.lr, state.step), state.step + 1
        size = lr / _one_minus_power(self.b1, step)
        root = M.rsqrt(_one_minus_power(self.b2, step))
        keep = 1 - lr * self.weight_decay if self.decoupled and self.weight_decay else None

        def rule(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
            g = g if self.decoupled else plus_decay(g, self.weight_decay, p)
            m = m * self.b1 + g * (1 - self.b1)
            v = v * self.b2 + g * g * (1 - self.b2)
            kept = p if keep is None else p * keep
            return kept - m / (M.sqrt(v) * root + self.eps) * size, m, v

        new, first, second = updated(rule, model, grads, state.first, state.second)
        return new, AdamState(step, first, second)


def adam(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Adam:
    """Adam; weight_decay is added to the gradients."""
    return Adam(lr, b1, b2, eps, weight_decay, decoupled=False)


def adamw(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Adam:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    return Adam(lr, b1, b2, eps, weight_decay, decoupled=True)


@dataclass(frozen=True)
class RMSpropState:
    """Updates done, running means of squares and (centered) of gradients, and velocities."""

    step: Array
    second: Any
    first: Any
    velocity: Any


@dataclass(frozen=True)
class RMSprop:
    """RMSprop (Hinton, 2012; torch.optim.RMSprop); made by `rmsprop`."""

    lr: Rate
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: bool

    def init(self, model: Any) -> RMSpropState:
        """The state before the first update."""
        first = moments(model) if self.centered else None
        velocity = moments(model) if self.momentum else None
        return RMSpropState(no_steps(), moments(model), first, velocity)

    def update(self, model: Any, state: RMSpropState, grads: Any) -> tuple[Any, RMSpropState]:
        """The model after a step along `grads`, and the next state."""
        lr = rate(self.lr, state.step)
        kept = [m for m in (state.second, state.first, state.velocity) if m is not None]

        def rule(p: Array, g: Array, v: Array, *more: Array) -> list[Array]:
            g = plus_decay(g, self.weight_decay, p)
            v = v * self.alpha + g * g * (1 - self.alpha)
            out, rest, spread = [v], list(more), v
            if self.centered:
                m = rest.pop(0) * self.alpha + g * (1 - self.alpha)
                spread = v - m * m
                out.append(m)
            change = g / (M.sqrt(spread) + self.eps)
            if self.momentum:
                change = rest.pop(0) * self.momentum + change
                out.append(change)
            return [p - change * lr, *out]

        new, second, *rest = updated(rule, model, grads, *kept)
        first = rest.pop(0) if self.centered else None
        velocity = rest.pop(0) if self.momentum else None
        return new, RMSpropState(state.step + 1, second, first, velocity)


def rmsprop(
    lr: Rate = 0.01, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
    momentum: float = 0.0, centered: bool = False,
) -> RMSprop:  # fmt: skip
    """p - lr * g / (sqrt(mean of g^2) + eps), with momentum if wanted."""
    return RMSprop(lr, alpha, eps, weight_decay, momentum, centered)


@dataclass(frozen=True)
class AdafactorState:
    """Updates done, and means of squared gradients over rows and over columns.

    For a parameter with fewer than two axes `rows` has them all.
    """

    step: Array
    rows: Any
    columns: Any


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern, 2018; torch.optim.Adafactor); made by `adafactor`."""

    lr: Rate
    beta2_decay: float
    eps1: float
    eps2: float
    d: float
    weight_decay: float

    def init(self, model: Any) -> AdafactorState:
        """The state before the first update."""
        rows = moments(model, lambda s: (*s[:-1], 1) if len(s) > 1 else s)
        columns = moments(model, lambda s: (*s[:-2], 1, s[-1]) if len(s) > 1 else ())
        return AdafactorState(no_steps(), rows, columns)

    def update(self, model: Any, state: AdafactorState, grads: Any) -> tuple[Any, AdafactorState]:
        """The model after a step along `grads`, and the next state."""
        lr, step = rate(self.lr, state.step), state.step + 1
        count = as_float(step)
        share = M.exp(M.log(count) * self.beta2_decay)  # of the new squares: step^beta2_decay
        size = M.minimum(M.rsqrt(count), lr)

        def rule(p: Array, g: Array, r: Array, c: Array) -> tuple[Array, Array, Array]:
            alpha = M.maximum(_rms(as_float(p)), self.eps2) * size
            kept = p * (1 - lr * self.weight_decay) if self.weight_decay else p
            if g.ndim > 1:
                r = r + (mean(g * g, -1, keepdims=True) - r) * share
                c = c + (mean(g * g, -2, keepdims=True) - c) * share
                spread = r * c / M.maximum(mean(r, -2, keepdims=True), self.eps1)
            else:
                spread = r = r + (g * g - r) * share
            change = g * M.rsqrt(M.maximum(spread, self.eps1 * self.eps1))
            return kept - change * (alpha / M.maximum(_rms(change) / self.d, 1.0)), r, c

        new, rows, columns = updated(rule, model, grads, state.rows, state.columns)
        return new, AdafactorState(step, rows, columns)


def adafactor(
    lr: Rate = 0.01, beta2_decay: float = -0.8, eps1: float = 2.0**-23, eps2: float = 1e-3,
    d: float = 1.0, weight_decay: float = 0.0,
) -> Adafactor:  # fmt: skip
    """Adam's second moment kept as rows and columns, and steps relative to the parameters."""
    return Adafactor(lr, beta2_decay, eps1, eps2, d, weight_decay)


def _rms(x: Array) -> Array:
    return M.sqrt(mean(x * x))


def _one_minus_power(b: float, step: Array) -> Array:
    """1 - b**step, exact to the last digits also where b**step is close to 1."""
    if b == 0.0:
        return M.astype(step >= 0, "f32")
    return -M.expm1(as_float(step) * math.log(b))
