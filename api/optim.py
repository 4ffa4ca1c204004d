"""Optimizers, learning-rate schedules and gradient clipping, all traced into the compiled step.

An optimizer is a value: `state = opt.init(model)` once, then in each step
`model, state = opt.update(model, state, grads)`. Formulas are those of torch.optim. Only float
leaves change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.library.reductions import sum as total
from eggpu.compiler.library.shaping import zeros
from eggpu.compiler.tracing import Array, array
from eggpu.nn.initial import known

Scalar = float | Array
Schedule = Callable[[Array], Scalar]  # of the number of updates done so far, i32
Rate = float | Schedule


@dataclass(frozen=True)
class SGDState:
    """Updates done, and the velocity of each parameter (None without momentum)."""

    step: Array
    velocity: Any


@dataclass(frozen=True)
class AdamState:
    """Updates done, and running means of gradients and their squares, built like the model."""

    step: Array
    first: Any
    second: Any


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum (torch.optim.SGD); made by `sgd`."""

    lr: Rate
    momentum: float
    nesterov: bool
    weight_decay: float

    def init(self, model: Any) -> SGDState:
        """The state before the first update."""
        return SGDState(_zero_steps(), _moments(model) if self.momentum else None)

    def update(self, model: Any, state: SGDState, grads: Any) -> tuple[Any, SGDState]:
        """The model after a step along `grads`, and the next state."""
        lr = rate(self.lr, state.step)
        params, gradients, structure = _pairs(model, grads)
        velocities = pytree.flatten(state.velocity)[0] if self.momentum else [None] * len(params)
        new, moved = [], []
        for p, g, v in zip(params, gradients, velocities, strict=True):
            if not _is_float(p):
                new.append(p)
                moved.append(v)
                continue
            g = _plus(g, self.weight_decay, p)
            if v is not None:
                v = v * self.momentum + g
                g = g + v * self.momentum if self.nesterov else v
            new.append(_like(p, p - g * lr))
            moved.append(v)
        velocity = pytree.unflatten(structure, moved) if self.momentum else None
        return pytree.unflatten(structure, new), SGDState(state.step + 1, velocity)


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
        return AdamState(_zero_steps(), _moments(model), _moments(model))

    def update(self, model: Any, state: AdamState, grads: Any) -> tuple[Any, AdamState]:
        """The model after a step along `grads`, and the next state."""
        lr, step = rate(self.lr, state.step), state.step + 1
        size = lr / _one_minus_power(self.b1, step)
        root = M.rsqrt(_one_minus_power(self.b2, step))
        keep = 1 - lr * self.weight_decay if self.decoupled and self.weight_decay else None
        params, gradients, structure = _pairs(model, grads)
        first, second = pytree.flatten(state.first)[0], pytree.flatten(state.second)[0]
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            if not _is_float(p):
                continue
            g = g if self.decoupled else _plus(g, self.weight_decay, p)
            first[i] = first[i] * self.b1 + g * (1 - self.b1)
            second[i] = second[i] * self.b2 + g * g * (1 - self.b2)
            kept = p if keep is None else p * keep
            change = first[i] / (M.sqrt(second[i]) * root + self.eps)
            params[i] = _like(p, kept - change * size)
        new, *moments = (pytree.unflatten(structure, v) for v in (params, first, second))
        return new, AdamState(step, *moments)


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> SGD:
    """p - lr * (g + weight_decay * p), with momentum if wanted."""
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0")
    return SGD(lr, momentum, nesterov, weight_decay)


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


# Schedules. Every number may be an Array too, so that it can be an argument of the compiled step.


def rate(lr: Rate, step: Array) -> Scalar:
    """The learning rate after `step` updates."""
    return lr(step) if callable(lr) else lr


def constant(value: Scalar) -> Schedule:
    """The same rate always."""
    return lambda step: value


def linear(start: Scalar, end: Scalar, steps: Scalar) -> Schedule:
    """From `start` to `end` in `steps` updates, then `end`."""
    return lambda step: start + (end - start) * _fraction(step, steps)


def warmup(lr: Rate, steps: Scalar) -> Schedule:
    """`lr` times 1/steps, 2/steps, ... 1: the `steps`-th update is the first at the full rate."""
    return lambda step: rate(lr, step) * _fraction(step + 1, steps)


def cosine(peak: Scalar, *, steps: Scalar, warmup: Scalar = 0, floor: Scalar = 0.0) -> Schedule:
    """Up to `peak` in `warmup` updates, then along half a cosine down to `floor` at `steps`."""
    numbers = isinstance(steps, (int, float)) and isinstance(warmup, (int, float))
    if numbers and not 0 <= warmup < steps:
        raise ValueError(f"cosine needs 0 <= warmup < steps, got {warmup} and {steps}")

    def run(step: Array) -> Array:
        down = _half_cosine(peak, floor, _fraction(step - warmup, steps - warmup))
        if isinstance(warmup, (int, float)) and warmup == 0:
            return down
        return M.where(_float(step) < warmup, _float(step + 1) * peak / warmup, down)

    return run


