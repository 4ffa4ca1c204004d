"""The process that times plans for `eggpu.tuning`: a JSON line for each, in order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.serialize import plan_from_json
from eggpu.runtime import Device, DeviceError, Executable, KernelError, open_device

_REPEAT = 5


def main(arguments: list[str]) -> None:
    """Time the plans of a file from a number on, on the device of that name."""
    where, first, name, backend = arguments
    plans = [plan_from_json(t) for t in json.loads(Path(where).read_text(encoding="utf-8"))]
    device = open_device(name, backend)
    print(json.dumps({"ready": device.target.name}), flush=True)
    for plan in plans[int(first) :]:
        try:
            said: dict[str, object] = {"ns": measure(plan, device)}
        except (KernelError, DeviceError) as error:
            refused = isinstance(error, KernelError)
            said = {"ns": None, "why": str(error).splitlines()[0], "refused": refused}
        print(json.dumps(said), flush=True)


def measure(plan: Plan, device: Device) -> float:
    """The ns of a plan's kernels, on random numbers."""
    executable = Executable(plan, device)
    buffers = [device.upload(given(plan, i)) for i in range(len(plan.inputs))]
    executable(buffers)
    device.synchronize()
    return float(executable.total(buffers, repeat=_REPEAT))


def given(plan: Plan, i: int) -> np.ndarray:
    """Numbers for an argument: normal floats, zeros for integers, which may be positions."""
    buffer = plan.buffers[plan.inputs[i]]
    if buffer.dtype in ("f32", "f16"):
        numbers = np.random.default_rng(i).standard_normal(buffer.shape, np.float32)
        return numbers.astype(np.float16) if buffer.dtype == "f16" else numbers
    kinds = {"i32": np.int32, "u32": np.uint32, "bool": np.bool_}
    return np.zeros(buffer.shape, kinds[buffer.dtype])


if __name__ == "__main__":
    main(sys.argv[1:])
