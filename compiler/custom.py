"""Functions with gradients of their own: `custom_vjp`, and `checkpoint`, whose gradient computes
the function again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import pytree
from .autodiff import vjp_nodes
from .errors import TraceError
from .ir import Kind, Node, Op, make, substitute, topological
from .ops.elementwise import barrier, identity
from .ops.fused import get
from .tracing import Array, array
from .types import TupleType, Type

# From cotangents of the results, inputs, results and kept values to cotangents of the inputs. These
# are given each time, since the call may stand in a graph of its own by then, such as the body of a
# loop.
Pullback = Callable[
    [Sequence[Node], Sequence[Node], Sequence[Node], Sequence[Node]], Sequence[Node | None]
]


@dataclass(frozen=True, eq=False)
class Custom(Op):
    """Results of a function with the gradient `pullback` to its inputs: operands are inputs,
    results, and kept values.

    Only autodiff sees it: a traced program has the results themselves.
    """

    pullback: Pullback = field(compare=False)
    inputs: int = field(compare=False)
    results: int = field(compare=False)
    name = "custom"
    kind = Kind.TUPLE

    def attributes(self) -> dict[str, Any]:
        return {}

    def infer(self, *operands: Type) -> TupleType:
        return TupleType(operands[self.inputs : self.inputs + self.results])

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        return operands[self.inputs : self.inputs + self.results]

    def vjp(self, cotangent: Any, result: Node, *operands: Node) -> list[Node | None]:
        end = self.inputs + self.results
        inputs, results, kept = operands[: self.inputs], operands[self.inputs : end], operands[end:]
        parts = self.pullback(cotangent, inputs, results, kept)
        return [*parts, *[None] * (len(operands) - self.inputs)]

    def item(self, node: Node, index: int) -> Node:
        return node.operands[self.inputs + index]


def _custom(
    inputs: Sequence[Node], outputs: Sequence[Node], kept: Sequence[Node], pullback: Pullback
) -> list[Array]:
    call = make(Custom(pullback, len(inputs), len(outputs)), *inputs, *outputs, *kept)
    return [Array(get(call, k)) for k in range(len(outputs))]


class custom_vjp:
    """A function whose gradient is given, as in JAX.

    >>> @eggpu.custom_vjp
    ... def clipped(x): return x
    >>> clipped.defvjp(lambda x: (x, None), lambda kept, ct: (eggpu.clip(ct, -1, 1),))

    `forward(*args)` gives the result and what to keep, `backward(kept, cotangent)` the cotangents
    of all arguments, None for those without. Arguments and results are pytrees of arrays. The
    gradient reaches arguments only, not arrays that the function has from around it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> custom_vjp:
        """Give the two functions of the gradient."""
        self.forward, self.backward = forward, backward
        return self

    def __call__(self, *args: Any) -> Any:
        if self.forward is None or self.backward is None:
            raise TraceError(
                f"{self._label} has no gradient yet: give it by {self._label}.defvjp(forward, "
                "backward)"
            )
        leaves, structure = pytree.flatten(list(args))
        inputs = [array(v).node for v in leaves]
        out, kept = self.forward(*pytree.unflatten(structure, [Array(n) for n in inputs]))
        results, shape = pytree.flatten(out)
        outputs = [array(r).node for r in results]
        values, form = pytree.flatten(kept)
        saved = [array(v).node for v in values]

        def pullback(
            cotangents: Sequence[Node],
            inputs: Sequence[Node],
            _: Sequence[Node],
            saved: Sequence[Node],
        ) -> list[Node | None]:
            given = pytree.unflatten(shape, [Array(c) for c in cotangents])
            kept = pytree.unflatten(form, [Array(n) for n in saved])
            return self._cotangents(kept, given, args, inputs)

        return pytree.unflatten(shape, _custom(inputs, outputs, saved, pullback))

    @property
    def _label(self) -> str:
        return getattr(self.function, "__name__", "the function")

    def _cotangents(
        self, kept: Any, given: Any, args: Sequence[Any], inputs: Sequence[Node]
    ) -> list[Node | None]:
        assert self.backward is not None
        parts = self.backward(kept, given)
        if not isinstance(parts, (tuple, list)) or len(parts) != len(args):
            raise TraceError(
                f"the backward function of {self._label} gives a tuple of {len(args)} "
                f"cotangents, got {parts!r}"
            )
        out: list[Node | None] = []
        for part, arg in zip(parts, args, strict=True):
            leaves, structure = pytree.flatten(arg)
            if part is None:
                out += [None] * len(leaves)
                continue
            cotangents, same = pytree.flatten(part)
            if same != structure:
                raise TraceError(
                    f"a cotangent of {self._label} needs the structure of its argument"
                )
            out += [array(c).node for c in cotangents]
        for found, n in zip(out, inputs, strict=True):
            if found is not None and found.type != n.type:
                raise TraceError(
                    f"a cotangent of {self._label} needs the type of its argument, {n.type}, got "
                    f"{found.type}"
                )
        return out


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose intermediate values are not kept for its gradient but computed a second
    time.

    It trades time for memory. Gradients reach the arguments and every array that the function has
    from around it.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        leaves, structure = pytree.flatten(list(args))
        marked = [identity(array(v).node) for v in leaves]
        out = function(*pytree.unflatten(structure, [Array(n) for n in marked]))
        results, shape = pytree.flatten(out)
        outputs = [array(r).node for r in results]
        frontier = _frontier(outputs, marked)

        def pullback(
            cotangents: Sequence[Node],
            frontier: Sequence[Node],
            outputs: Sequence[Node],
            _: Sequence[Node],
        ) -> list[Node | None]:
            hidden = [barrier(n) for n in frontier]
            again = substitute(outputs, dict(zip(frontier, hidden, strict=True)))
            parts = vjp_nodes(again, cotangents, hidden)
            return [
                p if n.dtype.kind == "f" else None for p, n in zip(parts, frontier, strict=True)
            ]

        return pytree.unflatten(shape, _custom(frontier, outputs, [], pullback))

    return run


def _frontier(outputs: Sequence[Node], marked: Sequence[Node]) -> list[Node]:
    """What the part of a program between `marked` nodes and `outputs` reads: marked nodes, and
    values from around it."""
    given, inside, numbers = set(marked), set[Node](), set[Node]()
    found: dict[Node, None] = {}
    for node in topological(outputs):
        if node in given:
            continue
        if any(o in inside or o in given for o in node.operands):
            inside.add(node)
            found |= dict.fromkeys(o for o in node.operands if o not in inside and o not in numbers)
        elif node.kind not in (Kind.INPUT, Kind.CONSTANT) and all(
            o in numbers for o in node.operands
        ):
            numbers.add(node)
    return list(found)
