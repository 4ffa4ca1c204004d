"""The graph: immutable, interned, typed nodes. Equal nodes are the same object and are compared
with `is`.

A `Node` is an op applied to operands; its op carries the attributes and knows the type rule, the
NumPy meaning and the gradient. `Graph` names inputs and outputs. Passes are pure: a graph in, a
graph out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .errors import IRError, user_frame
from .index import Index
from .threads import Stack
from .types import TupleType, Type

if TYPE_CHECKING:
    from .ops.samples import Sample


class Kind(Enum):
    """How an op is lowered. Every mechanism after tracing dispatches on the kind, never on a
    name."""

    INPUT = "input"  # an argument of the program
    CONSTANT = "constant"  # an array that the program carries
    LITERAL = "literal"  # a number, shape ()
    IOTA = "iota"  # positions along an axis
    ELEMENTWISE = "elementwise"  # one scalar expression of operands of one shape
    # each element comes from one place: transpose, reshape, slice, pad, concat, gather ...
    MOVE = "move"
    REDUCE = "reduce"  # combine over axes, which stay as 1
    CONTRACT = "contract"  # batched matrix product
    SCATTER = "scatter"  # add updates into places given by data
    SCAN = "scan"  # running combination along an axis
    SORT = "sort"
    WINDOW = "window"  # convolution and window reductions
    TUPLE = "tuple"  # a kernel with several results
    LOOP = "loop"  # a graph run many times, with several results
    GET = "get"  # one result of a TUPLE or LOOP


@dataclass(frozen=True, eq=False)
class Op:
    """The base of ops. Subclasses are frozen dataclasses whose fields are the attributes; they have
    a name and a kind, some of them as properties."""

    name: ClassVar[str]
    kind: ClassVar[Kind]

    def infer(self, *operands: Type) -> Type | TupleType:
        """The type of the result; raises TypeMismatch with op, needed and got."""
        raise NotImplementedError

    def evaluate(self, *operands: np.ndarray) -> Any:
        """The NumPy meaning, in the operands' own precision."""
        raise NotImplementedError

    def vjp(self, cotangent: Node, result: Node, *operands: Node) -> Sequence[Node | None]:
        """Cotangents of the operands; None where the gradient is zero or there is none."""
        raise NotImplementedError

    @property
    def masking(self) -> bool | None:
        """Whether it may hide operands at places where their derivatives do not exist (True), or
        says that they exist (False). None: as what uses it."""
        return None

    def guarded(self, cotangent: Node, parts: Sequence[Node | None]) -> Sequence[Node | None]:
        """The parts of its vjp where a mask may hide the result: 0 where the cotangent is 0,
        whatever the derivative."""
        return parts

    def item(self, node: Node, index: int) -> Node | None:
        """Of a node with several results: what stands for one of them once gradients are taken."""
        return None

    def stripped(self, operands: Sequence[Node]) -> Node | None:
        """What stands for the node once gradients are taken, if only autodiff needs the op."""
        return None

    def expansions(self, *operands: Node) -> Sequence[Node]:
        """Equal programs of simpler ops, which the e-graph holds beside this one; the first is the
        plain lowering."""
        return ()

    @property
    def bodies(self) -> tuple[Graph, ...]:
        """The graphs that the op runs: those of a loop."""
        return ()

    def with_bodies(self, bodies: Sequence[Graph]) -> Op:
        """The op with other bodies, in the order of `bodies`."""
        assert not bodies
        return self

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Example calls, from which the tests of the op are made."""
        from .ops.samples import samples

        return samples(cls)

    def flops(self, result: Type, *operands: Type) -> int:
        """Scalar operations to compute the result from its operands."""
        return 0

    def attributes(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}


class Node:
    """An op applied to operands. Build nodes with `make`; never call this class."""

    __slots__ = ("op", "operands", "type", "__weakref__")
    op: Op
    operands: tuple[Node, ...]
    type: Type  # a TupleType only for kinds TUPLE and LOOP

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self):  # noqa: ANN201
        return self.type.dtype

    @property
    def kind(self) -> Kind:
        return self.op.kind

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.type!r}>"

    # Arithmetic on nodes of one type, for gradients and library code. Python scalars become
    # literals.
    def __add__(self, other: Node | float) -> Node:
        return _binary("add", self, other)

    def __radd__(self, other: float) -> Node:
        return _binary("add", other, self)

    def __sub__(self, other: Node | float) -> Node:
        return _binary("sub", self, other)

    def __rsub__(self, other: float) -> Node:
        return _binary("sub", other, self)

    def __mul__(self, other: Node | float) -> Node:
        return _binary("mul", self, other)

    def __rmul__(self, other: float) -> Node:
        return _binary("mul", other, self)

    def __truediv__(self, other: Node | float) -> Node:
        return _binary("div", self, other)

    def __rtruediv__(self, other: float) -> Node:
        return _binary("div", other, self)

    def __neg__(self) -> Node:
        return make(_named("neg"), self)


def _named(name: str) -> Op:
    from .ops.elementwise import ELEMENTWISE

    return ELEMENTWISE[name]


def _binary(name: str, a: Node | float, b: Node | float) -> Node:
    from .ops import full

    if not isinstance(a, Node):
        assert isinstance(b, Node)
        a = full(a, b.shape, b.dtype)
    if not isinstance(b, Node):
        b = full(b, a.shape, a.dtype)
    return make(_named(name), a, b)


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_interning = threading.Lock()
_recorders: Stack[dict[Node, str]] = Stack()
_here: Stack[str] = Stack()


def make(op: Op, *operands: Node) -> Node:
    """The node `op(*operands)`; its type is inferred, so an ill-typed node never exists."""
    key = (op, *map(id, operands))
    node = _interned.get(key)
    if node is None:
        node = Node.__new__(Node)
        node.op = op
        node.operands = operands
        node.type = op.infer(*(n.type for n in operands))  # type: ignore[assignment]
        with _interning:  # another thread may have made it meanwhile
            known = _interned.get(key)
            if known is None:
                _interned[key] = node
            else:
                node = known
    if recorders := _recorders.values:
        record = recorders[-1]
        if node not in record:
            here = _here.values
            record[node] = here[-1] if here else user_line()
    return node


def user_line() -> str:
    """`file.py:17` of the innermost frame outside eggpu, or an empty string."""
    frame = user_frame()
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame else ""


class recording:
    """Within it, `make` notes the user's line of each new node in `sources`."""

    def __init__(self, sources: dict[Node, str]) -> None:
        self.sources = sources

    def __enter__(self) -> dict[Node, str]:
        _recorders.values.append(self.sources)
        return self.sources

    def __exit__(self, *_: object) -> None:
        _recorders.values.pop()


