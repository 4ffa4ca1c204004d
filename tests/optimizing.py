"""What tests of optimizers share: a first point, gradients, steps run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace_call

Vector = np.ndarray


def interpreted(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`function` traced once for arguments like these; each call runs it in float64."""
    traced = trace_call(function, args)

    def call(*args: Any) -> Any:
        leaves = [np.asarray(v) for v in pytree.flatten(args)[0]]
        return pytree.unflatten(traced.results, evaluate(traced.graph, leaves, np.float64))

    return call


def gradient(i: int) -> dict[str, Vector]:
    """Made-up gradients of step i, of several sizes."""
    rng = np.random.default_rng(i)
    return {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(4) * 1e-3}


def start() -> dict[str, Vector]:
    rng = np.random.default_rng(99)
    return {"w": rng.standard_normal((3, 4)), "b": np.zeros(4)}
