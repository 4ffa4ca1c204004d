"""From placed steps to a plan: buffers and constants by number, and of each kernel its bindings and
its WGSL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from ..errors import IRError
from ..ir import Node
from ..types import DTYPES
from .horizontal import Merged, bound
from .images import AHEAD, TEXELS, with_images
from .kernel import KernelSource
from .memory import aligned
from .order import Step
from .parts import TABLE, merged
from .placement import Place, Placement
from .plan import Access, Binding, Buffer, Constant, Kernel, Plan, Repeat
from .program import Array, Program
from .repeat import Embedding, LoopSource, opened
from .selection import Group, body
from .times import Times, parts_of


def build(placement: Placement, ahead: int = AHEAD) -> Plan:
    """The plan, with WGSL for the access that the placement needs; images `ahead` kernels."""
    return _Builder(placement).plan(ahead)


class _Builder:
    def __init__(self, at: Placement) -> None:
        self.at, self.program = at, at.program
        self.table = _Buffers(at)

    def plan(self, ahead: int) -> Plan:
        program, graph, table = self.program, self.program.graph, self.table
        self._check_written()
        inputs = tuple(table.number(value) for value in program.inputs)
        outputs = tuple(table.number(result.value) for result in program.results)
        time = Times(program.groups, self.at.kept, self.at.launch)
        kernels: list[Kernel] = []
        loops: list[Repeat] = []
        made: list[tuple[Group, ...]] = []
        of = program.groups
        for step in self.at.kept:
            if isinstance(step.source, LoopSource):
                self._embed(step.source, kernels, loops)
                made += [()] * (len(kernels) - len(made))
            else:
                kernels.append(self._kernel(step, step.source, time(step)))
                made.append(tuple(g for p in parts_of(step) if isinstance(g := of[p.group], Group)))
        scratch = sum(aligned(program.values[i].nbytes, self.at.alignment) for i in self.at.slot_of)
        plan = Plan(
            name=graph.name,
            buffers=tuple(table.buffers),
            kernels=tuple(kernels),
            inputs=inputs,
            outputs=outputs,
            donated=tuple(sorted(set(graph.donated))),
            constants=tuple(table.constants),
            arena=self.at.layout.blocks,
            scratch_bytes=scratch,
            features=tuple(sorted({f for step in self.at.kept for f in step.source.features})),
            loops=tuple(loops),
            packs=tuple(self.at.packs),
        )
        plan = with_images(opened(plan), ahead)
        if program.made is not None and len(plan.kernels) == len(made):
            program.made[id(plan)] = tuple(made)
        return plan

    def _embed(self, source: LoopSource, kernels: list[Kernel], loops: list[Repeat]) -> None:
        """Adds the kernels of a loop's body."""
        program, table = self.program, self.table
        results = [table.number(program.number(v)) for v in source.results]
        twins = {k: table.number(program.number(v)) for k, v in source.twins.items()}
        blocks = [self._block(program.number(v)) for v in source.blocks]
        operands = [table.number(program.number(v)) for v in source.operands]
        for k, init in source.seeds.items():  # where it lies already, it was not copied
            number, result = program.number(init), program.number(source.results[k])
            if self.at.place(number) == self.at.place(result):
                operands[source.first_carry + k] = table.number(number)
        Embedding(
            source, operands, results, twins, blocks, table.add, table.buffers, table.constants,
            kernels, loops,
        ).embed()  # fmt: skip

    def _block(self, value: int) -> tuple[int, int]:
        """The block of scratch in which a value lies, and its offset."""
        match self.at.place(value):
            case ("arena", block, offset):
                return block, offset
            case place:
                raise AssertionError(f"scratch lies at {place}")

    def _check_written(self) -> None:
        for k, step in enumerate(self.at.steps):
            for number in step.reads:
                value = self.program.values[number]
                made = value.role in ("input", "constant") or value.size == 0
                if not made and self.at.first_write.get(number, k) >= k:
                    raise IRError(f"kernel {step.source.name} reads {value!r} before it is written")

    def _kernel(self, step: Step, source: KernelSource, predicted_ns: float) -> Kernel:
        if isinstance(step, Merged):
            return self._merged_kernel(step, source, predicted_ns)
        numbers = [(self.table.number(value),) for value in bound(step)]
        return self._bound_kernel(step, source, numbers, len(step.writes), predicted_ns)

    def _merged_kernel(self, step: Merged, source: KernelSource, predicted_ns: float) -> Kernel:
        """The parts' text with the places of what they bind."""
        sources = step.sources
        first = sources[0]
        numbers: list[tuple[int, ...]] = []
        offsets: list[tuple[int, ...] | None] = []
        for k, shared in enumerate(step.shared):
            held = [self.table.number(value) for value in step.values(k)]
            numbers.append((held[0],) if shared else tuple(dict.fromkeys(held)))
            if first.elements[k] in TEXELS:
                layers = tuple(numbers[-1].index(n) for n in held)
                offsets.append(None if shared else layers)
                continue
            starts = [self.table.buffers[n].place[-1] for n in held]
            lowest = min(starts)  # type: ignore[type-var]
            offsets.append(None if shared else tuple(int(s) - int(lowest) for s in starts))
        text, entries = merged(sources, offsets, source.grid)
        source = replace(source, text=text, writes=first.writes, reads=first.reads)
        if entries:
            numbers.append((self.table.numbers(entries),))
            reads = (*first.reads, first.reads[0] if first.reads else first.writes[0])
            text = text.replace(f"${TABLE}", f"${len(first.elements)}")
            source = replace(source, text=text, reads=reads, elements=(*first.elements, "u32"))
        kernel = self._bound_kernel(step, source, numbers, len(first.writes), predicted_ns)
        return replace(kernel, computes=f"{len(step.parts)} times: {kernel.computes}")

    def _bound_kernel(
        self,
        step: Step,
        source: KernelSource,
        numbers: Sequence[tuple[int, ...]],
        writes: int,
        predicted_ns: float,
    ) -> Kernel:
        """A kernel whose binding k is of the buffers `numbers[k]`."""
        program = self.program
        memory = [self.table.buffers[n[0]].place[:2] for n in numbers]
        written = set(memory[:writes])
        accesses: list[Access] = ["read_write" if m in written else "read" for m in memory]
        for k, element in enumerate(source.elements):
            if element in TEXELS:
                accesses[k] = cast("Access", element)
        writable = frozenset(j for j, m in enumerate(memory[writes:]) if m in written)
        layered = frozenset(
            k for k, e in enumerate(source.elements) if e in TEXELS and len(numbers[k]) > 1
        )
        return Kernel(
            name=source.name,
            template=source.template,
            wgsl=source.source(_binding_names(source), writable, layered),
            bindings=tuple(
                Binding(n[0], a, more=n[1:]) for n, a in zip(numbers, accesses, strict=True)
            ),
            grid=source.grid,
            workgroup=source.workgroup,
            flops=source.flops,
            bytes_read=source.bytes_read,
            bytes_written=source.bytes_written,
            predicted_ns=predicted_ns,
            computes=source.describe([f"%{self.table.buffers[n[0]].name}" for n in numbers]),
            source=_texts(step, program, program.graph.sources),
            rules=_texts(step, program, program.made_by),
            trusted=source.trusted,
            writes=writes,
            updates=tuple((k, self.table.number(program.number(v))) for k, v in source.updates),
        )


