"""NumPy-like functions on Arrays, and the operators and methods of Array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..tracing import Array
from . import indexing, linalg, loops, math, nn, ordering, random, reductions, shaping, updates


def _reversed(function: Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
    return lambda self, other: function(other, self)


_OPERATORS = {
    "add": math.add,
    "sub": math.subtract,
    "mul": math.multiply,
    "truediv": math.divide,
    "pow": math.power,
    "matmul": linalg.matmul,
    "floordiv": math.floor_divide,
    "mod": math.remainder,
    "lshift": math.left_shift,
    "rshift": math.right_shift,
    "and": math.bitwise_and,
    "or": math.bitwise_or,
    "xor": math.bitwise_xor,
}
for _name, _function in _OPERATORS.items():
    setattr(Array, f"__{_name}__", lambda self, other, f=_function: f(self, other))
    setattr(Array, f"__r{_name}__", _reversed(_function))
_COMPARISONS = {
    "eq": math.equal,
    "ne": math.not_equal,
    "lt": math.less,
    "le": math.less_equal,
    "gt": math.greater,
    "ge": math.greater_equal,
}
for _name, _function in _COMPARISONS.items():
    setattr(Array, f"__{_name}__", lambda self, other, f=_function: f(self, other))
Array.__neg__ = lambda self: math.negative(self)  # type: ignore[attr-defined]
Array.__pos__ = lambda self: self  # type: ignore[attr-defined]
Array.__abs__ = lambda self: math.abs(self)  # type: ignore[attr-defined]
Array.__invert__ = lambda self: math.invert(self)  # type: ignore[attr-defined]
Array.__getitem__ = indexing.getitem  # type: ignore[attr-defined]
Array.__hash__ = object.__hash__  # type: ignore[method-assign]
Array.T = property(lambda self: shaping.transpose(self))  # type: ignore[attr-defined]
for _name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "argmax", "argmin"):
    setattr(Array, _name, getattr(reductions, _name))
for _name in ("reshape", "transpose", "swapaxes", "squeeze", "ravel", "repeat"):
    setattr(Array, _name, getattr(shaping, _name))
for _name in ("argsort", "cumsum", "cumprod"):
    setattr(Array, _name, getattr(ordering, _name))
Array.flatten = shaping.ravel  # type: ignore[attr-defined]
Array.at = property(updates.At)  # type: ignore[attr-defined]
for _name in ("astype", "clip", "round"):
    setattr(Array, _name, getattr(math, _name))
Array.take = indexing.take  # type: ignore[attr-defined]
Array.dot = linalg.dot  # type: ignore[attr-defined]

__all__ = [
    "indexing",
    "linalg",
    "loops",
    "math",
    "nn",
    "ordering",
    "random",
    "reductions",
    "shaping",
    "updates",
]
