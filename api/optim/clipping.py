"""Gradients limited by value or by their norm, alone or in front of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.library.reductions import sum as total
from eggpu.compiler.tracing import Array, array
from eggpu.optim.trees import Optimizer, as_float, is_float, like, map_floats


def global_norm(tree: Any) -> Array:
    """The Euclidean norm of all float leaves together."""
    leaves = [array(v) for v in pytree.flatten(tree)[0]]
    squares = [total(M.square(as_float(v))) for v in leaves if is_float(v)]
    if not squares:
        raise TraceError("global_norm needs at least one float array")
    out = squares[0]
    for more in squares[1:]:
        out = out + more
    return M.sqrt(out)


def clip_by_global_norm(grads: Any, limit: float) -> Any:
    """`grads` times min(1, limit / (norm + 1e-6)), as torch's clip_grad_norm_."""
    scale = M.minimum(limit / (global_norm(grads) + 1e-6), 1.0)
    return map_floats(lambda g: like(g, g * scale), grads)


def clip_by_value(grads: Any, limit: float) -> Any:
    """Every element of `grads` limited to [-limit, limit]."""
    return map_floats(lambda g: M.clip(g, -limit, limit), grads)


@dataclass(frozen=True)
class Clipped:
    """An optimizer of gradients that are clipped before; made by `clipped`."""

    inner: Optimizer
    norm: float | None
    value: float | None

    def init(self, model: Any) -> Any:
        """The state of the optimizer within."""
        return self.inner.init(model)

    def update(self, model: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """The model after a step along the clipped `grads`, and the next state."""
        if self.value is not None:
            grads = clip_by_value(grads, self.value)
        if self.norm is not None:
            grads = clip_by_global_norm(grads, self.norm)
        return self.inner.update(model, state, grads)


def clipped(inner: Optimizer, norm: float | None = None, value: float | None = None) -> Clipped:
    """`inner` after clip_by_value and clip_by_global_norm, whichever is given."""
    if norm is None and value is None:
        raise ValueError("clipped needs a norm or a value")
    return Clipped(inner, norm, value)