def _binding_names(source: KernelSource) -> list[str]:
    """Names by position, so that equal kernels of a plan have equal texts and are compiled once."""
    writes, reads = range(len(source.writes)), range(len(source.reads))
    return [*(f"out{k}" for k in writes), *(f"in{k}" for k in reads)]


def _texts(step: Step, program: Program, of: Mapping[Node, str]) -> tuple[str, ...]:
    """What `of` says about the nodes that a step's groups compute, each text once."""
    groups = (program.groups[part.group] for part in parts_of(step))
    nodes = (n for g in groups if isinstance(g, Group) for n in body(g))
    return tuple(dict.fromkeys(t for n in nodes if (t := of.get(n))))


@dataclass(slots=True)
class _Buffers:
    """The plan's buffers and constants, numbered as they are asked for."""

    at: Placement
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    constants: list[Constant] = field(default_factory=list[Constant])
    _numbers: dict[int, int] = field(default_factory=dict[int, int])
    _names: set[str] = field(default_factory=set[str])

    def number(self, value: int) -> int:
        """The buffer of a value."""
        if value not in self._numbers:
            array = self.at.program.values[value]
            if array.role == "constant":
                name, place = array.name or f"c{len(self.constants)}", self._constant(array)
            else:
                name, place = array.name or self._scratch_name(value), self.at.place(value)
            self._numbers[value] = self._add(array, name, place)
        return self._numbers[value]

    def _add(self, array: Array, name: str, place: Place) -> int:
        return self.add(Buffer(name, array.shape, array.dtype, array.nbytes, array.role, place))

    def add(self, buffer: Buffer) -> int:
        """The number of a new buffer, whose name is made its own."""
        name = buffer.name
        while name in self._names:
            name += "'"
        self._names.add(name)
        self.buffers.append(replace(buffer, name=name))
        return len(self.buffers) - 1

    def _scratch_name(self, value: int) -> str:
        """`t3` is written by kernel 3, as is `t3.1`; an empty array may be written by none."""
        k = self.at.first_kept.get(value)
        if k is None:
            return "empty"
        made = [w for w in self.at.kept[k].writes if w in self.at.slot_of]
        position = made.index(value)
        return f"t{k}.{position}" if position else f"t{k}"

    def numbers(self, values: Sequence[int]) -> int:
        """The buffer of a constant that holds numbers."""
        data = np.asarray(values, "<u4").tobytes()
        self.constants.append(Constant((len(values),), "u32", data))
        at = len(self.constants) - 1
        self.buffers.append(
            Buffer(f"c{at}", (len(values),), "u32", len(data), "constant", ("constant", at))
        )
        return len(self.buffers) - 1

    def _constant(self, array: Array) -> Place:
        assert isinstance(array.key, Node)
        values: np.ndarray = array.key.op.evaluate()
        stored = np.dtype("<u4") if array.dtype == "bool" else DTYPES[array.dtype].numpy
        data = values.astype(stored.newbyteorder("<")).tobytes()
        padded = data + bytes(array.nbytes - len(data))
        self.constants.append(Constant(array.shape, array.dtype, padded))
        return ("constant", len(self.constants) - 1)
