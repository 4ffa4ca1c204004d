"""The untyped edge to wgpu-native: adapters, submission, polling, mapping and raw encoding.

Recording a dispatch through the raw functions costs a quarter of what the wrappers cost. All that
can fail (begin, end, finish, submit, create, map) goes through the checked library `libf`, which
turns the library's errors into Python exceptions in the calling thread.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import wgpu

from . import lavapipe
from .bindings import native as _native

# after `bindings`, which has its C header at hand
from wgpu.backends.wgpu_native import _api, _helpers, _mappings, extras  # isort: skip  # pyright: ignore[reportPrivateUsage]

ffi: Any = _native.ffi
lib: Any = _native.lib
libf: Any = _api.libf
MAP_READ, MAP_WRITE = 1, 2

# One recorded dispatch: pipeline and bind group handles, the number of workgroups, and whether the
# pipeline has immediates (see `NUMBERS`).
Step = tuple[Any, Any, int, int, int, bool]
# What immediates always are: the numbers 0 to 31, u32 (see compiler/codegen/lanes.py).
NUMBERS = bytes(np.arange(32, dtype=np.uint32).data)


class Copy:
    """A recorded copy of a range of a buffer to some rows of an image."""

    __slots__ = ("extent", "image", "source")

    def __init__(
        self,
        buffer: Any,
        offset: int,
        image: Any,
        at: tuple[int, int],
        extent: tuple[int, int],
        texel: int,
    ) -> None:
        width, rows = extent
        self.source = ffi.new("WGPUTexelCopyBufferInfo *")
        self.source.buffer = buffer._internal
        self.source.layout.offset = offset
        self.source.layout.bytesPerRow = texel * width if rows > 1 else _ROW
        self.source.layout.rowsPerImage = rows
        self.image = ffi.new("WGPUTexelCopyTextureInfo *")
        self.image.texture = image._internal
        self.image.origin.y, self.image.origin.z = at
        self.image.aspect = lib.WGPUTextureAspect_All
        self.extent = ffi.new("WGPUExtent3D *")
        self.extent.width, self.extent.height, self.extent.depthOrArrayLayers = width, rows, 1


_ROW = 1 << 18  # bytes a row, of a copy that has one


def copies(
    buffer: Any, offset: int, nbytes: int, image: Any, width: int, texel: int, layer: int
) -> list[Copy]:
    """Copies of a range of a buffer to a layer of an image: of whole rows, and of the rest."""
    # buffers end at multiples of texels, so that the last one may hold other bytes as well
    rows, rest = divmod(-(-nbytes // texel), width)
    out = [Copy(buffer, offset, image, (0, layer), (width, rows), texel)] if rows else []
    if rest:
        start = offset + texel * width * rows
        out.append(Copy(buffer, start, image, (rows, layer), (rest, 1), texel))
    return out


@contextmanager
def _quiet_wayland() -> Iterator[None]:
    """Keeps libwayland, which Mesa asks for surfaces, from printing when there is no session."""
    if "XDG_RUNTIME_DIR" in os.environ or os.name != "posix":
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        os.environ.pop("XDG_RUNTIME_DIR", None)


def enumerate_adapters(opengl: bool = False) -> list[Any]:
    """Vulkan, Metal and DX12 adapters, or OpenGL's, which is slow to start and mostly in vain."""
    with _quiet_wayland():
        if opengl:
            return _opengl_adapters()
        if _helpers._the_instance is None:  # pyright: ignore[reportPrivateUsage]
            lavapipe.prepare()
            extras.set_instance_extras(backends=("Vulkan", "Metal", "DX12"))
        found = wgpu.gpu.enumerate_adapters_sync()
    return [a for a in found if not a.info["backend_type"].startswith("OpenGL")]


def _opengl_adapters() -> list[Any]:
    extra = ffi.new("WGPUInstanceExtras *")
    extra.chain.sType = lib.WGPUSType_InstanceExtras
    extra.backends = _mappings.native_flags["InstanceBackend.GL"]
    descriptor = ffi.new("WGPUInstanceDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", extra)
    instance = lib.wgpuCreateInstance(descriptor)
    count = libf.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, ffi.NULL)
    handles = ffi.new("WGPUAdapter[]", count)
    libf.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, handles)
    gpu: Any = wgpu.gpu
    return [gpu._create_adapter(handle) for handle in handles]


