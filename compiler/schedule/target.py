"""What the compiler must know of a device: its class, limits, features and measured rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates for the cost model. Times in ns, so a rate is bytes per ns (GB/s) or flop per ns
    (GFLOP/s)."""

    launch: float  # one more dispatch in a pass
    bandwidth: float  # bytes per ns, large contiguous reads and writes
    contract: float  # flop per ns of a large float32 product
    attention: float  # flop per ns of fused attention, all scores counted
    elementwise: float  # scalar flop per ns
    rows: int  # rows that keep the device busy when one worker handles a row
    onchip: int  # elements of a row that stay on chip between two passes over it
    strided: float = 1.5  # factor on bytes read across the last axis
    decode: float = 20.0  # bytes per ns of keys and values that one workgroup of attention reads


LAVAPIPE = Profile(
    launch=16000,
    bandwidth=10,
    contract=80,
    attention=107,
    elementwise=20,
    rows=16,
    onchip=1 << 16,
    decode=5,
)
GENERIC_GPU = Profile(
    launch=4000,
    bandwidth=1000,
    contract=20000,
    attention=15000,
    elementwise=10000,
    rows=512,
    onchip=8192,
)

H200 = Profile(
    launch=3000,
    bandwidth=3500,
    contract=42000,
    attention=45000,
    elementwise=12000,
    rows=512,
    onchip=8192,
    decode=60,
)


def built_in(name: str, kind: Literal["cpu", "gpu"]) -> Profile:
    """The rates of a device that was not calibrated, by the name of its adapter."""
    if kind == "cpu":
        return LAVAPIPE
    return H200 if name.startswith("NVIDIA H200") else GENERIC_GPU


@dataclass(frozen=True, slots=True)
class Target:
    """A device as the compiler sees it. `kind` picks the templates: "cpu" for llvmpipe, else
    "gpu"."""

    name: str
    driver: str
    backend: str
    kind: Literal["cpu", "gpu"]
    subgroup: int  # probed size; 0 without subgroup operations
    features: tuple[str, ...]  # sorted WebGPU feature names the device was opened with
    max_bindings: int  # storage buffers a kernel may bind
    max_binding_bytes: int
    max_buffer_bytes: int
    max_workgroup_bytes: int
    max_invocations: int  # in a workgroup
    max_groups: int  # workgroups in one dimension
    offset_alignment: int  # of a binding inside a buffer
    loop_limit: int  # loop iterations of one invocation in all; 0 when unlimited
    profile: Profile
    images: bool = False  # vec4<f32> are read several times faster from images than from buffers
    # arguments that hardly change may be copied to images that stay for later calls
    keeps: bool = False
    # `images` is off to save memory: the profile's rates are those of the device with images
    spares: bool = False

    def sparing(self) -> Target:
        """The same device, where nothing is copied to images."""
        return replace(self, images=False, keeps=False, spares=self.images or self.spares)

    def rated(self) -> Target:
        """The device as its profile was measured."""
        return replace(self, images=True, spares=False) if self.spares else self


FLOOR = Target(
    name="WebGPU floor",
    driver="",
    backend="none",
    kind="gpu",
    subgroup=0,
    features=(),
    max_bindings=8,
    max_binding_bytes=128 << 20,
    max_buffer_bytes=256 << 20,
    max_workgroup_bytes=16 << 10,
    max_invocations=256,
    max_groups=65535,
    offset_alignment=256,
    loop_limit=0,
    profile=GENERIC_GPU,
)
LLVMPIPE = Target(
    name="llvmpipe",
    driver="Mesa 22.3.6",
    backend="Vulkan",
    kind="cpu",
    subgroup=8,
    features=("immediates", "subgroup"),
    max_bindings=16,
    max_binding_bytes=128 << 20,
    max_buffer_bytes=(2 << 30) - 4,
    max_workgroup_bytes=32 << 10,
    max_invocations=1024,
    max_groups=65535,
    offset_alignment=32,
    loop_limit=65535,
    profile=LAVAPIPE,
    images=True,
    keeps=True,
)
