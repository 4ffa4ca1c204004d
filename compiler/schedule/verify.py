"""Checks a plan by what it says alone: reads find the values they mean, and limits hold."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..errors import IRError
from ..types import DTYPES
from .images import TEXELS
from .plan import Buffer, Copy, Kernel, Plan, Row
from .rounds import Loops, Rounds
from .target import Target

MAX_WORKGROUP_Z = 64  # the WebGPU floor, which no device raises
_ROUNDS = 4  # of a loop are followed: the first ones, of both parities, and the last


def verify_plan(plan: Plan, target: Target) -> None:
    """Raises IRError with kernel and buffer unless the plan can run on the target and is sound.

    A kernel is taken to read all that it binds and to write all of its first `writes` bindings.
    Memory is followed byte by byte: a read before its write, a write over a value that is still to
    be read and a result that nobody wrote all show as bytes that hold another value.
    """
    _check_tables(plan)
    for buffer in plan.buffers:
        _check_buffer(plan, buffer, target)
    loops = Loops(plan)
    memory = _Contents(plan, loops)
    copies: dict[int, list[Copy]] = {}
    for copy in plan.copies:
        copies.setdefault(copy.kernel, []).append(copy)
    for number, kernel in enumerate(plan.kernels):
        where = f"plan {plan.name}, kernel {number} ({kernel.name})"
        _check_kernel(plan, kernel, target, where)
    for number, rounds in loops.schedule(_ROUNDS):
        kernel = plan.kernels[number]
        where = f"plan {plan.name}, kernel {number} ({kernel.name})"
        where += "".join(f", round {t} of loop {r}" for r, t in rounds.items())
        memory.rounds = rounds
        _check_sharing(memory, kernel, where)
        for copy in copies.get(number, ()):
            if not (copy.once and any(rounds.values())):
                memory.copy(copy, where)
        memory.run(kernel, where)
    memory.rounds = {}
    for j, number in enumerate(plan.outputs):
        memory.check(number, f"plan {plan.name}, result {j}")


def _need(condition: bool, where: str, message: str) -> None:
    if not condition:
        raise IRError(f"{where}: {message}")


def _check_tables(plan: Plan) -> None:
    """Every number in the plan points at something."""
    where, count = f"plan {plan.name}", len(plan.buffers)
    bound = [n for k in plan.kernels for b in k.bindings for n in b.buffers]
    for what, numbers in (("inputs", plan.inputs), ("outputs", plan.outputs), ("bindings", bound)):
        for n in numbers:
            _need(0 <= n < count, where, f"{what} name buffer {n} of {count} buffers")
    for i, n in enumerate(plan.inputs):
        place, name = plan.buffers[n].place, plan.buffers[n].name
        packed = place[0] == "pack" and i in plan.donated
        fits = plan.buffers[n].role == "input" and (place == ("input", i) or packed)
        _need(fits, where, f"input {i} needs a place ('input', {i}), {name} lies at {place}")
    _check_loops(plan, where)
    for i in plan.donated:
        total = len(plan.inputs)
        _need(0 <= i < total, where, f"donates input {i} of {total} inputs")


def _check_loops(plan: Plan, where: str) -> None:
    """Loops hold kernels, nest or lie apart, and say where each of their views lies."""
    count, viewed = len(plan.buffers), list[int]()
    for r, loop in enumerate(plan.loops):
        span, total = f"{loop.start}:{loop.stop}", len(plan.kernels)
        fits = 0 <= loop.start < loop.stop <= total and loop.count >= 1
        _need(fits, where, f"loop {r} runs kernels {span} of {total} {loop.count} times")
        for q, inner in enumerate(plan.loops[r + 1 :], r + 1):
            apart = inner.start >= loop.stop or inner.stop <= loop.start
            inside = loop.start <= inner.start and inner.stop <= loop.stop
            _need(apart or inside, where, f"loops {r} and {q} neither nest nor lie apart")
        mine = [row.buffer for row in loop.rows]
        mine += [b for c in loop.carries for b in (c.value, c.after)]
        others = [row.stack for row in loop.rows]
        others += [b for c in loop.carries for b in (c.first, c.even, c.odd)]
        for n in (*mine, *others):
            _need(0 <= n < count, where, f"loop {r} names buffer {n} of {count} buffers")
        for n in mine:
            place = plan.buffers[n].place
            _need(place == ("loop", r), where, f"a view of loop {r} lies at {place}")
        viewed += mine
        for row in loop.rows:
            _check_row(plan, row, loop.count, where)
        for carry in loop.carries:
            sizes = {plan.buffers[n].nbytes for n in (carry.value, carry.after, carry.even)}
            sizes |= {plan.buffers[n].nbytes for n in (carry.first, carry.odd)}
            _need(len(sizes) == 1, where, f"a carry of loop {r} has {sorted(sizes)} bytes")
    _need(len(set(viewed)) == len(viewed), where, "a view lies in two places")
    views = {n for n, b in enumerate(plan.buffers) if b.place[0] == "loop"}
    _need(views == set(viewed), where, "a view lies in no loop that the plan has")


def _check_row(plan: Plan, row: Row, count: int, where: str) -> None:
    """All rows lie inside their stack."""
    nbytes, whole = plan.buffers[row.buffer].nbytes, plan.buffers[row.stack].nbytes
    ends = row.start, row.start + (count - 1) * row.step
    fits = min(ends) >= 0 and max(ends) + nbytes <= whole and abs(row.step) >= nbytes
    name = plan.buffers[row.stack].name
    alone = count == 1 and max(ends) + nbytes <= whole
    rows = f"rows of {nbytes} bytes from {row.start} by {row.step}"
    _need(fits or alone, where, f"{rows} leave {name} of {whole} bytes")


def _check_buffer(plan: Plan, buffer: Buffer, target: Target) -> None:
    where, most = f"plan {plan.name}, buffer {buffer.name}", target.max_buffer_bytes
    got, type_ = buffer.nbytes, f"{buffer.dtype}{list(buffer.shape)}"
    _need(buffer.dtype in DTYPES, where, f"{buffer.dtype} is none of {', '.join(DTYPES)}")
    need = max(4, -(-math.prod(buffer.shape) * DTYPES[buffer.dtype].size // 4) * 4)
    _need(got == need, where, f"needs {need} bytes for {type_}, got {got}")
    _need(got <= most, where, f"needs at most {most} bytes on {target.name}, got {got}")
    tables: dict[str | int, int] = {
        "input": len(plan.inputs),
        "output": len(plan.outputs),
        "arena": len(plan.arena),
        "pack": len(plan.packs),
        "constant": len(plan.constants),
        "loop": len(plan.loops),
    }
    kind, number = buffer.place[:2]
    size = 3 if kind in ("arena", "pack") else 2
    known = 0 <= number < tables.get(kind, 0) and len(buffer.place) == size
    _need(known, where, f"lies at {buffer.place}, which is no place of this plan")
    if kind == "constant":
        held = len(plan.constants[number].data)
        _need(held == need, where, f"needs {need} bytes of constant {number}, got {held}")
    if size == 3:
        start, end = _bytes(buffer)
        block = (plan.arena if kind == "arena" else plan.packs)[number]
        unit = target.offset_alignment
        _need(start % unit == 0, where, f"needs an offset divisible by {unit}, got {start}")
        _need(0 <= start and end <= block, where, f"{start}:{end} leaves a block of {block} bytes")
        _need(block <= most, where, f"needs a block of at most {most} bytes, got {block}")


def _check_kernel(plan: Plan, kernel: Kernel, target: Target, where: str) -> None:
    count, most = len(kernel.bindings), target.max_bindings
    _need(1 <= count <= most, where, f"needs 1 to {most} bindings on {target.name}, got {count}")
    _need(1 <= kernel.writes <= count, where, f"writes {kernel.writes} of its {count} bindings")
    most = target.max_groups
    fits = min(kernel.grid) >= 1 and max(kernel.grid) <= most
    _need(fits, where, f"needs a grid of 1 to {most} each way, got {_by(kernel.grid)}")
    size, most = kernel.workgroup, target.max_invocations
    fits = min(size) >= 1 and math.prod(size) <= most and size[2] <= MAX_WORKGROUP_Z
    _need(fits, where, f"needs a workgroup of 1 to {most} invocations, got {_by(size)}")
    most = target.max_binding_bytes
    for binding in kernel.bindings:
        held = [plan.buffers[n] for n in binding.buffers]
        if binding.access in TEXELS:
            _need(
                len({b.shape for b in held}) == 1, where, f"stacks {held[0].name} on other shapes"
            )
            continue
        got = max(_bytes(b)[1] for b in held) - min(_bytes(b)[0] for b in held)
        _need(got <= most, where, f"binds at most {most} bytes, {held[0].name} has {got}")
        one = len(held) == 1 or (len({b.place[:2] for b in held}) == 1 and len(held[0].place) == 3)
        _need(one, where, f"binds {held[0].name} with arrays in other buffers")


def _check_sharing(memory: _Contents, kernel: Kernel, where: str) -> None:
    """What one kernel may do with memory: bindings of one device buffer, and ranges that meet."""
    plan, whole = memory.plan, enumerate(kernel.bindings)
    members = [(k, memory.placed(n), b.access) for k, b in whole for n in b.buffers]
    outputs = sum(k < kernel.writes for k, _, _ in members)
    bound = [(buffer, access) for _, buffer, access in members]
    written = {buffer.place[:2] for buffer, _ in bound[:outputs]}
    if memory.rounds:  # in other rounds they may share memory with what is written then
        written |= {buffer.place[:2] for buffer, access in bound if access == "read_write"}
    for k, buffer, access in members:
        writes, (kind, number) = k < kernel.writes, buffer.place[:2]
        need = "read_write" if writes or buffer.place[:2] in written else "read"
        need = access if access in TEXELS and not writes else need  # a copy, so it shares nothing
        _need(access == need, where, f"binds {buffer.name} as {access}, needs {need}")
        _need(not writes or kind != "constant", where, f"writes the constant {buffer.name}")
        allowed = not writes or kind != "input" or number in plan.donated
        _need(allowed, where, f"writes {buffer.name} over input {number}, which is not donated")
    for k, (first, _) in enumerate(bound[:outputs]):
        for j, (second, _) in enumerate(bound):
            if j == k or not _meet(first, second):
                continue
            same = DTYPES[first.dtype].size == DTYPES[second.dtype].size
            in_place = j >= outputs and same and _bytes(first) == _bytes(second)
            _need(in_place, where, f"writes {first.name} over {second.name}, which it binds")


def _bytes(buffer: Buffer) -> tuple[int, int]:
    start = buffer.place[2] if len(buffer.place) == 3 else 0
    return start, start + buffer.nbytes


def _meet(first: Buffer, second: Buffer) -> bool:
    (a, b), (c, d) = _bytes(first), _bytes(second)
    return first.place[:2] == second.place[:2] and a < d and c < b


def _by(sizes: tuple[int, int, int]) -> str:
    return "x".join(map(str, sizes))


@dataclass(slots=True)
class _Region:
    """What a device buffer holds: sorted, disjoint ranges (start, end, number of a buffer)."""

    ranges: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def holds(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The ranges that meet [start, end)."""
        first = max(bisect_left(self.ranges, (start,)) - 1, 0)
        last = bisect_left(self.ranges, (end,))
        return [r for r in self.ranges[first:last] if r[1] > start]

    def write(self, start: int, end: int, owner: int) -> None:
        for a, b, old in self.holds(start, end):
            self.ranges.remove((a, b, old))
            if a < start:
                insort(self.ranges, (a, start, old))
            if b > end:
                insort(self.ranges, (end, b, old))
        insort(self.ranges, (start, end, owner))


