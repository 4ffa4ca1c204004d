"""Reverse-mode differentiation on primitives: a graph in, a bigger graph out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import pytree
from .errors import TraceError
from .ir import Kind, Node, at_line, known_lines, topological
from .loop_gradient import loop_vjp
from .ops import full
from .ops.elementwise import guard
from .ops.loop import Loop
from .slopes import function_of
from .tracing import Array, array, note
from .types import TupleType

# A mask reaches values through these; products and sorted sums mix places.
_MASKED = (Kind.ELEMENTWISE, Kind.MOVE, Kind.REDUCE)


def vjp_nodes(
    outputs: Sequence[Node], cotangents: Sequence[Node], wrt: Sequence[Node]
) -> list[Node]:
    """The cotangents of `wrt`, given those of `outputs`; zeros where an output does not depend on
    them.

    Where a select hides a value, its cotangent is 0 and stays 0, even where a derivative below is
    infinite or NaN.
    """
    pass_ = _Backward(outputs, wrt)
    for output, cotangent in zip(outputs, cotangents, strict=True):
        pass_.accumulate(output, cotangent)
    pass_.run()
    total = pass_.total
    return [total[n] if n in total else full(0, n.shape, n.dtype) for n in wrt]


class _Backward:
    """One sweep from outputs to operands."""

    def __init__(self, outputs: Sequence[Node], wrt: Sequence[Node]) -> None:
        self.order = topological(outputs)
        self.wanted = set(wrt)
        self.active: set[Node] = set()
        for node in self.order:
            if node in self.wanted or any(o in self.active for o in node.operands):
                self.active.add(node)
        self.position = {node: k for k, node in enumerate(self.order) if node in self.active}
        self.users: dict[Node, set[Node]] = {}
        for node in self.active:
            for operand in node.operands:
                self.users.setdefault(operand, set()).add(node)
        for node in self.wanted.union(outputs):
            self.users.setdefault(node, set()).add(node)  # outside of any function
        self.total: dict[Node, Node] = {}
        self.items: dict[
            Node, dict[int, Node]
        ] = {}  # cotangents of the results of a node with several
        self.masked: set[Node] = set()

    def accumulate(self, node: Node, value: Node | None) -> None:
        if value is not None and node in self.active:
            self.total[node] = self.total[node] + value if node in self.total else value

    def run(self) -> None:
        sources = known_lines()
        for node in reversed(self.order):
            if node not in self.active or not node.operands:
                continue
            with at_line(sources.get(node, "")):
                if isinstance(node.type, TupleType):
                    self._several(node)
                elif node in self.total:
                    self._one(node)

    def _one(self, node: Node) -> None:
        cotangent = self.total[node]
        if node.kind is Kind.GET:
            self.items.setdefault(node.operands[0], {})[node.op.index] = cotangent  # type: ignore[attr-defined]
            return
        function = function_of(node, self.users, self.position)
        if function is not None:
            self._slope(*function, cotangent)
            return
        parts = node.op.vjp(cotangent, node, *node.operands)
        if node in self.masked:
            parts = node.op.guarded(cotangent, parts)
        hides = node.op.masking
        if hides or (hides is None and node in self.masked and node.kind in _MASKED):
            self.masked.update(node.operands)
        for operand, part in zip(node.operands, parts, strict=True):
            self.accumulate(operand, part)

    def _slope(self, x: Node, ops: Sequence[Node], cotangent: Node) -> None:
        """The cotangent of the one value that a node is a function of, the first of `ops`."""
        node = ops[0]
        total = {node: full(1.0, node.shape, node.dtype)}
        for op in ops:
            parts = op.op.vjp(total[op], op, *op.operands)
            for operand, part in zip(op.operands, parts, strict=True):
                if part is not None and operand in self.active:
                    total[operand] = total[operand] + part if operand in total else part
        part = cotangent * total[x]
        if node in self.masked:
            part = guard(cotangent, part)
            self.masked.add(x)
        self.accumulate(x, part)

    def _several(self, node: Node) -> None:
        given = self.items.get(node)
        if given is None:
            return
        types = node.type.items  # type: ignore[attr-defined]
        if isinstance(node.op, Loop):
            parts = loop_vjp(node, [given.get(k) for k in range(len(types))], vjp_nodes)
        else:
            zeros = (full(0, t.shape, t.dtype) for t in types)
            cotangents = tuple(given.get(k) or zero for k, zero in enumerate(zeros))
            parts = node.op.vjp(cotangents, node, *node.operands)  # type: ignore[arg-type]
        for operand, part in zip(node.operands, parts, strict=True):
            self.accumulate(operand, part)


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives `(value, gradients)` of a scalar function.

    Gradients have the structure of the argument (of the tuple of arguments when `argnums` is a
    sequence); integer and bool leaves get zeros. With `has_aux` the function returns `(value, aux)`
    and the result is `((value, aux), gradients)`.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        single = isinstance(argnums, int)
        numbers = [argnums] if isinstance(argnums, int) else list(argnums)
        if any(not -len(args) <= k < len(args) for k in numbers):
            raise TraceError(
                f"argnums {argnums} is out of range: the function was called with {len(args)} "
                "positional arguments"
            )
        leaves, structure = pytree.flatten([args[k] for k in numbers])
        arrays = [array(v) for v in leaves]
        fresh = _fresh(arrays)
        rebuilt = pytree.unflatten(structure, fresh)
        call = list(args)
        for k, value in zip(numbers, rebuilt, strict=True):
            call[k] = value
        out = function(*call, **kwargs)
        value, aux = out if has_aux else (out, None)
        if value is None or isinstance(value, (tuple, list, dict)):
            raise TraceError(
                f"grad needs a function with a float scalar result, got a {type(value).__name__}; "
                "one of (loss, more) is for has_aux=True"
            )
        value = array(value)
        if value.shape != () or value.dtype.kind != "f":
            raise TraceError(f"grad needs a function with a float scalar result, got {value.type}")
        note([value.node])
        with at_line(known_lines().get(value.node, "")):
            seed = full(1.0, (), value.dtype)
        grads = vjp_nodes([value.node], [seed], [a.node for a in fresh])
        tree = pytree.unflatten(structure, [Array(g) for g in grads])
        return ((value, aux) if has_aux else value), (tree[0] if single else tuple(tree))

    run.__name__ = f"grad_{getattr(function, '__name__', 'function')}"
    return run


def grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the gradients of a scalar function (and aux); see value_and_grad."""
    both = value_and_grad(function, argnums, has_aux=has_aux)

    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def vjp(
    function: Callable[..., Any], *primals: Any
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`(result, pullback)` where `pullback(cotangent)` gives the cotangents of all primals."""
    leaves, structure = pytree.flatten(list(primals))
    fresh = _fresh([array(v) for v in leaves])
    out = function(*pytree.unflatten(structure, fresh))
    results, shape = pytree.flatten(out)
    nodes = [array(r).node for r in results]

    def pullback(cotangent: Any) -> tuple[Any, ...]:
        given, same = pytree.flatten(cotangent)
        if same != shape:
            raise TraceError("the cotangent needs the structure of the result")
        cts = [array(c, r.dtype).node for c, r in zip(given, nodes, strict=True)]
        grads = vjp_nodes(nodes, cts, [a.node for a in fresh])
        return tuple(pytree.unflatten(structure, [Array(g) for g in grads]))

    return out, pullback


def _fresh(arrays: Sequence[Array]) -> list[Array]:
    """The same values as nodes of their own, so that a value used elsewhere too is not
    differentiated there."""
    from .ops.elementwise import identity

    return [Array(identity(a.node)) for a in arrays]
