"""A program cut at its loops: parts without loops, each chosen by an e-graph of its own, and loops
between them.

A part takes what earlier parts computed as further inputs, which stand for these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .ir import Graph, Kind, Node, at_line, rebuild, recording, substitute, topological
from .loops import Body, enclose, marks, rebuilt
from .ops import full, input_node, literal, pad, reshape, slice_
from .ops.elementwise import barrier
from .ops.loop import Loop
from .ops.move import Reshape
from .types import Type


@dataclass(frozen=True, slots=True)
class Segment:
    """A part without loops.

    `names[i]` is the input of other parts that stands for `graph.outputs[i]`.
    """

    graph: Graph
    names: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class LoopPart:
    """A loop: its operands (inputs of the program or standing for values of parts), what stands for
    its results.
    """

    op: Loop
    operands: tuple[Node, ...]
    results: tuple[Node | None, ...]  # None: nobody reads it


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a program in order, and the inputs that stand for its outputs."""

    parts: tuple[Segment | LoopPart, ...]
    outputs: tuple[Node, ...]


def cut(graph: Graph, alignment: int) -> Parts:
    """The parts of a program whose loops bind rows one by one, at multiples of `alignment`."""
    sources = dict(graph.sources)
    with recording(sources):
        outputs = rebuilt(graph.outputs, lambda node, new: _fitted(node, new, alignment))
        return _Cut(graph.replace(outputs=outputs, sources=sources)).parts()


# loops whose rows can be bound


def _fitted(node: Node, operands: list[Node], alignment: int) -> dict[int, Node]:
    """The results of a loop made anew, with rows padded where needed and each result of its body a
    value of its own.
    """
    op = node.op
    assert isinstance(op, Loop)
    seen, init, stacks = op.parts(operands)
    seen_in, carried_in, rows_in = op.parts(op.body.inputs)
    carries = marks([n.type for n in carried_in])
    new = dict(zip(seen_in, seen, strict=True)) | dict(zip(carried_in, carries, strict=True))
    rows: list[Node] = []
    wide: list[Node] = []
    for row, stack in zip(rows_in, stacks, strict=True):
        if not row.type.size:
            new[row] = full(0, row.shape, row.dtype)
            continue
        (mark,) = marks([_row_type(row.type, alignment)])
        rows.append(mark)
        wide.append(_padded(stack, op.count, mark.type))
        new[row] = _narrow(mark, row.type)
    outputs = substitute(op.body.outputs, new)
    kept = [
        k for k, o in enumerate(outputs) if k < op.carries or o.type.size
    ]  # rows without elements need no kernel
    types = [outputs[k].type for k in kept]
    results = [
        outputs[k]
        if k < op.carries
        else _widened(outputs[k], _row_type(outputs[k].type, alignment))
        for k in kept
    ]
    body = Body(op.body.name, carries, rows, _distinct(results, {*carries, *rows}))
    found = enclose(body, init, wide, op.count, op.reverse)
    stacked = [(op.count, *t.shape) for t in types]
    whole = {
        k: found[i] if k < op.carries else _narrow_stack(found[i], types[i], stacked[i])
        for i, k in enumerate(kept)
    }
    empty = [k for k in range(len(outputs)) if k not in whole]
    for k in empty:
        whole[k] = full(0, (op.count, *outputs[k].shape), outputs[k].dtype)
    return whole


