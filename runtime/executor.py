"""Runs a plan: one command buffer, one compute pass and one submission a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import wgpu

from ..compiler.schedule.images import TEXELS
from ..compiler.schedule.plan import Copy, Kernel, Plan
from ..compiler.schedule.rounds import Loops, Rounds
from . import native, timing
from .buffers import DeviceBuffer, Storage
from .device import Device
from .errors import DeviceError, KernelError
from .limits import check_plan
from .pipelines import Accesses

_SPLIT = 4000  # dispatches in one command buffer
_RECORDINGS = 64  # combinations of external memory whose steps are kept
_Range = tuple[int, int, int]  # serial of the memory (below 0: of an image), offset, bytes


@dataclass(frozen=True, slots=True)
class _Recording:
    """The dispatches of a call over particular memory, and the bind groups they point at."""

    steps: list[native.Step | native.Copy]
    groups: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A kernel with a grid: its place in the plan, its pipeline and the access of its bindings."""

    index: int
    kernel: Kernel
    pipeline: Any
    accesses: Accesses


class Executable:
    """A plan loaded on a device. Call it with one buffer an argument; it returns one a result.

    A donated argument is consumed. Where a kernel wrote over it, its memory moves to the result;
    an argument that is a result unwritten is returned as it is. Results are ready for further calls
    at once; only a download waits.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        device.check()
        check_plan(plan, device.target)
        self.plan = plan
        self.device = device
        self._written = _written_arguments(plan)
        live = [(i, k) for i, k in enumerate(plan.kernels) if 0 not in k.grid]
        pipelines = device.pipelines.get([kernel for _, kernel in live])
        self._kernels = [
            _Prepared(index, kernel, pipeline, tuple(b.access for b in kernel.bindings))
            for (index, kernel), pipeline in zip(live, pipelines)
        ]
        self._arena = [device.alloc(nbytes) for nbytes in plan.arena]
        self._images = [device.pipelines.image(image) for image in plan.images]
        self._constants = [device.upload_bytes(c.data) for c in plan.constants]
        self._by_number = {p.index: p for p in self._kernels}
        self._loops = Loops(plan)
        self._rounds = list(self._loops.schedule())
        bound = {b.buffer for p in self._kernels for b in p.kernel.bindings}
        bound = {base for b in bound for base in self._loops.bases(b)}
        self._external = sorted(b for b in bound if self._is_external(b))
        self._made = [b for b in sorted(bound | set(plan.outputs)) if self._place(b) == "output"]
        self._copied = [b for b in dict.fromkeys(plan.outputs) if not self._is_external(b)]
        self._recordings: OrderedDict[tuple[int, ...], _Recording] = OrderedDict()
        self._groups: OrderedDict[tuple[Accesses, tuple[_Range, ...]], Any] = OrderedDict()
        self._max_groups = max(1024, 8 * len(self._rounds))
        device.register(self)

    def __repr__(self) -> str:
        return f"Executable({self.plan.name}, {len(self.plan.kernels)} kernels, {self.device})"

    def __call__(self, buffers: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """Runs the plan. Raises DonatedError, DeviceError or ValueError before anything runs."""
        with self.device.lock:
            memory, made = self._memory(buffers)
            self._submit(self._recording(memory), memory, made)
            return self._results(buffers, made)

    def profile(self, buffers: Sequence[DeviceBuffer], repeat: int = 5) -> list[int]:
        """The median nanoseconds of each kernel over some calls; the arguments keep their values.

        Of a kernel in a loop it is the sum over its runs.
        """
        with self.device.lock:
            memory, _ = self._memory(buffers)
            spare = self._spare(memory)
            memory.update({b: copy.storage for b, copy in spare.items()})
            recording = self._recording(memory)
            times = timing.measure(self.device, recording.steps, repeat)
        ns = [0] * len(self.plan.kernels)
        run = [k for k, _ in self._rounds if k in self._by_number]
        for k, time in zip(run, times, strict=True):
            ns[k] += time
        return ns

    def forget(self, serials: set[int]) -> None:
        """Drops what is kept for memory that the device lets go."""
        for key in [k for k in self._groups if any(r[0] in serials for r in k[1])]:
            del self._groups[key]
        for key in [k for k in self._recordings if not serials.isdisjoint(k)]:
            del self._recordings[key]

    def _place(self, buffer: int) -> str:
        return self.plan.buffers[buffer].place[0]

    def _is_external(self, buffer: int) -> bool:
        return self._place(buffer) in ("input", "output")

    def _memory(
        self, buffers: Sequence[DeviceBuffer]
    ) -> tuple[dict[int, Storage], dict[int, DeviceBuffer]]:
        """The memory of each external buffer of the plan, and the buffers made for results."""
        self.device.check()
        arguments = self._arguments(buffers)
        plan = self.plan
        made = {b: self.device.alloc(plan.buffers[b].nbytes) for b in self._made}
        memory = {b: buffer.storage for b, buffer in made.items()}
        for b in {*self._external, *plan.outputs}:
            if self._place(b) == "input":
                memory[b] = arguments[plan.buffers[b].place[1]]
        made.update({b: self.device.alloc(plan.buffers[b].nbytes) for b in self._copied})
        return memory, made

    def _arguments(self, buffers: Sequence[DeviceBuffer]) -> list[Storage]:
        """The memory of the arguments, once they fit the plan."""
        plan = self.plan
        if len(buffers) != len(plan.inputs):
            raise ValueError(f"{plan.name} needs {len(plan.inputs)} buffers, got {len(buffers)}")
        storages = [buffer.storage for buffer in buffers]
        for i, (buffer, b) in enumerate(zip(buffers, plan.inputs)):
            needed = plan.buffers[b]
            if buffer.device is not self.device:
                raise DeviceError(
                    f"argument {i} ({needed.name}) of {plan.name} needs a buffer of "
                    f"{self.device}, got one of {buffer.device}"
                )
            if buffer.nbytes != needed.nbytes:
                raise ValueError(
                    f"argument {i} ({needed.name}) of {plan.name} needs {needed.nbytes} bytes "
                    f"for {needed.dtype}{list(needed.shape)}, got {buffer.nbytes}"
                )
        if self._written and len({s.serial for s in storages}) < len(storages):
            self._refuse_shared(storages)
        return storages

    def _refuse_shared(self, storages: Sequence[Storage]) -> None:
        for i in sorted(self._written):
            for j, storage in enumerate(storages):
                if j != i and storage is storages[i]:
                    raise ValueError(
                        f"argument {i} of {self.plan.name} is written over, "
                        f"so its buffer cannot also be argument {j}"
                    )

    def _recording(self, memory: dict[int, Storage]) -> _Recording:
        key = tuple(memory[b].serial for b in self._external)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._record(memory)
            self._recordings[key] = recording
            if len(self._recordings) > _RECORDINGS:
                self._recordings.popitem(last=False)
        else:
            self._recordings.move_to_end(key)
        return recording

    def _record(self, memory: dict[int, Storage]) -> _Recording:
        copies: dict[int, list[Copy]] = {}
        for copy in self.plan.copies:
            copies.setdefault(copy.kernel, []).append(copy)
        groups: dict[int, Any] = {}
        steps: list[native.Step | native.Copy] = []
        for k, rounds in self._rounds:
            for copy in copies.get(k, ()):
                if not (copy.once and any(rounds.values())):
                    steps += self._copies(copy, memory, rounds)
            if (p := self._by_number.get(k)) is not None:
                group = self._group(p, memory, rounds)
                groups[id(group)] = group
                steps.append((native.handle(p.pipeline), native.handle(group), *p.kernel.grid))
        return _Recording(steps, tuple(groups.values()))

    def _copies(self, copy: Copy, memory: dict[int, Storage], rounds: Rounds) -> list[native.Copy]:
        storage, offset, nbytes = self._range(copy.buffer, memory, rounds)
        image, texel = self._images[copy.image][0], self.plan.images[copy.image].texel
        return native.copies(storage.gpu, offset, nbytes, image, copy.width, texel)

    def _group(self, prepared: _Prepared, memory: dict[int, Storage], rounds: Rounds) -> Any:
        bound: list[tuple[Any, int, int]] = []
        ranges: list[_Range] = []
        for b in prepared.kernel.bindings:
            if b.access in TEXELS:
                bound.append((self._images[b.image][1], 0, 0))
                ranges.append((-1 - b.image, 0, 0))
                continue
            storage, offset, nbytes = self._range(b.buffer, memory, rounds)
            bound.append((storage.gpu, offset, nbytes))
            ranges.append((storage.serial, offset, nbytes))
        key = prepared.accesses, tuple(ranges)
        group = self._groups.get(key)
        if group is None:
            group = self.device.pipelines.bind(prepared.accesses, bound)
            self._groups[key] = group
            if len(self._groups) > self._max_groups:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
        return group

    def _range(
        self, b: int, memory: dict[int, Storage], rounds: Rounds
    ) -> tuple[Storage, int, int]:
        nbytes = self.plan.buffers[b].nbytes
        b, start = self._loops.locate(b, rounds)
        buffer = self.plan.buffers[b]
        match buffer.place:
            case ("arena", block, offset):
                return self._arena[block].storage, offset + start, nbytes
            case ("constant", k):
                return self._constants[k].storage, start, nbytes
            case ("input" | "output", _):
                return memory[b], start, nbytes
            case _:
                raise AssertionError(f"unknown place {buffer.place}")

    def _submit(
        self,
        recording: _Recording,
        memory: dict[int, Storage],
        made: dict[int, DeviceBuffer],
    ) -> None:
        """Records and submits the dispatches, then copies of results that the plan itself keeps."""
        steps = recording.steps
        if not steps and not self._copied:
            return
        for start in range(0, max(len(steps), 1), _SPLIT):
            encoder = self.device.gpu.create_command_encoder()
            part = steps[start : start + _SPLIT]
            native.encode(encoder, part)
            if start + _SPLIT >= len(steps):
                for b in self._copied:
                    source, offset, nbytes = self._range(b, memory, {})
                    target = made[b].storage.gpu
                    encoder.copy_buffer_to_buffer(source.gpu, offset, target, 0, nbytes)
            try:
                self.device.submit([encoder.finish()])
            except wgpu.GPUError as error:
                raise KernelError(f"plan {self.plan.name} cannot run: {error}") from error
        self.device.counters.dispatches += sum(k in self._by_number for k, _ in self._rounds)

    def _results(
        self, buffers: Sequence[DeviceBuffer], made: dict[int, DeviceBuffer]
    ) -> list[DeviceBuffer]:
        """One buffer a result. Consumes what was donated."""
        plan = self.plan
        results = dict(made)
        for b in plan.outputs:
            place = plan.buffers[b].place
            if place[0] == "input" and b not in results:
                old = buffers[place[1]]
                if place[1] in self._written:
                    memory = old.consume(plan.name, place[1])
                    results[b] = DeviceBuffer(self.device, memory, old.nbytes)
                else:
                    results[b] = old
        outputs = [results[b] for b in plan.outputs]
        for i in plan.donated:
            if not buffers[i].donated and all(buffers[i] is not out for out in outputs):
                self.device.pool.returned.append(buffers[i].consume(plan.name, i))
        return outputs

    def _spare(self, memory: dict[int, Storage]) -> dict[int, DeviceBuffer]:
        """Copies of the arguments that the plan writes over."""
        written = [b for b in memory if self._place(b) == "input"]
        written = [b for b in written if self.plan.buffers[b].place[1] in self._written]
        spare = {b: self.device.alloc(self.plan.buffers[b].nbytes) for b in written}
        if spare:
            encoder = self.device.gpu.create_command_encoder()
            for b, copy in spare.items():
                encoder.copy_buffer_to_buffer(memory[b].gpu, 0, copy.storage.gpu, 0, copy.nbytes)
            self.device.submit([encoder.finish()])
        return spare


def _written_arguments(plan: Plan) -> set[int]:
    """Argument positions that kernels write over. Raises unless they are donated."""
    written: set[int] = set()
    loops = Loops(plan)
    for k, kernel in enumerate(plan.kernels):
        changed = [b for b in kernel.bindings if b.access == "read_write"]
        if loops.around(k):  # where others may share memory with what is written in another round
            changed = list(kernel.bindings[: kernel.writes])
        for base in {base for b in changed for base in loops.bases(b.buffer)}:
            place = plan.buffers[base].place
            if place[0] == "input":
                written.add(place[1])
    kept = sorted(written - set(plan.donated))
    if kept:
        raise ValueError(f"plan {plan.name} writes over arguments {kept}, which are not donated")
    return written