class _Contents:
    """Which buffer's value each byte and each image holds, as kernels run."""

    def __init__(self, plan: Plan, loops: Loops) -> None:
        self.plan = plan
        self.loops = loops
        self.rounds: Rounds = {}
        self.images: dict[tuple[int, int], int] = {}  # the buffer in each layer
        self.regions: dict[tuple[str | int, ...], _Region] = {}
        for number, buffer in enumerate(plan.buffers):
            if buffer.role in ("input", "constant"):
                self._region(buffer).write(*_bytes(buffer), number)

    def _region(self, buffer: Buffer) -> _Region:
        return self.regions.setdefault(buffer.place[:2], _Region())

    def placed(self, number: int) -> Buffer:
        """The buffer with the place that it has in this round."""
        base, start = self.loops.locate(number, self.rounds)
        if base == number:
            return self.plan.buffers[number]
        place = self.plan.buffers[base].place
        offset = start + (place[2] if len(place) == 3 else 0)
        return replace(self.plan.buffers[number], place=(place[0], place[1], offset))

    def check(self, number: int, where: str) -> None:
        """Raises unless all bytes of the buffer hold its value."""
        buffer, (number, _) = self.placed(number), self.loops.locate(number, self.rounds)
        start, end = _bytes(buffer)
        held = self._region(buffer).holds(start, end)
        whole = bool(held) and held[0][0] <= start and held[-1][1] >= end
        whole = whole and all(a[1] == b[0] for a, b in pairwise(held))
        if math.prod(buffer.shape) == 0 or (whole and all(owner == number for *_, owner in held)):
            return
        others = [self.plan.buffers[owner].name for _, _, owner in held if owner != number]
        what = f"hold {' and '.join(others)}" if others else "were never written"
        raise IRError(f"{where}: reads {buffer.name}, but its bytes {what}")

    def _check_update(self, number: int, before: int, where: str) -> None:
        """Raises unless a buffer that is written in part holds what it is made from."""
        buffer, old = self.placed(number), self.placed(before)
        number, _ = self.loops.locate(number, self.rounds)
        held = {owner for _, _, owner in self._region(buffer).holds(*_bytes(buffer))}
        if held != {number}:
            _need(
                _bytes(buffer) == _bytes(old) and buffer.place[:2] == old.place[:2],
                where, f"writes a part of {buffer.name}, which {self.plan.buffers[before].name} "
                "was not copied to",
            )  # fmt: skip
            self.check(before, where)

    def copy(self, copy: Copy, where: str) -> None:
        """Checks a copy of a buffer into an image, and notes it."""
        buffer, count = self.plan.buffers[copy.buffer], len(self.plan.images)
        _need(0 <= copy.image < count, where, f"copies to image {copy.image} of {count} images")
        image = self.plan.images[copy.image]
        whole = buffer.dtype in ("f32", "u32") and buffer.nbytes % 4 == 0
        _need(whole, where, f"copies texels of f32 or u32 to an image, {buffer.name} has none")
        stays = not copy.kept or (buffer.place[0] == "input" and copy.kernel == 0)
        _need(stays, where, f"keeps a copy of {buffer.name}, no argument of its own")
        need = -(-buffer.nbytes // (image.texel * copy.width))
        fits = copy.width <= image.width and need <= image.rows
        got = f"{image.rows} of {image.width}"
        _need(fits, where, f"needs {need} rows of {copy.width} for {buffer.name}, got {got}")
        there = 0 <= copy.layer < image.layers
        _need(there, where, f"copies to layer {copy.layer} of {image.layers} of an image")
        self.check(copy.buffer, where)
        self.images[copy.image, copy.layer] = copy.buffer

    def run(self, kernel: Kernel, where: str) -> None:
        """Checks what the kernel reads and notes what it writes."""
        for binding in kernel.bindings[kernel.writes :]:
            if binding.access not in TEXELS:
                for number in binding.buffers:
                    self.check(number, where)
                continue
            name, image = self.plan.buffers[binding.buffer].name, binding.image
            holds = all(
                self.images.get((image, layer)) == number
                for layer, number in enumerate(binding.buffers, binding.layer)
            )
            _need(holds, where, f"reads {name} from image {image}, which holds another value")
            need, got = TEXELS[binding.access].nbytes, self.plan.images[image].texel
            _need(got == need, where, f"needs texels of {need} bytes of {name}, got {got}")
        for k, before in kernel.updates:
            self._check_update(kernel.bindings[k].buffer, before, where)
        for number in (n for b in kernel.bindings[: kernel.writes] for n in b.buffers):
            self._write(number)

    def _write(self, number: int) -> None:
        buffer, (base, _) = self.placed(number), self.loops.locate(number, self.rounds)
        self._region(buffer).write(*_bytes(buffer), base)
        stack = self.loops.stack(number, self.rounds)
        if stack is not None:  # the last row: those of rounds that were left out are written too
            self._write(stack)
