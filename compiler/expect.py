"""What library functions need of the values of integers, such as labels below the number of
classes: looked at where the host has them, at once or as the arguments of a call.

No kernel checks it, and nothing is read back for it: values in device memory are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .errors import EggpuError, user_line
from .ir import Graph, Kind, Node, topological
from .threads import Stack


class OutOfRange(EggpuError, IndexError, ValueError):
    """Integers that must name something, such as classes, name nothing."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """That integers are at least 0 and below `end`, or equal `other`.

    They are `source` after the ops of `path`, the first one first.
    """

    what: str
    source: Node
    path: tuple[Node, ...]
    end: int
    other: int | None
    where: str

    def check(self, value: np.ndarray, argument: str = "") -> None:
        """Raise OutOfRange unless it holds for this value of the source."""
        for node in self.path:
            value = node.op.evaluate(value)
        value = np.asarray(value)
        if not value.size or (value.min() >= 0 and value.max() < self.end):
            return
        wrong = (value < 0) | (value >= self.end)
        if self.other is not None:
            wrong &= value != self.other
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            instead = "" if self.other is None else f" or {self.other}"
            of = f" of the argument {argument}" if argument else ""
            raise OutOfRange(
                f"{self.what} needs integers from 0 to {self.end - 1}{instead}, got {value[at]} at "
                f"{list(at)}{of}{self.where}"
            )


_recorded: Stack[list[Expectation]] = Stack()


@contextmanager
def expecting(found: list[Expectation]) -> Iterator[None]:
    """Within it, what is expected of values that are not known yet is appended to the list."""
    _recorded.values.append(found)
    try:
        yield
    finally:
        _recorded.values.pop()


def expect(node: Node, end: int, what: str, other: int | None = None) -> None:
    """Integers must be at least 0 and below `end`, or equal `other`. Raises OutOfRange where they
    are known; what is an argument, or a part of one, is looked at when the program is called."""
    path: list[Node] = []
    source = node
    while source.kind is Kind.MOVE and len(source.operands) == 1:
        path.append(source)
        source = source.operands[0]
    expected = Expectation(what, source, tuple(reversed(path)), end, other, user_line())
    if source.kind is Kind.INPUT:
        if recorded := _recorded.values:
            recorded[-1].append(expected)
    elif not any(n.kind is Kind.INPUT for n in topological([source])):
        from .reference import evaluate

        expected.check(evaluate(Graph("value", (), (source,)), [])[0])


def of_arguments(
    found: Sequence[Expectation], inputs: Sequence[Node]
) -> dict[int, list[Expectation]]:
    """The expectations of each argument; those of values inside of loops are nobody's."""
    out: dict[int, list[Expectation]] = {}
    for expected in dict.fromkeys(found):
        if expected.source in inputs:
            out.setdefault(inputs.index(expected.source), []).append(expected)
    return out
