"""From the saturated e-graph back to ops: a deterministic `Snapshot` with types and the rule behind each e-node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CompileError
from ..ir import Kind, Node, Op
from ..types import TupleType, Type
from .engine import Engine
from .language import Form, form_of, made_by
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
    traced: bool
    key: tuple[Any, ...]  # what tells it from the other e-nodes of its class


@dataclass(slots=True)
class Frozen:
    """The rows of an e-graph. `named` has the classes of each stepping stone, `nodes` the class of each inserted node."""

    enodes: list[ENode]
    nodes: dict[int, Class]
    named: dict[str, list[Class]] = field(default_factory=dict)


def freeze(engine: Engine, forms: Sequence[Form], order: Sequence[Node], traced: int, named: Iterable[str]) -> Frozen:
    """Decode all rows. `order` are the inserted nodes, the first `traced` of which are the program's."""
    rows = engine.freeze()
    place = {engine.integer(inputs[0]): output for inputs, output in rows["node"]}
    nodes = {i: (_sort(node), place[i]) for i, node in enumerate(order)}
    number = {node: i for i, node in enumerate(order)}
    programs, originals = set(), {}
    for i, node in enumerate(order):
        form = form_of(node.op, len(node.operands))
        values = tuple(v for _, v in (nodes[number[o]] for o in node.operands))
        if i < traced:
            programs.add((form.name, values, nodes[i][1], node.op))
        originals[node.op] = node.op
    enodes = []
    for form in forms:
        makers = {tuple(inputs): output for inputs, output in rows[made_by(form.name)]}
        operand = "Tup" if form.family.kind is Kind.GET else "T"
        for inputs, output in rows[form.name]:
            attributes = form.read(engine, inputs[form.arity :])
            op = _op(form, attributes, originals)
            kids = tuple(inputs[: form.arity])
            maker = makers.get(tuple(inputs))
            is_traced = (form.name, kids, output, op) in programs
            rule = "" if is_traced or maker is None else engine.string(maker)
            key = (not is_traced, form.name, repr(sorted(attributes.items())))
            enodes.append(ENode(op, tuple((operand, k) for k in kids), (form.output, output), rule, is_traced, key))
    stones = {name: [("T", output) for _, output in rows[name]] for name in named}
    return Frozen(enodes, nodes, stones)


def _sort(node: Node) -> str:
    return "Tup" if isinstance(node.type, TupleType) else "T"


def _op(form: Form, attributes: Mapping[str, Any], originals: Mapping[Op, Op]) -> Op:
    """The op, and the very instance that was inserted when there was one: it may carry data beside its attributes."""
    try:
        op = form.family.entry(**attributes)
    except TypeError:  # data that is no attribute: only inserted ops have it
        op = next(o for o in originals if form_of(o, form.arity) == form and o.attributes() == dict(attributes))
    return originals.get(op, op)


def snapshot(frozen: Frozen, order: Sequence[Node], traced: int, roots: Sequence[int]) -> Snapshot:
    """Dense numbers: classes by their first inserted node, then by discovery from there; e-nodes by class."""
    members = _members(frozen.enodes)
    number = _numbered(frozen, members, traced)
    types = _types(frozen, members, order, number)
    out = Snapshot([], [], [], [], [types[c] for c in number], [number[frozen.nodes[r]] for r in roots])
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
    out.class_of = {node: number[frozen.nodes[i]] for i, node in enumerate(order[:traced]) if frozen.nodes[i] in number}
    return out


def _members(enodes: Sequence[ENode]) -> dict[Class, list[ENode]]:
    """E-nodes by class, without those that need a class that only stepping stones are in."""
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


def _numbered(frozen: Frozen, members: Mapping[Class, list[ENode]], traced: int) -> dict[Class, int]:
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
        mine = sorted(members[queue[at]], key=lambda e: (*e.key, tuple(number.get(k, len(number)) for k in e.kids)))
        for enode in mine:
            for kid in enode.kids:
                visit(kid)
        at += 1
    return number


def _types(frozen: Frozen, members: Mapping[Class, list[ENode]], order: Sequence[Node],
           number: Mapping[Class, int]) -> dict[Class, Type | TupleType]:  # fmt: skip
    """The type of every class, inferred through its e-nodes, all of which must agree."""
    types: dict[Class, Type | TupleType] = {frozen.nodes[i]: node.type for i, node in enumerate(order)}
    waiting = list(number)
    while waiting:
        later = []
        for cls in waiting:
            pending = False
            for enode in members[cls]:
                if any(k not in types for k in enode.kids):
                    pending = True
                    continue
                found = enode.op.infer(*(types[k] for k in enode.kids))  # type: ignore[arg-type]
                known = types.setdefault(cls, found)
                if known != found:
                    raise CompileError(f"rule {enode.rule!r} put {enode.op.name} of type {found} into a class of type {known}")
            if pending or cls not in types:
                later.append(cls)
        if len(later) == len(waiting):
            raise CompileError(f"{len(later)} e-classes have no type")
        waiting = later
    return types
