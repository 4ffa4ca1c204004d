"""WGSL spelling of types and numbers."""

from __future__ import annotations

import math
import struct

import numpy as np

from ...templates import number
from ..types import DType

_SCALARS = {"f32": "f32", "f16": "f16", "i32": "i32", "u32": "u32", "bool": "bool"}
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
            return _float(value, dtype)


def _signed(value: int) -> str:
    if value == -(2**31):
        return "bitcast<i32>(0x80000000u)"
    return f"{value}i" if value >= 0 else f"({value}i)"


def _float(value: float, dtype: DType) -> str:
    bits = struct.unpack("<I", struct.pack("<f", _rounded(value)))[0]
    plain = math.isfinite(value) and (value == 0 or bits & _EXPONENT) and bits != 0x80000000
    # a constant expression that is infinite or NaN is an error in WGSL: eg_bits reads the bits from a variable
    text = number(value) if plain else f"eg_bits(0x{bits:08x}u)"
    if dtype.name == "f16":
        return f"f16({text})"
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
    target = wgsl_type(to, vector)
    one, zero = (f"{wgsl_type(to, vector)}({literal(k, to)})" for k in (1, 0))
    four = "4" if vector else ""
    match source.kind, to.kind:
        case a, "b":
            # NaN is true, so not `x != 0`
            return f"!({text} == {wgsl_type(source, vector)}({literal(0, source)}))" if a != "b" else text
        case "b", _:
            return f"select({zero}, {one}, {text})"
        case "f", "i":
            return f"eg_to_i32{four}({_wide(text, source, vector)})"
        case "f", "u":
            return f"eg_to_u32{four}({_wide(text, source, vector)})"
        case _:
            return f"{target}({text})"


def _wide(text: str, source: DType, vector: bool) -> str:
    return text if source.name == "f32" else f"{'vec4<f32>' if vector else 'f32'}({text})"
