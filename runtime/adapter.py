"""Which adapters there are, which one is taken, and how one becomes a `Target`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ..compiler.schedule.target import Target, built_in
from . import native
from .errors import DeviceError

# What kernels and the runtime can use. All features at once is refused by some drivers.
FEATURES = (
    "immediates",
    "mappable-primary-buffers",
    "shader-f16",
    "shader-float32-atomic",
    "shader-int64",
    "subgroup",
    "subgroup-barrier",
    "timestamp-query",
    "timestamp-query-inside-encoders",
    "timestamp-query-inside-passes",
)
INSTALL = (
    "Install a driver: on Debian or Ubuntu `apt-get install mesa-vulkan-drivers` gives the drivers "
    "of AMD and Intel GPUs and a device that runs on the CPU; NVIDIA's driver also needs "
    "`apt-get install libvulkan1`. `vulkaninfo --summary` of vulkan-tools lists what is found."
)
Class = Literal["discrete", "integrated", "cpu", "other"]
_CLASSES: dict[str, Class] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "cpu",
}
_RANK: dict[Class, int] = {"discrete": 0, "integrated": 1, "other": 2, "cpu": 3}
_BACKENDS = {"vulkan": "Vulkan", "metal": "Metal", "dx12": "D3D12", "d3d12": "D3D12"}
_LOOP_LIMIT = 65535  # llvmpipe before Mesa 25 stops an invocation's loops after this many rounds


@dataclass(frozen=True, slots=True)
class Adapter:
    """One way to reach a device. `index` is its position in `adapters()`."""

    index: int
    name: str
    kind: Class
    backend: str
    driver: str
    vendor: str

    def __str__(self) -> str:
        driver = self.driver or "unknown driver"
        return f"{self.index}: {self.name} ({self.kind}, {self.backend}, {driver})"


def adapters(backend: str | None = None) -> list[Adapter]:
    """The adapters, best first; OpenGL's only for backend "gl"."""
    return [adapter for adapter, _ in found(backend)]


def found(backend: str | None) -> list[tuple[Adapter, Any]]:
    """Adapters with wgpu's objects, best first: discrete, integrated, CPU; Vulkan before others."""
    wanted = None if backend is None else backend.lower()
    if wanted not in (None, "gl", "opengl", *_BACKENDS):
        raise DeviceError(f"backend needs vulkan, metal, dx12 or gl, got {backend!r}")
    opengl = wanted in ("gl", "opengl")
    raw = native.enumerate_adapters(opengl)
    if wanted is not None and not opengl:
        raw = [a for a in raw if a.info["backend_type"] == _BACKENDS[wanted]]
    raw.sort(key=_rank)
    return [(_describe(index, a), a) for index, a in enumerate(raw)]


def _rank(adapter: Any) -> tuple[int, bool]:
    return _RANK[_class(adapter)], adapter.info["backend_type"] == "D3D12"


def _class(adapter: Any) -> Class:
    name = adapter.info["device"].lower()
    if "llvmpipe" in name or "swiftshader" in name:
        return "cpu"
    return _CLASSES.get(adapter.info["adapter_type"], "other")


def _describe(index: int, adapter: Any) -> Adapter:
    info = adapter.info
    return Adapter(
        index=index,
        name=info["device"],
        kind=_class(adapter),
        backend=info["backend_type"],
        driver=info["description"],
        vendor=info["vendor"],
    )


def choose(name: str | None, backend: str | None) -> tuple[Adapter, Any]:
    """The best adapter, the one with an index, or the best whose name holds `name`."""
    candidates = found(backend)
    if not candidates:
        raise DeviceError(_none_found(backend))
    if name is None:
        return candidates[0]
    if name.isdecimal() and int(name) < len(candidates):
        return candidates[int(name)]
    for candidate in candidates:
        if name.lower() in candidate[0].name.lower():
            return candidate
    listed = "\n  ".join(str(adapter) for adapter, _ in candidates)
    raise DeviceError(f"no device has the index or a name with {name!r}; there are\n  {listed}")


def _none_found(backend: str | None) -> str:
    if backend is not None:
        return f"no adapter for backend {backend!r} was found. {INSTALL}"
    text = f"no Vulkan, Metal or DX12 adapter was found. {INSTALL}"
    opengl = native.enumerate_adapters(opengl=True)
    if opengl:
        text += f" OpenGL offers {opengl[0].info['device']}, used only when backend is 'gl'."
    return text


def features(adapter: Adapter, raw: Any) -> list[str]:
    """What to open a device with. Mappable memory is the fast kind on CPUs only."""
    unwanted = set() if adapter.kind == "cpu" else {"mappable-primary-buffers"}
    return [f for f in FEATURES if f in raw.features and f not in unwanted]


def make_target(adapter: Adapter, gpu: Any, subgroup: int) -> Target:
    """The compiler's view of an open device; `subgroup` is the probed size, 0 without shuffles."""
    limits = gpu.limits
    opened = set(gpu.features) & set(FEATURES)
    if subgroup == 0:
        opened -= {"subgroup", "subgroup-barrier"}
    cpu = adapter.kind == "cpu"
    return Target(
        name=adapter.name,
        driver=adapter.driver,
        backend=adapter.backend,
        kind="cpu" if cpu else "gpu",
        subgroup=subgroup,
        features=tuple(sorted(opened)),
        max_bindings=min(
            limits["max-storage-buffers-per-shader-stage"], limits["max-bindings-per-bind-group"]
        ),
        max_binding_bytes=limits["max-storage-buffer-binding-size"] & ~3,
        max_buffer_bytes=limits["max-buffer-size"] & ~3,
        max_workgroup_bytes=limits["max-compute-workgroup-storage-size"],
        max_invocations=limits["max-compute-invocations-per-workgroup"],
        max_groups=limits["max-compute-workgroups-per-dimension"],
        offset_alignment=limits["min-storage-buffer-offset-alignment"],
        loop_limit=_loop_limit(adapter),
        profile=built_in(adapter.name, "cpu" if cpu else "gpu"),
        keeps=_mesa(adapter) == 22,
        images=_mesa(adapter) == 22,  # later ones gain little, and some results are wrong
    )


def _loop_limit(adapter: Adapter) -> int:
    if "llvmpipe" not in adapter.name:
        return 0
    return 0 if _mesa(adapter) >= 25 else _LOOP_LIMIT


def _mesa(adapter: Adapter) -> int:
    """Mesa's major version where the device is its llvmpipe; 0 when unknown, or another device."""
    found = re.search(r"Mesa (\d+)", adapter.driver) if "llvmpipe" in adapter.name else None
    return int(found[1]) if found is not None else 0
