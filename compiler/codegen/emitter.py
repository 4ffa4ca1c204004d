"""Emits WGSL statements for the value of any node of a kernel's body at a symbolic index."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..index import Index, flatten, index, unflatten, variable
from ..ir import IRError, Kind, Node, Source
from ..ops.leaf import Iota, Literal
from ..ops.move import Move
from ..schedule.images import row_width
from ..schedule.kernel import Stored
from ..schedule.selection import stored_base
from ..types import DType, u32
from . import lanes
from .expression import expression, loaded, quad_access, scalar_access
from .gathers import gathered
from .held import Held
from .statements import LANE, Block, Statements, V, Value
from .wgsl import cast, literal, wgsl_type


@dataclass(slots=True)
class Access:
    """How a kernel touches one binding."""

    stored: Stored
    dtype: str
    size: int
    vector: bool = False  # some access is of four aligned elements
    atomic: bool = False
    single: bool = False  # some load is of single elements
    reused: bool = False  # vec4s of it are loaded several times
    kept: bool = False  # it is an argument that hardly changes
    paired: bool = False  # lanes store it in pairs
    skewed: bool = False  # vec4s of it are loaded whose elements are no four of its last axis
    # flat indexes, and the pass in which they stand
    at: list[tuple[Index, int]] = field(default_factory=list[tuple[Index, int]])


class Emitter(Statements):
    """Builds one kernel's statements. `memory` says what holds a node that the kernel reads instead
    of computing."""

    def __init__(self, writes: Sequence[Stored], memory: dict[Node, Stored]) -> None:
        super().__init__()
        self.memory = memory
        self.accesses = [Access(w, *stored_type(w)) for w in writes]
        self.outputs = len(writes)
        self.bound: dict[Node, Value] = {}  # values of anchors: reductions and products
        self.place: Callable[[Node], tuple[Index, ...] | None] = lambda node: None
        self.phase = 0
        self.reusing = False
        self.fours = False  # neighbours that are loaded one by one are parts of a vec4
        self.parts = False  # single elements of what was read in vec4s before are parts of these
        self.functions: dict[str, str] = {}
        self.held: Held | None = None  # loads that are made once, before these statements
        self.lanes: lanes.Lanes | None = None  # that store one after the other
        self._reads: dict[Node, int] = {}

    def child(self) -> Emitter:
        """An emitter of a function's statements in the same kernel."""
        other = Emitter((), self.memory)
        other.accesses, other.outputs, other._reads = self.accesses, self.outputs, self._reads
        return other

    def trial(self) -> Emitter:
        """An emitter that continues from here, of statements that are looked at and dropped."""
        other = Emitter((), self.memory)
        other.accesses = [replace(a, at=[]) for a in self.accesses]
        other.outputs, other._reads, other.place = self.outputs, dict(self._reads), self.place
        other.blocks = [Block(values=dict(block.values)) for block in self.blocks]
        other.variables, other.bound = dict(self.variables), dict(self.bound)
        other.sharing, other.fours, other.parts = self.sharing, self.fours, self.parts
        return other

    # ---- values of nodes

    def value(self, node: Node, at: tuple[Index, ...]) -> Value:
        """The element of `node` at `at`, or four along the lane variable where `at` depends on
        it."""
        if node in self.bound:
            return self.bound[node]
        if isinstance(node.op, Literal):
            return Value(literal(node.op.number, node.dtype), constant=True)
        placed = self.place(node)
        at = at if placed is None else placed
        if node in self.memory:
            return self.load(node, flatten(at, node.shape))
        known = self.known((node, at))
        if known is not None:
            return known
        match node.kind:
            case Kind.ELEMENTWISE:
                return self._elementwise(node, at)
            case Kind.IOTA:
                return self._iota(node, at)
            case Kind.MOVE:
                return self._move(node, at)
            case _:
                raise IRError(f"illegal kernel: {node!r} has no value inside it")

    def _elementwise(self, node: Node, at: tuple[Index, ...]) -> Value:
        operands = [  # no call between: one more a node and long chains recurse too deep
            self._numbered(node, k, at) or self.value(o, at) for k, o in enumerate(node.operands)
        ]
        if all(o.constant for o in operands):
            operands = [
                self._variable(o) for o in operands
            ]  # keeps the shader compiler from folding it: 1/0 is an error
        vector = any(o.vector for o in operands)
        texts = [
            self.splat(o, n.dtype, vector) for o, n in zip(operands, node.operands, strict=True)
        ]
        text = expression(node, texts, vector)
        depth = max(o.depth for o in operands)
        if re.fullmatch(r"\w+", text):
            return Value(text, vector, depth)  # an op that is the identity
        return self.let((node, at), node.op.name, text, depth, vector)

    def _numbered(self, node: Node, k: int, at: tuple[Index, ...]) -> Value | None:
        """The number that the k-th operand of an elementwise op is, where it counts modulo a period
        and that is known."""
        periods = getattr(node.op, "periods", ())
        period = periods[k] if k < len(periods) else 0
        place = self._counted(node.operands[k], at) if period else None
        if place is not None and not (place % period).terms:
            return Value(f"{(place % period).constant}u", depth=0)
        return None

    def _counted(self, node: Node, at: tuple[Index, ...]) -> Index | None:
        """The position that an iota of u32, perhaps moved, has at a place."""
        if isinstance(node.op, Iota) and node.dtype is u32:
            return at[node.op.axis]
        if isinstance(node.op, Move) and len(node.operands) == 1 and node not in self.memory:
            source, *others = node.op.sources(at, [node.operands[0].type], self._no_load)
            if not others and not source.condition:
                return self._counted(node.operands[0], source.index)
        return None

    @staticmethod
    def _no_load(operand: int, where: tuple[Index, ...], bound: int) -> Index:
        raise AssertionError("a movement of one operand reads no positions")

    def _variable(self, constant: Value) -> Value:
        key = ("variable", constant.text)
        known = self.known(key)
        if known is None:
            known = self.blocks[0].values[key] = Value(self.fresh("number"))
            self.blocks[0].lines.append(f"var {known.text} = {constant.text};")
        return known

    def _iota(self, node: Node, at: tuple[Index, ...]) -> Value:
        assert isinstance(node.op, Iota)
        position = self.index(at[node.op.axis])
        if node.dtype is u32:
            return position
        text = cast(position.text, u32, node.dtype, position.vector)
        return self.let((node, at), "iota", text, position.depth, position.vector)

    def _move(self, node: Node, at: tuple[Index, ...]) -> Value:
        def load(operand: int, where: tuple[Index, ...], bound: int) -> Index:
            return self.position(node.operands[operand], where, bound)

        types = [o.type for o in node.operands]
        assert isinstance(node.op, Move)
        sources = node.op.sources(at, types, load)
        out: Value | None = None
        for source in reversed(sources):
            condition = self._condition(source)
            if condition is False:
                continue
            value = self.value(node.operands[source.operand], source.index)
            if out is None or condition is True:
                out = value
                continue
            vector = out.vector or value.vector or condition.vector
            no, yes = self.splat(out, node.dtype, vector), self.splat(value, node.dtype, vector)
            where = (
                f"vec4<bool>({condition.text})"
                if vector and not condition.vector
                else condition.text
            )
            depth = max(out.depth, value.depth, condition.depth)
            out = self.let(
                (node, at, source.operand),
                node.op.name,
                f"select({no}, {yes}, {where})",
                depth,
                vector,
            )
        assert out is not None, f"{node!r} has no source"
        self.blocks[out.depth].values[node, at] = out
        return out

    def _condition(self, source: Source) -> Value | bool:
        """Whether the source holds: known from the ranges, or a WGSL bool."""
        parts: list[Value] = []
        for position, lower, upper in source.condition:
            if position.hi < lower or position.lo >= upper or upper <= lower:
                return False
            if position.lo >= lower and position.hi < upper:
                continue
            # u32 wraps: one comparison does for both bounds
            shifted = self.index(position - lower)
            bound = f"vec4<u32>({upper - lower}u)" if shifted.vector else f"{upper - lower}u"
            key = ("below", position - lower, upper - lower)
            text = f"{shifted.text} < {bound}"
            known = self.known(key)
            parts.append(known or self.let(key, "inside", text, shifted.depth, shifted.vector))
        if not parts:
            return True
        vector = any(p.vector for p in parts)
        texts = [f"vec4<bool>({p.text})" if vector and not p.vector else p.text for p in parts]
        if len(parts) == 1:
            return Value(texts[0], vector, parts[0].depth)
        key = ("all", *texts)
        known = self.known(key)
        return known or self.let(
            key, "inside", " & ".join(texts), max(p.depth for p in parts), vector
        )

    def position(self, node: Node, at: tuple[Index, ...], bound: int) -> Index:
        """The position that an integer node names: below 0 from the end, clipped into [0,
        bound)."""
        if bound == 1:
            return Index()
        value = self.value(node, at)
        key = ("position", node, at, bound)
        known = self.known(key)
        if known is None:
            four = "4" if value.vector else ""
            last = self.splat(Value(f"{bound - 1}u"), u32, value.vector)
            text = (
                f"min({value.text}, {last})"
                if node.dtype.kind == "u"
                else f"eg_wrap{four}({value.text}, {bound}u)"
            )
            known = self.let(key, "position", text, value.depth, value.vector)
            self.variables[known.text] = known
        return variable(known.text, bound)

    def splat(self, value: Value, dtype: DType, vector: bool) -> str:
        return (
            f"{wgsl_type(dtype, True)}({value.text})" if vector and not value.vector else value.text
        )

    # ---- memory

    def load(self, node: Node, flat: Index) -> Value:
        """The stored node's element at row-major position `flat`."""
        access = self._read(node)
        if self.held is not None and (name := self.held.name(node, flat)) is not None:
            return Value(name, self.is_vector(flat))
        flat = self._clamped(flat, access)
        known = self.known((node, flat))
        if known is not None:
            return known
        access.at.append((flat, self.phase))
        access.reused |= self.reusing
        k = self._reads[node]
        if not self.is_vector(flat):
            part = self._part(flat, k, access) if self.fours else None
            if part is not None:
                return part
            if self.parts and access.vector:
                return self._element_of_four(node, flat, k, access)
            access.single = True
            at = self.index(flat)
            return self.let(
                (node, flat),
                "load",
                loaded(scalar_access(k, at.text), access.dtype, False),
                at.depth,
                False,
            )
        if aligned(flat, access.size):
            access.vector = True
            quad = Index(tuple((a, c // 4) for a, c in (flat - V).terms), flat.constant // 4)
            text, depth = self._quad(k, access, quad)
            return self.let(
                (node, flat),
                "load",
                loaded(text, access.dtype, True),
                depth,
                True,
            )
        access.single = True
        return gathered(self, node, flat, k, access)

    def _part(self, flat: Index, k: int, access: Access) -> Value | None:
        """An element as a part of the aligned vec4 that holds it."""
        c = flat.constant % 4
        whole = flat - c
        if access.size % 4 or not whole.divisible(4):
            return None
        access.vector = True
        quad = Index(tuple((a, n // 4) for a, n in whole.terms), whole.constant // 4)
        known = self.known(("four", k, quad))
        if known is None:
            text, depth = self._quad(k, access, quad)
            text = loaded(text, access.dtype, True)
            known = self.let(("four", k, quad), "load", text, depth, True)
        return known.part(c)

    def _element_of_four(self, node: Node, flat: Index, k: int, access: Access) -> Value:
        """An element of the aligned vec4 that holds it, wherever that is."""
        access.vector = True
        text, depth = self._quad(k, access, flat // 4)
        at = self.index(flat % 4)
        text = loaded(f"{text}[{at.text}]", access.dtype, False)
        return self.let((node, flat), "load", text, max(depth, at.depth), False)

    def texel(self, node: Node, at: str) -> str:
        """Vec4 number `at` of a stored node's elements, from an image, which may end within it."""
        access = self._read(node)
        access.reused = access.vector = access.skewed = True
        access.at.append((Index(), self.phase))  # for others as well: no result takes its memory
        stored = access.stored
        shape = stored_base(stored).shape if isinstance(stored, Node) else stored.shape
        return quad_access(self._reads[node], row_width(shape, "image4"), at)

    def _quad(self, k: int, access: Access, quad: Index) -> tuple[str, int]:
        """Four elements of binding k from vec4 number `quad` on, and the depth of the block."""
        stored = access.stored
        shape = stored_base(stored).shape if isinstance(stored, Node) else stored.shape
        width = row_width(shape, "image4")
        if not self.reusing:
            at = self.index(quad)
            return quad_access(k, width, at.text), at.depth
        row, column = unflatten(quad, (-(-access.size // (4 * width)), width))
        texts = [self.index(row), self.index(column)]
        return quad_access(k, width, texts[1].text, texts[0].text), max(t.depth for t in texts)

    def _read(self, node: Node) -> Access:
        if node not in self._reads:
            self._reads[node] = len(self.accesses)
            self.accesses.append(Access(self.memory[node], *stored_type(self.memory[node])))
        return self.accesses[self._reads[node]]

    def _clamped(self, flat: Index, access: Access) -> Index:
        """`flat` kept inside the operand where it may leave it (for a value that is then not
        selected)."""
        if 0 <= flat.lo and flat.hi < access.size:
            return flat
        lane = (
            V
            if flat.coefficient(LANE) == 1 and access.size % 4 == 0 and (flat - V).divisible(4)
            else Index()
        )
        base = flat - lane
        at = self.index(base)
        last = access.size - (4 if lane.terms else 1)
        key = ("clamped", base, last)
        known = self.known(key)
        if known is None:
            bound = self.splat(Value(f"{last}u"), u32, at.vector)
            text = f"min({at.text}, {bound})"
            if lane.terms:
                text = f"{text} / 4u"
            known = self.let(key, "at", text, at.depth, at.vector)
            self.variables[known.text] = known
        if lane.terms:
            return variable(known.text, last // 4 + 1) * 4 + lane
        return variable(known.text, access.size)

    def store(self, k: int, flat: Index, value: Value, dtype: DType) -> None:
        """Write `value` to output k at row-major position `flat`."""
        access = self.accesses[k]
        access.at.append((flat, self.phase))
        vector = self.is_vector(flat)
        text = self.splat(value, dtype, vector)
        if dtype.kind == "b":
            text = (
                f"select(vec4<u32>(0u), vec4<u32>(1u), {text})"
                if vector
                else f"select(0u, 1u, {text})"
            )
        elif dtype.name == "f16":
            text = f"vec4<f16>({text})" if vector else f"f16({text})"
        places = self.lanes.places(flat, LANE) if self.lanes and access.paired else None
        if places is not None:
            lanes.store(self, k, places, Value(text, vector=True))
        elif not vector:
            self.line(f"{scalar_access(k, self.index(flat).text)} = {text};")
        elif aligned(flat, access.size) and access.vector:
            at = self.index(
                Index(tuple((a, c // 4) for a, c in (flat - V).terms), flat.constant // 4)
            )
            self.line(f"${k}[{at.text}] = {text};")
        else:
            name = self.fresh("out")
            self.line(f"let {name} = {text};")
            for c in range(4):
                at = self.index(flat.substitute({LANE: index(c)}))
                self.line(f"{scalar_access(k, at.text)} = {name}.{'xyzw'[c]};")


def aligned(flat: Index, size: int) -> bool:
    """Whether four elements along the lane variable from `flat` on are one vec4 in memory."""
    return size % 4 == 0 and flat.coefficient(LANE) == 1 and (flat - V).divisible(4)


def stored_type(stored: Stored) -> tuple[str, int]:
    """The type and the number of its elements."""
    if isinstance(stored, Node):
        return stored.dtype.name, stored.type.size
    return stored.dtype, stored.size
