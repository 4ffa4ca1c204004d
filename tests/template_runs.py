"""Templates on the device: a fixture, operands as a kernel sees them, and a run of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest
import wgpu
from numpy.typing import NDArray

from eggpu.compiler.schedule.target import FLOOR
from eggpu.compiler.schedule.tile import Tile

Array = NDArray[np.generic]
NVIDIA = replace(FLOOR, max_workgroup_bytes=64 << 10, max_invocations=1024, subgroup=32)


@pytest.fixture(name="device", scope="module")
def gpu_device() -> wgpu.GPUDevice:
    adapters = wgpu.gpu.enumerate_adapters_sync()
    found = [a for a in adapters if a.info["backend_type"] == "Vulkan" and "subgroup" in a.features]
    assert found, "no Vulkan adapter with subgroups: scripts/setup-driver.sh installs one"
    return found[0].request_device_sync(required_features=["subgroup"])


@dataclass(frozen=True)
class Operand:
    """An array as a kernel sees it: stored with its axes in `order`, bound as vec4 or not."""

    name: str
    data: Array  # with logical axes
    order: tuple[int, ...]  # of the stored axes
    vec: bool  # bound as vec4: the last stored axis is contiguous and a multiple of 4
    prologue: str = "{0}"  # applied to each element

    def index(self, coords: tuple[str, ...]) -> str:
        stored = [self.data.shape[axis] for axis in self.order]
        strides = {axis: prod(stored[at + 1 :]) for at, axis in enumerate(self.order)}
        return " + ".join(f"{c} * {strides[axis]}u" for axis, c in enumerate(coords))

    def stored(self) -> Array:
        return np.ascontiguousarray(self.data.transpose(self.order))

    def element(self) -> str:
        return "u32" if self.data.dtype == bool else "vec4<f32>" if self.vec else "f32"

    def load(self, result: str, coords: tuple[str, ...], vec: int, axis: int | None) -> str:
        lines = [f"let {result}_at = {self.index(coords)};"]
        if vec == 4:
            assert self.vec
            assert axis == self.order[-1], "a vector runs along the contiguous axis"
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at / 4u];")
        elif self.vec:
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at / 4u][{result}_at % 4u];")
        else:
            lines.append(f"let {result}_raw = {self.name}_in[{result}_at];")
        value = self.prologue.format(f"{result}_raw")
        lines.append(f"let {result} = {value}{' != 0u' if self.data.dtype == bool else ''};")
        return "\n".join(lines)


def store_to(
    name: str, shape: tuple[int, ...], vec: bool, epilogue: str = "{0}"
) -> Callable[..., str]:
    def store(coords: tuple[str, ...], value: str, width: int = 1) -> str:
        at = " + ".join(f"{c} * {prod(shape[i + 1 :])}u" for i, c in enumerate(coords))
        place = f"{name}_out[at / 4u]" if vec else f"{name}_out[at]"
        if vec and width == 1:
            place += "[at % 4u]"
        assert vec or width == 1
        return f"let at = {at};\nlet result = {epilogue.format(value)};\n{place} = result;"

    return store


def bindings(operands: list[Operand], results: list[tuple[str, bool]]) -> str:
    lines = [
        f"@group(0) @binding({i}) var<storage, read> {o.name}_in: array<{o.element()}>;"
        for i, o in enumerate(operands)
    ]
    lines += [
        f"@group(0) @binding({len(operands) + i}) var<storage, read_write> {name}_out: "
        f"array<{'vec4<f32>' if vec else 'f32'}>;"
        for i, (name, vec) in enumerate(results)
    ]
    return "\n".join(lines)


def run(
    device: wgpu.GPUDevice,
    code: str,
    operands: list[Array],
    sizes: list[int],
    grid: tuple[int, ...],
) -> list[NDArray[np.float32]]:
    """Results of `sizes` float32 each; they start as NaN, so that what is not written shows."""
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    arrays = [a.astype(np.uint32) if a.dtype == bool else a for a in operands]
    arrays += [np.full(size, np.nan, np.float32) for size in sizes]
    buffers = [device.create_buffer_with_data(data=a, usage=usage) for a in arrays]
    module = device.create_shader_module(code=code)
    pipeline = device.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )
    entries = [
        {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
        for i, b in enumerate(buffers)
    ]
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = device.create_command_encoder()
    step = encoder.begin_compute_pass()
    step.set_pipeline(pipeline)
    step.set_bind_group(0, group)
    step.dispatch_workgroups(*grid)
    step.end()
    device.queue.submit([encoder.finish()])
    return [
        np.frombuffer(device.queue.read_buffer(b), np.float32) for b in buffers[len(operands) :]
    ]


def with_values(tile: Tile, splits: int | None = None, **changes: object) -> Tile:
    params = tile.values | changes
    return replace(tile, params=tuple(params.items()), splits=splits or tile.splits)
