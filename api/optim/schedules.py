"""Learning rates that change with the number of updates.

Every number may be an Array too, so that it can be an argument of the compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from eggpu.compiler.library import math as M
from eggpu.compiler.tracing import Array
from eggpu.optim.trees import as_float

Scalar = float | Array
Schedule = Callable[[Array], Scalar]  # of the number of updates done so far, i32
Rate = float | Schedule


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
        return M.where(as_float(step) < warmup, as_float(step + 1) * peak / warmup, down)

    return run


def step_decay(initial: Scalar, factor: float, every: int) -> Schedule:
    """`initial`, multiplied by `factor` after every `every` updates (torch's StepLR)."""
    if not factor > 0:
        raise ValueError(f"step_decay needs a factor above 0, got {factor}")
    return lambda step: initial * M.exp(M.floor(as_float(step) / every) * math.log(factor))


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
        return M.where(as_float(step) <= top, up, down)

    return run


def _fraction(step: Array, steps: Scalar) -> Array:
    """step / steps between 0 and 1."""
    return M.clip(as_float(step) / steps, 0.0, 1.0)


def _half_cosine(start: Scalar, end: Scalar, fraction: Array) -> Array:
    return end + (start - end) * (M.cos(fraction * math.pi) + 1.0) * 0.5
