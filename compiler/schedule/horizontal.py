"""Horizontal fusion: independent kernels of one form become the parts of one dispatch.

A value that differs between parts must lie in one device buffer with those of the other parts. So
they are placed in rows: scratch in one range of the arena, arguments that the call writes over in a
pack, one buffer that the runtime keeps them in from call to call. Merging saves launches; it keeps
values alive until the last part can run, so `assemble` weighs it against memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .images import LAYERS, TEXELS
from .kernel import KernelSource, Stored
from .order import Before, Step, stable
from .parts import Column, form, loads, mergeable
from .program import Array, Program
from .selection import Group
from .target import Target
from .tile import fold

MOST_NUMBERS = 4  # that may differ between the texts of parts
# What takes longer is not worth merging. Threads that wait for the next dispatch of a CPU cost more
# than a launch: three products of 512 by 128 by 128 take 1.05 ms one by one, 0.85 in one.
LAUNCHES = {"cpu": 24, "gpu": 16}
LOAD = 8.0  # an entry of a table costs an invocation as much as so many scalar operations


@dataclass(frozen=True, slots=True)
class Merged(Step):
    """A step of several kernels. `shared[k]` says that all parts bind one value at binding k."""

    parts: tuple[Step, ...] = ()
    shared: tuple[bool, ...] = ()

    @property
    def sources(self) -> list[KernelSource]:
        """The kernels of the parts."""
        return [kernel_of(part) for part in self.parts]

    def values(self, k: int) -> tuple[int, ...]:
        """The value of each part at binding k."""
        return tuple(bound(part)[k] for part in self.parts)


def bound(step: Step) -> tuple[int, ...]:
    """The values of a step's bindings in order."""
    return (*step.writes, *step.reads)


def kernel_of(step: Step) -> KernelSource:
    """The kernel of a step that is no loop."""
    assert isinstance(step.source, KernelSource)
    return step.source


def merge(program: Program, target: Target, launches: float = math.inf) -> list[Merged]:
    """Steps worth merging, of those whose scratch is read in the time of so many launches."""
    most = launches * target.profile.launch * target.profile.bandwidth
    long = LAUNCHES[target.kind] * target.profile.launch
    late = _late(program.before)
    alike: dict[object, list[int]] = {}
    for k, step in enumerate(program.steps):
        room = len(bound(step)) < target.max_bindings  # for a table
        part = isinstance(step.source, KernelSource) and _fits(step.source)
        group = program.groups[step.group]
        part = part and isinstance(group, Group) and group.predicted_ns <= long
        if room and part and _weight(program, step) <= most:
            key = _key(program, step)
            alike.setdefault((late[k], key), []).append(k)
    found: list[Merged] = []
    for numbers in alike.values():
        if len(numbers) > 1:
            found += _sets([program.steps[k] for k in numbers], program, target)
    return found


def contract(steps: Sequence[Step], before: Before, found: Sequence[Merged]) -> list[Step]:
    """The steps with merged ones in place of their parts, in a legal order."""
    at = {id(part): m for m, step in enumerate(found) for part in step.parts}
    names = [at.get(id(step), -1 - k) for k, step in enumerate(steps)]
    last = {name: k for k, name in enumerate(names)}  # each stands where its last part stood
    order = {name: i for i, name in enumerate(sorted(last, key=last.__getitem__))}
    new: list[Step] = [found[name] if name >= 0 else steps[-1 - name] for name in order]
    waits: Before = [set() for _ in order]
    for k, name in enumerate(names):
        waits[order[name]] |= {order[names[j]] for j in before[k]} - {order[name]}
    return [new[k] for k in stable(waits)]


def _late(before: Before) -> list[int]:
    """How many steps follow each step on the longest path: equal ones do not depend on another."""
    late = [0] * len(before)
    for k in reversed(range(len(before))):
        for j in before[k]:
            late[j] = max(late[j], late[k] + 1)
    return late


def _fits(source: KernelSource) -> bool:
    """Whether a kernel can be a part."""
    plain = not source.copies and not source.updates and source.grid[2] == 1
    flat = source.workgroup[1:] == (1, 1)
    return plain and flat and mergeable(source.text)


def _weight(program: Program, step: Step) -> int:
    """Bytes of scratch that a step binds."""
    values = (program.values[v] for v in bound(step))
    return sum(v.nbytes for v in values if v.role == "scratch")


def _key(program: Program, step: Step) -> object:
    """What parts have in common: their form, how they run and what kinds of values they bind."""
    source = kernel_of(step)
    pairs = program.likely
    kinds: list[object] = []
    for k, value in enumerate(bound(step)):
        array = program.values[value]
        if source.elements[k] in TEXELS:
            kinds.append(array.shape)
        elif array.role == "scratch":
            kinds.append("scratch")
        elif value in pairs:
            kinds.append("kept")
        else:
            kinds.append(value)
        kinds.append(source.elements[k])
    grid = source.grid if source.grid[1] > 1 else None
    run = (source.workgroup, grid, source.in_place, source.features, source.trusted)
    return form(source.text)[0], len(step.writes), tuple(kinds), run


