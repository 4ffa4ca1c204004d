"""Example loops: one row and many, backwards, several carries, rows of several shapes, loops in
loops, no carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..ir import Graph, Node
from ..types import Type, dtype
from .leaf import input_node
from .loop import Loop, loop
from .samples import Sample, floats

Make = Callable[..., Sequence[Node]]


def loop_samples() -> Iterator[Sample]:
    """Calls of loops; carries come first in what a body gives."""
    for count, reverse in ((1, False), (4, False), (3, True)):
        yield _sample(_sums, count, reverse, [], [floats(5)], [floats(count, 5, seed=2)])
    weight, h = floats(8, 8, seed=3), floats(2, 8, seed=4)
    yield _sample(_cell, 6, False, [weight], [h], [floats(6, 2, 8, seed=5)])
    words = np.arange(70, dtype=np.int32).reshape(7, 10)
    yield _sample(_counts, 7, True, [], [floats(3), np.asarray(2, np.int32)], [words])
    yield _sample(_rows, 5, False, [floats(4)], [], [floats(5, 4, seed=1)])
    yield _sample(_inner, 2, False, [], [floats(4)], [floats(2, 3, 4, seed=6)])


def _sums(h: Node, x: Node) -> list[Node]:
    total = h + x
    return [total, total]


def _cell(w: Node, h: Node, x: Node) -> list[Node]:
    from .contract import dot
    from .elementwise import tanh

    after = tanh(dot(h, w) + x)
    return [after, after * h]


def _counts(h: Node, n: Node, x: Node) -> list[Node]:
    from .elementwise import cast

    return [h + h, n + 1, x + 1, h, cast(n, h.dtype)]


def _rows(w: Node, x: Node) -> list[Node]:
    return [x * w]


def _inner(h: Node, x: Node) -> list[Node]:
    types = [h.type, Type(h.shape, h.dtype)]
    inputs = tuple(input_node(k, label, t) for k, (label, t) in enumerate(zip("hx", types)))
    op = Loop(Graph("inner", inputs, tuple(_sums(*inputs))), x.shape[0], 1, 1, False)
    total, sums = loop(op, [h, x])
    return [total * 0.5, sums]


def _sample(
    body: Make,
    count: int,
    reverse: bool,
    seen: Sequence[np.ndarray],
    carries: Sequence[np.ndarray],
    stacks: Sequence[np.ndarray],
) -> Sample:
    rows = [x[0] for x in stacks]
    values = [np.asarray(v) for v in (*seen, *carries, *rows)]
    inputs = tuple(
        input_node(k, f"v{k}", Type(v.shape, dtype(v.dtype))) for k, v in enumerate(values)
    )
    graph = Graph(body.__name__.strip("_"), inputs, tuple(body(*inputs)))
    op = Loop(graph, count, len(carries), len(stacks), reverse)
    return Sample(op, tuple(np.asarray(v) for v in (*seen, *carries, *stacks)), smooth=False)
