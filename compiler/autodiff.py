"""Reverse-mode differentiation on primitives: a graph in, a bigger graph out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import pytree
from .errors import TraceError
from .ir import Node, _recorders, at_line, topological
from .ops import full
from .tracing import Array, array, note


def vjp_nodes(outputs: Sequence[Node], cotangents: Sequence[Node], wrt: Sequence[Node]) -> list[Node]:
    """The cotangents of `wrt`, given those of `outputs`; zeros where an output does not depend on them."""
    order = topological(outputs)
    wanted = set(wrt)
    active: set[Node] = set()
    for node in order:
        if node in wanted or any(o in active for o in node.operands):
            active.add(node)
    sources = _recorders[-1] if _recorders else {}
    total: dict[Node, Node] = {}

    def accumulate(node: Node, value: Node | None) -> None:
        if value is not None and node in active:
            total[node] = total[node] + value if node in total else value

    for output, cotangent in zip(outputs, cotangents, strict=True):
        accumulate(output, cotangent)
    for node in reversed(order):
        if node not in active or node not in total or not node.operands:
            continue
        with at_line(sources.get(node, "")):
            parts = node.op.vjp(total[node], node, *node.operands)
            for operand, part in zip(node.operands, parts, strict=True):
                accumulate(operand, part)
    return [total[n] if n in total else full(0, n.shape, n.dtype) for n in wrt]


def value_and_grad(function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives `(value, gradients)` of a scalar function.

    Gradients have the structure of the argument (of the tuple of arguments when `argnums` is a sequence); integer and
    bool leaves get zeros. With `has_aux` the function returns `(value, aux)` and the result is `((value, aux), gradients)`.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        single = isinstance(argnums, int)
        numbers = [argnums] if isinstance(argnums, int) else list(argnums)
        if any(not -len(args) <= k < len(args) for k in numbers):
            raise TraceError(f"argnums {argnums} is out of range: the function was called with {len(args)} positional arguments")
        leaves, structure = pytree.flatten([args[k] for k in numbers])
        arrays = [array(v) for v in leaves]
        fresh = _fresh(arrays)
        rebuilt = pytree.unflatten(structure, fresh)
        call = list(args)
        for k, value in zip(numbers, rebuilt, strict=True):
            call[k] = value
        out = function(*call, **kwargs)
        value, aux = out if has_aux else (out, None)
        value = array(value)
        if value.shape != () or value.dtype.kind != "f":
            raise TraceError(f"grad needs a function with a float scalar result, got {value.type}")
        note([value.node])
        grads = vjp_nodes([value.node], [full(1.0, (), value.dtype)], [a.node for a in fresh])
        tree = pytree.unflatten(structure, [Array(g) for g in grads])
        return ((value, aux) if has_aux else value), (tree[0] if single else tuple(tree))

    run.__name__ = f"grad_{getattr(function, '__name__', 'function')}"
    return run


def grad(function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the gradients of a scalar function (and aux); see value_and_grad."""
    both = value_and_grad(function, argnums, has_aux=has_aux)

    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def vjp(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
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
    """The same values as nodes of their own, so that a value used elsewhere too is not differentiated there."""
    from .ops.elementwise import identity

    return [Array(identity(a.node)) for a in arrays]
