"""From statements to a `KernelSource`: the filled template, what is bound and how, names, figures
and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...templates import render
from ...templates.library import functions
from ..errors import CompileError
from ..ir import Kind, Node
from ..ops.leaf import Literal
from ..schedule.images import LARGEST
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.selection import Group, body
from ..schedule.target import Target
from ..types import DTYPES
from .emitter import Access, Emitter
from .expression import spell
from .lanes import ELEMENT
from .wgsl import literal, storage_type

Choice = TypeVar("Choice")

_MOST_IMAGES = 12  # of a kernel; Mesa has many more


@dataclass(frozen=True, slots=True)
class Job:
    """A group to lower, and where its values lie: outputs and operands are nodes of the program or
    scratch."""

    group: Group
    target: Target
    memory: Mapping[Node, Stored]  # what holds an operand
    # what an output is written to, when not itself
    stores: Mapping[Node, Stored] = field(default_factory=dict[Node, Stored])
    hints: Mapping[str, object] = field(default_factory=dict[str, object])

    def ranked(self, found: Sequence[Choice]) -> Choice:
        """Of choices, the best first, the one that the hint `rank` names: 0 for the best."""
        rank = self.hints.get("rank", 0)
        assert isinstance(rank, int)
        return found[min(rank, len(found) - 1)]

    @property
    def count(self) -> int:
        """How many choices `ranked` needs."""
        rank = self.hints.get("rank", 0)
        assert isinstance(rank, int)
        return rank + 1

    def held_by(self, output: Node) -> Stored:
        return self.stores.get(output, output)

    def part(
        self,
        outputs: Sequence[Node],
        memory: Mapping[Node, Stored] | None = None,
        stores: Mapping[Node, Stored] | None = None,
    ) -> Job:
        """The same job for other outputs."""
        memory = self.memory if memory is None else memory
        stores = self.stores if stores is None else stores
        return Job(Group(tuple(outputs), tuple(memory)), self.target, memory, stores, self.hints)


def finish(
    job: Job,
    emitter: Emitter,
    template: str,
    values: Mapping[str, object],
    grid: tuple[int, int, int],
    workgroup: tuple[int, int, int],
    flops: int | None = None,
    features: Sequence[str] = (),
) -> KernelSource:
    """The kernel whose statements `emitter` holds; `values` fill the template."""
    accesses, outputs = emitter.accesses, emitter.outputs
    main = render(template, library="", header="", **values)
    check_limits(job, len(accesses), grid, workgroup)
    text = "\n\n".join([*emitter.functions.values(), main.lstrip("\n")])
    library = functions(text)
    elements = _elements(job.target, accesses, outputs)
    text = spell(f"{library}\n\n{text}" if library else text, elements)
    used = {a.dtype for a in accesses}
    if "f16" in used or re.search(r"\bf16\b", text):  # in memory, or only rounded to on the way
        features = (*features, "shader-f16")
    nbytes = [a.size * DTYPES[a.dtype].size for a in accesses]
    return KernelSource(
        name=kernel_name(job.group),
        template=template,
        text=text,
        writes=tuple(a.stored for a in accesses[:outputs]),
        reads=tuple(a.stored for a in accesses[outputs:]),
        elements=elements,
        grid=grid,
        workgroup=workgroup,
        flops=flops if flops is not None else total_flops(body(job.group)),
        bytes_read=sum(nbytes[outputs:]),
        bytes_written=sum(nbytes[:outputs]),
        computes=computes(job, accesses),
        in_place=in_place(job, accesses, outputs),
        features=tuple(sorted(set(features))),
        trusted=True,
    )


def _elements(target: Target, accesses: Sequence[Access], outputs: int) -> tuple[str, ...]:
    """The WGSL element type of each binding; operands that are loaded over and over are images."""
    worth = [
        k
        for k, a in enumerate(accesses)
        if k >= outputs and target.images and a.reused and a.dtype == "f32" and a.size <= LARGEST
    ]
    worth += [
        k
        for k, a in enumerate(accesses)
        if k >= outputs and target.keeps and a.kept and 256 <= a.size <= LARGEST
    ]
    images = sorted(worth, key=lambda k: (not accesses[k].skewed, -accesses[k].size, k))[
        :_MOST_IMAGES
    ]
    found: list[str] = []
    for k, a in enumerate(accesses):
        if k in images:
            single = a.single or (a.size % 4 and not a.skewed)
            found.append(("image1" if single else "image4") + ("u" if a.dtype == "u32" else ""))
        else:
            plain = ELEMENT if a.paired else storage_type(a.dtype, a.vector)
            found.append("atomic<u32>" if a.atomic else plain)
    return tuple(found)


def check_limits(
    job: Job, bindings: int, grid: tuple[int, int, int], workgroup: tuple[int, int, int]
) -> None:
    """Raise CompileError where the target cannot run the kernel."""
    target, name = job.target, kernel_name(job.group)
    if bindings > target.max_bindings:
        most = target.max_bindings
        raise CompileError(
            f"illegal kernel {name}: {target.name} binds {most} arrays, got {bindings}"
        )
    if math.prod(workgroup) > target.max_invocations or max(grid) > target.max_groups:
        raise CompileError(
            f"illegal kernel {name}: grid {grid} of {workgroup} is beyond {target.name}"
        )


def in_place(job: Job, accesses: Sequence[Access], outputs: int) -> frozenset[tuple[int, int]]:
    """(k, j) where output k may take operand j's memory: every element is read only by the
    invocation that then writes it, and not after.

    Drivers take bindings for memory that does not overlap. So the output is one that is computed
    from the operand: its store waits for the load, while a driver may move the load of another
    output's operand behind it (on NVIDIA such a kernel takes four times as long).
    """
    found: set[tuple[int, int]] = set()
    for k, out in enumerate(accesses[:outputs]):
        written, needed = dict(out.at), _operands_of(job, out.stored)
        for j, operand in enumerate(accesses[outputs:]):
            same = operand.size == out.size and DTYPES[operand.dtype].size == DTYPES[out.dtype].size
            if (
                same
                and operand.at
                and (needed is None or id(operand.stored) in needed)
                and all(at in written and phase <= written[at] for at, phase in operand.at)
            ):
                found.add((k, j))
    return frozenset(found)


def _operands_of(job: Job, stored: Stored) -> set[int] | None:
    """The ids of what holds the operands that an output is computed from; None for scratch that is
    no output of the group."""
    nodes = [o for o in job.group.outputs if job.held_by(o) is stored]
    if not nodes:
        return None
    found, seen = set[int](), set(nodes)
    while nodes:
        node = nodes.pop()
        operands = (node,) if node in job.memory else node.operands
        for operand in operands:
            if operand in job.memory:
                found.add(id(job.memory[operand]))
            elif operand not in seen:
                seen.add(operand)
                nodes.append(operand)
    return found


def total_flops(nodes: Iterable[Node]) -> int:
    return sum(
        n.op.flops(n.type, *(o.type for o in n.operands)) for n in nodes if n.kind is not Kind.GET
    )


def kernel_name(group: Group) -> str:
    """The ops that a kernel runs, in order, each once: `max_sub_exp_sum_div`. A kernel with several
    results comes first."""
    silent = (Kind.LITERAL, Kind.IOTA, Kind.MOVE, Kind.GET)
    nodes = sorted(body(group), key=lambda n: n.kind is not Kind.TUPLE)
    names = list(dict.fromkeys(n.op.name for n in nodes if n.kind not in silent))
    names = names or list(dict.fromkeys(n.op.name for n in body(group))) or ["copy"]
    return "_".join(names[:4] + (["and", f"{len(names) - 4}", "more"] if len(names) > 4 else []))


def computes(job: Job, accesses: Sequence[Access], limit: int = 240) -> str:
    """One line in the IR's notation, with `$k` for bindings; what would make it too long is left
    out."""
    names = {id(a.stored): f"${k}" for k, a in enumerate(accesses)}
    operands = {node: names[id(held)] for node, held in job.memory.items() if id(held) in names}
    written = [(names.get(id(job.held_by(o))), o) for o in job.group.outputs]
    text = ""
    for depth in range(1, 13):
        longer = "; ".join(f"{name} = {_term(o, operands, depth)}" for name, o in written if name)
        if text and (len(longer) > limit or longer == text):
            break
        text = longer
    return text


def _term(node: Node, operands: Mapping[Node, str], depth: int) -> str:
    if node in operands:
        return operands[node]
    if isinstance(node.op, Literal):
        return f"{node.op.number:g}" if node.dtype.kind == "f" else str(node.op.number)
    if node.op.name in ("broadcast", "reshape"):
        return _term(node.operands[0], operands, depth)  # said by the shapes
    if depth == 0:
        return "..."
    return f"{node.op.name}({', '.join(_term(o, operands, depth - 1) for o in node.operands)})"


def identity(combine_identity: Mapping[str, float], dtype: str) -> str:
    return literal(combine_identity[DTYPES[dtype].kind], DTYPES[dtype])


def scratch(label: str, shape: tuple[int, ...], dtype: str) -> Scratch:
    return Scratch(label, shape, dtype)
