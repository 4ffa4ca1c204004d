"""Times single kernels against torch on the CPU, one after the other in one process.

    python bench/kernels.py --json

`ratio` is torch's time over ours, so 1 is as fast as torch. Both sides run blocks of calls in turn,
and the best call of each counts. Before a block there is a pause, since threads of the other side
go on spinning for a while and would take a core of the two. Results are compared before anything is
timed. Torch is optional.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.compiler.library.attention import scaled_dot_product_attention

try:
    import torch
    import torch.nn.functional as torch_functional
except ImportError:
    torch = torch_functional = None

THREADS = 2
PAUSE, BLOCK = 0.25, 0.05  # seconds before a block, and of a block
TOLERANCE = 1e-4  # of the largest value, in float32
HEADS = (1, 8, 512, 64)
ROWS = (1024, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """A computation on both sides, the shapes of its arguments, and the ratio that is wanted."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    wanted: float


def main() -> None:
    """Time the cases; print a line for each, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    args = parser.parse_args()
    if args.device is not None:
        eg.device(args.device)
    if torch is not None:
        torch.set_num_threads(THREADS)
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"no case has {args.only!r} in its name")
    for case in chosen:
        row = measure(case, args.rounds)
        print(json.dumps(row) if args.json else text(row), flush=True)


def cases() -> Iterator[Case]:
    """Products in sizes and layouts, attention, rows, and a chain of elementwise ops."""
    for n in (512, 1024, 2048, 511, 513, 1023, 1025):
        yield Case(f"matmul {n}", _matmul, _matmul, ((n, n), (n, n)), 0.30)
    for name, f in (("tn", _matmul_tn), ("nt", _matmul_nt), ("tt", _matmul_tt)):
        yield Case(f"matmul 1024 {name}", f, f, ((1024, 1024), (1024, 1024)), 0.30)
    heads = (HEADS,) * 3
    yield Case("attention forward", _attention, _torch_attention, heads, 0.5)
    yield Case("attention backward", _gradient, _torch_gradient, (*heads, HEADS), 0.35)
    yield Case("softmax", _softmax, _torch_softmax, (ROWS,), 0.2)
    yield Case("layer norm", _norm, _torch_norm, (ROWS, ROWS[1:], ROWS[1:]), 0.2)
    yield Case("elementwise chain", _chain, _torch_chain, ((2048, 2048),) * 2, 0.5)


def _matmul(a: Any, b: Any) -> Any:
    return a @ b


def _matmul_tn(a: Any, b: Any) -> Any:
    return a.T @ b


def _matmul_nt(a: Any, b: Any) -> Any:
    return a @ b.T


def _matmul_tt(a: Any, b: Any) -> Any:
    return a.T @ b.T


def _attention(q: Any, k: Any, v: Any) -> Any:
    return scaled_dot_product_attention(q, k, v)


def _torch_attention(q: Any, k: Any, v: Any) -> Any:
    return torch_functional.scaled_dot_product_attention(q, k, v)


def _gradient(q: Any, k: Any, v: Any, ct: Any) -> Any:
    """Forward and backward: the gradients of q, k and v."""
    return eg.grad(lambda heads: (_attention(*heads) * ct).sum())((q, k, v))


def _torch_gradient(q: Any, k: Any, v: Any, ct: Any) -> Any:
    heads = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(_torch_attention(*heads), heads, ct)


def _softmax(x: Any) -> Any:
    return nn.softmax(x, -1)


def _torch_softmax(x: Any) -> Any:
    return torch.softmax(x, -1)


def _norm(x: Any, weight: Any, bias: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered * eg.rsqrt(variance + 1e-5) * weight + bias


def _torch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return torch_functional.layer_norm(x, x.shape[-1:], weight, bias)


def _chain(x: Any, y: Any) -> Any:
    """Eight elementwise ops."""
    return eg.tanh((x * y + x) * 0.5 - y) * (x + 1.0) + y


def _torch_chain(x: Any, y: Any) -> Any:
    return torch.tanh((x * y + x) * 0.5 - y) * (x + 1.0) + y


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The best time of each side in ms, measured alternately."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in case.shapes]
    compiled = eg.compile(case.ours)
    arguments = [eg.put(a) if hasattr(eg, "put") else a for a in arrays]

    def ours() -> Any:
        out = compiled(*arguments)
        eg.synchronize()
        return out

    row: dict[str, Any] = {"bench": "kernels", "case": case.name, "device": eg.device().target.name}
    results = [np.asarray(leaf.numpy()) for leaf in pytree.flatten(ours())[0]]
    sides: dict[str, Callable[[], Any]] = {"ours": ours}
    if torch is not None:
        tensors = [torch.from_numpy(a) for a in arrays]
        sides["torch"] = lambda: case.theirs(*tensors)
        compare(case.name, results, sides["torch"]())
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            time.sleep(PAUSE)
            best[name] = min(best[name], best_of_block(run))
    row |= {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in best.items()}
    if torch is not None:
        ratio = best["torch"] / best["ours"]
        row |= {"ratio": round(ratio, 3), "wanted": case.wanted, "reached": ratio >= case.wanted}
    return row


def best_of_block(run: Callable[[], Any]) -> float:
    """The least seconds of a call, of some after a first one."""
    run()
    best, end = float("inf"), time.perf_counter() + BLOCK
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def compare(name: str, results: list[np.ndarray], theirs: Any) -> None:
    """Raises ValueError where the sides differ by more than rounding."""
    others = [theirs] if isinstance(theirs, torch.Tensor) else list(theirs)
    for got, other in zip(results, others, strict=True):
        want = other.detach().numpy()
        worst = float(np.abs(got - want).max() / np.abs(want).max())
        if not worst < TOLERANCE:
            raise ValueError(f"{name} needs torch's values within {TOLERANCE}, got {worst:.2g}")


def text(row: dict[str, Any]) -> str:
    """A row for people."""
    line = f"{row['case']:20} ours {row['ours_ms']:9.3f} ms"
    if "ratio" not in row:
        return line
    mark = "" if row["reached"] else "  below what is wanted"
    line += f"  torch {row['torch_ms']:9.3f} ms  ratio {row['ratio']:.3f}"
    return f"{line} (wanted {row['wanted']}){mark}"


if __name__ == "__main__":
    main()
