"""Times single kernels against other frameworks on the CPU, in turn; torch is optional as all are.

    python bench/kernels.py --json [--against torch,jax] [--python jax=/path/to/python]

`ratio` is torch's time over ours, so 1 is as fast as torch; `jax_ratio` and so on are the same for
other peers. All sides run blocks of calls in turn, and the best call of each counts. Before a block
there is a pause, since threads of another side go on spinning for a while and would take a core of
the two. Results are compared before anything is timed. A side that has been timed for BUDGET
seconds gets no more blocks. Peers and what to install for them: see bench/peers.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import peers_children
from peers_children import Here, Peers
from peers_known import PRODUCTS, chain

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.compiler.library.attention import scaled_dot_product_attention

PAUSE, BLOCK, BUDGET = 0.25, 0.05, 10.0  # seconds before a block, of a block, of a side's blocks
TOLERANCE = 1e-4  # of the largest value, in float32
HEADS = (1, 8, 512, 64)
ROWS = (1024, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """A computation, what peers call it, its arguments' shapes, and the ratio that is wanted."""

    name: str
    ours: Callable[..., Any]
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    wanted: float


def main() -> None:
    """Time the cases; print a line for each, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    peers_children.add_arguments(parser)
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"no case has {args.only!r} in its name")
    with peers_children.start(parser, args) as others:
        if args.device is not None:
            eg.device(args.device)
        for case in chosen:
            row = measure(case, args.rounds, others)
            print(json.dumps(row) if args.json else text(row), flush=True)


def cases() -> Iterator[Case]:
    """Products in sizes and layouts, attention, rows, and a chain of elementwise ops."""
    for n in (512, 1024, 2048, 511, 513, 1023, 1025):
        yield Case(f"matmul {n}", PRODUCTS["matmul"], "matmul", ((n, n), (n, n)), 0.30)
    for layout in ("tn", "nt", "tt"):
        kind = f"matmul {layout}"
        yield Case(f"matmul 1024 {layout}", PRODUCTS[kind], kind, ((1024, 1024),) * 2, 0.30)
    yield Case("attention forward", _attention, "attention forward", (HEADS,) * 3, 0.5)
    yield Case("attention backward", _gradient, "attention backward", (HEADS,) * 4, 0.35)
    yield Case("softmax", _softmax, "softmax", (ROWS,), 0.2)
    yield Case("layer norm", _norm, "layer norm", (ROWS, ROWS[1:], ROWS[1:]), 0.2)
    yield Case("elementwise chain", chain(eg.tanh), "elementwise chain", ((2048, 2048),) * 2, 0.5)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return scaled_dot_product_attention(q, k, v)


def _gradient(q: Any, k: Any, v: Any, ct: Any) -> Any:
    """Forward and backward: the gradients of q, k and v."""
    return eg.grad(lambda heads: (_attention(*heads) * ct).sum())((q, k, v))


def _softmax(x: Any) -> Any:
    return nn.softmax(x, -1)


def _norm(x: Any, weight: Any, bias: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered * eg.rsqrt(variance + 1e-5) * weight + bias


class Ours:
    """Compiled kernels in this process, as bench/peers_torch.py has torch's."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.functions = functions

    def kernel(self, kind: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
        """A call that ends when its results are there."""
        compiled, arguments = eg.compile(self.functions[kind]), [eg.put(a) for a in arrays]

        def run() -> Any:
            out = compiled(*arguments)
            eg.synchronize()
            return out

        return run

    def values(self, results: Any) -> list[np.ndarray]:
        """Results of a call as NumPy's."""
        return [np.asarray(leaf.numpy()) for leaf in pytree.flatten(results)[0]]


def measure(case: Case, rounds: int, others: Peers) -> dict[str, Any]:
    """The best time of each side in ms, measured alternately."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in case.shapes]
    ours = Here(module=Ours({case.kind: case.ours}))
    found = {"ours": ours.kernel(case.kind, arrays)}
    found |= others.each(lambda _, side: side.kernel(case.kind, arrays))
    for name, (results, _) in found.items():
        compare(case.name, name, found["ours"][0], results)
    best, spent = dict.fromkeys(found, float("inf")), dict.fromkeys(found, 0.0)

    def block(name: str, side: Any) -> None:
        if spent[name] > BUDGET:
            return
        time.sleep(PAUSE)
        start = time.perf_counter()
        best[name] = min(best[name], side.best(BLOCK))
        spent[name] += time.perf_counter() - start

    for _ in range(rounds):
        block("ours", ours)
        others.each(block)
    row: dict[str, Any] = {"bench": "kernels", "case": case.name, "device": eg.device().target.name}
    for name in ("ours", *others.sides):
        key = name.replace("-", "_")
        row |= {f"{key}_ms": round(1e3 * best[name], 3), f"{key}_first_s": round(found[name][1], 3)}
        if name != "ours":
            row[f"{key}_ratio"] = round(best[name] / best["ours"], 3)
    if "torch_ratio" in row:
        ratio = best["torch"] / best["ours"]
        row |= {"ratio": row["torch_ratio"], "wanted": case.wanted, "reached": ratio >= case.wanted}
    return row


def compare(case: str, peer: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Raises ValueError where the sides differ by more than rounding."""
    for got, want in zip(ours, theirs, strict=True):
        worst = float(np.abs(got - want).max() / np.abs(want).max())
        if not worst < TOLERANCE:
            raise ValueError(f"{case} needs {peer}'s values within {TOLERANCE}, got {worst:.2g}")


def text(row: dict[str, Any]) -> str:
    """A row for people."""
    line = f"{row['case']:20} ours {row['ours_ms']:9.3f} ms"
    for key in (k.removesuffix("_ratio") for k in row if k.endswith("_ratio")):
        line += f"  {key} {row[f'{key}_ms']:9.3f} ms  ratio {row[f'{key}_ratio']:.3f}"
        if key == "torch":
            line += f" (wanted {row['wanted']})"
            line += "" if row["reached"] else "  below what is wanted"
    return line


if __name__ == "__main__":
    main()
