"""The NumPy interpreter: what a graph means, one op after the other. It is the oracle of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .errors import TypeMismatch
from .ir import Graph, Kind, Node, check
from .ops.move import Reshape
from .types import TupleType, Type

Precision = type[np.float32] | type[np.float64]
# An array may be given where its kind of number, or a higher one, is needed.
_KINDS = {"b": 0, "i": 1, "u": 1, "f": 2}


class ChosenGroup(Protocol):
    """The part of a schedule's group that has a meaning without a device."""

    @property
    def outputs(self) -> tuple[Node, ...]: ...
    @property
    def operands(self) -> tuple[Node, ...]: ...


class ChosenProgram(Protocol):
    """The part of a schedule's selection that has a meaning without a device."""

    @property
    def graph(self) -> Graph: ...
    @property
    def groups(self) -> Sequence[ChosenGroup]: ...


def evaluate(
    graph: Graph, inputs: Sequence[Any], precision: Precision = np.float32
) -> list[np.ndarray]:
    """The outputs of `graph` for `inputs`.

    With precision=np.float64 every float is a float64 from the leaves on, and inputs keep their
    own double precision; integers stay 32 bits wide. A value is dropped after its last use.
    """
    values = arguments(graph, inputs, precision)
    return [np.array(v, order="C") for v in _run(graph.outputs, values, precision)]


def evaluate_selection(
    selection: ChosenProgram, inputs: Sequence[Any], precision: Precision = np.float32
) -> list[np.ndarray]:
    """The outputs of a chosen program, group by group; each sees only what earlier ones stored."""
    graph = selection.graph
    stored: dict[Node, Any] = dict(arguments(graph, inputs, precision))
    last = {o: k for k, group in enumerate(selection.groups) for o in group.operands}
    needed = {_base(o) for o in graph.outputs}
    for k, group in enumerate(selection.groups):
        seen = {o: _operand(o, stored, k) for o in group.operands if o not in group.outputs}
        results = _run(group.outputs, seen, precision)
        stored.update(zip(group.outputs, results, strict=True))
        for operand in group.operands:
            if last[operand] == k and operand not in needed:
                stored.pop(operand, None)
    constants = {n: n.op.evaluate() for n in needed if n.kind is Kind.CONSTANT}
    for node in needed:
        check(node in stored or node in constants, f"output {node!r} is stored by no group")
    return [np.array(v, order="C") for v in _run(graph.outputs, constants | stored, precision)]


def arguments(graph: Graph, inputs: Sequence[Any], precision: Precision) -> dict[Node, np.ndarray]:
    """The inputs' nodes with arrays of their types; raises TypeMismatch when one does not fit."""
    if len(inputs) != len(graph.inputs):
        need = len(graph.inputs)
        raise TypeMismatch(f"graph {graph.name} takes {need} inputs, got {len(inputs)}")
    names = graph.input_names or tuple(f"input {i}" for i in range(len(inputs)))
    values: dict[Node, np.ndarray] = {}
    for node, name, value in zip(graph.inputs, names, inputs, strict=True):
        array = np.asarray(value)
        to = _dtype(node.type, precision)
        if array.shape != node.shape or _KINDS.get(array.dtype.kind, 9) > _KINDS[to.kind]:
            raise TypeMismatch(f"{name} needs {node.type!r}, got {array.dtype}{list(array.shape)}")
        values[node] = array.astype(to, copy=False)
    return values


def _run(roots: Sequence[Node], known: Mapping[Node, Any], precision: Precision) -> list[Any]:
    """The values of `roots`, computed from `known` values."""
    order = _between(roots, known)
    last = {operand: node for node in order for operand in node.operands}
    values, keep = dict(known), set(roots)
    for node in order:
        check(node.kind is not Kind.INPUT, f"input {node!r} has no value")
        with np.errstate(all="ignore"):  # infinities and NaN are values like others
            result = node.op.evaluate(*(values[o] for o in node.operands))
        values[node] = _fitted(node, result, precision)
        for operand in node.operands:
            if last[operand] is node and operand not in keep:
                values.pop(operand, None)
    return [values[r] for r in roots]


def _between(roots: Sequence[Node], known: Mapping[Node, Any]) -> list[Node]:
    """The nodes under `roots` down to `known` ones, operands first, without recursion."""
    done: set[Node] = set(known)
    order: list[Node] = []
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            order.append(node)
        else:
            stack.append((node, True))
            stack.extend((o, False) for o in reversed(node.operands) if o not in done)
    return order


def _fitted(node: Node, value: Any, precision: Precision) -> Any:
    """`value` in the dtype of `node`, after a check of its shape."""
    if isinstance(node.type, TupleType):
        name, types, count = node.op.name, node.type.items, len(value)
        check(count == len(types), f"{name} gave {count} results where its type is {node.type!r}")
        return tuple(_array(node, v, t, precision) for v, t in zip(value, types, strict=True))
    return _array(node, value, node.type, precision)


def _array(node: Node, value: Any, type_: Type, precision: Precision) -> np.ndarray:
    array, to = np.asarray(value), _dtype(type_, precision)
    same = array.dtype == to or (array.dtype.kind == "f" and to.kind == "f")
    fits = same and array.shape == type_.shape
    check(fits, f"{node.op.name} gave {array.dtype}{list(array.shape)} where its type is {type_!r}")
    with np.errstate(over="ignore"):
        return array.astype(to, copy=False)


def _dtype(type_: Type, precision: Precision) -> np.dtype:
    double = precision is np.float64 and type_.dtype.kind == "f"
    return np.dtype(np.float64) if double else type_.dtype.numpy


def _operand(node: Node, stored: Mapping[Node, Any], group: int) -> Any:
    if node.kind is Kind.CONSTANT:
        return node.op.evaluate()
    check(node in stored, f"group {group} reads {node!r}, which no earlier group stores")
    return stored[node]


def _base(node: Node) -> Node:
    """The value whose memory holds `node`: itself without reshapes."""
    while isinstance(node.op, Reshape):
        node = node.operands[0]
    return node
