"""From groups to a plan: kernels in order, a place for every value, and what each kernel binds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from ..errors import CompileError, IRError
from ..ir import Node
from ..types import DTYPES
from .horizontal import Merged, Row, bound, rows
from .horizontal import merge as find_merged
from .images import AHEAD, TEXELS, with_images
from .kernel import KernelSource
from .memory import Item, Layout, aligned, lay_out, most_alive
from .order import Step
from .parts import TABLE, merged
from .plan import Access, Binding, Buffer, Constant, Kernel, Plan, Repeat
from .program import Array, Lower, Program
from .recompute import recomputed
from .repeat import Embedding, LoopSource, opened
from .selection import Group, Selection, body
from .target import Target
from .times import Times, parts_of

Place = tuple[str, int] | tuple[str, int, int]
Made = tuple[tuple[Group, ...], ...]
"""For each kernel of a plan the groups that it computes; () for a kernel of a loop's body."""


def assemble(
    selection: Selection,
    target: Target,
    lower: Lower,
    merge: bool = True,
    max_memory: int | None = None,
    made: dict[int, Made] | None = None,
) -> Plan:
    """The plan of a selection; `lower` gives the kernels of a group.

    Of the selection's order, the same with donated inputs read earlier, and orders that free
    scratch early, the one that needs least memory is taken. Independent kernels of one form are
    merged where that takes little memory (with `merge`). Raises CompileError when a value is too
    large for the target, and when `max_memory` bytes are too few for a call, even where values are
    computed again instead of kept. `made` is given the groups of each kernel, by the id of a plan.
    """
    program = Program(selection, target, lower)
    program.made = made
    plain = _smallest(program, target)
    merged = _with_merged(program, plain, target) if merge else None
    plan = (merged or plain).plan()
    if max_memory is None or plan.peak_bytes <= max_memory:
        return plan
    plan = plan if merged is None else plain.plan()
    return plan if plan.peak_bytes <= max_memory else _limited(plain, target, max_memory)


