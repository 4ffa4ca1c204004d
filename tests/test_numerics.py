"""Every elementwise function on the device against NumPy, in its scalar and its vec4 form."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.ir import make
from eggpu.compiler.library.convert import wrap
from eggpu.compiler.ops.elementwise import ELEMENTWISE, Cast
from eggpu.compiler.ops.random import threefry
from eggpu.compiler.tracing import array

Floats = np.ndarray[Any, np.dtype[np.float32]]

N = 1 << 17  # values a sweep
RNG = np.random.default_rng(20)
TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
TOO_LARGE = 2.0**126  # other devices may take the reciprocal, a denormal, for 0
_POSITIVE = np.array([
    0, 1, 0.5, 2, 3, 1.5, 7, 0.1, 1e-45, 1e-40, TINY, LARGEST, np.inf, np.nan, 1.0000001, 0.9999999,
    1e10, 1e-10, 16777215, 16777216, 8388607.5, 88.72284, 88.7229, 89.5, 87.4, 103.9, 104, 128, 149,
    150, 1.5707964, 3.1415927,
], np.float32)  # fmt: skip
SPECIAL = np.concatenate([_POSITIVE, -_POSITIVE])
WORDS = np.array([
    0, 1, 2, 3, 5, 7, 31, 32, 33, 64, 255, 65535, 65536, 0x12345678, 0xDEADBEEF,
    2**31 - 1, 2**31, 2**31 + 1, 2**32 - 7, 2**32 - 2, 2**32 - 1,
], np.uint32)  # fmt: skip


@cache
def limits() -> dict[str, float]:
    """The table of docs/numerics.md: the largest error in ulps by function."""
    text = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w, ]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    return {name: float(limit) for names, _, limit in rows for name in names.split(", ")}


@cache
def exact_device() -> bool:
    """Whether the device is the one that the table was measured on."""
    return "llvmpipe" in eg.device().target.name


def usable(*operands: np.ndarray) -> tuple[np.ndarray, ...]:
    """The operands; without denormals, which other devices may take for zero."""
    if exact_device():
        return operands
    return tuple(
        np.where(np.abs(x) < TINY, np.copysign(0, x), x).astype(x.dtype)
        if x.dtype.kind == "f"
        else x
        for x in operands
    )


def run(op: Any, *operands: np.ndarray) -> np.ndarray:
    """The op on the device, by kernels of vec4 and of scalars, which must agree."""

    def call(*xs: Any) -> Any:
        return wrap(make(op, *(array(x).node for x in xs)))

    compiled = eg.compile(call, optimize=False)
    size = operands[0].size // 4 * 4
    wide = compiled(*(x[:size] for x in operands)).numpy()
    assert "vec4<" in next(iter(compiled.wgsl.values()))
    narrow = compiled(*(x[: size - 1] for x in operands)).numpy()
    assert "vec4<" not in next(iter(compiled.wgsl.values())).split("fn main")[1]
    assert np.array_equal(wide[:-1], narrow, equal_nan=wide.dtype.kind == "f")
    return wide


def reference(op: Any, *operands: np.ndarray) -> np.ndarray:
    """The exact results, in double precision."""
    with np.errstate(all="ignore"):
        return op.evaluate(*(x.astype(np.float64) for x in operands))


def errors(got: Floats, exact: np.ndarray) -> np.ndarray:
    """The distance in ulps; infinite for a wrong NaN, infinity or sign of zero."""
    with np.errstate(all="ignore"):
        size = np.clip(np.abs(exact), TINY, LARGEST)
        ulp = 2.0 ** (np.floor(np.log2(size)) - 23)
        out = np.abs(_bounded(got.astype(np.float64)) - _bounded(exact)) / ulp
    out = np.where(np.isinf(exact) & (got != exact), np.inf, out)
    out = np.where(np.isnan(exact), np.where(np.isnan(got), 0.0, np.inf), out)
    out = np.where(np.isnan(got) & ~np.isnan(exact), np.inf, out)
    if not exact_device():
        return np.where((np.abs(exact) < TINY) & (got == 0), 0.0, out)  # denormals may be 0
    return np.where((got == 0) & (exact == 0) & (np.signbit(got) != np.signbit(exact)), np.inf, out)


def _bounded(x: np.ndarray) -> np.ndarray:
    """Infinity as the number that follows the largest float32."""
    return np.clip(x, -(2.0**128), 2.0**128)


def assert_accurate(name: str, *operands: Floats) -> None:
    op = ELEMENTWISE[name]
    operands = usable(*operands)
    if name in ("div", "atan2") and not exact_device():
        operands = (operands[0], np.clip(operands[1], -TOO_LARGE, TOO_LARGE))
        if name == "atan2":
            operands = (np.clip(operands[0], -TOO_LARGE, TOO_LARGE), operands[1])
    found = errors(run(op, *operands), reference(op, *(x[: x.size // 4 * 4] for x in operands)))
    limit = limits()[name] if exact_device() else max(4.0, limits()[name])
    worst = int(np.argmax(found))
    shown = [float(x[worst]) for x in operands]
    assert found[worst] <= limit, f"{name}{shown}: off by {found[worst]:.3g} ulp, limit {limit}"


def words(count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return RNG.integers(0, 1 << 32, count, dtype=np.uint32)


def every_exponent(count: int = N) -> Floats:
    values = words(count).view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1))


def between(low: float, high: float, count: int = N) -> Floats:
    return RNG.uniform(low, high, count).astype(np.float32)


# where each function is hardest, besides all exponents
INTERVALS = {
    "sqrt": [(0, 4)],
    "rsqrt": [(0, 4)],
    "exp": [(-104, 90), (-1, 1)],
    "exp2": [(-152, 130), (-1, 1)],
    "expm1": [(-25, 90), (-1, 1)],
    "sigmoid": [(-110, 90), (-4, 4)],
    "tanh": [(-10, 10), (-1, 1)],
    "sinh": [(-91, 91), (-2, 2)],
    "cosh": [(-91, 91), (-2, 2)],
    "erf": [(-4.2, 4.2), (0.85, 1.1)],
    "log": [(0, 10), (0.5, 2)],
    "log2": [(0, 10), (0.5, 2)],
    "log1p": [(-1, 10), (-1, 1)],
    "sin": [(-10, 10), (-401, 401), (-1e6, 1e6)],
    "cos": [(-10, 10), (-401, 401), (-1e6, 1e6)],
    "tan": [(-10, 10), (-401, 401), (-1e6, 1e6)],
    "asin": [(-1, 1), (0.49, 0.56)],
    "acos": [(-1, 1), (0.49, 0.56)],
    "atan": [(-2, 2), (0.9, 1.2)],
}


@pytest.mark.parametrize("name", INTERVALS)
def test_functions_of_one_number(name: str) -> None:
    parts = [SPECIAL, every_exponent(), *(between(low, high) for low, high in INTERVALS[name])]
    assert_accurate(name, np.concatenate(parts))


def test_angles_next_to_multiples_of_a_right_angle() -> None:
    turns = RNG.integers(1, 1 << 23, N).astype(np.float64)
    angles = (turns * (np.pi / 2)).astype(np.float32)
    powers = np.ldexp(angles[: N // 2], RNG.integers(0, 100, N // 2)).astype(np.float32)
    hardest = np.array([16367173 * 2.0**72, 11416666, 1.5707964, 355, 52174], np.float32)
    for name in ("sin", "cos", "tan"):
        assert_accurate(name, np.concatenate([angles, powers, hardest, -hardest]))


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.array(list(product(values, values)), values.dtype).T
    return left.copy(), right.copy()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "atan2"])
def test_functions_of_two_numbers(name: str) -> None:
    a, b = pairs(SPECIAL)
    x = every_exponent()
    y = np.clip(x.astype(np.float64) * between(-3, 3), -LARGEST, LARGEST).astype(np.float32)
    left = np.concatenate([a, x, x, between(-2, 2)])
    right = np.concatenate([b, every_exponent(), y, between(-2, 2)])
    assert_accurate(name, left, right)


def test_power() -> None:
    a, b = pairs(SPECIAL)
    x = np.abs(every_exponent())
    close = np.exp(between(-1e-3, 1e-3)).astype(np.float32)
    wholes = np.round(between(-20, 20))
    bases = np.concatenate([x, close])
    with np.errstate(all="ignore"):
        exponents = between(-151, 129, 2 * N) / np.log2(bases.astype(np.float64))
        exponents = np.nan_to_num(exponents, posinf=1.0, neginf=1.0).astype(np.float32)
    assert_accurate(
        "pow",
        np.concatenate([a, bases, every_exponent(), between(-5, 5), between(0, 10)]),
        np.concatenate([b, exponents, every_exponent(), wholes, between(-5, 5)]),
    )


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
def test_float_division_is_numpy_s(name: str) -> None:
    a, b = pairs(SPECIAL)
    tests = [
        (a, b),
        (every_exponent(), every_exponent()),
        (between(-100, 100), between(-3, 3)),
        (np.round(between(-100, 100)), np.round(between(-9, 9))),
        (between(-1e7, 1e7), between(-1, 1)),
        (every_exponent() * np.float32(TINY), every_exponent() * np.float32(1e-44)),
    ]
    x, y = (np.concatenate(side) for side in zip(*tests, strict=True))
    op = ELEMENTWISE[name]
    x, y = usable(x, y)
    got, want = run(op, x, y), op.evaluate(x, y)[: x.size // 4 * 4]
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    if not exact_device():  # whose division may be off by 2.5 ulp, and denormals 0
        with np.errstate(all="ignore"):
            same |= np.abs(got - want) <= np.maximum(3e-7 * np.abs(want), TINY)
            same |= np.abs(y[: got.size]) > TOO_LARGE
    worst = int(np.argmin(same))
    values = ", ".join(repr(v[worst]) for v in (x, y, got, want))
    assert same.all(), f"{name}: operands, result, NumPy's result: {values}"


@pytest.mark.parametrize("name", ["neg", "abs", "sign", "floor", "ceil", "round", "isnan"])
def test_exact_functions_of_one_number(name: str) -> None:
    op = ELEMENTWISE[name]
    halves = np.round(between(-40, 40)) / np.float32(2)
    x = np.concatenate([SPECIAL, every_exponent(), between(-4, 4), halves])
    (x,) = usable(x)
    got, want = run(op, x), op.evaluate(x)[: x.size // 4 * 4]
    assert np.array_equal(got, want, equal_nan=got.dtype.kind == "f")
    if exact_device() and got.dtype.kind == "f":
        assert np.all((np.signbit(got) == np.signbit(want)) | np.isnan(want))


@pytest.mark.parametrize("name", ["maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"])
def test_exact_functions_of_two_numbers(name: str) -> None:
    op = ELEMENTWISE[name]
    a, b = usable(*pairs(SPECIAL))
    got, want = run(op, a, b), op.evaluate(a, b)[: a.size // 4 * 4]
    assert np.array_equal(got, want, equal_nan=got.dtype.kind == "f")


INTEGER = ["add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder", "integer_power"]
BITWISE = ["and", "or", "xor", "shift_left", "shift_right"]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("name", INTEGER + BITWISE)
def test_integers(name: str, dtype: type) -> None:
    op = ELEMENTWISE[name]
    a, b = pairs(WORDS.view(dtype))
    got, want = run(op, a, b), op.evaluate(a, b)[: a.size // 4 * 4]
    wrong = [v[: got.size][got != want][:4].tolist() for v in (a, b, got, want)]
    assert not wrong[0], f"{name}: operands, results, NumPy's results: {wrong}"


def test_integer_division_of_many() -> None:
    for dtype in (np.int32, np.uint32):
        a, b = words(N).view(dtype), (words(N) >> (words(N) & np.uint32(31))).view(dtype)
        for name in ("floor_divide", "remainder"):
            op = ELEMENTWISE[name]
            assert np.array_equal(run(op, a, b), op.evaluate(a, b))


@pytest.mark.parametrize("to", ["i32", "u32", "bool"])
def test_casts_of_floats(to: str) -> None:
    ends = np.array([2147483520, 2147483648, 4294967040, 4294967296, -2147483648], np.float32)
    x = np.concatenate([SPECIAL, ends, every_exponent()])
    op = Cast(to)
    (x,) = usable(x)
    assert np.array_equal(run(op, x), op.evaluate(x)[: x.size // 4 * 4])


def test_random_bits() -> None:
    k0, k1, counter = words(4096), words(4096), words(4096)
    got = run(ELEMENTWISE["random_bits"], k0, k1, counter)
    assert np.array_equal(got, threefry(k0, k1, counter))
    # the published value for a key and counter of zeros (Salmon et al.)
    zeros = np.zeros(4, np.uint32)
    assert run(ELEMENTWISE["random_bits"], zeros, zeros, zeros)[0] == 0x6B200159


def test_unit_floats() -> None:
    bits = np.concatenate([WORDS, words(4096)])
    got = run(ELEMENTWISE["unit_float"], bits)
    assert np.array_equal(got, ELEMENTWISE["unit_float"].evaluate(bits)[: got.size])
    assert got.min() >= 0
    assert got.max() < 1


PACKED = ["field_1", "field_2", "field_4", "field_8", "unpack_half", "unpack_bfloat"]


@pytest.mark.parametrize("name", PACKED)
def test_numbers_packed_in_words(name: str) -> None:
    place = RNG.integers(0, 40, 4096, dtype=np.uint32)
    word = words(4096)
    got, want = run(ELEMENTWISE[name], word, place), ELEMENTWISE[name].evaluate(word, place)
    assert np.array_equal(got, want[: got.size], equal_nan=True)


def test_every_function_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    others = {"not", "select", "barrier"}  # no function of the library
    functions = [n for n, op in ELEMENTWISE.items() if not op.mark and n not in others]
    assert not [n for n in functions if f'"{n}"' not in source]
