"""From the saturated e-graph back to ops: a deterministic `Snapshot` with types and the rule behind
each e-node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CompileError
from ..ir import Kind, Node, Op
from ..ops.move import Broadcast, Reshape
from ..types import TupleType, Type
from .engine import Engine
from .language import Form, made_by
from .rules.named import Named
from .snapshot import Snapshot

Class = tuple[str, Any]  # sort and value: the engine's name of an e-class
COMMUTATIVE = frozenset(("Add", "Mul", "Maximum", "Minimum", "Eq", "Ne", "And", "Or", "Xor"))


@dataclass(slots=True)
class ENode:
    """A row of a constructor."""

    op: Op
    kids: tuple[Class, ...]
    cls: Class
    rule: str
    key: tuple[Any, ...]  # what tells it from the other e-nodes of its class


@dataclass(slots=True)
class Frozen:
    """The rows of an e-graph. `nodes` has the class of each inserted node, `named` the operands and
    class of each stepping stone, `numbers` the classes all of whose elements are one number.
    """

    enodes: list[ENode]
    nodes: dict[int, Class]
    named: dict[str, list[tuple[tuple[Class, ...], Class]]]
    numbers: frozenset[Class]


def freeze(engine: Engine, forms: Sequence[Form], order: Sequence[Node], named: Iterable[Named],
           makers: Mapping[Node, str]) -> Frozen:  # fmt: skip
    """Decode all rows. `order` are the inserted nodes; `makers` has the rules behind those that are
    not the program's.
    """
    rows = engine.freeze()
    place = {engine.integer(inputs[0]): output for inputs, output in rows["node"]}
    nodes = {i: (_sort(node), place[i]) for i, node in enumerate(order)}
    reader = _Reader(engine, order)
    origin = _origins(order, place, makers)
    enodes = []
    for form in forms:
        made = {tuple(inputs): output for inputs, output in rows[made_by(form.name)]}
        operand = "Tup" if form.family.kind is Kind.GET else "T"
        for inputs, output in rows[form.name]:
            kids = tuple(inputs[: form.arity])
            op = reader.op(form, inputs[form.arity :])
            rule = origin.get((op, kids))
            if rule is None:
                maker = made.get(tuple(inputs))
                rule = "constant" if maker is None else reader.text(maker)
            key = (rule != "", form.name, reader.order(op))
            enodes.append(
                ENode(op, tuple((operand, k) for k in kids), (form.output, output), rule, key)
            )
    stones = {stone.name: [_stone(stone, *row) for row in rows[stone.name]] for stone in named}
    return Frozen(
        enodes, nodes, stones, frozenset(("T", inputs[0]) for inputs, _ in rows["uniform"])
    )


def _stone(stone: Named, inputs: Sequence[Any], output: Any) -> tuple[tuple[Class, ...], Class]:
    sorts = stone.sorts or ("T",) * stone.operands
    return tuple(zip(sorts, inputs, strict=False)), ("T", output)


def _origins(
    order: Sequence[Node], place: Mapping[int, Any], makers: Mapping[Node, str]
) -> dict[tuple[Op, Any], str]:
    """The rule behind each inserted e-node, "" for the program's."""
    cls = {node: place[i] for i, node in enumerate(order)}
    out: dict[tuple[Op, Any], str] = {}
    for node in order:
        key = (node.op, tuple(cls[o] for o in node.operands))
        rule = makers.get(node, "")
        out[key] = "" if rule == "" else out.get(key, rule)
    return out


class _Reader:
    """Turns attribute values back into ops, each value and each op once."""

    def __init__(self, engine: Engine, order: Sequence[Node]) -> None:
        self.engine = engine
        self.ops: dict[Any, Op] = {}
        self.texts: dict[Any, str] = {}
        self.orders: dict[Op, str] = {}
        self.inserted = {node.op: node.op for node in order}
        self.constants = {
            (type(o), *o.attributes().values()): o for o in self.inserted if o.kind is Kind.CONSTANT
        }

    def op(self, form: Form, values: Sequence[Any]) -> Op:
        key = (form.name, *values)
        found = self.ops.get(key)
        if found is None:
            attributes = form.read(self.engine, values)
            # a constant's data is no attribute: the very op that was inserted comes back
            found = self.constants.get((form.family.cls, *attributes.values()))
            if found is None:
                found = form.family.entry(**attributes)
            found = self.ops[key] = self.inserted.get(found, found)
        return found

    def text(self, value: Any) -> str:
        if value not in self.texts:
            self.texts[value] = self.engine.string(value)
        return self.texts[value]

    def order(self, op: Op) -> str:
        """A text by which ops of one form are put in order."""
        if op not in self.orders:
            self.orders[op] = repr(sorted(op.attributes().items()))
        return self.orders[op]


