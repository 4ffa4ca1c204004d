"""Element types and array types of the IR, printed as `f32[8, 64]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .errors import TypeMismatch


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `size` is bytes per element in memory (bool is stored as a u32)."""

    name: str
    kind: str  # "f" float, "i" signed, "u" unsigned, "b" bool
    size: int
    rank: int  # place in the promotion order

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(
            {"f16": "float16", "f32": "float32", "i32": "int32", "u32": "uint32", "bool": "bool"}[
                self.name
            ]
        )

    def __repr__(self) -> str:
        return self.name


bool_ = DType("bool", "b", 4, 0)
u32 = DType("u32", "u", 4, 1)
i32 = DType("i32", "i", 4, 2)
f16 = DType("f16", "f", 2, 3)
f32 = DType("f32", "f", 4, 4)
DTYPES = {d.name: d for d in (bool_, u32, i32, f16, f32)}
_FROM_NUMPY = {
    "bool": bool_,
    "uint8": u32,
    "uint16": u32,
    "uint32": u32,
    "uint64": u32,
    "int8": i32,
    "int16": i32,
    "int32": i32,
    "int64": i32,
    "float16": f16,
    "float32": f32,
    "float64": f32,
}


def dtype(value: object) -> DType:
    """The DType of a name ("f32"), a NumPy dtype (64-bit types become 32-bit) or a DType."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    try:
        return _FROM_NUMPY[np.dtype(value).name]  # type: ignore[call-overload]
    except (TypeError, KeyError):
        known = ", ".join(DTYPES)
        raise TypeMismatch(f"unknown dtype {value!r}; the dtypes are {known}") from None


@dataclass(frozen=True, slots=True)
class Type:
    """The type of an array."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class TupleType:
    """The type of a kernel with several results."""

    items: tuple[Type, ...]

    def __repr__(self) -> str:
        return f"({', '.join(map(repr, self.items))})"


def parse_type(text: str) -> Type:
    """`f32[8, 64]` or `f32[8,64]` or `i32[]` or `f32` (a scalar) as a Type."""
    name, _, rest = text.strip().partition("[")
    if name not in DTYPES:
        raise TypeMismatch(
            f"unknown dtype {name!r} in {text!r}; the dtypes are {', '.join(DTYPES)}"
        )
    if not rest:
        return Type((), DTYPES[name])
    if not rest.endswith("]"):
        raise TypeMismatch(f"a type looks like f32[8, 64], got {text!r}")
    try:
        shape = tuple(int(d) for d in rest[:-1].split(",") if d.strip())
    except ValueError:
        raise TypeMismatch(f"a type looks like f32[8, 64], got {text!r}") from None
    if any(d < 0 for d in shape):
        raise TypeMismatch(f"a dimension is at least 0, got {text!r}")
    return Type(shape, DTYPES[name])
