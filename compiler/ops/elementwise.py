"""Elementwise ops: one scalar expression each.

A declaration gives the WGSL, the NumPy meaning and the gradient; all else follows. In the WGSL, {0} {1} ... are the
operands, {T} the operand type (`f32` or `vec4<f32>`), {v} is "4" in vector code and "" otherwise, {s} is {v} with the
dtype's letter (`f`, `f4`, `i4` ...: an overloaded helper has one definition a type). Library functions named
`eg_*` live in templates/lib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import DTYPES, DType, Type, bool_
from .leaf import literal
from .move import broadcast

if TYPE_CHECKING:
    from .samples import Sample

Vjp = Callable[..., Sequence[Node | None]]


@dataclass(frozen=True, eq=False)
class Elementwise(Op):
    """An op whose result element is a function of the operands' elements at the same place."""

    label: str
    arity: int
    wgsl: str | dict[str, str]  # by dtype kind of the last operand where it differs
    numpy: Callable[..., np.ndarray]
    gradient: Vjp | None
    takes: str  # dtype kinds of the operands
    result: str  # "same" or a dtype's name
    cost: int  # scalar operations
    linear: bool = False  # its derivatives are numbers, or there are none
    mark: bool = False  # the operand itself, marked for autodiff; traced programs do not have it
    masking: bool | None = None  # see Op
    domain: tuple[float, float] = (-2.0, 2.0)  # where its float samples lie
    periods: tuple[int, ...] = ()  # by operand: what it counts modulo of, 0 where it counts itself
    kind = Kind.ELEMENTWISE

    @property
    def name(self) -> str:
        return self.label

    def attributes(self) -> dict[str, Any]:
        return {}

    def infer(self, *xs: Type) -> Type:
        if len(xs) != self.arity:
            raise TypeMismatch(f"{self.label} takes {self.arity} operands, got {len(xs)}")
        head, rest = (xs[0], xs[1:]) if self.label == "select" else (None, xs)
        if head is not None and head.dtype is not bool_:
            raise TypeMismatch(f"{self.label} needs a bool condition, got {head}")
        if any(x.shape != xs[0].shape for x in xs):
            raise ShapeMismatch(f"{self.label} needs equal shapes, got {_and(xs)}")
        if any(x.dtype != rest[0].dtype for x in rest) or rest[0].dtype.kind not in self.takes:
            kinds = {"f": "float", "i": "i32", "u": "u32", "b": "bool"}
            need = " or ".join(kinds[k] for k in self.takes)
            raise TypeMismatch(
                f"{self.label} needs operands of one dtype ({need}), got {_and(rest)}"
            )
        return Type(xs[0].shape, rest[0].dtype if self.result == "same" else DTYPES[self.result])

    def evaluate(self, *xs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            out = np.asarray(self.numpy(*xs))
        want = xs[-1].dtype if self.result == "same" else DTYPES[self.result].numpy
        return out.astype(want, copy=False)

    def vjp(self, cotangent: Node, result: Node, *xs: Node) -> Sequence[Node | None]:
        return self.gradient(cotangent, result, *xs) if self.gradient else [None] * len(xs)

    def guarded(self, cotangent: Node, parts: Sequence[Node | None]) -> Sequence[Node | None]:
        return parts if self.linear else [guard(cotangent, part) for part in parts]

    def stripped(self, operands: Sequence[Node]) -> Node | None:
        return operands[0] if self.mark else None

    def samples(self) -> Sequence[Sample]:
        from .samples import samples

        return samples(self)

    def flops(self, result: Type, *xs: Type) -> int:
        return self.cost * result.size


@dataclass(frozen=True)
class Cast(Op):
    """The value as another dtype: floats truncate towards zero to integers, anything non-zero is true."""

    to: str
    name = "cast"
    kind = Kind.ELEMENTWISE

    @property
    def wgsl(self) -> str:
        return f"cast<{self.to}>({{0}})"  # the code generator knows both types

    def infer(self, x: Type) -> Type:
        return Type(x.shape, DTYPES[self.to])

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        if x.dtype.kind == "f" and self.to in ("i32", "u32"):
            info = np.iinfo(DTYPES[self.to].numpy)
            return np.clip(
                np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), info.min, info.max
            ).astype(info.dtype)
        to = DTYPES[self.to]
        if to.kind == "f" and x.dtype == np.float64:
            return x  # the oracle runs in double precision
        return x.astype(to.numpy)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node | None]:
        floats = x.dtype.kind == "f" and result.dtype.kind == "f"
        return [cast(cotangent, x.dtype) if floats else None]

    def flops(self, result: Type, x: Type) -> int:
        wider = x.dtype.name == "f16" and result.dtype.name == "f32"  # registers hold f16 as f32
        return 0 if wider else result.size


