"""Runs a plan: one command buffer, one compute pass and one submission a call."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import wgpu

from ..compiler.schedule.images import TEXELS
from ..compiler.schedule.plan import Binding, Copy, Kernel, Plan, has_immediates
from ..compiler.schedule.rounds import Loops, Rounds
from . import native, timing
from .buffers import MOST_FETCHED, DeviceBuffer, Fetched, Slab, Storage
from .device import Device
from .errors import KernelError
from .handed import Handed, cycle, hand
from .limits import check_plan
from .pipelines import Accesses
from .places import Arguments, Places, Spot, move

_SPLIT = 4000  # dispatches in one command buffer
_RECORDINGS = 64  # combinations of external memory whose steps are kept
_SERIAL = attrgetter("serial")
_Memory = tuple[tuple[int, ...], tuple[int, ...]]  # serials and offsets of external memory
# serial of the memory, offset, bytes; of an image a number below 0, layer, layers
_Range = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Recording:
    """The dispatches of a call over particular memory, and the bind groups they point at."""

    steps: list[native.Step | native.Copy]
    groups: tuple[Any, ...]
    parts: list[list[native.Copy | list[native.Step]]]  # as they are recorded, for a buffer each


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A kernel with a grid: its place in the plan, its pipeline, the access of its bindings and
    whether it has immediates."""

    index: int
    kernel: Kernel
    pipeline: Any
    accesses: Accesses
    immediates: bool


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
            _Prepared(
                index,
                kernel,
                pipeline,
                tuple(b.layout for b in kernel.bindings),
                has_immediates(kernel.wgsl),
            )
            for (index, kernel), pipeline in zip(live, pipelines)
        ]
        self._kept = _kept_copies(plan)
        self._images_of: dict[int, weakref.ref[DeviceBuffer]] = {}  # arguments that they hold
        self._arena = [device.alloc(nbytes) for nbytes in plan.arena]
        self._images = [device.pipelines.image(image) for image in plan.images]
        self._constants = [device.upload_bytes(c.data) for c in plan.constants]
        self._by_number = {p.index: p for p in self._kernels}
        self._loops = Loops(plan)
        self._rounds = list(self._loops.schedule())
        self._ns = sum(plan.kernels[k].predicted_ns for k, _ in self._rounds)
        self._dispatches = sum(k in self._by_number for k, _ in self._rounds)
        bound = {n for p in self._kernels for b in p.kernel.bindings for n in b.buffers}
        bound = {base for b in bound for base in self._loops.bases(b)}
        self._arguments = Arguments(plan, device, self._written)
        self.cycle = 0 if self._kept else cycle(plan, self._written)  # see `again`
        self._external = sorted({self._owner(b) for b in bound if self._is_external(b)})
        made = [b for b in sorted(bound | set(plan.outputs)) if self._place(b) == "output"]
        self._made = [(b, plan.buffers[b].nbytes) for b in made]
        kept = ("arena", "constant")
        self._copied = [b for b in dict.fromkeys(plan.outputs) if self._place(b) in kept]
        results = dict.fromkeys(plan.outputs)  # two of them may be one value
        self._packed = [
            (b, int(place[1]), plan.buffers[b].nbytes, int(place[-1]))
            for b in results if (place := plan.buffers[b].place)[0] == "pack"
        ]  # fmt: skip
        self._unpacked = [b for b in results if self._place(b) != "pack"]
        self._all_made = not plan.donated and all(self._place(b) == "output" for b in results)
        self._recordings: OrderedDict[_Memory, _Recording] = OrderedDict()
        self._groups: OrderedDict[tuple[Accesses, tuple[_Range, ...]], Any] = OrderedDict()
        self._max_groups = max(1024, 8 * len(self._rounds))
        device.register(self)

    def __repr__(self) -> str:
        return f"Executable({self.plan.name}, {len(self.plan.kernels)} kernels, {self.device})"

    def __call__(
        self, buffers: Sequence[DeviceBuffer], fetch: Sequence[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan. Raises DonatedError, DeviceError or ValueError before anything runs.

        `fetch` names results that the host will read: the call copies them for it, so that reading
        one does not wait for later calls.
        """
        self.device.pipelines.wait()
        with self.device.lock:
            places = self._places(buffers)
            told = dict.fromkeys(self.plan.outputs[i] for i in fetch)
            self._keep(buffers, places)
            fetched = self._submit(self._recording(places), places, told)
            out = self._results(buffers, places)
            for i in fetch:
                out[i].fetched = fetched.get(self.plan.outputs[i])
            return out

    def hand(self, results: Sequence[DeviceBuffer]) -> Handed | None:
        """The first `cycle` results of a call, which nobody has seen, as `again` takes them."""
        with self.device.lock:
            return hand(self, results) if self.cycle else None

    def again(
        self, handed: Handed, others: Sequence[DeviceBuffer], fetch: Sequence[int] = ()
    ) -> tuple[Handed, list[DeviceBuffer]] | None:
        """Runs the plan for the first results of its last call as the first arguments, and `others`
        after them; its first results, which again take their memory, and a buffer for each other
        one. None where `handed` is not whole any more; raises as a call does.

        `fetch` may not name one of the first results.
        """
        self.device.pipelines.wait()
        with self.device.lock:
            if handed.executable is not self or not handed.whole:
                return None
            places = self._with_made(self._arguments.again(handed.spots, handed.packs, others))
            told = dict.fromkeys(self.plan.outputs[i] for i in fetch)
            fetched = self._submit(self._recording(places), places, told)
            out = self._other_results(others, places)
            for i in fetch:
                out[i - self.cycle].fetched = fetched.get(self.plan.outputs[i])
            return handed.taken(self.plan.name), out

    def profile(self, buffers: Sequence[DeviceBuffer], repeat: int = 5) -> list[int]:
        """The median nanoseconds of each kernel over some calls; the arguments keep their values.

        Of a kernel in a loop it is the sum over its runs.
        """
        self.device.pipelines.wait()
        with self.device.lock:
            places = self._places(buffers)
            self._keep(buffers, places)
            self.device.flush()
            recording = self._recording(self._spare(places))
            run = [k for k, _ in self._rounds if k in self._by_number]
            again = [not self._changes(self.plan.kernels[k]) for k in run]
            times = timing.measure(self.device, recording.steps, repeat, again)
        ns = [0] * len(self.plan.kernels)
        for k, time in zip(run, times, strict=True):
            ns[k] += time
        return ns

    def total(self, buffers: Sequence[DeviceBuffer], repeat: int = 5) -> int:
        """The least nanoseconds of a call on the device, without timestamps between its kernels;
        the arguments keep their values."""
        self.device.pipelines.wait()
        with self.device.lock:
            places = self._places(buffers)
            self._keep(buffers, places)
            self.device.flush()
            recording = self._recording(self._spare(places))
            return timing.total(self.device, recording.steps, repeat)

    def _changes(self, kernel: Kernel) -> bool:
        """Whether a kernel may write over what it reads, so that it gives something else when
        repeated."""
        if kernel.updates or self.plan.loops:
            return True
        parts = kernel.bindings[: kernel.writes], kernel.bindings[kernel.writes :]
        written, read = ([self._extent(n) for b in p for n in b.buffers] for p in parts)
        if any(w[0][0] in ("input", "pack") for w in written):  # one binding may serve for both
            return True
        return any(w[0] == r[0] and w[1] < r[2] and r[1] < w[2] for w in written for r in read)

    def _extent(self, buffer: int) -> tuple[tuple[str | int, ...], int, int]:
        """The memory that a buffer lies in by the plan, the bytes at which it begins and ends."""
        kind, *where = self.plan.buffers[buffer].place
        start = int(where.pop()) if kind in ("arena", "pack") else 0
        return (kind, *where), start, start + self.plan.buffers[buffer].nbytes

    def forget(self, serials: set[int]) -> None:
        """Drops what is kept for memory that the device lets go."""
        for key in [k for k in self._groups if any(r[0] in serials for r in k[1])]:
            del self._groups[key]
        for key in [k for k in self._recordings if not serials.isdisjoint(k[0])]:
            del self._recordings[key]

    def _outside(self, spots: Mapping[int, Spot]) -> tuple[tuple[Storage, ...], tuple[int, ...]]:
        """The memory and the offset of each buffer that is external."""
        if not self._external:
            return (), ()
        storages, offsets = zip(*map(spots.__getitem__, self._external))
        return storages, offsets

    def _place(self, buffer: int) -> str:
        return self.plan.buffers[buffer].place[0]

    def _owner(self, buffer: int) -> int:
        """The argument's buffer where a result lies over it."""
        place = self.plan.buffers[buffer].place
        return self.plan.inputs[place[1]] if place[0] == "input" else buffer

    def _is_external(self, buffer: int) -> bool:
        return self._place(buffer) in ("input", "output")

    def _places(self, buffers: Sequence[DeviceBuffer]) -> Places:
        """The memory of a call, results among it."""
        self.device.check()
        return self._with_made(self._arguments.place(buffers))

    def _with_made(self, places: Places) -> Places:
        """The same with memory for the results that are not written over arguments."""
        alloc = self.device.alloc
        for b, nbytes in self._made:
            made = places.made[b] = alloc(nbytes)
            places.spots[b] = made.storage, 0
        for b in self._copied:
            places.made[b] = self.device.alloc(self.plan.buffers[b].nbytes)
        return places

    def _recording(self, places: Places) -> _Recording:
        storages, offsets = self._outside(places.spots)
        key = (*map(_SERIAL, storages), *(slab.storage.serial for slab in places.packs)), offsets
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._record(places)
            self._recordings[key] = recording
            if len(self._recordings) > _RECORDINGS:
                self._recordings.popitem(last=False)
        else:
            self._recordings.move_to_end(key)
        return recording

    def _record(self, places: Places) -> _Recording:
        copies: dict[int, list[Copy]] = {}
        for copy in self.plan.copies:
            if not copy.kept:
                copies.setdefault(copy.kernel, []).append(copy)
        groups: dict[int, Any] = {}
        steps: list[native.Step | native.Copy] = []
        for k, rounds in self._rounds:
            for copy in copies.get(k, ()):
                if not (copy.once and any(rounds.values())):
                    steps += self._copies(copy, places, rounds)
            if (p := self._by_number.get(k)) is not None:
                group = self._group(p, places, rounds)
                groups[id(group)] = group
                handles = native.handle(p.pipeline), native.handle(group)
                steps.append((*handles, *p.kernel.grid, p.immediates))
        starts = range(0, max(len(steps), 1), _SPLIT)
        parts = [native.in_passes(steps[at : at + _SPLIT]) for at in starts]
        return _Recording(steps, tuple(groups.values()), parts)

    def _copies(self, copy: Copy, places: Places, rounds: Rounds) -> list[native.Copy]:
        storage, offset, nbytes = self._range(copy.buffer, places, rounds)
        texture, texel = self._images[copy.image].texture, self.plan.images[copy.image].texel
        return native.copies(storage.gpu, offset, nbytes, texture, copy.width, texel, copy.layer)

    def _keep(self, buffers: Sequence[DeviceBuffer], places: Places) -> None:
        """Copies arguments to images that stay for later calls, where these hold others."""
        for i, copies in self._kept.items():
            held = self._images_of.get(i)
            if held is not None and held() is buffers[i]:
                continue
            for copy in copies:
                for step in self._copies(copy, places, {}):
                    native.copy(self.device.encoder(), step)
            self._images_of[i] = weakref.ref(buffers[i])

    def _group(self, prepared: _Prepared, places: Places, rounds: Rounds) -> Any:
        bound: list[tuple[Any, int, int]] = []
        ranges: list[_Range] = []
        for b in prepared.kernel.bindings:
            if b.access in TEXELS:
                layers = b.layer, len(b.buffers)
                bound.append((self._images[b.image].view(*layers), 0, 0))
                ranges.append((-1 - b.image, *layers))
                continue
            storage, offset, nbytes = self._hull(b, places, rounds)
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

    def _hull(self, binding: Binding, places: Places, rounds: Rounds) -> tuple[Storage, int, int]:
        """The range that holds all buffers of a binding."""
        storage, start, nbytes = self._range(binding.buffer, places, rounds)
        end = start + nbytes
        for b in binding.more:
            _, offset, nbytes = self._range(b, places, rounds)
            start, end = min(start, offset), max(end, offset + nbytes)
        return storage, start, end - start

    def _range(self, b: int, places: Places, rounds: Rounds) -> tuple[Storage, int, int]:
        nbytes = self.plan.buffers[b].nbytes
        b, start = self._loops.locate(b, rounds)
        match self.plan.buffers[b].place:
            case ("arena", block, offset):
                return self._arena[block].storage, offset + start, nbytes
            case ("pack", p, offset):
                return places.packs[p].storage, offset + start, nbytes
            case ("constant", k):
                return self._constants[k].storage, start, nbytes
            case ("input", i):
                storage, offset = places.spots[self.plan.inputs[i]]
                return storage, offset + start, nbytes
            case ("output", _):
                storage, offset = places.spots[b]
                return storage, offset + start, nbytes
            case _:
                raise AssertionError(f"unknown place {self.plan.buffers[b].place}")

    def _submit(
        self, recording: _Recording, places: Places, told: Iterable[int]
    ) -> dict[int, Fetched]:
        """Records and submits the dispatches, then copies of results that the plan itself keeps
        and of those that the host is told."""
        device, fetched = self.device, dict[int, Fetched]()
        if not recording.steps and not self._copied:
            return fetched
        *before, last = recording.parts
        try:
            if places.moves:
                move(device.encoder(), places.moves)
            for part in before:
                device.passes().record(part)
                device.recorded(self._ns)
            device.passes().record(last)
            if self._copied:
                self._copy_results(places)
            if told:
                fetched = self._fetch(places, told)
            device.recorded(self._ns)
            if fetched:  # the host will wait for it, so it waits for no further calls
                device.send()
        except wgpu.GPUError as error:
            raise KernelError(f"plan {self.plan.name} cannot run: {error}") from error
        device.counters.dispatches += self._dispatches
        return fetched

    def _fetch(self, places: Places, told: Iterable[int]) -> dict[int, Fetched]:
        """Records copies of small results for the host; arguments that are results as they came
        are not."""
        out: dict[int, Fetched] = {}
        for b in told:
            place = self.plan.buffers[b].place
            if place[0] == "input" and place[1] not in self._written:
                continue
            storage, offset, nbytes = self._range(b, places, {})
            if 0 < nbytes <= MOST_FETCHED:
                out[b] = self.device.fetch(storage, offset, nbytes)
        return out

    def _copy_results(self, places: Places) -> None:
        """Copies results that the plan itself keeps."""
        for b in self._copied:
            source, offset, nbytes = self._range(b, places, {})
            target = places.made[b].storage.gpu
            self.device.encoder().copy_buffer_to_buffer(source.gpu, offset, target, 0, nbytes)

    def _results(self, buffers: Sequence[DeviceBuffer], places: Places) -> list[DeviceBuffer]:
        """One buffer a result. Consumes what was donated."""
        plan, made, device = self.plan, places.made, self.device
        if self._all_made:
            return [made[b] for b in plan.outputs]
        results: dict[int, DeviceBuffer] = {}
        for b, p, nbytes, offset in self._packed:
            slab = places.packs[p]
            results[b] = DeviceBuffer(device, slab.storage, nbytes, offset, slab)
        for b in self._unpacked:
            match plan.buffers[b].place:
                case ("input", i) if plan.inputs[i] in made:  # it was moved
                    results[b] = made[plan.inputs[i]]
                case ("input", i) if i in self._written:
                    results[b] = buffers[i].consume(plan.name, i)
                case ("input", i):
                    results[b] = buffers[i]
                case _:
                    results[b] = made[b]
        outputs = [results[b] for b in plan.outputs]
        kept = {id(out) for out in outputs}
        for i in plan.donated:
            if not buffers[i].donated and id(buffers[i]) not in kept:
                buffers[i].spend(plan.name, i)
        return outputs

    def _other_results(self, others: Sequence[DeviceBuffer], places: Places) -> list[DeviceBuffer]:
        """One buffer a result after the first ones. Consumes what was donated of `others`."""
        plan, first = self.plan, self.cycle
        outputs: list[DeviceBuffer] = []
        for b in plan.outputs[first:]:
            place = plan.buffers[b].place
            outputs.append(others[place[1] - first] if place[0] == "input" else places.made[b])
        kept = {id(out) for out in outputs}
        for i in plan.donated:
            if i >= first and id(others[i - first]) not in kept:
                others[i - first].spend(plan.name, i)
        return outputs

    def _spare(self, places: Places) -> Places:
        """The same places with copies of what the plan writes over."""
        spare = Places(dict(places.spots), [], {}, list(places.moves))
        for slab in places.packs:
            copy = Slab(self.device, self.device.pool.acquire(slab.storage.capacity))
            whole = (slab.storage, 0, copy.storage, 0, slab.storage.capacity)
            spare.moves.append(whole)
            spare.packs.append(copy)
        for i in self._written:
            b = self.plan.inputs[i]
            if b in spare.spots and b not in places.made:
                copy = self.device.alloc(self.plan.buffers[b].nbytes)
                spare.moves.append((*spare.spots[b], copy.storage, 0, copy.nbytes))
                spare.spots[b], spare.made[b] = (copy.storage, 0), copy
        if spare.moves:
            encoder = self.device.gpu.create_command_encoder()
            move(encoder, spare.moves)
            self.device.submit([encoder.finish()])
        return spare


def _kept_copies(plan: Plan) -> dict[int, list[Copy]]:
    """Copies that stay for later calls, by the argument."""
    found: dict[int, list[Copy]] = {}
    for copy in plan.copies:
        if copy.kept:
            found.setdefault(plan.inputs.index(copy.buffer), []).append(copy)
    return found


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
    inputs = enumerate(plan.inputs)
    written |= {i for i, b in inputs if plan.buffers[b].place[0] == "pack"}
    kept = sorted(written - set(plan.donated))
    if kept:
        raise ValueError(f"plan {plan.name} writes over arguments {kept}, which are not donated")
    return written
