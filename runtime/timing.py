"""Device time of each dispatch, from timestamps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from . import native
from .buffers import read_staged
from .errors import DeviceError

if TYPE_CHECKING:
    from .device import Device

_QUERIES = 4096  # timestamps that one query set holds
_WARM_SECONDS = 0.05  # an idle GPU runs at a fraction of its clock


def measure(device: Device, steps: Sequence[native.Step | native.Copy], repeat: int) -> list[int]:
    """The median nanoseconds of each dispatch over `repeat` runs, once the device is warm.

    Where timestamps can stand inside passes, the copies before a dispatch count for it.
    """
    if "timestamp-query" not in device.gpu.features:
        raise DeviceError(f"profiling needs timestamp-query, which {device.target.name} lacks")
    within = "timestamp-query-inside-passes" in device.gpu.features
    run = _one_pass if within else _pass_each
    most = _QUERIES - 1 if within else _QUERIES // 2
    parts = [steps[start : start + most] for start in range(0, len(steps), most)]

    def once() -> list[float]:
        return [t for part in parts for t in run(device, part)]

    end = time.perf_counter() + _WARM_SECONDS
    once()
    while time.perf_counter() < end:
        once()
    return [round(statistics.median(times)) for times in zip(*(once() for _ in range(repeat)))]


def _one_pass(device: Device, steps: Sequence[native.Step | native.Copy]) -> list[float]:
    """Timestamps before, between and after the dispatches of a pass, which only copies end."""
    count = sum(not isinstance(step, native.Copy) for step in steps)
    queries = _query_set(device, count + 1)
    encoder = device.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    native.write_timestamp(compute_pass, queries, 0)
    index = 0
    for step in steps:
        if isinstance(step, native.Copy):
            if compute_pass is not None:
                compute_pass.end()
            compute_pass = None
            native.copy(encoder, step)
            continue
        compute_pass = compute_pass or encoder.begin_compute_pass()
        native.record(compute_pass, [step])
        index += 1
        native.write_timestamp(compute_pass, queries, index)
    if compute_pass is not None:
        compute_pass.end()
    ticks = _resolve(device, encoder, queries, count + 1)
    return [float(t) for t in np.diff(ticks) * native.timestamp_period(device.gpu)]


def _pass_each(device: Device, steps: Sequence[native.Step | native.Copy]) -> list[float]:
    """A pass for each dispatch, with timestamps at its begin and end."""
    count = sum(not isinstance(step, native.Copy) for step in steps)
    queries = _query_set(device, 2 * count)
    encoder = device.gpu.create_command_encoder()
    index = -1
    for step in steps:
        if isinstance(step, native.Copy):
            native.copy(encoder, step)
            continue
        index += 1
        compute_pass = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": queries,
                "beginning_of_pass_write_index": 2 * index,
                "end_of_pass_write_index": 2 * index + 1,
            }
        )
        native.record(compute_pass, [step])
        compute_pass.end()
    ticks = _resolve(device, encoder, queries, 2 * count).reshape(-1, 2)
    return [float(t) for t in (ticks[:, 1] - ticks[:, 0]) * native.timestamp_period(device.gpu)]


def _query_set(device: Device, count: int) -> Any:
    return device.gpu.create_query_set(type="timestamp", count=count)


def _resolve(device: Device, encoder: Any, queries: Any, count: int) -> np.ndarray:
    """Submits, waits, and returns the timestamps in ticks."""
    usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
    resolved = device.gpu.create_buffer(size=8 * count, usage=usage)
    encoder.resolve_query_set(queries, 0, count, resolved, 0)
    with device.lock:
        device.submit([encoder.finish()])
    out = np.empty(8 * count, np.uint8)
    read_staged(device, resolved, 0, out)
    return out.view("<i8")
