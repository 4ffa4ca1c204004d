"""Elementwise functions, named as in NumPy (PyTorch's names where NumPy has none)."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from ..errors import TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, full
from ..ops import elementwise as E
from ..tracing import Array, array
from ..types import bool_, dtype
from .convert import Value, broadcast_shapes, floating, is_scalar, node, promoted, together, wrap


def _unary(
    name: str, build: Callable[[Node], Node], needs_float: bool, doc: str
) -> Callable[[Value], Array]:
    def run(x: Value) -> Array:
        return wrap(build(floating(name, x) if needs_float else node(x)))

    run.__name__ = run.__qualname__ = name
    run.__doc__ = doc
    return run


def _of_floats(build: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """A function that leaves integers and bools as they are."""
    return lambda x: build(x) if x.dtype.kind == "f" else x


def _sign(x: Node) -> Node:
    if x.dtype.kind == "u":
        return E.minimum(x, full(1, x.shape, x.dtype))
    return E.sign(x)


def _binary(
    name: str, build: Callable[[Node, Node], Node], doc: str
) -> Callable[[Value, Value], Array]:
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
exp2 = _unary("exp2", E.exp2, True, "2 to the power x.")
log2 = _unary("log2", E.log2, True, "The logarithm to base 2.")
log10 = _unary("log10", lambda x: E.log(x) * (1 / math.log(10)), True, "The logarithm to base 10.")
expm1 = _unary("expm1", E.expm1, True, "exp(x) - 1, exact near 0.")
log1p = _unary("log1p", E.log1p, True, "log(1 + x), exact near 0.")
erf = _unary("erf", E.erf, True, "The error function.")
sigmoid = _unary("sigmoid", E.sigmoid, True, "1 / (1 + exp(-x)).")
tan = _unary("tan", E.tan, True, "The tangent of x radians.")
asin = _unary("asin", E.asin, True, "The arc sine, in radians; NaN outside [-1, 1].")
acos = _unary("acos", E.acos, True, "The arc cosine, in radians; NaN outside [-1, 1].")
atan = _unary("atan", E.atan, True, "The arc tangent, in radians.")
sinh = _unary("sinh", E.sinh, True, "The hyperbolic sine.")
cosh = _unary("cosh", E.cosh, True, "The hyperbolic cosine.")
negative = _unary("negative", E.neg, False, "-x; unsigned integers wrap.")
builtin_abs = builtins.abs
abs = _unary(
    "abs", lambda x: x if x.dtype.kind in "ub" else E.abs_(x), False, "|x|; its gradient at 0 is 0."
)
sign = _unary("sign", lambda x: _sign(x), False, "-1, 0 or 1; its gradient is 0.")
floor = _unary(
    "floor", _of_floats(E.floor), False, "The largest integer not above x, in x's dtype."
)
ceil = _unary("ceil", _of_floats(E.ceil), False, "The smallest integer not below x, in x's dtype.")
isnan = _unary("isnan", E.isnan, True, "True where x is NaN.")
stop_gradient = _unary(
    "stop_gradient", E.stop_gradient, False, "x, treated as a constant by gradients."
)
logical_not = _unary(
    "logical_not", lambda x: E.not_(cast(x, bool_)), False, "True where x is zero."
)
invert = _unary("invert", E.not_, False, "Bitwise complement; logical not of bools.")

add = _binary("add", E.add, "x + y.")
subtract = _binary("subtract", E.sub, "x - y.")
multiply = _binary("multiply", E.mul, "x * y.")
maximum = _binary(
    "maximum", E.maximum, "The larger; NaN if either is. Ties share the gradient evenly."
)
minimum = _binary(
    "minimum", E.minimum, "The smaller; NaN if either is. Ties share the gradient evenly."
)
atan2 = _binary(
    "atan2",
    lambda a, b: E.atan2(*_floats(a, b)),
    "The angle of the point (y, x), in radians: atan2(x, y) of NumPy's arctan2.",
)
floor_divide = _binary("floor_divide", E.floor_divide, "x / y rounded down; integers by 0 give 0.")
remainder = _binary(
    "remainder", E.remainder, "x - floor(x / y) * y, with the sign of y; integers by 0 give 0."
)
left_shift = _binary("left_shift", E.shift_left, "x shifted left by y bits; 0 for 32 or more.")
right_shift = _binary(
    "right_shift", E.shift_right, "x shifted right by y bits, keeping the sign of signed numbers."
)
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
    """A Python number as a float, which takes the dtype beside it; anything else as a float
    array."""
    return float(x) if is_scalar(x) else wrap(floating("divide", x))


def _floats(*nodes: Node) -> list[Node]:
    return [n if n.dtype.kind == "f" else cast(n, dtype("f32")) for n in nodes]


def isinf(x: Value) -> Array:
    """True where x is an infinity."""
    n = E.abs_(floating("isinf", x))
    return wrap(E.eq(n, full(math.inf, n.shape, n.dtype)))


def isfinite(x: Value) -> Array:
    """True where x is neither NaN nor an infinity."""
    n = E.abs_(floating("isfinite", x))
    return wrap(E.lt(n, full(math.inf, n.shape, n.dtype)))


def logical_and(x: Value, y: Value) -> Array:
    """True where both are not zero."""
    return bitwise_and(wrap(cast(node(x), bool_)), wrap(cast(node(y), bool_)))


def logical_or(x: Value, y: Value) -> Array:
    """True where either is not zero."""
    return bitwise_or(wrap(cast(node(x), bool_)), wrap(cast(node(y), bool_)))


def logical_xor(x: Value, y: Value) -> Array:
    """True where exactly one is not zero."""
    return bitwise_xor(wrap(cast(node(x), bool_)), wrap(cast(node(y), bool_)))


def trunc(x: Value) -> Array:
    """The integer part of x, in x's dtype."""
    n = node(x)
    if n.dtype.kind != "f":
        return wrap(n)
    return wrap(E.select(E.lt(n, full(0, n.shape, n.dtype)), E.ceil(n), E.floor(n)))


