"""An open device: its target, memory, pipelines, counters, and the one way to submit work to it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from ..compiler.schedule.target import Target
from . import buffers, host, lavapipe, native
from .adapter import Adapter, choose, features, make_target
from .buffers import DeviceBuffer, Fetched, Pool, Storage
from .errors import DeviceError
from .pipelines import Pipelines
from .places import move

if TYPE_CHECKING:
    from .executor import Executable

_IN_FLIGHT = 16  # submissions that may be under way before the next one waits
_TOGETHER = 32  # short calls in one command buffer
_STAGED = 4  # pieces of host memory of one size that are kept for the next copies
_ENOUGH = 300_000.0  # predicted ns of work that is not worth waiting with
# of what was sent since the device was last waited for, the part that may wait beyond that: a
# submission costs the host as much as thirty dispatches, and waiting can only cost this part
_MORE, _MOST = 1 / 8, 1_200_000.0
_PROBED = 128  # invocations of the probe, at least the largest subgroup


@dataclass(slots=True)
class Counters:
    """What a device has been asked to do so far."""

    submits: int = 0
    dispatches: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0
    buffers_created: int = 0
    pipelines_compiled: int = 0
    pipelines_translated: int = 0  # to machine code before they first ran, on CPUs
    bind_groups_created: int = 0

    def copy(self) -> Counters:
        """The counts of this moment."""
        return replace(self)

    def since(self, before: Counters) -> dict[str, int]:
        """What each count has gained, without those that gained nothing."""
        then = asdict(before)
        return {name: now - then[name] for name, now in asdict(self).items() if now != then[name]}


class Device:
    """A device opened by `open_device`. Methods may be called from several threads.

    `lock` is held around every submission and mapping, since submitting a mapped buffer ends the
    process. `debug` keeps bounds checks in all kernels. With `batching`, which GPUs get, short
    calls share a command buffer until there are enough of them, or until something is read: on an
    NVIDIA GPU a command buffer and its submission cost as much as thirty dispatches.
    """

    def __init__(self, adapter: Adapter, gpu: Any, debug: bool = False) -> None:
        self.adapter = adapter
        self.gpu = gpu
        self.debug = debug
        self.lock = threading.RLock()
        self.counters = Counters()
        self.lost = ""  # why the device cannot be used any more
        self.queued = 0  # bytes of queued writes that the next submission carries
        self._executables: weakref.WeakSet[Executable] = weakref.WeakSet()
        self._in_flight: deque[int] = deque()
        self._open: native.Passes | None = None  # calls that are still to be submitted
        self._calls, self._calls_ns = 0, 0.0
        self._sent_ns = 0.0  # since the device was last waited for
        self._staging: dict[int, list[Any]] = {}
        self._fetching: list[Fetched] = []  # recorded, not submitted yet
        self.target: Target = make_target(adapter, gpu, 0)
        cpu = self.target.kind == "cpu"
        self.batching = not cpu
        self.mappable = cpu and "mappable-primary-buffers" in self.target.features
        self.pool = Pool(self, host.memory() * 9 // 10 if cpu else None)
        self.pipelines = Pipelines(self)
        self.others: list[Device] = []  # of the same adapter, which translate kernels
        self.target = make_target(adapter, gpu, _probe_subgroup(self))
        _alive.add(self)

    def __repr__(self) -> str:
        return f"Device({self.target.name}, {self.target.backend})"

    def another(self) -> Device:
        """A second device of the same adapter, with a queue of its own."""
        raw = self.gpu.adapter
        opened = raw.request_device_sync(required_features=features(self.adapter, raw))
        return Device(self.adapter, opened, self.debug)

    def alloc(self, nbytes: int) -> DeviceBuffer:
        """A buffer of `nbytes`, rounded up to whole words, with undefined contents."""
        size = max(4, -(-nbytes // 4) * 4)
        with self.lock:
            return DeviceBuffer(self, self.pool.acquire(size), size)

    def upload(self, array: np.ndarray) -> DeviceBuffer:
        """A buffer with the values of a float32, float16, int32, uint32 or bool array."""
        return self._upload(buffers.stored(np.asarray(array)))

    def upload_bytes(self, data: bytes | bytearray | memoryview) -> DeviceBuffer:
        """A buffer with these bytes, zeros after them up to whole words."""
        return self._upload(buffers.padded(np.frombuffer(data, np.uint8)))

    def _upload(self, data: np.ndarray) -> DeviceBuffer:
        self.check()
        with self.lock:
            buffer = self.alloc(data.nbytes)
            buffers.write(self, buffer.storage, data)
        return buffer

    def download(self, buffer: DeviceBuffer, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The array of that shape and dtype (f32, f16, i32, u32, bool) at the start of a buffer."""
        self.check()
        if buffer.device is not self:
            raise DeviceError(f"download needs a buffer of {self}, got one of {buffer.device}")
        if dtype not in buffers.DTYPES:
            raise TypeError(f"download needs one of {', '.join(buffers.DTYPES)}, got {dtype}")
        count = int(np.prod(shape, dtype=np.int64))
        needed = -(-count * np.dtype(buffers.DTYPES[dtype]).itemsize // 4) * 4
        if needed > buffer.nbytes:
            raise ValueError(
                f"{dtype}{list(shape)} needs {needed} bytes, the buffer has {buffer.nbytes}"
            )
        if count == 0:
            return np.empty(shape, bool if dtype == "bool" else buffers.DTYPES[dtype])
        return buffers.decoded(buffers.read(self, buffer, needed), shape, dtype)

    def copies(self, values: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """The same values in memory of their own, without the host: one submission at most."""
        self.check()
        with self.lock:
            sources = [v.storage for v in values]  # raises before anything is recorded
            out = [self.alloc(v.nbytes) for v in values]
            made = zip(sources, values, out, strict=True)
            moves = [(s, v.offset, to.storage, 0, v.nbytes) for s, v, to in made]
            if moves:
                move(self.encoder(), moves)
                self.recorded(0.0)
        return out

    def fetch(self, storage: Storage, offset: int, nbytes: int) -> Fetched:
        """Records a copy to memory that the host can map. Needs the lock, until `recorded`."""
        fetched = Fetched(self.take_staging(buffers.bucket(nbytes)), nbytes)
        self.encoder().copy_buffer_to_buffer(storage.gpu, offset, fetched.memory, 0, nbytes)
        self._fetching.append(fetched)
        return fetched

    def encoder(self) -> Any:
        """The encoder that copies are recorded with. Needs the lock, until `recorded`."""
        return self.passes().end()

    def passes(self) -> native.Passes:
        """What the next call's kernels are recorded with. Needs the lock, until `recorded`."""
        if self._open is None:
            self._open = native.Passes(self.gpu.create_command_encoder())
        return self._open

    def recorded(self, ns: float) -> None:
        """A call of so many predicted ns was recorded: submits, unless more calls may follow."""
        self._calls += 1
        self._calls_ns += ns
        enough = max(_ENOUGH, min(_MORE * self._sent_ns, _MOST))
        few = self._calls < _TOGETHER and self._calls_ns < enough
        if not (self.batching and few):
            self.send()

    def submit(self, command_buffers: Sequence[Any]) -> int:
        """Submits, after what was recorded before; the number of the submission. Needs the lock."""
        return self._submit([*self._closed(), *command_buffers])

    def send(self) -> None:
        """Submits what was recorded. Needs the lock.

        To be called before queued writes to memory that recorded work may use: they take place
        before the next submission.
        """
        closed = self._closed()
        if closed:
            self._submit(closed)

    def _closed(self) -> list[Any]:
        """The command buffer of what was recorded, if anything was."""
        passes, self._open = self._open, None
        self._sent_ns += self._calls_ns
        self._calls, self._calls_ns = 0, 0.0
        return [] if passes is None else [passes.end().finish()]

    def _submit(self, command_buffers: Sequence[Any]) -> int:
        """Submits, and waits for old submissions when too many are under way."""
        index = native.submit(self.gpu, command_buffers)
        self.queued = 0
        self.counters.submits += 1
        for fetched in self._fetching:
            fetched.submission = index
        self._fetching.clear()
        self._in_flight.append(index)
        if len(self._in_flight) > _IN_FLIGHT:
            native.poll(self.gpu, wait=True, index=self._in_flight.popleft())
        return index

    def flush(self) -> None:
        """Submits what was recorded and queued writes, if there are any. Needs the lock."""
        if self.queued:
            self.encoder()
        self.send()

    def quiet(self, storage: Storage) -> bool:
        """Whether no work, queued or under way, can be using a storage. Needs the lock."""
        free = self.queued == 0 and self._open is None
        return storage.fresh or (free and native.idle(self.gpu))

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        self.check()
        with self.lock:
            self.flush()
            self._in_flight.clear()
            self.waited()
        native.poll(self.gpu, wait=True)

    def waited(self) -> None:
        """Notes that the host waits for all that was sent. Needs the lock."""
        self._sent_ns = 0.0

    def check(self) -> None:
        """Raises when the device cannot be used any more."""
        if self.lost:
            raise DeviceError(f"{self.target.name}: {self.lost}")

    def trim(self) -> None:
        """Drops memory that no buffer uses."""
        with self.lock:
            self.pool.trim()
            self._staging.clear()

    def forget(self, serials: set[int]) -> None:
        """Drops bind groups that hold on to memory which is being dropped."""
        for executable in list(self._executables):
            executable.forget(serials)

    def register(self, executable: Executable) -> None:
        """Notes a loaded plan, so that `forget` reaches it."""
        self._executables.add(executable)

    def take_staging(self, size: int) -> Any:
        """Memory to copy results through where device memory cannot be mapped."""
        with self.lock:
            kept = self._staging.get(size)
            if kept:
                return kept.pop()
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        return self.gpu.create_buffer(size=size, usage=usage)

    def give_staging(self, staging: Any) -> None:
        """Keeps a few pieces of each size for the next copies."""
        with self.lock:
            kept = self._staging.setdefault(staging.size, [])
            if len(kept) < _STAGED:
                kept.append(staging)


_alive: weakref.WeakSet[Device] = weakref.WeakSet()
_devices: dict[tuple[str, str, str], Device] = {}
_choices: dict[tuple[str | None, str | None], Device] = {}
_opening = threading.Lock()


def open_device(name: str | None = None, backend: str | None = None) -> Device:
    """The best device, or the one with that index in `adapters()` or that part of a name.

    OpenGL is used only for backend "gl". Each device is opened once. Raises DeviceError when there
    is none, with the command that installs a driver.
    """
    with _opening:
        if (name, backend) not in _choices:
            adapter, raw = choose(name, backend)
            key = (adapter.name, adapter.backend, str(adapter.index))
            if key not in _devices:
                before = lavapipe.threads()
                gpu = raw.request_device_sync(required_features=features(adapter, raw))
                if adapter.kind == "cpu":
                    lavapipe.spread(before)
                _devices[key] = Device(adapter, gpu)
            _choices[name, backend] = _devices[key]
        device = _choices[name, backend]
    device.check()
    return device


def synchronize(device: Device) -> None:
    """Waits until the device has finished all work."""
    device.synchronize()


@atexit.register
def _finish() -> None:
    """Waits for all devices, since a driver that still compiles or computes as the process takes
    its libraries down ends in a segmentation fault."""
    for device in list(_alive):
        with suppress(Exception):
            device.pipelines.stop()
            device.synchronize()


def _lose_after_fork() -> None:
    """In a forked process, which lacks the threads that may have held the locks."""
    _opening.release()
    for device in list(_alive):
        device.lost = "opened before a fork; a forked process must open its own (use spawn)"
        device.lock = threading.RLock()
        device.pipelines.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_opening.acquire,
        after_in_parent=_opening.release,
        after_in_child=_lose_after_fork,
    )


_PROBE = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(128)
fn main(
  @builtin(local_invocation_index) i: u32,
  @builtin(subgroup_size) size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  out[i] = size;
  out[128u + i] = lane;
  out[256u + i] = subgroupShuffle(i, 1u);
  out[384u + i] = subgroupShuffleXor(i, 1u);
}
"""


def _probe_subgroup(device: Device) -> int:
    """The subgroup size that a kernel sees, 0 unless lanes are consecutive and shuffles are right.

    What adapters report is not the size in use (lavapipe: 4 to 128 for 8).
    """
    if "subgroup" not in device.gpu.features:
        return 0
    bound = [device.alloc(16 * _PROBED)]
    device.pipelines.run_once(_PROBE, "probe_subgroup", bound)
    size, lane, first, swapped = device.download(bound[0], (4, _PROBED), "u32")
    n = int(size[0])
    i = np.arange(_PROBED)
    good = (
        2 <= n <= _PROBED
        and (size == n).all()
        and (lane == i % n).all()
        and (first == i // n * n + 1).all()
        and (swapped == i ^ 1).all()
    )
    return n if good else 0