def handle(wrapped: Any) -> Any:
    """The library's pointer; valid while the Python object lives."""
    return wrapped._internal


def submit(gpu: Any, command_buffers: Sequence[Any]) -> int:
    """Submits command buffers, each only ever once; returns the index of the submission."""
    handles = ffi.new("WGPUCommandBuffer[]", [c._internal for c in command_buffers])
    return libf.wgpuQueueSubmitForIndex(gpu.queue._internal, len(command_buffers), handles)


def poll(gpu: Any, wait: bool, index: int | None = None) -> None:
    """Runs callbacks; waits for all work, or for one submission. Releases the interpreter lock."""
    which = ffi.NULL if index is None else ffi.new("WGPUSubmissionIndex *", index)
    lib.wgpuDevicePoll(gpu._internal, wait, which)


def idle(gpu: Any) -> bool:
    """Whether the device has finished all work submitted so far."""
    return bool(lib.wgpuDevicePoll(gpu._internal, False, ffi.NULL) & 0xFF)


def timestamp_period(gpu: Any) -> float:
    """Nanoseconds of one tick of a timestamp."""
    return lib.wgpuQueueGetTimestampPeriod(gpu.queue._internal)


def write_buffer(gpu: Any, buffer: Any, offset: int, data: np.ndarray) -> None:
    """Queues a copy of contiguous bytes, which takes place before the next submission."""
    source = ffi.from_buffer("uint8_t[]", data)
    libf.wgpuQueueWriteBuffer(gpu.queue._internal, buffer._internal, offset, source, data.nbytes)


_statuses: dict[int, int] = {}
_tickets = itertools.count(1)


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")
def _on_mapped(status: int, _message: Any, ticket: Any, _unused: Any) -> None:
    _statuses[int(ffi.cast("uintptr_t", ticket))] = status


@contextmanager
def mapped(gpu: Any, buffer: Any, mode: int, nbytes: int, offset: int = 0) -> Iterator[np.ndarray]:
    """A range of a buffer in host memory, once the device has finished with the buffer.

    No submission may happen inside, since one that uses a mapped buffer ends the process: the
    caller holds the device's lock. No view may outlive the block. A request is never canceled:
    wgpu-core would grant the next one for that buffer when the work that the canceled one waited
    for ends, however much was submitted since.
    """
    ticket = next(_tickets)
    info = ffi.new("WGPUBufferMapCallbackInfo *")
    info.mode = lib.WGPUCallbackMode_AllowProcessEvents
    info.callback = _on_mapped
    info.userdata1 = ffi.cast("void *", ticket)
    libf.wgpuBufferMapAsync(buffer._internal, mode, offset, nbytes, info[0])
    try:
        _await(gpu, ticket)
        if _statuses[ticket] != lib.WGPUMapAsyncStatus_Success:
            raise RuntimeError(f"could not map {nbytes} bytes: status {_statuses[ticket]}")
        pointer = libf.wgpuBufferGetMappedRange(buffer._internal, offset, nbytes)
        yield np.frombuffer(ffi.buffer(pointer, nbytes), np.uint8)
    finally:
        _await(gpu, ticket)  # an interrupt may have ended the first wait
        if _statuses.pop(ticket) == lib.WGPUMapAsyncStatus_Success:
            libf.wgpuBufferUnmap(buffer._internal)


def _await(gpu: Any, ticket: int) -> None:
    if ticket not in _statuses:
        lib.wgpuDevicePoll(gpu._internal, False, ffi.NULL)  # enough when the buffer is not in use
    while ticket not in _statuses:
        lib.wgpuDevicePoll(gpu._internal, True, ffi.NULL)


