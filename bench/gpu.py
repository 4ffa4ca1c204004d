"""Times eggpu and PyTorch on one GPU, in turn in one process, and prints ratios.

    python bench/gpu.py [--json] [--rows matmul,attention] [--without-torch]

A ratio is PyTorch's time over ours: above 1 eggpu is faster. `goal` is the least that is asked for.
Times are the best mean over blocks of calls that are ended by waiting for the device.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpu_ours as ours

import eggpu as eg

BLOCKS = 4
GPT2_BYTES = 8338 << 20  # the peak of torch.compile's step
BLOCK_SECONDS = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: what we run, what PyTorch runs (given its module), the ratio asked for."""

    name: str
    ours: Callable[[], ours.Work]
    torch: Callable[[Any], Callable[[], Any]]
    goal: float
    against: str = "eager"
    same_as: str = ""  # the row whose PyTorch figures count for this one too


def _matmul(m: int, n: int, k: int, goal: float) -> Row:
    return Row(
        f"matmul {m}x{n}x{k}", lambda: ours.matmul(m, n, k), lambda t: t.matmul(m, n, k), goal
    )


def _rowwise(name: str) -> Row:
    return Row(name, lambda: ours.rowwise(name), lambda t: t.rowwise(name), 0.9)


def _step(
    name: str,
    build: Callable[[], ours.Work],
    torch: Callable[[Any, bool], Any],
    against: str,
    goal: float,
) -> Row:
    return Row(name, build, lambda t: torch(t, against == "compile"), goal, against)


ROWS = [
    _matmul(2048, 2048, 2048, 0.7),
    _matmul(4096, 4096, 4096, 0.7),
    _matmul(8192, 768, 3072, 0.7),
    _matmul(1, 49152, 576, 0.8),
    Row("attention forward", ours.attention, lambda t: t.attention(), 0.7, "memory-efficient"),
    Row(
        "attention gradients",
        ours.attention_gradients,
        lambda t: t.attention_gradients(),
        0.7,
        "memory-efficient",
    ),
    *(_rowwise(name) for name in ("softmax", "layer_norm", "gelu", "sum_rows", "sum_columns")),
    _step("peers mlp", lambda: ours.peer("mlp"), lambda t, c: t.peer("mlp", c), "eager", 2.0),
    _step("peers gpt", lambda: ours.peer("gpt"), lambda t, c: t.peer("gpt", c), "compile", 3.0),
    _step(
        "gpt 6x384", lambda: ours.gpt(ours.SMALL), lambda t, c: t.gpt(ours.SMALL, c), "compile", 0.8
    ),
    _step(
        "gpt2 124M", lambda: ours.gpt(ours.GPT2), lambda t, c: t.gpt(ours.GPT2, c), "compile", 0.7
    ),
    Row(
        "gpt2 124M, max_memory",
        lambda: ours.gpt(ours.GPT2, max_memory=GPT2_BYTES),
        lambda t: t.gpt(ours.GPT2, True),
        0.7,
        "compile",
        same_as="gpt2 124M",
    ),
]


def main() -> None:
    """Measure the rows, print a table or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="parts of names, with commas between")
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    parser.add_argument("--without-torch", action="store_true")
    args = parser.parse_args()
    peer = None if args.without_torch else torch_side()
    wanted = args.rows.split(",")
    theirs: dict[str, dict[str, Any]] = {}
    if not args.json:
        print(
            f"{'work':24}{'against':>18}{'eggpu ms':>10}{'torch ms':>10}{'ratio':>7}{'goal':>6}"
            f"{'eggpu MiB':>11}{'torch MiB':>11}"
        )
    for row in ROWS:
        if any(w in row.name for w in wanted):
            mine = measure_ours(row)
            if peer is not None and row.same_as not in theirs:
                theirs[row.name] = measure_theirs(row, peer)
            found = compared(row, mine, theirs.get(row.same_as or row.name))
            print(json.dumps(found) if args.json else line(found), flush=True)


def torch_side() -> Any:
    """The module that runs PyTorch; None where there is none or no GPU for it."""
    if importlib.util.find_spec("torch") is None:
        return None
    import gpu_torch

    if not gpu_torch.torch.cuda.is_available():
        return None
    gpu_torch.exact()
    return gpu_torch


def measure_ours(row: Row) -> dict[str, Any]:
    """Our time and memory, and what the plan says."""
    work = row.ours()
    start = time.perf_counter()
    work()
    eg.synchronize()
    first = time.perf_counter() - start
    seconds = best(work, eg.synchronize)
    plan = work.compiled.plan
    del work
    eg.device().trim()
    gc.collect()
    return {"eggpu_ms": seconds * 1e3, "first_s": first, "dispatches": len(plan.kernels),
            "eggpu_bytes": plan.peak_bytes,
            "gflop": sum(k.flops for k in plan.kernels) / 1e9}  # fmt: skip


def measure_theirs(row: Row, peer: Any) -> dict[str, Any]:
    """PyTorch's time and memory."""
    peer.fresh()
    run = row.torch(peer)
    run()
    peer.synchronize()
    seconds = best(run, peer.synchronize)
    found = {"torch_ms": seconds * 1e3, "torch_bytes": peer.peak_bytes()}
    del run
    gc.collect()
    return found


def compared(row: Row, mine: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the table."""
    about = {"work": row.name, "against": row.against, "device": eg.device().target.name}
    out = {**about, **mine, "goal": row.goal}
    if theirs is None:
        return out
    return {**out, **theirs, "ratio": theirs["torch_ms"] / mine["eggpu_ms"]}


def best(run: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Seconds of a call: the best of some blocks' means."""
    few = block(run, synchronize, 3)  # of one call, the wait would be most
    count = max(3, min(2000, round(BLOCK_SECONDS / few)))
    return min(block(run, synchronize, count) for _ in range(BLOCKS))


def block(run: Callable[[], Any], synchronize: Callable[[], None], count: int) -> float:
    """Seconds of a call, of some that follow one another."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize()
    return (time.perf_counter() - start) / count


def line(found: dict[str, Any]) -> str:
    """A row as text."""
    theirs = f"{found['torch_ms']:10.3f}{found['ratio']:7.2f}" if "ratio" in found else f"{'':17}"
    ours_text = f"{found['work']:24}{found['against']:>18}{found['eggpu_ms']:10.3f}"
    sizes = "".join(f"{found.get(k, 0) >> 20:11,}" for k in ("eggpu_bytes", "torch_bytes"))
    return f"{ours_text}{theirs}{found['goal']:6.2f}{sizes}"


if __name__ == "__main__":
    main()
