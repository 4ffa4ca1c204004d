"""Whether the cost model chooses what is fastest: workloads with their alternatives forced.

    python bench/choices.py --json

Each alternative is a compilation with some rules left out, or with the search off. All that differ
are checked against each other, then timed; `regret` is the time of the chosen one over the best.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree

TOLERANCE = 1e-3  # of the largest value; between alternatives, in float32
_FORCED: dict[str, dict[str, Any]] = {
    "chosen": {},
    "no attention": {"without": ("attention", "attention-extra")},
    "no wide product": {"without": ("wide-product", "sum-of-products")},
    "no layouts": {"without": ("transpose-dot", "flatten-batch-1", "flatten-shared-matrix")},
    "first guess": {"effort": 1},
    "a kernel for each op": {"optimize": False},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A program and the shapes of its arguments."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def main() -> None:
    """Time the grid; print rows and the regret."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing an alternative")
    args = parser.parse_args()
    if args.device is not None:
        eg.device(args.device)
    rows = [row(w, args.seconds) for w in workloads() if args.only in w.name]
    if not rows:
        parser.error(f"no workload has {args.only!r} in its name")
    regrets = [r["regret"] for r in rows]
    found = {
        "device": eg.device().target.name,
        "regret_mean": round(geometric_mean(regrets), 4),
        "regret_worst": max(regrets),
        "rows": rows,
    }
    print(json.dumps(found) if args.json else table(found))


def workloads() -> Iterator[Workload]:
    """The grid."""
    for length in (1, 16, 128, 512):
        for heads, size in ((4, 32), (4, 64), (12, 64)):
            kv = (1, heads, 512 if length == 1 else length, size)
            shapes = ((1, heads, length, size), kv, kv)
            yield Workload(f"attention {length} {heads}x{size}", attention, shapes)
    for m, k, n in (
        (1, 576, 49152), (1, 768, 768), (8, 768, 3072), (128, 128, 128), (512, 512, 512),
        (4096, 64, 64), (64, 4096, 64), (127, 129, 131), (1024, 33, 1024),
    ):  # fmt: skip
        yield Workload(f"product {m}x{k}x{n}", eg.matmul, ((m, k), (k, n)))
        if m > 1:
            yield Workload(f"product {m}x{k}x{n} transposed", transposed, ((k, m), (k, n)))
    for rows, length in ((1, 65536), (16, 4096), (1024, 256), (4096, 33)):
        shape = (rows, length)
        yield Workload(f"softmax {rows}x{length}", nn.softmax, (shape,))
        yield Workload(f"norm {rows}x{length}", norm, (shape, (length,)))
        yield Workload(f"sum of rows {rows}x{length}", lambda x: x.sum(1), (shape,))
        yield Workload(f"sum of columns {rows}x{length}", lambda x: x.sum(0), (shape,))
    for n in (1 << 10, 1 << 20):
        yield Workload(f"chain {n}", chain, ((n,), (n,)))
    for m, d in ((64, 128), (256, 256)):
        yield Workload(f"three products {m}x{d}", three, ((m, d), (d, d), (d, d), (d, d)))
        yield Workload(f"block {m}x{d}", block, ((m, d), (d, 4 * d), (4 * d, d)))


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal for squares, over all keys for a single query."""
    return nn.scaled_dot_product_attention(q, k, v, causal=q.shape[-2] > 1)


def transposed(a: Any, b: Any) -> Any:
    """A product whose left operand lies transposed."""
    return eg.transpose(a) @ b


def norm(x: Any, weight: Any) -> Any:
    """Root mean square norm."""
    return x * eg.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def chain(x: Any, y: Any) -> Any:
    """Elementwise, with values that are used twice."""
    a = eg.exp(-x * x) + y
    return eg.tanh(a) * a + eg.sqrt(eg.abs(a)), a


def three(x: Any, a: Any, b: Any, c: Any) -> Any:
    """Products that share an operand."""
    return x @ a, x @ b, x @ c


def block(x: Any, up: Any, down: Any) -> Any:
    """The feed-forward part of a transformer layer."""
    return x + nn.gelu(nn.softmax(x) @ up) @ down


def row(workload: Workload, seconds: float) -> dict[str, Any]:
    """Predicted and measured us of each alternative, and the regret."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s, np.float32) for s in workload.shapes]
    arguments = [eg.put(v) for v in values]
    plans: dict[Any, str] = {}
    runs: dict[str, Any] = {}
    results: dict[str, list[np.ndarray]] = {}
    for name, options in _FORCED.items():
        run = eg.compile(workload.function, cache=False, **options)
        outputs = run(*arguments)
        key = tuple((k.wgsl, k.grid) for k in run.plan.kernels)
        if key in plans:
            continue  # this plan is timed under another name
        plans[key] = name
        results[name] = [np.asarray(o) for o in pytree.flatten(outputs)[0]]
        runs[name] = run
    same(workload.name, results)
    measured = timed(runs, arguments, seconds)
    predicted = {n: sum(k.predicted_ns for k in r.plan.kernels) / 1e3 for n, r in runs.items()}
    best = min(measured, key=lambda n: measured[n])
    return {
        "workload": workload.name,
        "regret": round(measured["chosen"] / measured[best], 3),
        "best": best,
        "alternatives": {
            n: {
                "predicted_us": round(predicted[n], 1) if n != "a kernel for each op" else None,
                "measured_us": round(us, 1),
                "kernels": [k.name for k in runs[n].plan.kernels],
            }
            for n, us in measured.items()
        },
    }


def same(name: str, results: dict[str, list[np.ndarray]]) -> None:
    """Nothing is timed before all alternatives agree. Raises AssertionError."""
    *_, wanted = results.values()  # the plainest program
    for forced, found in results.items():
        for a, b in zip(found, wanted, strict=True):
            gap = float(np.abs(a - b).max(initial=0.0)) / (1 + float(np.abs(b).max(initial=0.0)))
            assert math.isfinite(gap), f"{name}, {forced}: not finite"
            assert gap < TOLERANCE, f"{name}, {forced}: off by {gap:.1e}"


def timed(runs: dict[str, Any], arguments: list[Any], seconds: float) -> dict[str, float]:
    """The least us of a call, its dispatches and the wait for them.

    Alternatives take turns, so that what else the machine does falls on all of them.
    """
    best = dict.fromkeys(runs, math.inf)
    end = time.perf_counter() + seconds * len(runs)
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for name, run in runs.items():
            start = time.perf_counter()
            run(*arguments)
            eg.synchronize()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - start))
    return best


def table(found: dict[str, Any]) -> str:
    """A line an alternative, predicted beside measured."""
    lines = [
        f"{found['device']}: regret mean {found['regret_mean']}, worst {found['regret_worst']}"
    ]
    for r in found["rows"]:
        lines.append(f"{r['workload']}: regret {r['regret']}, best {r['best']}")
        for name, a in r["alternatives"].items():
            guess = "-" if a["predicted_us"] is None else f"{a['predicted_us']:.1f}"
            us = f"{a['measured_us']:.1f}"
            lines.append(f"  {name:22} predicted {guess:>10} us, measured {us:>10} us")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
