"""Loops: a graph that runs once for each row of stacked arrays and hands on to its next run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Graph, Kind, Node, Op, make, topological
from ..types import TupleType, Type
from .fused import get

if TYPE_CHECKING:
    from .samples import Sample


@dataclass(frozen=True)
class Loop(Op):
    """`body` run `count` times, with the meaning of jax.lax.scan.

    Operands: values that every run sees, `carries` values for the first run, and `stacked` arrays
    of `count` rows of which each run sees one, the last row first when `reverse`. The body's inputs
    are the same with rows in place of stacked arrays; its outputs are the carries of the next run,
    then the rows of stacked results. The loop's results are the last carries, then the stacked
    results.
    """

    body: Graph
    count: int
    carries: int
    stacked: int
    reverse: bool
    name = "loop"
    kind = Kind.LOOP

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        from .loop_samples import loop_samples

        return list(loop_samples())

    @property
    def bodies(self) -> tuple[Graph, ...]:
        return (self.body,)

    def with_bodies(self, bodies: Sequence[Graph]) -> Loop:
        (body,) = bodies
        return replace(self, body=body)

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Operands or inputs of the body: (seen by every run, carries, stacked)."""
        rows = len(values) - self.stacked
        first = rows - self.carries
        return list(values[:first]), list(values[first:rows]), list(values[rows:])

    def infer(self, *operands: Type) -> TupleType:
        inputs, outputs = self.body.inputs, self.body.outputs
        if self.count < 1 or len(operands) != len(inputs) or len(outputs) < self.carries:
            raise ShapeMismatch(
                f"loop needs a count of at least 1 and {len(inputs)} operands for its body, "
                f"got {self.count} and {len(operands)}"
            )
        rows = len(operands) - self.stacked
        for k, (given, node) in enumerate(zip(operands, inputs, strict=True)):
            need = self._stack(node.type) if k >= rows else node.type
            if given != need:
                raise TypeMismatch(f"loop needs {need} as operand {k}, got {given}")
        carried = inputs[rows - self.carries : rows]
        for k, (before, after) in enumerate(zip(carried, outputs, strict=False)):
            if before.type != after.type:
                raise TypeMismatch(
                    f"loop needs a carry that keeps its type: carry {k} is {before.type}, "
                    f"its body gives {after.type}"
                )
        results = [n.type for n in outputs]
        stacks = [self._stack(t) for t in results[self.carries :]]
        return TupleType((*results[: self.carries], *stacks))

    def _stack(self, row: Type) -> Type:
        return Type((self.count, *row.shape), row.dtype)

    def runs(self, operands: Sequence[np.ndarray]) -> Iterator[tuple[int, list[Any], list[Any]]]:
        """(row, inputs of the body, outputs of the body) of each run in turn, by NumPy."""
        seen, carried, stacks = self.parts(operands)
        double = any(np.asarray(x).dtype == np.float64 for x in operands)
        order = topological(self.body.outputs)
        rows = range(self.count)
        for t in reversed(rows) if self.reverse else rows:
            inputs = [*seen, *carried, *(x[t] for x in stacks)]
            values = dict(zip(self.body.inputs, inputs, strict=True))
            for node in order:
                if node not in values:
                    result = node.op.evaluate(*(values[o] for o in node.operands))
                    values[node] = _typed(result, node.type, double)
            outputs = [values[n] for n in self.body.outputs]
            carried = outputs[: self.carries]
            yield t, inputs, outputs

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        stacks = self.body.outputs[self.carries :]
        rows: list[list[Any]] = [[None] * self.count for _ in stacks]
        outputs: list[Any] = []
        for t, _, outputs in self.runs(operands):
            for stack, row in zip(rows, outputs[self.carries :], strict=True):
                stack[t] = row
        return (*outputs[: self.carries], *(np.stack(stack) for stack in rows))

    def flops(self, result: TupleType, *operands: Type) -> int:  # type: ignore[override]
        nodes = [n for n in topological(self.body.outputs) if n.kind is not Kind.GET]
        return self.count * sum(n.op.flops(n.type, *(o.type for o in n.operands)) for n in nodes)


def _typed(value: Any, type_: Type | TupleType, double: bool) -> Any:
    """A result in the dtype of its node; floats as double where the program is evaluated so."""
    if isinstance(type_, TupleType):
        return tuple(_typed(v, t, double) for v, t in zip(value, type_.items, strict=True))
    to = np.float64 if double and type_.dtype.kind == "f" else type_.dtype.numpy
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(to, copy=False)


def loop(op: Loop, operands: Sequence[Node]) -> list[Node]:
    """The results of a loop, one node each."""
    node = make(op, *operands)
    return [get(node, k) for k in range(len(op.body.outputs))]
