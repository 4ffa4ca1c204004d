"""Device time of each dispatch, from timestamps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import wgpu

from . import native
from .buffers import read_staged
from .errors import DeviceError

if TYPE_CHECKING:
    from .device import Device

T = TypeVar("T")

_QUERIES = 4096  # timestamps that one query set holds
_WARM_SECONDS = 0.05  # of running before the first measurement
# an idle GPU runs at a sixth of its clock, which rises when it has much to do
_COLD_SECONDS, _BUSY_SECONDS = 0.2, 0.15
_BUSY_GROUPS = 16384
_BUSY = """
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  var x = f32(id.x);
  for (var i = 0u; i < 4096u; i++) {
    x = fma(x, 0.999, 0.001);
  }
  if (x == -1.0) {
    out[0] = x;
  }
}
"""
_TIMED = 200_000  # ns between two timestamps, which cost a GPU some microseconds themselves
_TIMES = 20  # that a dispatch is repeated at most for that


def measure(
    device: Device,
    steps: Sequence[native.Step | native.Copy],
    repeat: int,
    again: Sequence[bool] | None = None,
) -> list[int]:
    """The median nanoseconds of each dispatch over `repeat` runs, once the device is warm.

    Where timestamps can stand inside passes, the copies before a dispatch count for it. On a GPU a
    short dispatch of which `again` says that it gives the same when repeated stands several times
    between two timestamps, since these keep the next dispatch from starting early.
    """
    _needs_timestamps(device)
    within = "timestamp-query-inside-passes" in device.gpu.features
    dispatches = [step for step in steps if not isinstance(step, native.Copy)]
    times = [1] * len(dispatches)

    def once() -> list[float]:
        if within:
            return _in_parts(device, steps, times)
        most = _QUERIES // 2
        parts = (steps[start : start + most] for start in range(0, len(steps), most))
        return [t for part in parts for t in _pass_each(device, part)]

    found = _warmed(device, once)
    if within and device.target.kind == "gpu" and again is not None:
        times = [_count(ns) if same else 1 for ns, same in zip(found, again, strict=True)]
        once()
    out = [round(statistics.median(each)) for each in zip(*(once() for _ in range(repeat)))]
    _measured[device] = time.perf_counter()
    return out


def total(device: Device, steps: Sequence[native.Step | native.Copy], repeat: int) -> int:
    """The least nanoseconds of all dispatches from the first's start to the last's end, without
    timestamps between them; on a GPU of several runs one after the other, if they are short."""
    _needs_timestamps(device)
    first = _warmed(device, partial(_span, device, steps, 1))
    count = _count(first) if device.target.kind == "gpu" else 1
    best = min(_span(device, steps, count) for _ in range(repeat + 1))
    _measured[device] = time.perf_counter()
    return round(best)


_measured: WeakKeyDictionary[Device, float] = WeakKeyDictionary()  # when it was last


def _warmed(device: Device, run: Callable[[], T]) -> T:
    """What the last of some runs returns, once the device's clock has risen."""
    now = time.perf_counter()
    cold = now - _measured.get(device, -1.0) >= _COLD_SECONDS
    if cold and device.target.kind == "gpu":
        _keep_busy(device, now + _BUSY_SECONDS)
    end = time.perf_counter() + (_WARM_SECONDS if cold else _WARM_SECONDS / 10)
    found = run()
    while time.perf_counter() < end:
        found = run()
    _measured[device] = time.perf_counter()
    return found


def _keep_busy(device: Device, end: float) -> None:
    """Has all of the device compute until then."""
    out = device.alloc(4)
    while time.perf_counter() < end:
        device.pipelines.run_once(_BUSY, "keep_busy", [out], _BUSY_GROUPS)
        device.synchronize()


def _needs_timestamps(device: Device) -> None:
    if "timestamp-query" not in device.gpu.features:
        raise DeviceError(f"profiling needs timestamp-query, which {device.target.name} lacks")


def _count(ns: float) -> int:
    return max(1, min(_TIMES, round(_TIMED / max(ns, 1.0))))


def _span(device: Device, steps: Sequence[native.Step | native.Copy], count: int) -> float:
    """ns of a run, of which `count` follow one another between two timestamps."""
    queries = _query_set(device, 2)
    encoder = device.gpu.create_command_encoder()
    for index in (0, 1):  # a pass of its own for each timestamp: passes follow one another
        stamp = "beginning_of_pass_write_index" if index == 0 else "end_of_pass_write_index"
        encoder.begin_compute_pass(timestamp_writes={"query_set": queries, stamp: index}).end()
        if index == 0:
            native.encode(encoder, [step for _ in range(count) for step in steps])
    ticks = _resolve(device, encoder, queries, 2)
    return float(ticks[1] - ticks[0]) * native.timestamp_period(device.gpu) / count


def _in_parts(
    device: Device, steps: Sequence[native.Step | native.Copy], times: Sequence[int]
) -> list[float]:
    """ns of each dispatch, in as many passes as query sets need."""
    found: list[float] = []
    for start in range(0, len(steps), _QUERIES - 1):
        part = steps[start : start + _QUERIES - 1]
        count = sum(not isinstance(step, native.Copy) for step in part)
        found += _one_pass(device, part, times[len(found) : len(found) + count])
    return found


def _one_pass(
    device: Device, steps: Sequence[native.Step | native.Copy], times: Sequence[int]
) -> list[float]:
    """Timestamps before, between and after the dispatches of a pass, which only copies end; each
    dispatch is there as often as `times` says, and gets its part of the time between."""
    count = len(times)
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
        native.record(compute_pass, [step] * times[index])
        index += 1
        native.write_timestamp(compute_pass, queries, index)
    if compute_pass is not None:
        compute_pass.end()
    ticks = _resolve(device, encoder, queries, count + 1)
    period = native.timestamp_period(device.gpu)
    return [float(t) * period / n for t, n in zip(np.diff(ticks), times, strict=True)]


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
