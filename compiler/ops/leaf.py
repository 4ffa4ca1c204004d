"""Leaves: program inputs, carried arrays, numbers and positions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from ..ir import Kind, Node, Op, make
from ..types import DTYPES, DType, Type


@dataclass(frozen=True)
class Input(Op):
    """The `position`-th argument of the program."""

    position: int
    label: str
    shape: tuple[int, ...]
    dtype: str
    name = "input"
    kind = Kind.INPUT

    def infer(self) -> Type:
        return Type(self.shape, DTYPES[self.dtype])


@dataclass(frozen=True)
class Constant(Op):
    """An array that the program carries; equal contents are one constant."""

    digest: str
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray = field(compare=False, repr=False)
    name = "constant"
    kind = Kind.CONSTANT

    def infer(self) -> Type:
        return Type(self.shape, DTYPES[self.dtype])

    def evaluate(self) -> np.ndarray:
        return self.data


@dataclass(frozen=True)
class Literal(Op):
    """A number of a dtype, shape (). The bit pattern of a float counts, so NaN and -0.0 are
    themselves."""

    value: float
    dtype: str
    name = "literal"
    kind = Kind.LITERAL

    def infer(self) -> Type:
        return Type((), DTYPES[self.dtype])

    def evaluate(self) -> np.ndarray:
        return np.asarray(self.number, dtype=DTYPES[self.dtype].numpy)

    @property
    def number(self) -> float | int | bool:
        """The value as a Python number of the dtype's kind."""
        match DTYPES[self.dtype].kind:
            case "b":
                return bool(self.value)
            case "f":
                return self.value
            case _:
                return int(self.value)

    def _key(self) -> tuple[object, ...]:
        return (np.float64(self.value).tobytes(), self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key() == other._key()

    def __hash__(self) -> int:
        # nodes that die with the interpreter are looked up when there is no numpy any more
        return hash((self.value.hex(), self.dtype))


@dataclass(frozen=True)
class Iota(Op):
    """The position along `axis`, for every element of `shape`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str
    name = "iota"
    kind = Kind.IOTA

    def infer(self) -> Type:
        return Type(self.shape, DTYPES[self.dtype])

    def evaluate(self) -> np.ndarray:
        steps = np.arange(self.shape[self.axis], dtype=DTYPES[self.dtype].numpy)
        return np.broadcast_to(
            steps.reshape([-1 if k == self.axis else 1 for k in range(len(self.shape))]), self.shape
        )


def input_node(position: int, label: str, type_: Type) -> Node:
    """A program input."""
    return make(Input(position, label, type_.shape, type_.dtype.name))


def constant(value: np.ndarray, dtype: DType) -> Node:
    """An array as a leaf; a scalar becomes a literal."""
    array = np.ascontiguousarray(value, dtype=dtype.numpy)
    if array.shape == () and np.asarray(value).shape == ():
        return literal(array.item(), dtype)
    array = array.reshape(np.asarray(value).shape)
    array.flags.writeable = False
    digest = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    return make(Constant(digest, array.shape, dtype.name, array))


def literal(value: float | int | bool, dtype: DType) -> Node:
    """A number of a dtype: floats are rounded to it and integers wrap."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            value = float(np.asarray(value, dtype=dtype.numpy))
    elif dtype.kind in "iu":
        bits = int(value) & 0xFFFFFFFF
        value = bits - (1 << 32) if dtype.kind == "i" and bits >> 31 else bits
    return make(Literal(float(value), dtype.name))


def iota(shape: tuple[int, ...], axis: int, dtype: DType) -> Node:
    """Positions along an axis."""
    return make(Iota(tuple(shape), axis, dtype.name))