ELEMENTWISE: dict[str, Elementwise] = {}


def declare(label: str, wgsl: str | dict[str, str], numpy: Callable[..., np.ndarray], gradient: Vjp | None = None, *,
        arity: int = 1, takes: str = "f", result: str = "same", cost: int = 1, linear: bool = False, mark: bool = False,
        masking: bool | None = None, domain: tuple[float, float] = (-2.0, 2.0),
        periods: tuple[int, ...] = ()) -> Callable[..., Node]:  # fmt: skip
    op = Elementwise(
        label,
        arity,
        wgsl,
        numpy,
        gradient,
        takes,
        result,
        cost,
        linear,
        mark,
        masking,
        domain,
        periods,
    )
    ELEMENTWISE[label] = op

    def build(*xs: Node) -> Node:
        return make(op, *xs)

    build.__name__ = build.__qualname__ = label
    return build


def cast(x: Node, to: DType) -> Node:
    """x as dtype `to`."""
    return x if x.dtype is to else make(Cast(to.name), x)


def _zero(x: Node) -> Node:
    return _like(x, 0.0)


def _like(x: Node, value: float) -> Node:
    return broadcast(literal(value, x.dtype), x.shape)


def _and(xs: Sequence[Type]) -> str:
    return " and ".join(map(repr, xs))


def _where(c: Node, a: Node, b: Node | float) -> Node:
    return select(c, a, b if isinstance(b, Node) else _like(a, b))


def guard(cotangent: Node, part: Node | None) -> Node | None:
    """`part` of a vjp, and 0 where the cotangent is 0, whatever the derivative: 0 * inf is 0 behind a mask."""
    if part is None or _scaled(part, cotangent):
        return part
    none = eq(cotangent, _zero(cotangent))
    return select(broadcast(none, part.shape), _zero(part), part)


def _scaled(part: Node, cotangent: Node) -> bool:
    """Whether `part` is the cotangent, moved or times finite numbers."""
    while part is not cotangent:
        factors = [n for n in part.operands if not _is_number(n)]
        simple = part.kind is Kind.MOVE or part.op.name in ("neg", "mul")
        if not simple or len(factors) != 1:
            return False
        part = factors[0]
    return True


def _is_number(x: Node) -> bool:
    while x.kind is Kind.MOVE and len(x.operands) == 1:
        x = x.operands[0]
    return x.kind is Kind.LITERAL and math.isfinite(x.op.number)  # type: ignore[attr-defined]


