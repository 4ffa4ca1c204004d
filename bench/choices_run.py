"""Times the plans that bench/choices.py wrote, with no more than wgpu and NumPy: where eggpu is not
installed, its runtime is taken from the folder that this file lies in.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 2e-3  # of the largest value; between alternatives, in float32
FINALISTS = 4  # alternatives that are timed again, with the chosen one
HOPELESS = 2.0  # times the best one's time, after which an alternative is timed no more
PATIENCE = 5  # rounds before that, so that a busy moment rules nothing out


def attach() -> None:
    """Make `eggpu.runtime` importable from a checkout."""
    try:
        import eggpu.runtime  # noqa: F401
    except ImportError:
        root = Path(__file__).resolve().parent.parent
        package = types.ModuleType("eggpu")
        package.__path__ = [str(root / "api"), str(root)]
        sys.modules["eggpu"] = package


def row(file: Path, device: Any, seconds: float) -> dict[str, Any]:
    """Predicted and measured us of each plan in a file, and the regret."""
    from eggpu.compiler.schedule.serialize import plan_from_json
    from eggpu.runtime import DeviceError, Executable, KernelError

    content = json.loads(lzma.decompress(file.read_bytes()))
    runs: dict[str, Any] = {}
    results: dict[str, list[np.ndarray]] = {}
    predicted: dict[str, float] = {}
    failed: dict[str, str] = {}
    buffers = [device.upload(v) for v in arguments(content["types"], content["below"])]
    plans = [plan_from_json(entry["plan"]) for entry in content["plans"]]
    compile_together(plans, device)
    for entry, plan in zip(content["plans"], plans, strict=True):
        name = numbered(entry["name"], predicted)
        try:
            run = Executable(plan, device)
            out = run(buffers)
        except (DeviceError, KernelError) as error:
            if name == "chosen":
                raise
            failed[name] = str(error).splitlines()[0]
            continue
        places = [plan.buffers[o] for o in plan.outputs]
        pairs = zip(out, places, strict=True)
        results[name] = [device.download(b, p.shape, p.dtype) for b, p in pairs]
        runs[name], predicted[name] = run, entry["predicted_us"]
    wrong = different(results)
    for name in wrong:
        failed[name] = wrong[name]
        del runs[name]
    measured = timed(runs, buffers, device, seconds)
    best = min(measured, key=lambda n: measured[n])
    return {
        "regret": round(measured["chosen"] / measured[best], 3),
        "best": best,
        "alternatives": {
            n: {
                "predicted_us": predicted[n],
                "measured_us": round(us, 2),
                "kernels": [k.name for k in runs[n].plan.kernels],
            }
            for n, us in sorted(measured.items(), key=lambda item: item[1])
        },
        "failed": failed,
    }


def compile_together(plans: list[Any], device: Any) -> None:
    """Has the driver compile the kernels of all plans side by side."""
    from eggpu.runtime import DeviceError, KernelError

    kernels = [k for plan in plans for k in plan.kernels if 0 not in k.grid]
    try:
        device.pipelines.get(kernels)
    except (DeviceError, KernelError):
        return  # said when the plan of the kernel is loaded


def numbered(name: str, known: dict[str, float]) -> str:
    """`name`, or `name (2)` where there is one."""
    count = 1 + sum(k == name or k.startswith(f"{name} (") for k in known)
    return name if count == 1 else f"{name} ({count})"


def arguments(texts: list[str], below: int) -> list[np.ndarray]:
    """Normal numbers, and integers from 0 to `below` - 1."""
    rng = np.random.default_rng(0)
    out = []
    for text in texts:
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = tuple(int(n) for n in sizes.split(",") if n.strip())
        if dtype == "f32":
            out.append(rng.standard_normal(shape, np.float32))
        else:
            out.append(rng.integers(0, below, shape).astype(np.int32))
    return out


def different(results: dict[str, list[np.ndarray]]) -> dict[str, str]:
    """What is wrong with the alternatives whose values are not the chosen one's. Raises
    AssertionError when the chosen one's are not finite, or nothing agrees with it."""
    wanted = results["chosen"]
    assert all(np.isfinite(w).all() for w in wanted), "the chosen plan's results are not finite"
    wrong: dict[str, str] = {}
    for name, found in results.items():
        for a, b in zip(found, wanted, strict=True):
            gap = float(np.abs(a - b).max(initial=0.0)) / (1 + float(np.abs(b).max(initial=0.0)))
            if not (math.isfinite(gap) and gap < TOLERANCE):
                wrong[name] = f"differs from the chosen one's results by {gap:.1e} of the largest"
    assert len(results) == 1 or len(wrong) < len(results) - 1, f"nothing agrees: {wrong}"
    return wrong


def timed(
    runs: dict[str, Any], buffers: list[Any], device: Any, seconds: float
) -> dict[str, float]:
    """The least us of each run, in two heats: all of them, then the best again with the chosen one.

    Alternatives take turns, so that what else the machine does falls on all of them.
    """
    once = by_timestamps if device.target.kind == "gpu" else by_clock
    best = dict.fromkeys(runs, math.inf)
    left = list(runs)
    for part in (0.5, 0.5):
        end = time.perf_counter() + part * seconds * min(len(left), 8)
        rounds = 0
        while rounds < PATIENCE or (time.perf_counter() < end and rounds < 200):
            rounds += 1
            for name in left:
                best[name] = min(best[name], once(runs[name], buffers, device))
            limit = HOPELESS * min(best.values()) if rounds >= PATIENCE else math.inf
            left = [n for n in left if n == "chosen" or best[n] <= limit]
        first = sorted(left, key=lambda n: best[n])[:FINALISTS]
        left = list(dict.fromkeys(["chosen", *first]))
    return best


def by_clock(run: Any, buffers: list[Any], device: Any) -> float:
    """us of a call, its dispatches and the wait for them."""
    start = time.perf_counter()
    run(buffers)
    device.synchronize()
    return 1e6 * (time.perf_counter() - start)


def by_timestamps(run: Any, buffers: list[Any], device: Any) -> float:
    """us of a call on the device, without what the host takes."""
    return run.total(buffers, repeat=3) / 1e3
