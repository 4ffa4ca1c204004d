"""Elementwise functions, named as in NumPy (PyTorch's names where NumPy has none)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, full
from ..ops import elementwise as E
from ..tracing import Array
from ..types import bool_, dtype
from .convert import Value, broadcast_shapes, floating, is_scalar, node, promoted, together, wrap


def _unary(name: str, build: Callable[[Node], Node], needs_float: bool, doc: str) -> Callable[[Value], Array]:
    def run(x: Value) -> Array:
        return wrap(build(floating(name, x) if needs_float else node(x)))

    run.__name__ = run.__qualname__ = name
    run.__doc__ = doc
    return run


def _binary(name: str, build: Callable[[Node, Node], Node], doc: str) -> Callable[[Value, Value], Array]:
    def run(x: Value, y: Value) -> Array:
        return wrap(build(*together(name, x, y)))

    run.__name__ = run.__qualname__ = name
    run.__doc__ = doc
    return run


exp = _unary("exp", E.exp, True, "e to the power x.")
log = _unary("log", E.log, True, "The natural logarithm; -inf at 0, NaN below.")
sqrt = _unary("sqrt", E.sqrt, True, "The square root; its gradient at 0 is infinite.")
rsqrt = _unary("rsqrt", E.rsqrt, True, "1 / sqrt(x).")
sin = _unary("sin", E.sin, True, "The sine of x radians.")
cos = _unary("cos", E.cos, True, "The cosine of x radians.")
tanh = _unary("tanh", E.tanh, True, "The hyperbolic tangent.")
negative = _unary("negative", E.neg, False, "-x; unsigned integers wrap.")
abs = _unary("abs", E.abs_, False, "|x|; its gradient at 0 is 0.")  # noqa: A001
sign = _unary("sign", E.sign, False, "-1, 0 or 1; its gradient is 0.")
floor = _unary("floor", E.floor, True, "The largest integer not above x, as a float.")
ceil = _unary("ceil", E.ceil, True, "The smallest integer not below x, as a float.")
round = _unary("round", E.round_, True, "The nearest integer, halves to even, as a float.")  # noqa: A001
isnan = _unary("isnan", E.isnan, True, "True where x is NaN.")
stop_gradient = _unary("stop_gradient", E.stop_gradient, False, "x, treated as a constant by gradients.")
logical_not = _unary("logical_not", lambda x: E.not_(cast(x, bool_)), False, "True where x is zero.")
invert = _unary("invert", E.not_, False, "Bitwise complement; logical not of bools.")

add = _binary("add", E.add, "x + y.")
subtract = _binary("subtract", E.sub, "x - y.")
multiply = _binary("multiply", E.mul, "x * y.")
maximum = _binary("maximum", E.maximum, "The larger; NaN if either is. Ties share the gradient evenly.")
minimum = _binary("minimum", E.minimum, "The smaller; NaN if either is. Ties share the gradient evenly.")
equal = _binary("equal", E.eq, "x == y.")
not_equal = _binary("not_equal", E.ne, "x != y; true for NaN.")
less = _binary("less", E.lt, "x < y.")
less_equal = _binary("less_equal", E.le, "x <= y.")
greater = _binary("greater", E.gt, "x > y.")
greater_equal = _binary("greater_equal", E.ge, "x >= y.")
bitwise_and = _binary("bitwise_and", E.and_, "Bits of both; logical and of bools.")
bitwise_or = _binary("bitwise_or", E.or_, "Bits of either; logical or of bools.")
bitwise_xor = _binary("bitwise_xor", E.xor, "Bits of exactly one; inequality of bools.")


def divide(x: Value, y: Value) -> Array:
    """x / y as floats: integers become f32; 1/0 is inf and 0/0 is NaN."""
    return wrap(E.div(*together("divide", _float_or_number(x), _float_or_number(y))))


def _float_or_number(x: Value) -> Value:
    """A Python number as a float, which takes the dtype beside it; anything else as a float array."""
    return float(x) if is_scalar(x) else wrap(floating("divide", x))


def logical_and(x: Value, y: Value) -> Array:
    """True where both are not zero."""
    return bitwise_and(wrap(cast(node(x), bool_)), wrap(cast(node(y), bool_)))


def logical_or(x: Value, y: Value) -> Array:
    """True where either is not zero."""
    return bitwise_or(wrap(cast(node(x), bool_)), wrap(cast(node(y), bool_)))


def where(condition: Value, x: Value, y: Value) -> Array:
    """x where the condition holds, else y. The branch not taken never poisons the value or the gradient."""
    c = node(condition)
    if c.dtype is not bool_:
        raise TypeMismatch(f"where needs a bool condition, got {c.type}")
    a, b = promoted("where", [x, y])
    shape = broadcast_shapes("where", c.shape, a.shape, b.shape)
    return wrap(E.select(*(broadcast(n, shape) for n in (c, a, b))))


def clip(x: Value, low: Value | None = None, high: Value | None = None) -> Array:
    """x limited to [low, high]; either bound may be None."""
    out = wrap(node(x))
    if low is not None:
        out = maximum(out, low)
    return out if high is None else minimum(out, high)


def square(x: Value) -> Array:
    """x * x."""
    n = node(x)
    return wrap(n * n)


def power(x: Value, y: Value) -> Array:
    """x to the power y. Whole Python exponents up to 64 multiply, so negative bases are right; 0**0 is 1."""
    if is_scalar(y) and float(y) == int(y) and -64 <= y <= 64:
        n = node(x)
        if y < 0:
            return divide(1.0, power(wrap(floating("power", x)), -y))
        return wrap(_whole_power(n, int(y)))
    if is_scalar(y) and y == 0.5:
        return sqrt(x)
    if is_scalar(y) and y == -0.5:
        return rsqrt(x)
    raise TypeMismatch("power needs a whole or half Python exponent here")


def _whole_power(x: Node, y: int) -> Node:
    out: Node | None = None
    while y:
        if y & 1:
            out = x if out is None else out * x
        y >>= 1
        x = x * x if y else x
    return out if out is not None else full(1, x.shape, x.dtype)


def astype(x: Value, to: Any) -> Array:
    """x as another dtype: floats truncate towards zero to integers; anything but zero is true."""
    return wrap(cast(node(x), dtype(to)))


def relu(x: Value) -> Array:
    """max(x, 0), NaN stays NaN; the gradient at 0 is 0."""
    n = node(x)
    zero = full(0, n.shape, n.dtype)
    return wrap(E.select(E.lt(n, zero), zero, n)) if n.dtype.kind != "f" else wrap(E.select(E.le(n, zero), zero, n))


def sigmoid(x: Value) -> Array:
    """1 / (1 + exp(-x))."""
    n = floating("sigmoid", x)
    return wrap(1.0 / (1.0 + E.exp(-n)))


def silu(x: Value) -> Array:
    """x * sigmoid(x)."""
    n = floating("silu", x)
    return wrap(n / (1.0 + E.exp(-n)))


def gelu(x: Value, approximate: str = "tanh") -> Array:
    """The Gaussian error linear unit, by its tanh form (Hendrycks and Gimpel, 2016)."""
    if approximate != "tanh":
        raise TypeMismatch(f"gelu knows approximate='tanh', got {approximate!r}")
    n = floating("gelu", x)
    inner = (n + n * n * n * 0.044715) * math.sqrt(2 / math.pi)
    return wrap(n * 0.5 * (E.tanh(inner) + 1.0))
