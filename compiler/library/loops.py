"""Loops that stay loops: `scan` and `fori_loop` run a function many times as one node of the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import pytree
from ..errors import ShapeMismatch, TraceError, TypeMismatch
from ..loops import Body, enclose, marks
from ..ops import full
from ..tracing import Array, array
from ..types import Type
from .shaping import arange


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = f(carry, x)` for each row x of `xs`; gives the last carry and the rows y
    stacked, as jax.lax.scan.

    `init`, `xs` and what `f` gives are pytrees of arrays. Every array of `xs` has the rows along
    its first axis; without `xs`, `length` says how often to run. The carry keeps its structure,
    shapes and dtypes. With `reverse` the last row comes first, and y lies where its x lay. `f` is
    traced once: the program holds one copy of it, whatever the length. Arrays that `f` has from
    around it may be used, and are differentiated too. No rows: the carry is `init`.

    Raises TraceError when `f` gives no pair or another structure, TypeMismatch when a carry changes
    its type and ShapeMismatch when lengths differ; each names the leaf.

    >>> total, sums = eggpu.scan(lambda c, x: (c + x, c + x), 0.0, eggpu.arange(5, dtype="f32"))
    """
    leaves, structure = pytree.flatten(init)
    stacks, rows = pytree.flatten(xs)
    first, arrays = [array(v) for v in leaves], [array(v) for v in stacks]
    count = _length(arrays, pytree.paths(rows, "xs"), length)
    carried = marks([a.type for a in first])
    slices = marks([Type(a.shape[1:], a.dtype) for a in arrays])
    out = f(
        pytree.unflatten(structure, [Array(n) for n in carried]),
        pytree.unflatten(rows, [Array(n) for n in slices]),
    )
    if not isinstance(out, tuple) or len(out) != 2:
        raise TraceError(f"scan needs a function that gives (carry, y), got {_kind(out)}")
    after = _carry(out[0], structure, first)
    results, form = pytree.flatten(out[1])
    ys = [array(v).node for v in results]
    if count == 0:
        empty = [Array(full(0, (0, *y.shape), y.dtype)) for y in ys]
        return pytree.unflatten(structure, first), pytree.unflatten(form, empty)
    if not after and not ys:
        return pytree.unflatten(structure, []), pytree.unflatten(form, [])
    body = Body(_name(f), carried, slices, [*(a.node for a in after), *ys])
    nodes = enclose(body, [a.node for a in first], [a.node for a in arrays], count, reverse)
    found = [Array(n) for n in nodes]
    return (
        pytree.unflatten(structure, found[: len(first)]),
        pytree.unflatten(form, found[len(first) :]),
    )


def fori_loop(lower: int, upper: int, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """`value = body(i, value)` for i from `lower` to `upper` - 1, from `init` on, as
    jax.lax.fori_loop; i is an i32 scalar.

    The bounds are Python integers. With `upper` at most `lower` the result is `init`. See `scan`,
    whose rules hold.

    >>> eggpu.fori_loop(0, 5, lambda i, total: total + i, 0)
    """
    for bound in (lower, upper):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise TraceError(f"fori_loop needs integers as bounds, got {bound!r}")

    def step(value: Any, i: Array) -> tuple[Any, None]:
        return body(i, value), None

    step.__name__ = _name(body)
    return scan(step, init, arange(lower, max(lower, upper)))[0]


def _name(f: Callable[..., Any]) -> str:
    name = getattr(f, "__name__", "step")
    return name if name.isidentifier() else "step"


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _length(arrays: Sequence[Array], names: Sequence[str], length: int | None) -> int:
    """How many rows there are."""
    for a, name in zip(arrays, names, strict=True):
        if not a.shape:
            raise ShapeMismatch(f"scan needs arrays with a first axis, got {name}: {a.type}")
    if length is None and not arrays:
        raise TraceError("scan needs xs or a length")
    count = arrays[0].shape[0] if length is None else length
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise TraceError(f"scan needs an integer of at least 0 as length, got {count!r}")
    what = f"{names[0]} has" if length is None else "length asks for"
    for a, name in zip(arrays, names, strict=True):
        if a.shape[0] != count:
            raise ShapeMismatch(
                f"scan needs as many rows in each array: {what} {count}, {name} has {a.shape[0]}"
            )
    return count


def _carry(tree: Any, structure: pytree.Structure, before: Sequence[Array]) -> list[Array]:
    """The leaves of the carry that the function gave, once they fit those it got."""
    leaves, same = pytree.flatten(tree)
    names = pytree.paths(structure, "carry")
    if same != structure:
        got = pytree.paths(same, "carry")
        odd = sorted(set(names) ^ set(got)) or ["its containers or static values"]
        raise TraceError(
            "scan needs a function that keeps the structure of the carry, "
            f"which differs in {odd[0]}: "
            f"it got {', '.join(names) or 'no array'} and gave {', '.join(got) or 'no array'}"
        )
    after = [array(v) for v in leaves]
    for name, a, b in zip(names, before, after, strict=True):
        if a.type != b.type:
            raise TypeMismatch(
                f"scan needs a carry that keeps its type: {name} is {a.type} at first, "
                f"the function gives {b.type}"
            )
    return after
