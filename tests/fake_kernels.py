"""Kernels that are never run, one an op or group, for tests of how plans are put together."""

from __future__ import annotations

from eggpu.compiler.ir import Graph, Kind, Node, make
from eggpu.compiler.ops import ELEMENTWISE, input_node
from eggpu.compiler.schedule.kernel import KernelSource, Scratch, Stored
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, stored_base
from eggpu.compiler.schedule.target import Target
from eggpu.compiler.types import Type, f32


def source(
    name: str, writes: tuple[Stored, ...], reads: tuple[Stored, ...], in_place=(), grid=(1, 1, 1)
) -> KernelSource:
    """A kernel that is never run: its text only shows what is asked of it."""
    names = ", ".join(f"${len(writes) + k}" for k in range(len(reads)))
    return KernelSource(
        name=name,
        template="fake.wgsl.j2",
        text="fn main() {}",
        writes=writes,
        reads=reads,
        elements=("f32",) * (len(writes) + len(reads)),
        grid=grid,
        workgroup=(64, 1, 1),
        flops=10,
        bytes_read=4 * len(reads),
        bytes_written=4 * len(writes),
        computes=f"{name}({names})",
        in_place=frozenset(in_place),
    )


def lower(group: Group, target: Target) -> list[KernelSource]:
    """One kernel a group; elementwise results may take the memory of operands of their size."""
    safe = [
        (i, j)
        for i, out in enumerate(group.outputs)
        for j, operand in enumerate(group.operands)
        if out.kind is Kind.ELEMENTWISE and operand.type == out.type
    ]
    grid = (0, 1, 1) if all(o.type.size == 0 for o in group.outputs) else (1, 1, 1)
    return [source(group.outputs[0].op.name, group.outputs, group.operands, safe, grid)]


def lower_split(group: Group, target: Target) -> list[KernelSource]:
    """Two kernels a group, with scratch between them."""
    if all(o.type.size == 0 for o in group.outputs):
        return []
    partial = Scratch("partial", (3,), "f16")
    name = group.outputs[0].op.name
    second = source(f"{name}_join", group.outputs, (partial,))
    return [source(name, (partial,), group.operands), second]


def inputs_of(count: int, shape: tuple[int, ...] = (8,)) -> list[Node]:
    return [input_node(i, f"x{i}", Type(shape, f32)) for i in range(count)]


def graph_of(inputs: list[Node], outputs: list[Node], donated=(), names=()) -> Graph:
    labels = tuple(n.op.label for n in inputs)
    return Graph("g", tuple(inputs), tuple(outputs), labels, names, tuple(donated))


def add(a: Node, b: Node) -> Node:
    return make(ELEMENTWISE["add"], a, b)


def tanh(x: Node) -> Node:
    return make(ELEMENTWISE["tanh"], x)


def each(graph: Graph) -> Selection:
    """Every op its own kernel, but reshapes."""
    groups = [
        Group((n,), tuple(dict.fromkeys(map(stored_base, n.operands))))
        for n in graph.nodes()
        if n.operands and n is stored_base(n)
    ]
    return Selection(graph, tuple(groups))


def place(plan: Plan, name: str) -> tuple:
    return next(b.place for b in plan.buffers if b.name == name)
