"""The batched matrix product, to which matmul, dot, tensordot and einsum lower through movement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import Type
from .move import transpose


@dataclass(frozen=True)
class Dot(Op):
    """a[..., m, k] times b[..., k, n] with equal leading axes: result[..., m, n]."""

    name = "dot"
    kind = Kind.CONTRACT

    def infer(self, a: Type, b: Type) -> Type:
        if a.dtype != b.dtype or a.dtype.kind == "b":
            raise TypeMismatch(f"dot needs two arrays of one number type, got {a} and {b}")
        if (
            a.rank < 2
            or a.rank != b.rank
            or a.shape[:-2] != b.shape[:-2]
            or a.shape[-1] != b.shape[-2]
        ):
            raise ShapeMismatch(f"dot needs (..., m, k) and (..., k, n), got {a} and {b}")
        return Type((*a.shape[:-1], b.shape[-1]), a.dtype)

    def evaluate(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.matmul(a, b)

    def vjp(self, cotangent: Node, result: Node, a: Node, b: Node) -> list[Node]:
        return [dot(cotangent, swap(b)), dot(swap(a), cotangent)]

    def flops(self, result: Type, a: Type, b: Type) -> int:
        return 2 * result.size * a.shape[-1]


def swap(x: Node) -> Node:
    """The last two axes exchanged."""
    r = len(x.shape)
    return transpose(x, (*range(r - 2), r - 1, r - 2))


def dot(a: Node, b: Node) -> Node:
    """The batched matrix product of arrays with equal leading axes."""
    return make(Dot(), a, b)
