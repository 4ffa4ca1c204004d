"""WGSL spelling of types and numbers."""

from __future__ import annotations

import math
import struct

import numpy as np

from ...templates import number
from ..types import DType

# f16 is for memory only: registers hold f32
_SCALARS = {"f32": "f32", "f16": "f32", "i32": "i32", "u32": "u32", "bool": "bool"}
_EXPONENT = 0x7F800000


def wgsl_type(dtype: DType, vector: bool = False) -> str:
    """The type of a value in registers."""
    name = _SCALARS[dtype.name]
    return f"vec4<{name}>" if vector else name


def storage_type(dtype: str, vector: bool = False) -> str:
    """The type of a value in memory, where a bool is a u32."""
    name = "u32" if dtype == "bool" else dtype
    return f"vec4<{name}>" if vector else name


def literal(value: float, dtype: DType) -> str:
    """A number as a WGSL expression of exactly `dtype`."""
    match dtype.kind:
        case "b":
            return "true" if value else "false"
        case "u":
            return f"{int(value)}u"
        case "i":
            return _signed(int(value))
        case _:
            return _float(value)


def _signed(value: int) -> str:
    if value == -(2**31):
        return "bitcast<i32>(0x80000000u)"
    return f"{value}i" if value >= 0 else f"({value}i)"


def _float(value: float) -> str:
    bits = struct.unpack("<I", struct.pack("<f", _rounded(value)))[0]
    plain = math.isfinite(value) and (value == 0 or bits & _EXPONENT) and bits != 0x80000000
    # a constant expression that is infinite or NaN is an error in WGSL: eg_bits reads the bits from
    # a variable
    text = number(value) if plain else f"eg_bits(0x{bits:08x}u)"
    return f"({text})" if text.startswith("-") else text


def _rounded(value: float) -> float:
    """The float32 nearest to value."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def suffix(dtype: DType, vector: bool) -> str:
    """`f`, `i4`, ...: names one of the definitions of an overloaded library function."""
    return dtype.kind + ("4" if vector else "")


def cast(text: str, source: DType, to: DType, vector: bool) -> str:
    """`text` of dtype `source` as dtype `to`."""
    kind, four = wgsl_type(to, vector), "4" if vector else ""
    one, zero = (f"{kind}({literal(k, to)})" for k in (1, 0))
    match source.kind, to.kind:
        case "b", "b":
            return text
        case _, "b":
            # NaN is true, so not `x != 0`
            return f"!({text} == {wgsl_type(source, vector)}({literal(0, source)}))"
        case "b", _:
            return f"select({zero}, {one}, {text})"
        case "f", "i":
            return f"eg_to_i32{four}({text})"
        case "f", "u":
            return f"eg_to_u32{four}({text})"
        case "f", "f":
            half = "vec4<f16>" if vector else "f16"
            return f"{kind}({half}({text}))" if to.name == "f16" else text
        case _:
            return f"{kind}({text})"


def length(text: str) -> int:
    """About how many lines statements are with the functions of the library that they call."""
    return text.count("\n") + 12 * text.count(" eg_")  # lines of such a function
