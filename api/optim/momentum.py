"""Optimizers with one running mean at most: SGD and Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eggpu.compiler.library import math as M
from eggpu.compiler.tracing import Array
from eggpu.optim.schedules import Rate, rate
from eggpu.optim.trees import moments, no_steps, plus_decay, updated


@dataclass(frozen=True)
class SGDState:
    """Updates done, and the velocity of each parameter (None without momentum)."""

    step: Array
    velocity: Any


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum (torch.optim.SGD); made by `sgd`."""

    lr: Rate
    momentum: float
    nesterov: bool
    weight_decay: float

    def init(self, model: Any) -> SGDState:
        """The state before the first update."""
        return SGDState(no_steps(), moments(model) if self.momentum else None)

    def update(self, model: Any, state: SGDState, grads: Any) -> tuple[Any, SGDState]:
        """The model after a step along `grads`, and the next state."""
        lr, step = rate(self.lr, state.step), state.step + 1

        def plain(p: Array, g: Array) -> tuple[Array]:
            return (p - plus_decay(g, self.weight_decay, p) * lr,)

        def moving(p: Array, g: Array, v: Array) -> tuple[Array, Array]:
            g = plus_decay(g, self.weight_decay, p)
            v = v * self.momentum + g
            return p - (g + v * self.momentum if self.nesterov else v) * lr, v

        if not self.momentum:
            return updated(plain, model, grads)[0], SGDState(step, None)
        new, velocity = updated(moving, model, grads, state.velocity)
        return new, SGDState(step, velocity)


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> SGD:
    """p - lr * (g + weight_decay * p), with momentum if wanted."""
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0")
    return SGD(lr, momentum, nesterov, weight_decay)


@dataclass(frozen=True)
class LionState:
    """Updates done, and a running mean of gradients."""

    step: Array
    first: Any


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al., 2023, algorithm 2); made by `lion`."""

    lr: Rate
    b1: float
    b2: float
    weight_decay: float

    def init(self, model: Any) -> LionState:
        """The state before the first update."""
        return LionState(no_steps(), moments(model))

    def update(self, model: Any, state: LionState, grads: Any) -> tuple[Any, LionState]:
        """The model after a step along the signs of mixed gradients, and the next state."""
        lr = rate(self.lr, state.step)

        def rule(p: Array, g: Array, m: Array) -> tuple[Array, Array]:
            kept = p * (1 - lr * self.weight_decay) if self.weight_decay else p
            way = M.sign(m * self.b1 + g * (1 - self.b1))
            return kept - way * lr, m * self.b2 + g * (1 - self.b2)

        new, first = updated(rule, model, grads, state.first)
        return new, LionState(state.step + 1, first)


def lion(lr: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> Lion:
    """p * (1 - lr * weight_decay) - lr * sign(b1 * m + (1 - b1) * g)."""
    return Lion(lr, b1, b2, weight_decay)
