"""Times what the host spends on a dispatch: recording it, finishing the command buffer, submitting.

    python bench/encode.py --json

The same dispatches are recorded as eggpu does it, through the library's raw functions, and through
wgpu's own Python API, in turn in one process; `ratio` is the time of recording by wgpu's API over
ours. `call` is a whole call of the compiled function, Python's part of it included. A dispatch has
a bind group and eight elements, so the device has next to nothing to do; `goal` is the us that
recording, finishing and submitting may take.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.runtime import Device, native

GOAL = 1.5


def main() -> None:
    """Measure; print a line of text or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line of JSON")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--dispatches", type=int, default=600, help="of a command buffer")
    parser.add_argument("--rounds", type=int, default=40, help="command buffers of each side")
    args = parser.parse_args()
    if args.device is not None:
        eg.device(args.device)
    row = measure(args.dispatches, args.rounds)
    print(json.dumps(row) if args.json else text(row))


def measure(dispatches: int, rounds: int) -> dict[str, Any]:
    """Medians over some rounds, in us a dispatch."""
    on, program = eg.device(), eg.compile(chain(dispatches), optimize=False, cache=False)
    x = eg.put(np.ones(8, np.float32))
    program(x)
    eg.synchronize()
    executable = program._current().executable
    (recording,) = executable._recordings.values()
    steps = recording.steps
    assert len(steps) == dispatches
    pipelines = {native.handle(k.pipeline): k.pipeline for k in executable._kernels}
    groups = {native.handle(group): group for group in recording.groups}
    wrapped = [(pipelines[step[0]], groups[step[1]], step[2:5]) for step in steps]
    times: list[tuple[float, ...]] = []
    gc.disable()
    for _ in range(rounds):
        ours = command_buffer(on, lambda encoder: native.encode(encoder, steps))
        theirs = command_buffer(on, lambda encoder: by_wgpu(encoder, wrapped))
        start = time.perf_counter()
        program(x)
        times.append((*ours, theirs[0], time.perf_counter() - start))
        eg.synchronize()
    gc.enable()
    middle = np.median(np.array(times), axis=0) * 1e6 / dispatches
    names = ("record", "finish", "submit", "record_by_wgpu", "call")
    found = {name: round(float(us), 3) for name, us in zip(names, middle, strict=True)}
    all_ = round(sum(found[name] for name in names[:3]), 3)
    ratio = round(found["record_by_wgpu"] / found["record"], 2)
    about = {"device": on.target.name, "dispatches": dispatches, "unit": "us a dispatch"}
    return {**about, **found, "all": all_, "goal": GOAL, "ratio": ratio}


def chain(length: int) -> Callable[[Any], Any]:
    """So many kernels, each of which reads what the one before wrote."""

    def run(x: Any) -> Any:
        for _ in range(length):
            x = eg.sin(x)
        return x

    return run


def command_buffer(on: Device, record: Callable[[Any], None]) -> tuple[float, float, float]:
    """Seconds of recording, of finishing and of submitting."""
    encoder = on.gpu.create_command_encoder()
    start = time.perf_counter()
    record(encoder)
    recorded = time.perf_counter()
    finished = encoder.finish()
    done = time.perf_counter()
    with on.lock:
        on.submit([finished])
    sent = time.perf_counter()
    eg.synchronize()
    return recorded - start, done - recorded, sent - done


def by_wgpu(encoder: Any, wrapped: list[tuple[Any, Any, tuple[int, int, int]]]) -> None:
    """The same dispatches as people record them with wgpu."""
    to = encoder.begin_compute_pass()
    for pipeline, group, grid in wrapped:
        to.set_pipeline(pipeline)
        to.set_bind_group(0, group)
        to.dispatch_workgroups(*grid)
    to.end()


def text(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"{row['device']}, {row['dispatches']} dispatches, us each: record {row['record']:.2f}, "
        f"finish {row['finish']:.2f}, submit {row['submit']:.2f}, all {row['all']:.2f} (goal "
        f"{row['goal']}); record by wgpu's API {row['record_by_wgpu']:.2f}, ratio {row['ratio']}; "
        f"a whole call {row['call']:.2f}"
    )


if __name__ == "__main__":
    main()
