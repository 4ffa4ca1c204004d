"""What one kernel may hold: every value of a group's body is given a space, or the group is
illegal.

pure     computable at any index: elementwise, movement, iota and numbers over operands
full     an element of the matrix that the kernel's reductions run over
row      one value a row of that matrix (a reduction's result and what follows it)
tile     an element of the one contraction's, scatter's, scan's or sort's result
item     an element of one result of a kernel with several

A value may be transposed once after its anchor, and a pure one that is read in order as well; it
is then written by a transposed store. Reshapes keep the row-major order, so they never change a
space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import IRError
from ..index import Index, flatten, unflatten
from ..ir import Kind, Node
from ..ops.fused import Get
from ..ops.move import Transpose
from ..ops.reduce import Reduce
from ..types import TupleType, Type
from .selection import Group, body, stored_base

Pattern = tuple[tuple[bool, int], ...]
"""Runs of a row-major order: (reduced, size). Neighbouring axes of one kind are one run; unit axes
are dropped."""


@dataclass(frozen=True, slots=True)
class Space:
    kind: Literal["pure", "full", "row", "tile", "item"]
    pattern: Pattern = ()  # of a row value
    item: int = 0
    turned: tuple[tuple[int, ...], tuple[int, ...]] = (
        (),
        (),
    )  # (permutation, shape) of a transpose since the anchor


PURE = Space("pure")
FULL = Space("full")
TILE = Space("tile")


@dataclass(frozen=True, slots=True)
class Analysis:
    """A legal kernel. `pattern` is the rows' pattern, `columns` the transposed pattern of column
    results beside them."""

    group: Group
    body: tuple[Node, ...]
    kind: Literal["map", "rows", "contract", "scatter", "scan", "sort", "tuple"]
    anchor: Node | None
    pattern: Pattern
    columns: Pattern
    space: Mapping[Node, Space]
    level: Mapping[Node, int]  # reductions that a value depends on, one after the other
    anchors: tuple[Node, ...] = ()  # products of the same rows

    @property
    def size(self) -> int:
        """Elements of the iteration space."""
        if self.kind == "rows":
            return math.prod(n for _, n in self.pattern)
        return self.group.outputs[0].type.size if self.kind == "map" else _anchor_size(self.anchor)


def pattern(shape: Sequence[int], reduced: Sequence[bool]) -> Pattern:
    """The runs of `shape`, of whose axes some are reduced."""
    runs: list[tuple[bool, int]] = []
    for n, r in zip(shape, reduced, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][0] == r:
            runs[-1] = (r, runs[-1][1] * n)
        else:
            runs.append((r, n))
    return tuple(runs)


def reduction_pattern(node: Node) -> Pattern:
    """The pattern of a reduction, over its operand."""
    assert isinstance(node.op, Reduce)
    axes = node.op.axes
    return pattern(node.operands[0].shape, [k in axes for k in range(len(node.operands[0].shape))])


def rows(p: Pattern) -> int:
    return math.prod(n for reduced, n in p if not reduced)


def length(p: Pattern) -> int:
    return math.prod(n for reduced, n in p if reduced)


def transposed(p: Pattern) -> Pattern | None:
    """The pattern of column results over the same matrix, where there is one."""
    return tuple((not r, n) for r, n in p) if len(p) == 2 else None


def turned(space: Space, flat: Index) -> Index:
    """The row-major position, after the transpose of `space`, of what was at `flat` before it."""
    perm, shape = space.turned
    if not shape:
        return flat
    at = unflatten(flat, shape)
    return flatten([at[p] for p in perm], [shape[p] for p in perm])


def analyze(group: Group) -> Analysis:
    """Classify the body of a group; raises IRError where no kernel can compute it."""
    return _Walk(group).result()


def illegal(group: Group, why: str) -> IRError:
    names = ", ".join(repr(o) for o in group.outputs)
    return IRError(f"illegal kernel for {names}: {why}")


class _Walk:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.body = tuple(body(group))
        self.space: dict[Node, Space] = {o: PURE for o in group.operands if o not in group.outputs}
        self.level: dict[Node, int] = dict.fromkeys(self.space, 0)
        self.patterns: list[Pattern] = []
        self.spread: set[Pattern] = set()
        self.anchor: Node | None = None
        self.anchors: list[Node] = []

    def result(self) -> Analysis:
        for node in self.body:
            self.level[node] = max((self.level[o] for o in node.operands), default=0)
            self.space[node] = self._space(node)
        if self.anchor is not None and self.patterns and not self._are_of_rows():
            raise self._bad(
                "a reduction beside a product, a scatter or a kernel with several results"
            )
        main, columns = self._patterns()
        kind = (
            _ANCHORS[self.anchor.kind]
            if self.anchor is not None
            else "rows"
            if self.patterns
            else "map"
        )
        found = Analysis(
            self.group, self.body, kind, self.anchor, main, columns, self.space, self.level,
            tuple(self.anchors),
        )  # fmt: skip
        self._check_outputs(found)
        self.space |= {o: self._scattered(o) for o in self.group.outputs if self._turns(o, found)}
        return found

    def _turns(self, output: Node, a: Analysis) -> bool:
        """Whether an output is the transpose of an operand that another value of the kernel reads
        in order: it is then written by a transposed store, so that every invocation reads only its
        own elements, and a result may lie over the operand."""
        if not isinstance(output.op, Transpose) or self.space[output] != PURE:
            return False
        source = output.operands[0]
        kinds = (Kind.ELEMENTWISE, Kind.REDUCE)
        sizes = {a.size, rows(a.pattern)} if a.kind == "rows" else {a.size}
        inside = any(source in n.operands for n in self.body if n.kind in kinds)
        return inside and source.type.size in sizes and source in self.group.operands

    def _scattered(self, output: Node) -> Space:
        assert isinstance(output.op, Transpose)
        return Space("pure", turned=(output.op.perm, output.operands[0].shape))

    def _bad(self, why: str) -> IRError:
        return illegal(self.group, why)

    def _space(self, node: Node) -> Space:
        match node.kind:
            case Kind.LITERAL | Kind.IOTA:
                return PURE
            case Kind.ELEMENTWISE:
                return self._elementwise(node)
            case Kind.MOVE:
                return self._move(node)
            case Kind.REDUCE:
                return self._reduce(node)
            case Kind.CONTRACT | Kind.SCATTER | Kind.SCAN | Kind.SORT | Kind.TUPLE:
                self._anchor(node)
                if node.kind is Kind.CONTRACT:
                    return Space("tile", item=node.shape[-1])
                return TILE
            case Kind.GET:
                assert isinstance(node.op, Get)
                return Space("item", item=node.op.index)
            case Kind.INPUT | Kind.CONSTANT:
                raise self._bad(f"{node!r} is not an operand")
            case _:
                raise self._bad(f"there is no template for {node.kind.value} ({node!r})")

    def _elementwise(self, node: Node) -> Space:
        found = PURE
        for operand in node.operands:
            space = self.space[operand]
            if space == PURE:
                continue
            if found not in (PURE, space):
                raise self._bad(f"{node!r} joins {_show(found)} and {_show(space)}")
            found = space
        return found

    def _move(self, node: Node) -> Space:
        spaces = [self.space[o] for o in node.operands]
        if all(s == PURE for s in spaces):
            return PURE
        space, name = spaces[0], node.op.name
        if name == "reshape":
            return space
        if name == "broadcast" and space.kind == "row" and space.turned == ((), ()):
            inner = node.operands[0].shape
            p = pattern(node.shape, [a != b for a, b in zip(inner, node.shape, strict=True)])
            if p == space.pattern:
                self.spread.add(p)
                return FULL
            raise self._bad(
                f"{node!r} spreads a row value over {p}, which is not its row {space.pattern}"
            )
        if isinstance(node.op, Transpose) and space.turned == ((), ()):
            perm = node.op.perm
            moved = [k for k in perm if node.operands[0].shape[k] != 1]
            if moved == sorted(moved):
                return space  # only unit axes move: a reshape
            return Space(space.kind, space.pattern, space.item, (perm, node.operands[0].shape))
        raise self._bad(f"{node!r} moves {_show(space)}")

    def _reduce(self, node: Node) -> Space:
        space, p = self.space[node.operands[0]], reduction_pattern(node)
        if space not in (PURE, FULL):
            raise self._bad(f"{node!r} reduces {_show(space)}")
        if p not in self.patterns:
            fits = not self.patterns or (
                len(self.patterns) == 1 and transposed(self.patterns[0]) == p
            )
            if not fits:
                raise self._bad(f"reductions over {p} and {self.patterns[0]}")
            self.patterns.append(p)
        self.level[node] += 1
        return Space("row", p)

    def _anchor(self, node: Node) -> None:
        contract = node.kind is Kind.CONTRACT
        if self.anchor is not None:
            same = contract and self.anchor.kind is Kind.CONTRACT
            if not same or self._rows(node) is not self._rows(self.anchor):
                raise self._bad(f"{self.anchor!r} and {node!r} in one kernel")
        self.anchor = self.anchor or node
        self.anchors.append(node)
        for k, operand in enumerate(node.operands):
            space = self.space[operand]
            if space != PURE and not (space == FULL and k == 0 and contract):
                raise self._bad(f"{node!r} of {_show(space)}")

    def _rows(self, node: Node) -> Node:
        return stored_base(node.operands[0])

    def _are_of_rows(self) -> bool:
        """Whether all reductions are of the rows of all products."""
        if any(n.kind is not Kind.CONTRACT for n in self.anchors) or len(self.patterns) > 1:
            return False
        *_, m, k = self.anchors[0].operands[0].shape
        p = self.patterns[0]
        return rows(p) == m and length(p) == k and (not p or p[-1][0])

    def _patterns(self) -> tuple[Pattern, Pattern]:
        """(the pattern whose values are used inside, the one whose values are only stored)."""
        if len(self.patterns) < 2:
            return (self.patterns[0] if self.patterns else (), ())
        one, two = self.patterns
        if one in self.spread and two in self.spread:
            raise self._bad("row and column values both spread over the matrix")
        if two in self.spread or (one not in self.spread and two[-1][0]):
            one, two = two, one
        return one, two

    def _check_outputs(self, a: Analysis) -> None:
        sizes = {a.size, *(n.type.size for n in self.anchors if a.kind == "contract")}
        if a.kind == "rows":
            sizes |= {rows(p) for p in (a.pattern, a.columns) if p}
        for out in self.group.outputs:
            if self.space[out] == PURE and out.type.size not in sizes:
                raise self._bad(f"{out!r} has {out.type.size} elements, the kernel {sorted(sizes)}")


_ANCHORS: dict[Kind, Literal["contract", "scatter", "scan", "sort", "tuple"]] = {
    Kind.CONTRACT: "contract", Kind.SCATTER: "scatter", Kind.SCAN: "scan", Kind.SORT: "sort",
    Kind.TUPLE: "tuple",
}  # fmt: skip


def _anchor_size(anchor: Node | None) -> int:
    assert anchor is not None
    whole: Type | TupleType = anchor.type
    return whole.items[0].size if isinstance(whole, TupleType) else whole.size


def _show(space: Space) -> str:
    turned = " transposed" if space.turned != ((), ()) else ""
    what = {
        "pure": "a pure value",
        "full": "matrix elements",
        "row": f"values of rows {space.pattern}",
        "tile": "a product's elements",
        "item": f"elements of result {space.item}",
    }[space.kind]
    return what + turned