def round(x: Value, decimals: int = 0) -> Array:
    """The nearest number with so many decimals, halves to even, in x's dtype; integers are left as
    they are."""
    n = node(x)
    if n.dtype.kind != "f":
        return wrap(n)
    if decimals == 0:
        return wrap(E.round_(n))
    scale = 10.0 ** builtin_abs(decimals)
    # as in NumPy: times or divided by a power of ten, which is exact for both signs of `decimals`
    return wrap(E.round_(n * scale) / scale if decimals > 0 else E.round_(n / scale) * scale)


def where(condition: Value, x: Value, y: Value) -> Array:
    """x where the condition holds, else y. The branch not taken never poisons the value or the
    gradient."""
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
    if n.dtype is bool_:
        return wrap(n)
    return wrap(n * n)


def power(x: Value, y: Value) -> Array:
    """x to the power y; 0**0 is 1. Whole Python exponents up to 64 multiply.

    Integers to integers wrap; to a negative Python exponent they become floats, to one in an array
    1 / x**-y is rounded towards zero. A negative float to a power that is not whole is NaN. The
    gradient with respect to y is 0 where x <= 0.
    """
    if is_scalar(y) and -64 <= y <= 64 and float(y) == int(y):
        n = node(x)
        if y < 0:
            return divide(1.0, power(wrap(floating("power", x)), -y))
        return wrap(_whole_power(n, int(y)))
    if is_scalar(y) and y in (0.5, -0.5):
        return sqrt(x) if y == 0.5 else rsqrt(x)
    a, b = (
        together("power", x, y)
        if _whole(x) and _whole(y)
        else together("power", _float_or_number(x), _float_or_number(y))
    )
    return wrap(E.pow_(a, b) if a.dtype.kind == "f" else E.integer_power(a, b))


def _whole(x: Value) -> bool:
    """Whether a value is integers."""
    return (
        isinstance(x, int) and not isinstance(x, bool)
        if is_scalar(x)
        else array(x).dtype.kind in "iu"
    )


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
    return wrap(E.select(E.le(n, zero), zero, E.tame(n)))


def softplus(x: Value) -> Array:
    """log(1 + exp(x)), without overflow."""
    n = floating("softplus", x)
    return wrap(E.maximum(n, full(0, n.shape, n.dtype)) + E.log1p(E.exp(-E.abs_(n))))


def leaky_relu(x: Value, slope: float = 0.01) -> Array:
    """x where positive, else slope * x."""
    n = floating("leaky_relu", x)
    n = E.tame(n)
    return wrap(E.select(E.gt(n, full(0, n.shape, n.dtype)), n, n * slope))


def elu(x: Value, alpha: float = 1.0) -> Array:
    """x where positive, else alpha * (exp(x) - 1)."""
    n = E.tame(floating("elu", x))
    zero = full(0, n.shape, n.dtype)
    positive = E.gt(n, zero)
    return wrap(E.select(positive, n, E.expm1(E.select(positive, zero, n)) * alpha))


def silu(x: Value) -> Array:
    """x * sigmoid(x)."""
    n = floating("silu", x)
    return wrap(n * E.sigmoid(n))


def mish(x: Value) -> Array:
    """x * tanh(softplus(x)) (Misra, 2019)."""
    n = floating("mish", x)
    return wrap(n * E.tanh(node(softplus(wrap(n)))))


def hardswish(x: Value) -> Array:
    """x * clip(x + 3, 0, 6) / 6 (Howard et al., 2019)."""
    n = floating("hardswish", x)
    return wrap(n * node(clip(wrap(n + 3.0), 0.0, 6.0)) * (1 / 6))


def gelu(x: Value, approximate: str = "none") -> Array:
    """The Gaussian error linear unit: exact with erf, or its tanh form (Hendrycks and Gimpel,
    2016)."""
    if approximate not in ("none", "tanh"):
        raise TypeMismatch(f"gelu knows approximate='none' and 'tanh', got {approximate!r}")
    n = floating("gelu", x)
    if approximate == "none":
        return wrap(n * 0.5 * (E.erf(n * math.sqrt(0.5)) + 1.0))
    inner = (n + n * n * n * 0.044715) * math.sqrt(2 / math.pi)
    return wrap(n * 0.5 * (E.tanh(inner) + 1.0))
