"""Lowering once what a program repeats: groups of one structure, as in every layer of a model,
share their WGSL."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from ..ir import Kind, Node
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.selection import Group, body
from ..schedule.target import Target

Lower = Callable[[Group, Target], list[KernelSource]]


class Repeated:
    """`lower` with a memory: a group that differs from an earlier one only in its operands'
    identity gets its kernels."""

    def __init__(self, lower: Lower) -> None:
        self._lower = lower
        self._known: dict[Hashable, tuple[list[Node], list[KernelSource]]] = {}

    def __call__(self, group: Group, target: Target) -> list[KernelSource]:
        operands = [o for o in group.operands if o not in group.outputs]
        nodes = [*operands, *body(group)]
        key = (target, structure(group, nodes, len(operands)))
        found = self._known.get(key)
        if found is None:
            kernels = self._lower(group, target)
            self._known[key] = nodes, kernels
            return kernels
        twin: dict[Stored, Stored] = dict(zip(found[0], nodes, strict=True))
        for kernel in found[1]:  # each group has scratch of its own
            twin.update({v: replace(v) for v in kernel.writes if isinstance(v, Scratch)})
        return [
            replace(
                k,
                reads=tuple(twin[v] for v in k.reads),
                writes=tuple(twin[v] for v in k.writes),
                updates=tuple((i, twin[v]) for i, v in k.updates),
            )
            for k in found[1]
        ]


def structure(group: Group, nodes: list[Node], operands: int) -> Hashable:
    """A group up to the identity of what it reads, its first `operands` nodes: ops, wiring, types,
    outputs and which operands are equal leaves."""
    number = {n: i for i, n in enumerate(nodes)}
    rows = []
    for i, n in enumerate(nodes):
        if i < operands:
            rows.append((n.type, n.kind is Kind.CONSTANT))
        else:
            rows.append((n.op, tuple(number[o] for o in n.operands)))
    return tuple(rows), tuple(number[o] for o in group.outputs)
