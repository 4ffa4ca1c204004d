"""Device memory: values in pooled buffers, alone or several in one, and copies to and from NumPy.

Memory is never destroyed, only dropped: a destroyed buffer in a submission would end the process.
"""

from __future__ import annotations

import functools
import gc
import heapq
import math
from collections import OrderedDict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from . import native
from .errors import DeviceError, DonatedError

if TYPE_CHECKING:
    from .device import Device

DTYPES = {"f32": "<f4", "f16": "<f2", "i32": "<i4", "u32": "<u4", "bool": "<u4"}  # as stored
_SMALL = 1 << 12  # bytes up to which a queued write beats waiting for memory in use
_CHUNK = 32 << 20  # bytes moved at a time where a copy goes through other memory
MOST_FETCHED = _CHUNK  # bytes of a value that is copied for the host with the call
_KEEP = 2 << 30  # bytes of unused memory that the pool keeps


class Storage:
    """One piece of device memory; `serial` identifies it for as long as the process lives."""

    __slots__ = ("capacity", "fresh", "gpu", "serial")

    def __init__(self, gpu: Any, capacity: int, serial: int) -> None:
        self.gpu = gpu
        self.capacity = capacity
        self.serial = serial
        self.fresh = True  # not handed out before, so no work can be using it


class Slab:
    """Pooled memory that several values lie in, given back when the last of them is dropped."""

    __slots__ = ("device", "storage")

    def __init__(self, device: Device, storage: Storage) -> None:
        self.device = device
        self.storage = storage

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.device.pool.returned.append(self.storage)


class Fetched:
    """A copy of a value in memory that the host can map, made in the submission of the call that
    computed it: to read it waits for nothing that was submitted later."""

    __slots__ = ("memory", "nbytes", "submission")

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.submission: int | None = None  # none: not submitted yet