# fmt: off
# arithmetic; integers wrap
add = declare("add", "{0} + {1}", np.add, lambda ct, y, a, b: (ct, ct), arity=2, takes="fiu", linear=True)
sub = declare("sub", "{0} - {1}", np.subtract, lambda ct, y, a, b: (ct, -ct), arity=2, takes="fiu", linear=True)
mul = declare("mul", "{0} * {1}", np.multiply, lambda ct, y, a, b: (ct * b, ct * a), arity=2, takes="fiu")
div = declare("div", "{0} / {1}", np.divide, lambda ct, y, a, b: (ct / b, -(ct * y) / b), arity=2, cost=4, domain=(0.3, 3.0))
neg = declare("neg", {"f": "-{0}", "i": "-{0}", "u": "{T}(0u) - {0}"}, np.negative, lambda ct, y, x: (-ct,), takes="fiu", linear=True)
maximum = declare("maximum", "eg_max{s}({0}, {1})", np.maximum, lambda ct, y, a, b: _extreme(ct, gt(a, b), lt(a, b)), arity=2, takes="fiu", cost=2, linear=True)
minimum = declare("minimum", "eg_min{s}({0}, {1})", np.minimum, lambda ct, y, a, b: _extreme(ct, lt(a, b), gt(a, b)), arity=2, takes="fiu", cost=2, linear=True)
abs_ = declare("abs", "abs({0})", np.abs, lambda ct, y, x: (ct * sign(x),), takes="fi")
sign = declare("sign", {"f": "eg_sign{v}({0})", "i": "sign({0})"}, np.sign, lambda ct, y, x: (None,), takes="fi")
floor = declare("floor", "floor({0})", np.floor, lambda ct, y, x: (None,))
ceil = declare("ceil", "ceil({0})", np.ceil, lambda ct, y, x: (None,))
round_ = declare("round", "round({0})", np.round, lambda ct, y, x: (None,))
# exponentials
exp = declare("exp", "eg_exp{v}({0})", np.exp, lambda ct, y, x: (ct * y,), cost=12)
log = declare("log", "eg_log{v}({0})", np.log, lambda ct, y, x: (ct / x,), cost=14, domain=(0.2, 3.0))
sqrt = declare("sqrt", "sqrt({0})", np.sqrt, lambda ct, y, x: (ct * 0.5 / y,), cost=4, domain=(0.2, 3.0))
rsqrt = declare("rsqrt", "eg_rsqrt{v}({0})", lambda x: 1 / np.sqrt(x), lambda ct, y, x: (ct * -0.5 * y / x,), cost=5, domain=(0.2, 3.0))
tanh = declare("tanh", "eg_tanh{v}({0})", np.tanh, lambda ct, y, x: (ct * (1.0 - y * y),), cost=16)
sin = declare("sin", "eg_sin{v}({0})", np.sin, lambda ct, y, x: (ct * cos(x),), cost=14)
cos = declare("cos", "eg_cos{v}({0})", np.cos, lambda ct, y, x: (ct * -sin(x),), cost=14)
exp2 = declare("exp2", "eg_exp2{v}({0})", np.exp2, lambda ct, y, x: (ct * y * math.log(2),), cost=12)
log2 = declare("log2", "eg_log2{v}({0})", np.log2, lambda ct, y, x: (ct / x * (1 / math.log(2)),), cost=14, domain=(0.2, 3.0))
expm1 = declare("expm1", "eg_expm1{v}({0})", np.expm1, lambda ct, y, x: (ct * (y + 1.0),), cost=16)
log1p = declare("log1p", "eg_log1p{v}({0})", np.log1p, lambda ct, y, x: (ct / (x + 1.0),), cost=18, domain=(-0.8, 3.0))
sigmoid = declare("sigmoid", "eg_sigmoid{v}({0})", lambda x: np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))), lambda ct, y, x: (ct * y * (1.0 - y),), cost=16)
erf = declare("erf", "eg_erf{v}({0})", np.vectorize(math.erf, otypes=[float]), lambda ct, y, x: (ct * exp(-(x * x)) * (2 / math.sqrt(math.pi)),), cost=20)
pow_ = declare("pow", "eg_pow{v}({0}, {1})", np.power, lambda ct, y, a, b: _pow_vjp(ct, y, a, b), arity=2, cost=40, domain=(0.2, 3.0))
# trigonometry, in radians
tan = declare("tan", "eg_tan{v}({0})", np.tan, lambda ct, y, x: (ct * (1.0 + y * y),), cost=30, domain=(-1.2, 1.2))
asin = declare("asin", "eg_asin{v}({0})", np.arcsin, lambda ct, y, x: (ct * rsqrt(1.0 - x * x),), cost=20, domain=(-0.9, 0.9))
acos = declare("acos", "eg_acos{v}({0})", np.arccos, lambda ct, y, x: (-(ct * rsqrt(1.0 - x * x)),), cost=20, domain=(-0.9, 0.9))
atan = declare("atan", "eg_atan{v}({0})", np.arctan, lambda ct, y, x: (ct / (1.0 + x * x),), cost=20)
atan2 = declare("atan2", "eg_atan2{v}({0}, {1})", np.arctan2, lambda ct, y, a, b: (ct * b / (a * a + b * b), -(ct * a) / (a * a + b * b)), arity=2, cost=26, domain=(0.3, 3.0))
sinh = declare("sinh", "eg_sinh{v}({0})", np.sinh, lambda ct, y, x: (ct * cosh(x),), cost=24)
cosh = declare("cosh", "eg_cosh{v}({0})", np.cosh, lambda ct, y, x: (ct * sinh(x),), cost=24)
# division that rounds down, and its remainder, which has the sign of the divisor (NumPy); x // 0 is 0 for integers
floor_divide = declare("floor_divide", "eg_floordiv{s}({0}, {1})", np.floor_divide, lambda ct, y, a, b: (None, None), arity=2, takes="fiu", cost=8, domain=(0.3, 3.0))
remainder = declare("remainder", "eg_mod{s}({0}, {1})", np.remainder, lambda ct, y, a, b: (ct, -(ct * floor_divide(a, b))), arity=2, takes="fiu", cost=10, domain=(0.3, 3.0))
integer_power = declare("integer_power", "eg_ipow{s}({0}, {1})", lambda a, b: _integer_power(a, b), arity=2, takes="iu", cost=96)
# shifts by 32 or more give 0 (or the sign of a signed number shifted right), as in NumPy
shift_left = declare("shift_left", "eg_shl{s}({0}, {1})", np.left_shift, arity=2, takes="iu", cost=2)
shift_right = declare("shift_right", "eg_shr{s}({0}, {1})", np.right_shift, arity=2, takes="iu", cost=2)
# comparison and logic; equality of bools is logic
eq = declare("eq", "{0} == {1}", np.equal, arity=2, takes="fiub", result="bool")
ne = declare("ne", {"f": "eg_ne{v}({0}, {1})", "i": "{0} != {1}", "u": "{0} != {1}", "b": "{0} != {1}"}, np.not_equal, arity=2, takes="fiub", result="bool")
lt = declare("lt", "{0} < {1}", np.less, arity=2, takes="fiu", result="bool")
le = declare("le", "{0} <= {1}", np.less_equal, arity=2, takes="fiu", result="bool")
gt = declare("gt", "{0} > {1}", np.greater, arity=2, takes="fiu", result="bool")
ge = declare("ge", "{0} >= {1}", np.greater_equal, arity=2, takes="fiu", result="bool")
and_ = declare("and", "{0} & {1}", np.bitwise_and, arity=2, takes="iub")
or_ = declare("or", "{0} | {1}", np.bitwise_or, arity=2, takes="iub")
xor = declare("xor", {"i": "{0} ^ {1}", "u": "{0} ^ {1}", "b": "{0} != {1}"}, np.bitwise_xor, arity=2, takes="iub")
not_ = declare("not", {"i": "~{0}", "u": "~{0}", "b": "!{0}"}, np.invert, takes="iub")
isnan = declare("isnan", "eg_isnan{v}({0})", np.isnan, result="bool", cost=2)
# select(condition, when_true, when_false): the branch not taken never poisons the value or the gradient
select = declare("select", "select({2}, {1}, {0})", np.where, lambda ct, y, c, a, b: (None, _where(c, ct, 0.0), _where(c, _zero(ct), ct)), arity=3, takes="fiub", linear=True, masking=True)
# marks for autodiff: a value that is differentiated, one that counts as a constant, and one whose derivatives exist also
# where a select hides it, so that nothing below needs a guard
identity = declare("identity", "{0}", lambda x: x, lambda ct, y, x: (ct,), takes="fiub", cost=0, linear=True, mark=True)
stop_gradient = declare("stop_gradient", "{0}", lambda x: x, takes="fiub", cost=0, mark=True)
tame = declare("tame", "{0}", lambda x: x, lambda ct, y, x: (ct,), takes="fiub", cost=0, linear=True, mark=True, masking=False)
# x, in which the compiler does not see what it is equal to: values behind it are computed a second time
barrier = declare("barrier", "{0}", lambda x: x, lambda ct, y, x: (ct,), takes="fiub", cost=0, linear=True)
# fmt: on


