"""Compute pipelines, built on several threads and kept by WGSL text and binding access."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import wgpu

from ..compiler.schedule.images import TEXELS
from ..compiler.schedule.plan import LAYERED, Image, Kernel, has_immediates
from . import host, native
from .errors import KernelError
from .translate import Translation

if TYPE_CHECKING:
    from .buffers import DeviceBuffer
    from .device import Device

Accesses = tuple[str, ...]  # as in `Binding.layout`
Key = tuple[str, Accesses, bool]  # WGSL, access of each binding, runs without checks

_AROUND = 3  # source lines shown on each side of an error
_DUMMY_BYTES = 1 << 16
_LAYOUTS: dict[str, dict[str, Any]] = {
    "read": {"buffer": {"type": "read-only-storage"}},
    "read_write": {"buffer": {"type": "storage"}},
}
for _access, _texel in TEXELS.items():
    for _layers, _dimension in (("", "2d"), (LAYERED, "2d-array")):
        _LAYOUTS[_access + _layers] = {
            "storage_texture": {
                "access": "read-only", "format": _texel.format, "view_dimension": _dimension
            }
        }  # fmt: skip


class Picture:
    """An image on the device, whose layers kernels read."""

    def __init__(self, texture: Any) -> None:
        self.texture = texture
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, layer: int, count: int) -> Any:
        """A view of one layer, or of several."""
        if (layer, count) not in self._views:
            self._views[layer, count] = self.texture.create_view(
                dimension="2d" if count == 1 else "2d-array",
                base_array_layer=layer,
                array_layer_count=count,
            )
        return self._views[layer, count]


class Pipelines:
    """The compiled kernels of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pipelines: dict[Key, Any] = {}
        self._layouts: dict[Accesses, Any] = {}
        self._pipeline_layouts: dict[tuple[Accesses, bool], Any] = {}
        self._dummies: dict[Accesses, Any] = {}
        self._translations: list[Translation] = []
        self._given: dict[str, tuple[Any, int, int]] = {}  # what dummies bind

    def get(self, kernels: Sequence[Kernel]) -> list[Any]:
        """The pipeline of each kernel. On a CPU the driver starts to translate new ones at once;
        `wait` before they run.

        Raises KernelError with the source around the error when WGSL does not compile.
        """
        keys = [self._key(kernel) for kernel in kernels]
        missing = {k: kernel for k, kernel in zip(keys, kernels) if k not in self._pipelines}
        if missing:
            self._build(missing)
            if self._device.target.kind == "cpu":
                self._translations.append(Translation(self._device, missing))
        return [self._pipelines[key] for key in keys]

    def layout(self, accesses: Accesses) -> Any:
        """The bind-group layout of storage buffers with these accesses."""
        with self._device.lock:
            if accesses not in self._layouts:
                entries = [
                    {"binding": i, "visibility": wgpu.ShaderStage.COMPUTE, **_LAYOUTS[access]}
                    for i, access in enumerate(accesses)
                ]
                made = self._device.gpu.create_bind_group_layout(entries=entries)
                self._layouts[accesses] = made
            return self._layouts[accesses]

    def bind(self, accesses: Accesses, ranges: Sequence[tuple[Any, int, int]]) -> Any:
        """A bind group of (wgpu buffer, offset, bytes), or (view of an image, 0, 0)."""
        self._device.counters.bind_groups_created += 1
        entries: list[dict[str, Any]] = []
        for i, (access, (held, offset, nbytes)) in enumerate(zip(accesses, ranges, strict=True)):
            part = {"buffer": held, "offset": offset, "size": nbytes}
            buffer = access in ("read", "read_write")
            entries.append({"binding": i, "resource": part if buffer else held})
        return self._device.gpu.create_bind_group(layout=self.layout(accesses), entries=entries)

    def image(self, image: Image) -> Picture:
        """A new image.

        None has sides that are powers of two, or only one layer: lavapipe translates kernels once
        more for these. A layer that nothing is copied to takes no memory there.
        """
        made = self._device.gpu.create_texture(
            size=(_uneven(image.width), _uneven(image.rows), max(2, image.layers)),
            format={t.nbytes: t.format for t in TEXELS.values()}[image.texel],
            usage=wgpu.TextureUsage.STORAGE_BINDING | wgpu.TextureUsage.COPY_DST,
        )
        return Picture(made)

    def run_once(
        self, wgsl: str, name: str, buffers: Sequence[DeviceBuffer], groups: int = 1
    ) -> None:
        """Runs workgroups of a kernel on read-write buffers; it is compiled the first time."""
        accesses: Accesses = ("read_write",) * len(buffers)
        key: Key = (wgsl, accesses, False)
        if (pipeline := self._pipelines.get(key)) is None:
            pipeline = self._pipelines[key] = self._compile(wgsl, accesses, False, name)
        group = self.bind(accesses, [(b.storage.gpu, 0, b.nbytes) for b in buffers])
        encoder = self._device.gpu.create_command_encoder()
        compute_pass = encoder.begin_compute_pass()
        step = native.handle(pipeline), native.handle(group), groups, 1, 1, False
        native.record(compute_pass, [step])
        compute_pass.end()
        with self._device.lock:
            self._device.submit([encoder.finish()])

    def _key(self, kernel: Kernel) -> Key:
        device = self._device
        unchecked = kernel.trusted and not device.debug
        return kernel.wgsl, tuple(b.layout for b in kernel.bindings), unchecked

    def _build(self, missing: dict[Key, Kernel]) -> None:
        for wgsl, accesses, _ in missing:
            self._pipeline_layout(accesses, has_immediates(wgsl))
        workers = min(len(missing), host.processors(), 16)
        with ThreadPoolExecutor(workers, thread_name_prefix="eggpu-compile") as threads:
            built = threads.map(self._compile_kernel, missing, missing.values())
            self._pipelines.update(zip(missing, built))

    def _compile_kernel(self, key: Key, kernel: Kernel) -> Any:
        wgsl, accesses, unchecked = key
        return self._compile(wgsl, accesses, unchecked, f"{kernel.name} ({kernel.template})")

    def _compile(self, wgsl: str, accesses: Accesses, unchecked: bool, name: str) -> Any:
        gpu = self._device.gpu
        try:
            if unchecked:
                # a CPU's kernels lose more by limits on loops than by bounds checks
                bounds = self._device.target.kind == "cpu"
                module = native.trusted_module(gpu, wgsl, name, bounds)
            else:
                module = gpu.create_shader_module(code=wgsl, label=name)
            pipeline = gpu.create_compute_pipeline(
                label=name,
                layout=self._pipeline_layout(accesses, has_immediates(wgsl)),
                compute={"module": module, "entry_point": "main"},
            )
        except wgpu.GPUError as error:
            raise KernelError(explain(name, wgsl, str(error))) from error
        with self._device.lock:
            self._device.counters.pipelines_compiled += 1
        return pipeline

    def _pipeline_layout(self, accesses: Accesses, immediates: bool) -> Any:
        key = accesses, immediates
        with self._device.lock:
            if key not in self._pipeline_layouts:
                self._pipeline_layouts[key] = self._device.gpu.create_pipeline_layout(
                    bind_group_layouts=[self.layout(accesses)],
                    immediate_size=len(native.NUMBERS) if immediates else 0,
                )
            return self._pipeline_layouts[key]

    def translate(self, key: Key) -> int | None:
        """Makes lavapipe translate a kernel to machine code now, not when it first runs.

        It does so when it meets a dispatch, even one of no workgroups, while Python goes on.
        Returns the number of the submission; None for a kernel that wants larger bindings.
        """
        encoder = self._device.gpu.create_command_encoder()
        compute_pass = encoder.begin_compute_pass()
        group = self._dummy_group(key[1])
        step = native.handle(self._pipelines[key]), native.handle(group), 0, 1, 1, False
        native.record(compute_pass, [step])
        compute_pass.end()
        try:
            recorded = encoder.finish()
        except wgpu.GPUError:  # it is translated when it first runs
            return None
        with self._device.lock:
            self._device.counters.pipelines_translated += 1
            return self._device.submit([recorded])

    def wait(self) -> None:
        """Waits for translations that have begun; to be called before their kernels run, without
        the device's lock."""
        while translations := self._translations[:1]:
            translations[0].wait()
            self._translations = [t for t in self._translations if not t.done]

    def stop(self) -> None:
        """Gives up translations."""
        for translation in self._translations:
            translation.stop()

    def drop(self) -> None:
        """Forgets all pipelines: of a device that only translates for others, or that is lost."""
        self._pipelines.clear()
        self._translations.clear()

    def _dummy_group(self, accesses: Accesses) -> Any:
        if accesses not in self._dummies:
            self._dummies[accesses] = self.bind(accesses, [self._dummy(a) for a in accesses])
        return self._dummies[accesses]

    def _dummy(self, access: str) -> tuple[Any, int, int]:
        """Memory for bindings of a kind; one buffer cannot be read from and written to at once."""
        if access not in self._given:
            if (texel := TEXELS.get(access.removesuffix(LAYERED))) is not None:
                layers = 2 if access.endswith(LAYERED) else 1
                picture = self.image(Image(texel.nbytes, 4, 1, layers))
                self._given[access] = picture.view(0, layers), 0, 0
            else:
                usage = wgpu.BufferUsage.STORAGE
                made = self._device.gpu.create_buffer(size=_DUMMY_BYTES, usage=usage)
                self._given[access] = (made, 0, _DUMMY_BYTES)
        return self._given[access]


def _uneven(side: int) -> int:
    """The least number from `side` on that is no power of two."""
    while side & (side - 1) == 0:
        side += 1
    return side


def explain(name: str, wgsl: str, message: str) -> str:
    """The message of the WGSL compiler, with the kernel's name and the lines around the error."""
    causes = message.partition("Caused by:")[2] or message
    text = "\n".join(line for line in causes.strip().splitlines() if line.strip())
    place = re.search(r"wgsl:(\d+):", message)
    if place is None:
        return f"kernel {name} does not compile\n{text}"
    at = int(place[1])
    lines = wgsl.splitlines()
    first = max(1, at - _AROUND)
    shown = "\n".join(
        f"{'>' if number == at else ' '} {number:4} | {lines[number - 1]}"
        for number in range(first, min(len(lines), at + _AROUND) + 1)
    )
    return f"kernel {name} does not compile\n{text}\n{shown}"