def trusted_module(gpu: Any, code: str, label: str, bounds: bool) -> Any:
    """A shader module without limits on loops, and with bounds checks only if `bounds`."""
    text, name = code.encode(), label.encode()
    source = ffi.new("WGPUShaderSourceWGSL *")
    source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    source.code.data = text_data = ffi.new("char[]", text)
    source.code.length = len(text)
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    descriptor.label.data = name_data = ffi.new("char[]", name)
    descriptor.label.length = len(name)
    module = libf.wgpuDeviceCreateShaderModuleTrusted(gpu._internal, descriptor, bounds)
    del text_data, name_data  # held until here: the descriptor only points at them
    return _api.GPUShaderModule(label, module, gpu)


# Calls a function that calls the library many times, and raises what went wrong there: to look
# after each call of the library takes longer than most of the calls themselves.
_checked: Any = libf._make_proxy_func("record", lambda function, *args: function(*args))


class Passes:
    """Records dispatches on an encoder in one compute pass, which stays open until something else
    is to be recorded: a pass of its own costs a call more than its dispatches."""

    __slots__ = ("_pass", "encoder")

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self._pass: Any = None

    def record(self, steps: Sequence[Copy | Sequence[Step]]) -> None:
        """Records dispatches, and copies between passes. Errors are deferred to finish()."""
        if len(steps) == 1 and type(steps[0]) is list:
            self._record(steps)  # dispatches alone raise nothing before
        else:
            _checked(self._record, steps)

    def _record(self, steps: Iterable[Copy | Sequence[Step]]) -> None:
        encoder, compute_pass = self.encoder._internal, self._pass
        copy_to_image = lib.wgpuCommandEncoderCopyBufferToTexture
        for part in steps:
            if isinstance(part, Copy):
                if compute_pass is not None:
                    self._pass = None
                    lib.wgpuComputePassEncoderEnd(compute_pass)
                    lib.wgpuComputePassEncoderRelease(compute_pass)
                    compute_pass = None
                copy_to_image(encoder, part.source, part.image, part.extent)
                continue
            if compute_pass is None:
                begin = lib.wgpuCommandEncoderBeginComputePass
                self._pass = compute_pass = begin(encoder, ffi.NULL)
            _record(compute_pass, part)

    def end(self) -> Any:
        """Ends the pass; the encoder, on which something else can be recorded now."""
        if self._pass is not None:
            ended, self._pass = self._pass, None
            libf.wgpuComputePassEncoderEnd(ended)
            lib.wgpuComputePassEncoderRelease(ended)
        return self.encoder


def in_passes(steps: Iterable[Step | Copy]) -> list[Copy | list[Step]]:
    """The copies, and the dispatches between them together."""
    out: list[Copy | list[Step]] = []
    for step in steps:
        if isinstance(step, Copy):
            out.append(step)
        elif out and isinstance(last := out[-1], list):
            last.append(step)
        else:
            out.append([step])
    return out


def encode(encoder: Any, steps: Sequence[Step | Copy]) -> None:
    """Records dispatches in passes, and copies between the passes."""
    passes = Passes(encoder)
    passes.record(in_passes(steps))
    passes.end()


def copy(encoder: Any, step: Copy) -> None:
    """Records a copy, outside of passes."""
    to = encoder._internal
    libf.wgpuCommandEncoderCopyBufferToTexture(to, step.source, step.image, step.extent)


def record(compute_pass: Any, steps: Iterable[Step]) -> None:
    """Records dispatches. Errors in them are deferred to the encoder's finish()."""
    _record(compute_pass._internal, steps)


def _record(to: Any, steps: Iterable[Step]) -> None:
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    null, current = ffi.NULL, None
    for pipeline, group, x, y, z, immediates in steps:
        if pipeline is not current:
            set_pipeline(to, pipeline)
            current = pipeline
            if immediates:
                lib.wgpuComputePassEncoderSetImmediates(to, 0, NUMBERS, len(NUMBERS))
        set_bind_group(to, 0, group, 0, null)
        dispatch(to, x, y, z)


def write_timestamp(compute_pass: Any, query_set: Any, index: int) -> None:
    """Writes a timestamp between two dispatches of a pass."""
    lib.wgpuComputePassEncoderWriteTimestamp(compute_pass._internal, query_set._internal, index)