def known_lines() -> Mapping[Node, str]:
    """The user's lines of the nodes that the recording under way has seen."""
    recorders = _recorders.values
    return recorders[-1] if recorders else {}


class at_line:
    """Within it, new nodes belong to the given user line (a gradient belongs to its primal's
    line)."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __enter__(self) -> None:
        _here.values.append(self.line)

    def __exit__(self, *_: object) -> None:
        _here.values.pop()


@dataclass(frozen=True)
class Graph:
    """A program: `outputs` computed from `inputs`. `sources` maps nodes to the user's lines.

    `donated` are the positions of inputs whose memory the program may write over.
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()
    sources: Mapping[Node, str] = field(default_factory=dict, compare=False)

    def nodes(self) -> list[Node]:
        """Every node the outputs need, operands first, in a deterministic order."""
        return topological(self.outputs)

    def replace(self, **changes: Any) -> Graph:
        from dataclasses import replace

        return replace(self, **changes)

    def __str__(self) -> str:
        from .text import print_graph

        return print_graph(self)


def topological(roots: Iterable[Node]) -> list[Node]:
    """Nodes reachable from roots, operands before users; depth first, left to right, without
    recursion."""
    done: set[Node] = set()
    out: list[Node] = []
    for root in roots:
        if root in done:
            continue
        stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.operands))]
        done.add(root)
        while stack:
            node, rest = stack[-1]
            for operand in rest:
                if operand not in done:
                    done.add(operand)
                    stack.append((operand, iter(operand.operands)))
                    break
            else:
                out.append(node)
                stack.pop()
    return out


def rebuild(node: Node, operands: Sequence[Node]) -> Node:
    """`node` with other operands."""
    return (
        node
        if all(a is b for a, b in zip(node.operands, operands, strict=True))
        else make(node.op, *operands)
    )


def substitute(roots: Sequence[Node], replacements: Mapping[Node, Node]) -> list[Node]:
    """`roots` with nodes replaced throughout; a new node belongs to the line of the one it stands
    for."""
    new: dict[Node, Node] = dict(replacements)
    sources = known_lines()
    around = _here.values[-1] if _here.values else ""
    for node in topological(roots):
        if node not in new:
            with at_line(sources.get(node) or around):
                new[node] = rebuild(node, [new[o] for o in node.operands])
    return [new[r] for r in roots]


def nested(graph: Graph) -> Iterator[Graph]:
    """The graph and the bodies of its loops, with the lines that the graph knows."""
    yield graph
    for node in graph.nodes():
        for body in node.op.bodies:
            yield from nested(body.replace(sources=graph.sources))


@dataclass(frozen=True, slots=True)
class Source:
    """Where an element of a MOVE op's result comes from: operand `operand` at `index`, if
    `condition` holds.

    `condition` is a list of (index, lower, upper): lower <= index < upper for each. An index may
    hold variables made by the `load` function that `Op.sources` gets, for places that are given by
    data.
    """

    operand: int
    index: tuple[Index, ...]
    condition: tuple[tuple[Index, int, int], ...] = ()


def check(condition: bool, message: str) -> None:
    """Raise IRError unless the invariant holds."""
    if not condition:
        raise IRError(message)