def _sort(node: Node) -> str:
    return "Tup" if isinstance(node.type, TupleType) else "T"


def snapshot(frozen: Frozen, order: Sequence[Node], traced: int, roots: Sequence[int]) -> Snapshot:
    """Dense numbers: classes by their first inserted node, then by discovery from there; e-nodes by
    class.
    """
    members = _members(frozen)
    number = _numbered(frozen, members, traced)
    types = _types(frozen, members, order, number)
    out = Snapshot(
        [], [], [], [], [types[c] for c in number], [number[frozen.nodes[r]] for r in roots]
    )
    for cls, c in number.items():
        seen: set[tuple[Any, ...]] = set()
        kept = [e for e in members[cls] if cls not in e.kids]
        kept.sort(key=lambda e: (*e.key, tuple(number[k] for k in e.kids)))
        for enode in kept:
            kids = tuple(number[k] for k in enode.kids)
            same = tuple(sorted(kids)) if enode.key[1] in COMMUTATIVE else kids
            if (enode.op, same) in seen:
                continue
            seen.add((enode.op, same))
            out.ops.append(enode.op)
            out.kids.append(kids)
            out.cls.append(c)
            out.rule.append(enode.rule)
    out.class_of = {
        node: number[frozen.nodes[i]]
        for i, node in enumerate(order[:traced])
        if frozen.nodes[i] in number
    }
    return out


def _members(frozen: Frozen) -> dict[Class, list[ENode]]:
    """E-nodes by class, without those that need a class that only stepping stones are in.

    A class that is one number keeps the e-nodes that spell it: a literal, reshaped to ones and
    repeated.
    """
    spells = (Kind.LITERAL, Kind.MOVE)
    enodes = [
        e
        for e in frozen.enodes
        if e.cls not in frozen.numbers or (e.op.kind in spells and _spells(e, frozen))
    ]
    users: dict[Class, list[int]] = {}
    missing = []
    for i, enode in enumerate(enodes):
        kids = set(enode.kids)
        missing.append(len(kids))
        for kid in kids:
            users.setdefault(kid, []).append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    found: set[Class] = set()
    kept = []
    while ready:
        i = ready.pop()
        kept.append(i)
        cls = enodes[i].cls
        if cls in found:
            continue
        found.add(cls)
        for user in users.get(cls, ()):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    members: dict[Class, list[ENode]] = {}
    for i in sorted(kept):
        members.setdefault(enodes[i].cls, []).append(enodes[i])
    return members


def _spells(enode: ENode, frozen: Frozen) -> bool:
    """Whether an e-node is a literal, its reshape to ones, or the repetition of that."""
    if enode.op.kind is Kind.LITERAL:
        return True
    ones = isinstance(enode.op, Reshape) and len(enode.op.shape) > 0 and set(enode.op.shape) == {1}
    return ones or isinstance(enode.op, Broadcast)


def _numbered(
    frozen: Frozen, members: Mapping[Class, list[ENode]], traced: int
) -> dict[Class, int]:
    """The classes that matter: those of the program, and what their e-nodes reach."""
    number: dict[Class, int] = {}
    queue: list[Class] = []

    def visit(cls: Class) -> None:
        if cls not in number:
            number[cls] = len(number)
            queue.append(cls)

    for i in range(traced):
        visit(frozen.nodes[i])
    at = 0
    while at < len(queue):
        # e-nodes in an order that depends on numbers given so far only
        mine = sorted(
            members[queue[at]],
            key=lambda e: (*e.key, tuple(number.get(k, len(number)) for k in e.kids)),
        )
        for enode in mine:
            for kid in enode.kids:
                visit(kid)
        at += 1
    return number


def _types(frozen: Frozen, members: Mapping[Class, list[ENode]], order: Sequence[Node],
           number: Mapping[Class, int]) -> dict[Class, Type | TupleType]:  # fmt: skip
    """The type of every class, inferred through its e-nodes, all of which must agree."""
    types: dict[Class, Type | TupleType] = {
        frozen.nodes[i]: node.type for i, node in enumerate(order)
    }
    waiting = list(number)
    while waiting:
        later, before = [], len(types)
        for cls in waiting:
            pending = False
            for enode in members[cls]:
                if any(k not in types for k in enode.kids):
                    pending = True
                    continue
                found = enode.op.infer(*(types[k] for k in enode.kids))  # type: ignore[arg-type]
                known = types.setdefault(cls, found)
                if known != found:
                    what = f"{enode.op.name} of type {found} into a class of type {known}"
                    raise CompileError(f"rule {enode.rule!r} put {what}")
            if pending or cls not in types:
                later.append(cls)
        if len(later) == len(waiting) and len(types) == before:
            raise CompileError(f"{len(later)} e-classes have no type")
        waiting = later
    return types