def _row_type(row: Type, alignment: int) -> Type:
    """The type of a row that can be bound: the row's, or a vector with room at its end."""
    size = row.dtype.size
    nbytes = -(-row.nbytes // alignment) * alignment
    return row if nbytes == row.nbytes else Type((nbytes // size,), row.dtype)


def _widened(row: Node, to: Type) -> Node:
    if to == row.type:
        return row
    zero = literal(0, row.dtype)
    return pad(reshape(row, (row.type.size,)), zero, (0,), (to.size - row.type.size,))


def _narrow(row: Node, to: Type) -> Node:
    return row if row.type == to else reshape(slice_(row, (0,), (to.size,)), to.shape)


def _padded(stack: Node, count: int, row: Type) -> Node:
    size = stack.type.size // count
    if stack.shape == (count, *row.shape):
        return stack
    flat = reshape(stack, (count, size))
    return pad(flat, literal(0, stack.dtype), (0, 0), (0, row.size - size))


def _narrow_stack(stack: Node, row: Type, shape: Sequence[int]) -> Node:
    if stack.shape == tuple(shape):
        return stack
    return reshape(slice_(stack, (0, 0), (shape[0], row.size)), shape)


def _distinct(outputs: Sequence[Node], inputs: set[Node]) -> list[Node]:
    """Outputs of a body as values that its kernels write, each of its own memory."""
    computed = _computed(outputs, inputs)
    taken: set[Node] = set()
    out: list[Node] = []
    for node in outputs:
        while (base := _base(node)) in taken or base in inputs or base not in computed:
            node = barrier(node)
            computed.add(node)
        taken.add(_base(node))
        out.append(node)
    return out


def _computed(outputs: Sequence[Node], inputs: set[Node]) -> set[Node]:
    """The nodes that a body computes: what depends on its inputs."""
    found = set(inputs)
    for node in topological(outputs):
        if any(o in found for o in node.operands):
            found.add(node)
    return found


def _base(node: Node) -> Node:
    while isinstance(node.op, Reshape):
        node = node.operands[0]
    return node


# the parts


@dataclass
class _Cut:
    """What is computed in which part: part n stands before the loops that need n loops, one after
    the other.
    """

    graph: Graph
    level: dict[Node, int] = field(default_factory=dict[Node, int])
    names: dict[Node, Node] = field(default_factory=dict[Node, Node])
    given: dict[int, dict[Node, None]] = field(default_factory=dict[int, dict[Node, None]])
    results: dict[Node, dict[int, Node]] = field(default_factory=dict[Node, dict[int, Node]])

    def __post_init__(self) -> None:
        for node in topological(self.graph.outputs):
            level = max((self.level[o] for o in node.operands), default=0)
            from_loop = node.kind is Kind.GET and node.operands[0].kind is Kind.LOOP
            self.level[node] = level + from_loop
        numbers = set[
            Node
        ]()  # and what is only moved: such values are made again where they are read
        for node in self.level:
            if node.kind not in (Kind.INPUT, Kind.CONSTANT) and all(
                o in numbers for o in node.operands
            ):
                numbers.add(node)
        self.numbers = numbers

    def parts(self) -> Parts:
        outputs = tuple(self.name(o) for o in self.graph.outputs)
        loops = [n for n in self.level if n.kind is Kind.LOOP]
        found: list[Segment | LoopPart] = []
        for level in range(max(self.level.values(), default=0), -1, -1):
            mine = [n for n in loops if self.level[n] == level and n in self.results]
            found += [self._loop(n) for n in reversed(mine)]
            if level in self.given:
                found.append(self._segment(level))
        return Parts(tuple(reversed(found)), outputs)

    def name(self, node: Node) -> Node:
        """What stands for a value outside of its part: the value itself where it is a leaf in
        memory.
        """
        if node.kind in (Kind.INPUT, Kind.CONSTANT):
            return node
        if node not in self.names:
            place = len(self.graph.inputs) + len(self.names)
            self.names[node] = input_node(place, f"part{place}", node.type)
            if self._from_loop(node):
                at = self.results.setdefault(node.operands[0], {})
                at[node.op.index] = self.names[node]  # type: ignore[attr-defined]
            else:
                self.given.setdefault(self.level[node], {})[node] = None
        return self.names[node]

    def _from_loop(self, node: Node) -> bool:
        return node.kind is Kind.GET and node.operands[0].kind is Kind.LOOP

    def _loop(self, node: Node) -> LoopPart:
        assert isinstance(node.op, Loop)
        results = self.results[node]
        return LoopPart(
            node.op,
            tuple(self.name(o) for o in node.operands),
            tuple(results.get(k) for k in range(len(node.op.body.outputs))),
        )

    def _segment(self, level: int) -> Segment:
        """The part that computes the values of a level that others read."""
        values = tuple(self.given[level])
        new: dict[Node, Node] = {}
        stack = [(v, False) for v in reversed(values)]
        while stack:
            node, ready = stack.pop()
            if node in new:
                continue
            if self._elsewhere(node, level):
                new[node] = self.name(node)
            elif ready:
                with at_line(self.graph.sources.get(node, "")):
                    new[node] = rebuild(node, [new[o] for o in node.operands])
            else:
                stack.append((node, True))
                stack.extend((o, False) for o in reversed(node.operands))
        outputs = tuple(new[v] for v in values)
        name = self.graph.name if self._alone() else f"{self.graph.name}.{level}"
        inputs = tuple(n for n in topological(outputs) if n.kind is Kind.INPUT)
        graph = Graph(name, inputs, outputs, sources=self.graph.sources)
        return Segment(graph, tuple(self.names[v] for v in values))

    def _alone(self) -> bool:
        return max(self.level.values(), default=0) == 0

    def _elsewhere(self, node: Node, level: int) -> bool:
        """Whether a part reads a value that another one or a loop stored."""
        if node.kind in (Kind.INPUT, Kind.CONSTANT) or self._from_loop(node):
            return True
        moved = node in self.numbers or node.kind is Kind.MOVE
        return self.level[node] < level and not moved