def _sets(steps: Sequence[Step], program: Program, target: Target) -> Iterator[Merged]:
    """The steps as one merged step, or one for each text, or less where nothing is gained."""
    exact: dict[Column, list[Step]] = {}
    for step in steps:
        exact.setdefault(form(kernel_of(step).text)[1], []).append(step)
    saved = (len(exact) - 1) * target.profile.launch
    columns = set(zip(*exact))
    differ = [c for c in columns if len(set(c)) > 1]
    if len(differ) <= MOST_NUMBERS and _extra(steps, target) < saved:
        yield from _chunks(steps, program, target)
        return
    for group in exact.values():
        if len(group) > 1:
            yield from _chunks(group, program, target)


def _extra(steps: Sequence[Step], target: Target) -> float:
    """ns that a merged kernel of parts of different sizes takes to look up what differs."""
    first = steps[0]
    columns: list[Column] = list(zip(*(form(kernel_of(s).text)[1] for s in steps)))
    lookups = loads(columns) + len(bound(first)) + len(steps).bit_length()
    sources = [kernel_of(s) for s in steps]
    invocations = sum(s.grid[0] * s.grid[1] * s.workgroup[0] for s in sources)
    return LOAD * lookups * invocations / target.profile.elementwise


def _chunks(steps: Sequence[Step], program: Program, target: Target) -> Iterator[Merged]:
    """The steps merged, in as many as keep each binding within the limit."""
    most = min(target.max_binding_bytes, target.max_buffer_bytes)
    unit = target.offset_alignment
    chunk: list[Step] = []
    elements = kernel_of(steps[0]).elements
    limits = [LAYERS if e in TEXELS else most for e in elements]
    sizes = [0] * len(limits)
    for step in steps:
        more = [_room(program.values[v], e, unit) for v, e in zip(bound(step), elements)]
        if chunk and any(a + b > most for a, b, most in zip(sizes, more, limits)):
            if len(chunk) > 1:
                yield _merged(chunk, target)
            chunk, sizes = [], [0] * len(sizes)
        chunk.append(step)
        sizes = [a + b for a, b in zip(sizes, more)]
    if len(chunk) > 1:
        yield _merged(chunk, target)


def _room(array: Array, element: str, unit: int) -> int:
    """Layers of an image, or bytes in a buffer."""
    return 1 if element in TEXELS else _padded(array, unit)


def _padded(array: Array, unit: int) -> int:
    return -(-array.nbytes // unit) * unit


def _merged(steps: Sequence[Step], target: Target) -> Merged:
    sources = [kernel_of(s) for s in steps]
    first, count = sources[0], len(steps)
    writes = tuple(v for s in steps for v in s.writes)
    reads = tuple(dict.fromkeys(v for s in steps for v in s.reads))
    readers: dict[int, int] = {}
    for s in steps:
        for v in s.reads:
            readers[v] = readers.get(v, 0) + 1
    in_place = {
        (writes.index(s.writes[k]), reads.index(s.reads[j]))
        for s in steps
        for k, j in first.in_place
        if readers[s.reads[j]] == 1
    }
    stored: dict[int, Stored] = {}
    for s, source in zip(steps, sources, strict=True):
        stored |= zip(bound(s), (*source.writes, *source.reads), strict=True)
    groups = sum(s.grid[0] * s.grid[1] for s in sources)
    source = replace(
        first,
        name=f"{count}_times_{first.name}",
        writes=tuple(stored[v] for v in writes),
        reads=tuple(stored[v] for v in reads),
        in_place=frozenset(in_place),
        grid=fold(groups, target.max_groups),
        flops=sum(s.flops for s in sources),
        bytes_read=sum(s.bytes_read for s in sources),
        bytes_written=sum(s.bytes_written for s in sources),
    )
    columns = list(zip(*(bound(s) for s in steps)))
    shared = tuple(len(set(column)) == 1 for column in columns)
    return Merged(source, steps[0].group, writes, reads, tuple(steps), shared)


@dataclass(frozen=True, slots=True)
class Row:
    """Values that lie side by side in one buffer: each one's offset, and the bytes of all."""

    offsets: Mapping[int, int]
    nbytes: int


def rows(
    merged: Sequence[Merged], over: Mapping[int, int], program: Program, unit: int
) -> list[Row]:
    """The rows in which the merged steps need their values; of an output over an input, the input.

    Values of one binding lie in one row, in the order of the parts where no other row prevents it.
    """
    row_of: dict[int, list[int]] = {}
    for step in merged:
        for k, shared in enumerate(step.shared):
            if shared or step.sources[0].elements[k] in TEXELS:
                continue
            values = dict.fromkeys(over.get(v, v) for v in step.values(k))
            joined: list[int] = []
            for row in {id(r): r for v in values if (r := row_of.get(v)) is not None}.values():
                joined += row
            joined += [v for v in values if v not in row_of]
            row_of |= dict.fromkeys(joined, joined)
    found: list[Row] = []
    for values in {id(r): r for r in row_of.values()}.values():
        offsets, at = dict[int, int](), 0
        for value in values:
            offsets[value] = at
            at += _padded(program.values[value], unit)
        found.append(Row(offsets, at))
    return found
