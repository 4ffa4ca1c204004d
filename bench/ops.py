"""Times one representative of every kind of op against NumPy and, when installed, torch; one run,
interleaved.

    python bench/ops.py --json

Each is first checked against NumPy. `ms` is the best of several blocks, in each of which every
system runs for about as long; arrays lie on the device already, a block ends when the device is
done. `--threads` sets torch's threads (all cores by default).
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
from eggpu.runtime.host import processors

try:
    import torch
except ImportError:
    torch = None

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """The same computation three times; `torch` takes tensors."""

    kind: str
    name: str
    args: tuple[Array, ...]
    ours: Callable[..., Any]
    numpy: Callable[..., Any]
    torch: Callable[..., Any]
    tolerance: float = 1e-4


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def np_gelu(x: Array) -> Array:
    return (
        0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)))
    )


def np_softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_attention(q: Array, k: Array, v: Array) -> Array:
    return np_softmax(q @ np.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))) @ v


def np_conv(x: Array, w: Array) -> Array:
    view = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3)
    )
    return np.tensordot(view, w, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)


def np_scatter(rows: Array, at: Array) -> Array:
    out = np.zeros((1000, rows.shape[1]), rows.dtype)
    np.add.at(out, at, rows)
    return out


def np_steps(x: Any, w: Any, tanh: Callable[[Any], Any]) -> Any:
    h = x[0]
    for row in x:
        h = tanh(h @ w + row)
    return h


def cases(scale: int) -> Iterator[Case]:
    """One of each kind; `scale` shrinks the sizes."""
    n = 2048 // scale
    square, ids = floats(n, n), np.random.default_rng(1).integers(0, 1000, 4 * n).astype(np.int32)
    F = torch.nn.functional if torch else None
    yield Case(
        "elementwise",
        f"gelu {n}x{n}",
        (square,),
        lambda x: nn.gelu(x, "tanh"),
        np_gelu,
        lambda x: F.gelu(x, approximate="tanh"),
    )
    yield Case(
        "elementwise",
        f"add {n}x{n}",
        (square, floats(n, n, seed=1)),
        eg.add,
        np.add,
        lambda x, y: x + y,
    )
    yield Case(
        "move",
        f"transpose {n}x{n}",
        (square,),
        eg.transpose,
        lambda x: np.ascontiguousarray(x.T),
        lambda x: x.T.contiguous(),
    )
    yield Case(
        "move",
        f"gather rows {4 * n} of 1000x256",
        (floats(1000, 256), ids),
        lambda x, i: eg.take(x, i, 0),
        lambda x, i: x[i],
        lambda x, i: x[i],
    )
    yield Case(
        "reduce",
        f"sum rows {n}x{n}",
        (square,),
        lambda x: x.sum(1),
        lambda x: x.sum(1),
        lambda x: x.sum(1),
    )
    yield Case(
        "reduce",
        f"sum columns {n}x{n}",
        (square,),
        lambda x: x.sum(0),
        lambda x: x.sum(0),
        lambda x: x.sum(0),
    )
    yield Case(
        "reduce", f"softmax {n}x{n}", (square,), nn.softmax, np_softmax, lambda x: F.softmax(x, -1)
    )
    yield Case(
        "reduce",
        f"layer norm {n}x{n}",
        (square,),
        nn.layer_norm,
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        lambda x: F.layer_norm(x, (n,)),
    )
    m = 1024 // scale
    yield Case(
        "contract",
        f"matmul {m}x{m}x{m}",
        (floats(m, m), floats(m, m, seed=1)),
        eg.matmul,
        np.matmul,
        lambda a, b: a @ b,
        1e-3,
    )
    yield Case(
        "scatter",
        f"scatter-add {4 * n}x64 into 1000",
        (floats(4 * n, 64), ids),
        lambda u, i: eg.scatter_add(eg.zeros((1000, 64)), 0, i, u),
        np_scatter,
        lambda u, i: torch.zeros(1000, 64).index_add_(0, i, u),
        1e-3,
    )
    yield Case(
        "scan",
        f"cumsum {n}x{n}",
        (square,),
        lambda x: eg.cumsum(x, 1),
        lambda x: np.cumsum(x, 1),
        lambda x: x.cumsum(1),
        1e-3,
    )
    yield Case(
        "sort",
        f"argsort 8x{4 * n}",
        (floats(8, 4 * n),),
        eg.argsort,
        lambda x: np.argsort(x, -1, kind="stable"),
        lambda x: torch.sort(x, stable=True)[1],
    )
    c = 32 // max(1, scale // 2)
    yield Case(
        "window",
        f"conv 3x3 8x{c}x32x32",
        (floats(8, c, 32, 32), floats(c, c, 3, 3, seed=1)),
        lambda x, w: nn.conv2d(x, w, padding=1),
        np_conv,
        lambda x, w: F.conv2d(x, w, padding=1),
        1e-3,
    )
    q = floats(8, n // 4, 64)
    yield Case(
        "tuple",
        f"attention 8x{n // 4}x64",
        (q, q + 1, q * 2),
        nn.scaled_dot_product_attention,
        np_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        1e-3,
    )
    width = n // 8
    weight = floats(width, width, seed=2) / np.float32(np.sqrt(width))
    yield Case(
        "loop",
        f"64 steps tanh(h W + x) 16x{width}",
        (floats(64, 16, width), weight),
        lambda x, w: eg.scan(lambda h, row: (eg.tanh(h @ w + row), None), x[0], x)[0],
        lambda x, w: np_steps(x, w, np.tanh),
        lambda x, w: np_steps(x, w, torch.tanh),
        1e-3,
    )


def runners(case: Case) -> dict[str, Callable[[], Any]]:
    """Calls without arguments that end when the result is there."""
    compiled = eg.compile(case.ours)
    held = [eg.put(a) for a in case.args]

    def ours() -> Any:
        out = compiled(*held)
        eg.synchronize()
        return out

    want = case.numpy(*case.args)
    got = ours().numpy()
    if not np.allclose(got, want, case.tolerance, case.tolerance * np.abs(want).max()):
        raise SystemExit(f"{case.name}: largest difference {np.abs(got - want).max()}")
    found: dict[str, Callable[[], Any]] = {"eggpu": ours, "numpy": lambda: case.numpy(*case.args)}
    if torch:
        # torch indexes with 64-bit integers
        tensors = [
            torch.from_numpy(a.astype(np.int64) if a.dtype == np.int32 else a) for a in case.args
        ]
        found["torch"] = lambda: case.torch(*tensors)
    return found


def measure(case: Case, blocks: int, seconds: float) -> dict[str, Any]:
    """The best mean time of each system over interleaved blocks of about `seconds`."""
    calls = runners(case)
    repeat: dict[str, int] = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeat[name] = max(1, int(seconds / (time.perf_counter() - start + 1e-9)))
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(blocks):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeat[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeat[name])
    row: dict[str, Any] = {"kind": case.kind, "name": case.name}
    row |= {f"{name}_ms": round(1e3 * t, 4) for name, t in best.items()}
    row |= {
        f"times_{name}": round(t / best["eggpu"], 3) for name, t in best.items() if name != "eggpu"
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a block of one system")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--threads", type=int, default=processors())
    parser.add_argument("--only", default="", help="cases whose kind or name has this")
    args = parser.parse_args()
    if torch:
        torch.set_num_threads(args.threads)
    rows = []
    for case in cases(args.scale):
        if args.only in case.kind or args.only in case.name:
            rows.append(measure(case, args.blocks, args.seconds))
            if not args.json:
                shown = "  ".join(
                    f"{k} {v}" for k, v in rows[-1].items() if k not in ("kind", "name")
                )
                print(f"{case.kind:12} {case.name:34} {shown}", flush=True)
    if args.json:
        print(
            json.dumps(
                {
                    "device": eg.device().target.name,
                    "torch": torch.__version__ if torch else None,
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()