class DeviceBuffer:
    """A value on the device: `nbytes` of pooled memory, given back when dropped.

    It lies at the start of memory of its own, or at an offset in a slab that it shares.
    """

    __slots__ = (
        "__weakref__", "_donated", "_storage", "_told", "device", "fetched", "nbytes", "offset",
        "slab",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        storage: Storage | None,
        nbytes: int,
        offset: int = 0,
        slab: Slab | None = None,
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.offset = offset
        self.slab = slab
        self.fetched: Fetched | None = None
        self._told = False  # the host has taken what was fetched
        self._storage = storage
        self._donated = "", 0  # the call that took it, and as which argument

    @property
    def storage(self) -> Storage:
        """The memory. Raises DonatedError when a call has consumed it."""
        if self._storage is None:
            call, argument = self._donated
            raise DonatedError(
                f"argument {argument} of {call} was donated to it and holds no value now; use the "
                "value that the call returned"
            )
        return self._storage

    @property
    def donated(self) -> bool:
        """Whether a call has consumed the value."""
        return self._storage is None

    @property
    def gone(self) -> bool:
        """Whether a call has consumed the value and none was fetched for the host."""
        return self._storage is None and self.fetched is None and not self._told

    def take_fetched(self) -> Fetched | None:
        """What was fetched, once."""
        fetched, self.fetched = self.fetched, None
        self._told = self._told or fetched is not None
        return fetched

    def consume(self, call: str, argument: int) -> DeviceBuffer:
        """The value under another name; uses of this one raise DonatedError from now on, with the
        call and the argument."""
        moved = DeviceBuffer(self.device, self.storage, self.nbytes, self.offset, self.slab)
        self._storage = self.slab = None
        self._donated = call, argument
        return moved

    def spend(self, call: str, argument: int) -> None:
        """Gives the memory back; uses raise DonatedError from now on."""
        if self.slab is None and self._storage is not None:
            self.device.pool.returned.append(self._storage)
        self._storage = self.slab = None
        self._donated = call, argument

    @classmethod
    def gone_to(cls, device: Device, nbytes: int, call: str, argument: int) -> DeviceBuffer:
        """Stands for a value that a call has consumed."""
        out = cls(device, None, nbytes)
        out._donated = call, argument
        return out

    def disown(self, call: str, argument: int) -> None:
        """Lets go of the memory, which something else stands for now; uses raise DonatedError."""
        self._storage = self.slab = None
        self._donated = call, argument

    def __repr__(self) -> str:
        state = "donated" if self._storage is None else f"storage {self._storage.serial}"
        return f"DeviceBuffer({self.nbytes} bytes, {state})"

    def __del__(self) -> None:
        # Only an append: this may run in any thread, inside the pool's own code.
        try:
            if self.slab is None and self._storage is not None:
                self.device.pool.returned.append(self._storage)
        except AttributeError:  # not made in full
            return


@functools.lru_cache(maxsize=4096)
def bucket(nbytes: int) -> int:
    """The size allocated for `nbytes`: 256, then eight sizes an octave: at most 1/8 is wasted."""
    if nbytes <= 256:
        return 256
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


class Pool:
    """Memory by size. Freed memory is handed out again, lowest serial first: so loops settle."""

    def __init__(self, device: Device, limit: int | None) -> None:
        self.returned: deque[Storage] = deque()  # freed, not yet sorted in
        self.limit = limit  # bytes that may be allocated; None when the device says when it is full
        self.allocated = 0
        self.free = 0
        self._device = device
        self._buckets: OrderedDict[int, list[tuple[int, Storage]]] = OrderedDict()
        self._serial = 0
        # All of it: what an unreachable cycle holds is finalized with the cycle, and a storage that
        # comes back from there must not have lost its memory.
        self._all: dict[int, Storage] = {}

    def acquire(self, nbytes: int) -> Storage:
        """Memory of at least `nbytes`. The caller holds the device's lock."""
        if self.returned:
            self._collect()
        size = min(bucket(nbytes), self._device.target.max_buffer_bytes)
        if nbytes > size:
            raise DeviceError(
                f"a buffer on {self._device.target.name} holds at most {size} bytes, got {nbytes}"
            )
        free = self._buckets.get(size)
        if free:
            self._buckets.move_to_end(size)
            self.free -= size
            storage = heapq.heappop(free)[1]
            storage.fresh = False
            return storage
        return self._create(size)

    def trim(self) -> None:
        """Drops all memory that no buffer uses."""
        self._collect()
        self._evict(0)

    def _collect(self) -> None:
        while self.returned:
            storage = self.returned.popleft()
            heap = self._buckets.setdefault(storage.capacity, [])
            heapq.heappush(heap, (storage.serial, storage))
            self.free += storage.capacity
        if self.free > _KEEP:
            self._evict(_KEEP)

    def _evict(self, keep: int) -> None:
        while self.free > keep:
            size, heap = next(iter(self._buckets.items()))  # the size used longest ago
            self._device.forget({serial for serial, _ in heap})
            for serial, _ in heap:
                del self._all[serial]
            self.free -= size * len(heap)
            self.allocated -= size * len(heap)
            del self._buckets[size]

    def _create(self, size: int) -> Storage:
        if self.limit is not None and self.allocated + size > self.limit:
            gc.collect()
            self.trim()
            if self.allocated + size > self.limit:
                raise self._full(size)
        try:
            gpu = self._create_buffer(size)
        except wgpu.GPUError:
            gc.collect()
            self.trim()
            self._device.synchronize()
            gpu = self._retry(size)
        self.allocated += size
        self._serial += 1
        self._device.counters.buffers_created += 1
        storage = self._all[self._serial] = Storage(gpu, size, self._serial)
        return storage

    def _retry(self, size: int) -> Any:
        try:
            return self._create_buffer(size)
        except wgpu.GPUError as error:
            raise self._full(size) from error

    def _create_buffer(self, size: int) -> Any:
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        if self._device.mappable:
            usage |= wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.MAP_WRITE
        return self._device.gpu.create_buffer(size=size, usage=usage)

    def _full(self, size: int) -> DeviceError:
        limit = "" if self.limit is None else f" of {self.limit}"
        return DeviceError(
            f"{self._device.target.name} is out of memory: {size} bytes needed, "
            f"{self.allocated}{limit} bytes in use"
        )


def stored(array: np.ndarray) -> np.ndarray:
    """An array's bytes as a device stores them: little-endian, bool as u32, in whole words."""
    name = array.dtype.name
    if name == "bool":
        array = array.astype("<u4")
    elif name not in ("float32", "float16", "int32", "uint32"):
        raise TypeError(f"upload needs float32, float16, int32, uint32 or bool, got {name}")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return padded(array.reshape(-1).view(np.uint8))


def padded(data: np.ndarray) -> np.ndarray:
    """Bytes with zeros after them up to a multiple of 4, at least 4."""
    missing = max(4, -(-data.nbytes // 4) * 4) - data.nbytes
    return np.concatenate([data, np.zeros(missing, np.uint8)]) if missing else data


def write(device: Device, storage: Storage, data: np.ndarray) -> None:
    """Copies whole words to storage that was just acquired. The caller holds the device's lock."""
    device.counters.uploads += 1
    device.counters.upload_bytes += data.nbytes
    if not storage.fresh:
        device.send()
    if device.mappable and data.nbytes > _SMALL and device.quiet(storage):
        with native.mapped(device.gpu, storage.gpu, native.MAP_WRITE, data.nbytes) as view:
            np.copyto(view, data)
            del view
        return
    for start in range(0, data.nbytes, _CHUNK):
        piece = data[start : start + _CHUNK]
        native.write_buffer(device.gpu, storage.gpu, start, piece)
        device.queued += piece.nbytes
        if device.queued >= _CHUNK:
            device.flush()  # frees the queue's own copies


def read(device: Device, buffer: DeviceBuffer, nbytes: int) -> np.ndarray:
    """The first `nbytes`, a multiple of 4, once all work that writes them is done."""
    device.counters.downloads += 1
    device.counters.download_bytes += nbytes
    out = np.empty(nbytes, np.uint8)
    with device.lock:
        fetched = buffer.take_fetched()
    if fetched is not None and fetched.nbytes >= nbytes:
        read_fetched(device, fetched, out)
        return out
    with device.lock:
        device.waited()
        if device.mappable:
            device.flush()
    if device.mappable:
        native.poll(device.gpu, wait=True)  # not under the lock: others may submit meanwhile
        with device.lock:
            gpu = buffer.storage.gpu
            start = buffer.offset
            with native.mapped(device.gpu, gpu, native.MAP_READ, nbytes, start) as view:
                np.copyto(out, view)
                del view
        return out
    for start in range(0, nbytes, _CHUNK):
        part = out[start : start + _CHUNK]
        read_staged(device, buffer.storage.gpu, buffer.offset + start, part)
    return out


def read_staged(device: Device, gpu: Any, offset: int, out: np.ndarray) -> None:
    """Copies a range of a buffer to host memory through one that can be mapped."""
    staging = device.take_staging(bucket(out.nbytes))
    encoder = device.gpu.create_command_encoder()
    encoder.copy_buffer_to_buffer(gpu, offset, staging, 0, out.nbytes)
    with device.lock:
        device.submit([encoder.finish()])
    with native.mapped(device.gpu, staging, native.MAP_READ, out.nbytes) as view:
        np.copyto(out, view)
        del view
    device.give_staging(staging)


def read_fetched(device: Device, fetched: Fetched, out: np.ndarray) -> None:
    """Copies what a call has fetched, once that call is done."""
    if fetched.submission is None:
        with device.lock:
            device.send()
    native.poll(device.gpu, wait=True, index=fetched.submission)
    with native.mapped(device.gpu, fetched.memory, native.MAP_READ, out.nbytes) as view:
        np.copyto(out, view)
        del view
    device.give_staging(fetched.memory)


def decoded(data: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The array that stored bytes hold; inverse of `stored`."""
    values = data.view(DTYPES[dtype])[: math.prod(shape)].reshape(shape)
    return values != 0 if dtype == "bool" else values