def step_decay(initial: Scalar, factor: float, every: int) -> Schedule:
    """`initial`, multiplied by `factor` after every `every` updates (torch's StepLR)."""
    if not factor > 0:
        raise ValueError(f"step_decay needs a factor above 0, got {factor}")
    return lambda step: initial * M.exp(M.floor(_float(step) / every) * math.log(factor))


def one_cycle(
    peak: Scalar, steps: int, rise: float = 0.3, start: float = 25.0, end: float = 1e4
) -> Schedule:
    """Up from peak / start in the first `rise` of the updates, down to peak / (start * end).

    torch's OneCycleLR (Smith and Topin, 2019), there pct_start, div_factor and final_div_factor.
    """
    top = rise * steps - 1
    if not 0 < top < steps - 1:
        raise ValueError(f"one_cycle needs 1 < rise * steps < steps, got {rise} and {steps}")
    low = peak / start

    def run(step: Array) -> Array:
        up = _half_cosine(low, peak, _fraction(step, top))
        down = _half_cosine(peak, low / end, _fraction(step - top, steps - 1 - top))
        return M.where(_float(step) <= top, up, down)

    return run


# Clipping.


def global_norm(tree: Any) -> Array:
    """The Euclidean norm of all float leaves together."""
    leaves = [array(v) for v in pytree.flatten(tree)[0]]
    squares = [total(M.square(_float(v))) for v in leaves if _is_float(v)]
    if not squares:
        raise TraceError("global_norm needs at least one float array")
    out = squares[0]
    for more in squares[1:]:
        out = out + more
    return M.sqrt(out)


def clip_by_global_norm(grads: Any, limit: float) -> Any:
    """`grads` times min(1, limit / (norm + 1e-6)), as torch's clip_grad_norm_."""
    scale = M.minimum(limit / (global_norm(grads) + 1e-6), 1.0)
    return _map_floats(lambda g: _like(g, g * scale), grads)


def clip_by_value(grads: Any, limit: float) -> Any:
    """Every element of `grads` limited to [-limit, limit]."""
    return _map_floats(lambda g: M.clip(g, -limit, limit), grads)


def _map_floats(function: Callable[[Array], Array], tree: Any) -> Any:
    arrays = pytree.tree_map(array, tree)
    return pytree.tree_map(lambda v: function(v) if _is_float(v) else v, arrays)


def _zero_steps() -> Array:
    return known(zeros((), "i32"))


def _moments(model: Any) -> Any:
    """Zeros for each float leaf, in f32 whatever its dtype; a scalar in place of other leaves."""
    return pytree.tree_map(lambda v: known(zeros(array(v).shape if _is_float(v) else ())), model)


def _pairs(model: Any, grads: Any) -> tuple[list[Array], list[Array], pytree.Structure]:
    params, structure = pytree.flatten(model)
    gradients, same = pytree.flatten(grads)
    if same != structure:
        raise TraceError("an update needs gradients in the structure of the model")
    pairs: Sequence[tuple[Any, Any]] = list(zip(params, gradients, strict=True))
    for p, g in pairs:
        if array(p).shape != array(g).shape:
            raise TraceError(f"gradient {array(g).type} does not fit parameter {array(p).type}")
    wide = [_float(array(g)) if _is_float(g) else array(g) for _, g in pairs]
    return [array(p) for p, _ in pairs], wide, structure


def _is_float(x: Any) -> bool:
    return array(x).dtype.kind == "f"


def _float(x: Array) -> Array:
    return M.astype(x, "f32")


def _like(x: Array, new: Array) -> Array:
    return M.astype(new, x.dtype)


def _plus(g: Array, decay: float, p: Array) -> Array:
    return g + p * decay if decay else g


def _fraction(step: Array, steps: Scalar) -> Array:
    """step / steps between 0 and 1."""
    return M.clip(_float(step) / steps, 0.0, 1.0)


def _half_cosine(start: Scalar, end: Scalar, fraction: Array) -> Array:
    return end + (start - end) * (M.cos(fraction * math.pi) + 1.0) * 0.5


def _one_minus_power(b: float, step: Array) -> Array:
    """1 - b**step, exact to the last digits also where b**step is close to 1."""
    if b == 0.0:
        return M.astype(step >= 0, "f32")
    return -M.expm1(_float(step) * math.log(b))