class TooLittleMemory(CompileError):
    """`max_memory` is too little; `least` bytes would do."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def _limited(plain: _Memory, target: Target, limit: int) -> Plan:
    """The plan with images copied late and values computed again, within a limit of bytes."""
    time = Times(plain.program.groups, plain.steps, target.profile.launch)
    plan = plain.plan(ahead=1)
    if plan.peak_bytes <= limit:
        return plan
    fixed, least = plan.peak_bytes - sum(plan.arena), plan.peak_bytes
    budget = limit - fixed
    for _ in range(MOST_TRIES):
        program, steps = recomputed(plain.program, plain.steps, max(budget, 0), time)
        found = _smallest(program.ordered(steps), target).plan(ahead=1)
        least = min(least, found.peak_bytes)
        if found.peak_bytes <= limit:
            return found
        if budget <= 0:
            break
        budget -= max(found.peak_bytes - limit, limit // 64)
    raise TooLittleMemory(
        f"{plan.name} cannot run on {target.name} with max_memory={limit} bytes: arguments, "
        f"results, constants and images take {fixed}, and the least found, with values computed "
        f"again, is {least}",
        least,
    )


MOST_TRIES = 5  # budgets that are tried for a limit


def _smallest(program: Program, target: Target) -> _Memory:
    """Memory for the best order. Raises _Unplaceable when no order can place what is merged."""
    found: list[_Memory] = []
    refused: _Unplaceable | None = None
    for order in program.orders():
        try:
            found.append(_Memory(program, order, target))
        except _Unplaceable as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    given, *others = found
    best = min(others, key=lambda m: m.alive, default=given)
    return min(given, best, key=lambda m: m.nbytes)


def _with_merged(program: Program, plain: _Memory, target: Target) -> _Memory | None:
    """The program with all that can be merged, or only what reads little scratch, if that pays."""
    arguments = sum(v.nbytes for v in program.values if v.role == "input")
    room = (plain.nbytes + arguments) // ROOM
    profile = target.profile
    for launches in (math.inf, 1.0, 1 / 16):
        found = find_merged(program, target, launches)
        while found:
            try:
                memory = _smallest(program.merged(found), target)
            except _Unplaceable as error:
                found = [step for step in found if step not in error.steps]
                continue
            grown = memory.nbytes - plain.nbytes
            saved = (len(plain.steps) - len(memory.steps)) * profile.launch
            if grown <= room or 2 * grown < saved * profile.bandwidth:
                return memory
            break
    return None


ROOM = 8  # merged kernels may add an eighth to the memory of a call, or what is written sooner


class _Unplaceable(Exception):
    """The values of merged steps cannot lie together."""

    def __init__(self, steps: Sequence[Merged]) -> None:
        self.steps = steps


class _Memory:
    """Where the values of a program lie when its steps run in a given order."""

    def __init__(self, program: Program, order: Sequence[int], target: Target) -> None:
        self._pairs: dict[int, list[tuple[int, int]]] = {}  # see _in_place
        self.program = program
        self.steps = [program.steps[k] for k in order]
        self.alignment, self.limit = target.offset_alignment, target.max_buffer_bytes
        self.launch = target.profile.launch
        self.first_write: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        for k, step in enumerate(self.steps):
            self.first_write = dict.fromkeys(step.writes, k) | self.first_write
            self.last_read |= dict.fromkeys(step.reads, k)
            self.last_use |= dict.fromkeys((*step.writes, *step.reads), k)
        self.over = program.pairs(self._may_overwrite)
        self.packs: list[int] = []  # bytes
        self.packed: dict[int, tuple[str, int, int]] = {}
        self.row_of: dict[int, Row] = {}  # of scratch
        self._place_rows(target)
        self.slots: list[Item] = []
        self.slot_of: dict[int, int] = {}
        for k in range(len(self.steps)):
            self._allocate(k)
        values = enumerate(program.values)
        self.made = sum(v.nbytes for i, v in values if v.role == "output" and i not in self.over)

    def _place_rows(self, target: Target) -> None:
        """Packs for the arguments that merged steps bind together; notes their rows of scratch."""
        steps = [step for step in self.steps if isinstance(step, Merged)]
        most = min(target.max_binding_bytes, self.limit)
        kept = set(self.over.values())
        for row in rows(steps, self.over, self.program, self.alignment):
            roles = {self.program.values[v].role for v in row.offsets}
            if roles == {"scratch"} and row.nbytes <= most:
                self.row_of |= dict.fromkeys(row.offsets, row)
            elif roles == {"input"} and row.offsets.keys() <= kept and row.nbytes <= most:
                if not self.packs or self.packs[-1] + row.nbytes > self.limit:
                    self.packs.append(0)
                for value, offset in row.offsets.items():
                    self.packed[value] = ("pack", len(self.packs) - 1, self.packs[-1] + offset)
                self.packs[-1] += row.nbytes
            else:
                values = row.offsets.keys()
                inside = [s for s in steps if any(self.over.get(v, v) in values for v in bound(s))]
                raise _Unplaceable(inside)

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.slots, self.alignment, self.limit)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch and of results that get memory of their own."""
        return self.layout.nbytes + self.made

    @property
    def alive(self) -> int:
        """`nbytes` for a layout without gaps."""
        return most_alive(self.slots, self.alignment) + self.made

    def _may_overwrite(self, output: int, input_: int) -> bool:
        write, read = self.first_write.get(output, -1), self.last_read.get(input_, -1)
        return write > read or (write == read >= 0 and (output, input_) in self._in_place(write))

    def _in_place(self, k: int) -> list[tuple[int, int]]:
        """Pairs of values (written, read) of step k that may share memory."""
        if k not in self._pairs:
            step, values = self.steps[k], self.program.values
            pairs = [(step.writes[i], step.reads[j]) for i, j in sorted(step.source.in_place)]
            self._pairs[k] = [(w, r) for w, r in pairs if values[w].size == values[r].size]
        return self._pairs[k]

    def _allocate(self, k: int) -> None:
        """Gives slots to the scratch of step k; a value that dies in place hands its slot on."""
        values = self.program.values
        heirs: dict[int, int] = {}  # the dying value -> the value that takes its memory
        for written, read in self._in_place(k):
            dies = read in self.slot_of and self.last_use[read] == k
            fresh = values[written].role == "scratch" and written not in self.slot_of
            if read in self.row_of or written in self.row_of:
                continue
            if dies and fresh and read not in heirs and written not in heirs.values():
                heirs[read] = written
                slot = self.slot_of[written] = self.slot_of[read]
                old = self.slots[slot]
                self.slots[slot] = Item(old.nbytes, old.first, self.last_use[written])
        for value in (*self.steps[k].writes, *self.steps[k].reads):
            if values[value].role == "scratch" and value not in self.slot_of:
                row = self.row_of.get(value)
                held = [value] if row is None else list(row.offsets)
                nbytes = values[value].nbytes if row is None else row.nbytes
                self.slot_of |= dict.fromkeys(held, len(self.slots))
                self.slots.append(Item(nbytes, k, max(self.last_use[v] for v in held)))

    def place(self, value: int) -> Place:
        """Where a value lies; a constant by its value's number."""
        match self.program.values[value].role:
            case "input" if value in self.packed:
                return self.packed[value]
            case "input":
                return ("input", self.program.argument[value])
            case "output" if value in self.over:
                return self.place(self.over[value])
            case "output":
                return ("output", self.program.result[value])
            case "constant":
                return ("constant", value)
            case _:
                block, offset = self.layout.places[self.slot_of[value]]
                row = self.row_of.get(value)
                return ("arena", block, offset + (row.offsets[value] if row else 0))

    @cached_property
    def kept(self) -> list[Step]:
        """The steps without copies of values to where they lie."""
        return [s for s in self.steps if not s.source.copies or not self._stays(s)]

    @cached_property
    def first_kept(self) -> dict[int, int]:
        """The number of the first kernel that writes each value."""
        found: dict[int, int] = {}
        for k, step in enumerate(self.kept):
            for value in step.writes:
                found.setdefault(value, k)
        return found

    def _stays(self, step: Step) -> bool:
        return self.place(step.writes[0]) == self.place(step.reads[0])

    def plan(self, ahead: int = AHEAD) -> Plan:
        """The plan, with WGSL for the access that this layout needs; images `ahead` kernels."""
        program, graph = self.program, self.program.graph
        self._check_written()
        table = _Buffers(self)
        inputs = tuple(table.number(value) for value in program.inputs)
        outputs = tuple(table.number(result.value) for result in program.results)
        time = Times(program.groups, self.kept, self.launch)
        kernels: list[Kernel] = []
        loops: list[Repeat] = []
        made: list[tuple[Group, ...]] = []
        of = program.groups
        for step in self.kept:
            if isinstance(step.source, LoopSource):
                self._embed(step.source, table, kernels, loops)
                made += [()] * (len(kernels) - len(made))
            else:
                kernels.append(self._kernel(step, step.source, table, time(step)))
                made.append(tuple(g for p in parts_of(step) if isinstance(g := of[p.group], Group)))
        scratch = sum(aligned(program.values[i].nbytes, self.alignment) for i in self.slot_of)
        plan = Plan(
            name=graph.name,
            buffers=tuple(table.buffers),
            kernels=tuple(kernels),
            inputs=inputs,
            outputs=outputs,
            donated=tuple(sorted(set(graph.donated))),
            constants=tuple(table.constants),
            arena=self.layout.blocks,
            scratch_bytes=scratch,
            features=tuple(sorted({f for step in self.kept for f in step.source.features})),
            loops=tuple(loops),
            packs=tuple(self.packs),
        )
        plan = with_images(opened(plan), ahead)
        if program.made is not None and len(plan.kernels) == len(made):
            program.made[id(plan)] = tuple(made)
        return plan

    def _embed(
        self, source: LoopSource, table: _Buffers, kernels: list[Kernel], loops: list[Repeat]
    ) -> None:
        """Adds the kernels of a loop's body."""
        program = self.program
        results = [table.number(program.number(v)) for v in source.results]
        twins = {k: table.number(program.number(v)) for k, v in source.twins.items()}
        blocks = [self._block(program.number(v)) for v in source.blocks]
        operands = [table.number(program.number(v)) for v in source.operands]
        for k, init in source.seeds.items():  # where it lies already, it was not copied
            number, result = program.number(init), program.number(source.results[k])
            if self.place(number) == self.place(result):
                operands[source.first_carry + k] = table.number(number)
        Embedding(
            source, operands, results, twins, blocks, table.add, table.buffers, table.constants,
            kernels, loops,
        ).embed()  # fmt: skip

    def _block(self, value: int) -> tuple[int, int]:
        """The block of scratch in which a value lies, and its offset."""
        match self.place(value):
            case ("arena", block, offset):
                return block, offset
            case place:
                raise AssertionError(f"scratch lies at {place}")

    def _check_written(self) -> None:
        for k, step in enumerate(self.steps):
            for number in step.reads:
                value = self.program.values[number]
                made = value.role in ("input", "constant") or value.size == 0
                if not made and self.first_write.get(number, k) >= k:
                    raise IRError(f"kernel {step.source.name} reads {value!r} before it is written")

    def _kernel(
        self, step: Step, source: KernelSource, table: _Buffers, predicted_ns: float
    ) -> Kernel:
        if isinstance(step, Merged):
            return self._merged_kernel(step, source, table, predicted_ns)
        numbers = [(table.number(value),) for value in bound(step)]
        return self._bound_kernel(step, source, numbers, len(step.writes), table, predicted_ns)

    def _merged_kernel(
        self, step: Merged, source: KernelSource, table: _Buffers, predicted_ns: float
    ) -> Kernel:
        """The parts' text with the places of what they bind."""
        sources = step.sources
        first = sources[0]
        numbers: list[tuple[int, ...]] = []
        offsets: list[tuple[int, ...] | None] = []
        for k, shared in enumerate(step.shared):
            held = [table.number(value) for value in step.values(k)]
            numbers.append((held[0],) if shared else tuple(dict.fromkeys(held)))
            if first.elements[k] in TEXELS:
                layers = tuple(numbers[-1].index(n) for n in held)
                offsets.append(None if shared else layers)
                continue
            starts = [table.buffers[n].place[-1] for n in held]
            lowest = min(starts)  # type: ignore[type-var]
            offsets.append(None if shared else tuple(int(s) - int(lowest) for s in starts))
        text, entries = merged(sources, offsets, source.grid)
        source = replace(source, text=text, writes=first.writes, reads=first.reads)
        if entries:
            numbers.append((table.numbers(entries),))
            reads = (*first.reads, first.reads[0] if first.reads else first.writes[0])
            text = text.replace(f"${TABLE}", f"${len(first.elements)}")
            source = replace(source, text=text, reads=reads, elements=(*first.elements, "u32"))
        kernel = self._bound_kernel(step, source, numbers, len(first.writes), table, predicted_ns)
        return replace(kernel, computes=f"{len(step.parts)} times: {kernel.computes}")

    def _bound_kernel(
        self,
        step: Step,
        source: KernelSource,
        numbers: Sequence[tuple[int, ...]],
        writes: int,
        table: _Buffers,
        predicted_ns: float,
    ) -> Kernel:
        """A kernel whose binding k is of the buffers `numbers[k]`."""
        program = self.program
        memory = [table.buffers[n[0]].place[:2] for n in numbers]
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
            computes=source.describe([f"%{table.buffers[n[0]].name}" for n in numbers]),
            source=_texts(step, program, program.graph.sources),
            rules=_texts(step, program, program.made_by),
            trusted=source.trusted,
            writes=writes,
            updates=tuple((k, table.number(program.number(v))) for k, v in source.updates),
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

    memory: _Memory
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    constants: list[Constant] = field(default_factory=list[Constant])
    _numbers: dict[int, int] = field(default_factory=dict[int, int])
    _names: set[str] = field(default_factory=set[str])

    def number(self, value: int) -> int:
        """The buffer of a value."""
        if value not in self._numbers:
            array = self.memory.program.values[value]
            if array.role == "constant":
                name, place = array.name or f"c{len(self.constants)}", self._constant(array)
            else:
                name, place = array.name or self._scratch_name(value), self.memory.place(value)
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
        k = self.memory.first_kept.get(value)
        if k is None:
            return "empty"
        made = [w for w in self.memory.kept[k].writes if w in self.memory.slot_of]
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