def _integer_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a^b, wrapping; for a negative exponent 1 / a^-b rounded towards zero, and 0 for 0."""
    with np.errstate(over="ignore"):
        value, square = np.ones_like(a), a.copy()
        rest = np.abs(b.astype(np.int64))
        for _ in range(32):
            value = np.where(rest & 1, value * square, value)
            square = square * square
            rest = rest >> 1
    return np.where((b >= 0) | (a == 1) | (np.abs(a.astype(np.int64)) == 1), value, 0)


def _extreme(ct: Node, first: Node, second: Node) -> tuple[Node, Node]:
    # ties share evenly
    half = ct * 0.5
    return select(first, ct, select(second, _zero(ct), half)), select(
        second, ct, select(first, _zero(ct), half)
    )


def _pow_vjp(ct: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    # d a^b = b a^(b - 1) da + a^b log(a) db; a^0 is 1 also at 0, and the second term counts for a > 0 only
    zero, positive = _zero(a), gt(a, _zero(a))
    slope = select(eq(b, zero), zero, b * pow_(a, b - 1.0))
    return ct * slope, select(positive, ct * y * log(select(positive, a, _like(a, 1.0))), zero)


def nan_like(x: Node) -> Node:
    """NaN in x's shape and dtype."""
    return _like(x, math.nan)
