"""Programs with loops, and the same written out: what the tests of loops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler import pytree
from eggpu.compiler.ir import Graph, Kind
from eggpu.compiler.reference import evaluate
from eggpu.compiler.verify import verify_graph

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) / 2


def unrolled(f: Any, init: Any, xs: Any, length: int | None = None, reverse: bool = False) -> Any:
    """scan, written out."""
    leaves, structure = pytree.flatten(xs)
    count = length if length is not None else leaves[0].shape[0]
    rows: list[Any] = [None] * count
    carry = init
    for t in reversed(range(count)) if reverse else range(count):
        carry, rows[t] = f(carry, pytree.unflatten(structure, [x[t] for x in leaves]))
    flat = [pytree.flatten(row) for row in rows]
    stacks = [eg.stack([row[k] for row, _ in flat]) for k in range(len(flat[0][0]))]
    return carry, pytree.unflatten(flat[0][1], stacks)


Scan = Callable[..., Any]


def lstm(scan: Scan, w: Any, b: Any, h: Any, c: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        z = x + h @ w + b
        i, f, g, o = (z[:, k * 4 : (k + 1) * 4] for k in range(4))
        c = eg.sigmoid(f) * c + eg.sigmoid(i) * eg.tanh(g)
        h = eg.sigmoid(o) * eg.tanh(c)
        return (h, c), h

    return scan(step, (h, c), xs)


def running(scan: Scan, w: Any, xs: Any) -> Any:
    """A matrix that is multiplied up, with rows of odd sizes, integers and a backward direction."""

    def step(carry: Any, x: Any) -> Any:
        a, n = carry
        a = eg.tanh(a @ w + x["v"])
        return (a, n + x["k"]), (a.sum(), {"twice": 2 * n, "a": a[0]})

    init = (eg.ones((3, 3)), eg.array(2))
    return scan(step, init, {"v": xs, "k": eg.arange(xs.shape[0])}, reverse=True)


def nested(scan: Scan, w: Any, xs: Any) -> Any:
    def outer(h: Any, block: Any) -> Any:
        def inner(h: Any, x: Any) -> Any:
            h = eg.tanh(h * w + x)
            return h, h * h

        h, squares = scan(inner, h, block)
        return h * 0.5, (squares, h)

    return scan(outer, xs[0, 0] * 0, xs)


def seen(scan: Scan, w: Any, table: Any, xs: Any) -> Any:
    """No carry, and values from around the loop: one of them is moved, one of them is computed."""

    def step(carry: None, x: Any) -> Any:
        return carry, eg.tanh(table[x] @ w.T) + eg.exp(w[:, 0])

    return scan(step, None, xs)


def handed(scan: Scan, a: Any, b: Any) -> Any:
    """Carries that change places, stay as they are, are numbers, or are never read."""

    def step(carry: Any, _: None) -> Any:
        a, b, fixed, unused = carry
        return (b, a + fixed, fixed, unused * 2), eg.zeros(3)

    return scan(step, (a, b, b * 2, a), None, 6)


def window(scan: Scan, x: Any) -> Any:
    """A carry of which each run writes one element."""

    def step(total: Any, i: Any) -> Any:
        at = eg.array(i)
        return eg.where(eg.arange(total.shape[0]) == at, total.sum() * 0.1 + 1, total), total[0]

    return scan(step, x, eg.arange(5))


def cache(scan: Scan, x: Any, rows: Any) -> Any:
    """A window of a carry is written in each run, and rows of it are read."""

    def step(carry: Any, row: Any) -> Any:
        at, store = carry
        store = eg.dynamic_update_slice(store, row[None] + store[0], (at, 0))
        return (at + 1, store), store.sum()

    return scan(step, (eg.array(1), x), rows)


CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "lstm": (lstm, (floats(4, 16), floats(16), floats(2, 4), floats(2, 4), floats(5, 2, 16))),
    "running": (running, (floats(3, 3), floats(4, 3, 3))),
    "nested": (nested, (floats(4), floats(3, 2, 4))),
    "nested often": (nested, (floats(4), floats(6, 2, 4))),  # more rounds than are checked
    "seen": (seen, (floats(5, 3), floats(7, 3), np.array([6, 0, 3], np.int32))),
    "handed": (handed, (floats(3), floats(3))),
    "window": (window, (floats(6),)),
    "cache": (cache, (floats(7, 4), floats(4, 4))),
}


def leaves(tree: Any) -> list[Any]:
    return pytree.flatten(tree)[0]


def loss(case: str, scan: Scan) -> Callable[..., Any]:
    function, args = CASES[case]
    rng = np.random.default_rng(7)
    weights = [
        rng.normal(size=np.shape(y)).astype(np.float32)
        for y in leaves(function(unrolled, *map(eg.array, args)))
        if y.dtype.kind == "f"
    ]

    def run(*args: Any) -> Any:
        found = [y for y in leaves(function(scan, *args)) if y.dtype.kind == "f"]
        return sum(
            (y * np.float32(0.3 + k) * (y + w)).sum()
            for k, (y, w) in enumerate(zip(found, weights, strict=True))
        )

    return run


def moving(args: tuple[np.ndarray, ...]) -> tuple[int, ...]:
    return tuple(k for k, x in enumerate(args) if x.dtype == np.float32)


def double(function: Callable[..., Any], args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    graph = eg.trace(function, *args)
    verify_graph(graph)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in args]
    return evaluate(graph, exact, np.float64)


def loops_of(graph: Graph) -> list[Any]:
    return [n.op for n in graph.nodes() if n.kind is Kind.LOOP]
