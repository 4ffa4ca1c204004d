"""One peer in a process of its own: answers requests, a line of JSON each, until its input ends.

    python peers_worker.py jax [--cores 0,1]

The first line that it writes says `ready` and the peer's version, or what is `missing`. Requests:

    {"do": "train", "task": "gpt", "numbers": FILE}      a Trainer with these weights and batches
    {"do": "steps", "count": 10}                         {"losses": [...], "first_s": seconds}
    {"do": "block", "count": 10}                         {"seconds": mean of a step, the loss read}
    {"do": "kernel", "kind": "matmul", "arrays": FILE, "results": FILE}
                                                         {"first_s": seconds}; results are written
    {"do": "best", "seconds": 0.05}                      {"seconds": the best call of that while}

What fails is answered with {"error": text}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import peers_known


def main() -> None:
    """Say what is here, then answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=sorted(peers_known.PEERS))
    parser.add_argument("--cores", default="", help="numbers of those that the peer may use")
    args = parser.parse_args()
    # What libraries print goes to stderr: stdout is for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if args.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    peer = peers_known.PEERS[args.peer]
    if missing := peers_known.missing(peer):
        print(json.dumps({"missing": missing}), file=answers)
        return
    os.environ.update(peers_known.environment(peer))
    print(json.dumps({"ready": args.peer, "version": peers_known.version(peer)}), file=answers)
    serve(Worker(peer.module), sys.stdin, answers)
    answers.flush()
    os._exit(0)  # drivers' threads may not end by themselves


def serve(worker: Worker, requests: IO[str], answers: IO[str]) -> None:
    """Answer every line."""
    for line in requests:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001, whatever a peer raises is told to the other side
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """What a peer is doing: a trainer or a kernel."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.trainer: Any = None
        self.run: Callable[[], Any] = lambda: None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a request gives."""
        match request:
            case {"do": "train", "task": task, "numbers": path}:
                weights, batches = peers_known.load_numbers(path)
                peer = importlib.import_module(self.module)
                self.trainer = peer.Trainer(task, weights, batches, peers_known.THREADS)
                return {}
            case {"do": "steps", "count": count}:
                start = time.perf_counter()
                losses = [float(self.trainer.advance())]
                first = time.perf_counter() - start
                losses += [float(self.trainer.advance()) for _ in range(count - 1)]
                return {"losses": losses, "first_s": first}
            case {"do": "block", "count": count}:
                return {"seconds": peers_known.block(self.trainer.advance, count)}
            case {"do": "kernel", "kind": kind, "arrays": arrays, "results": results}:
                return self.kernel(kind, arrays, results)
            case {"do": "best", "seconds": seconds}:
                return {"seconds": peers_known.best_of_block(self.run, seconds)}
            case _:
                raise ValueError(f"needs a request as in the docstring, got {request}")

    def kernel(self, kind: str, arrays: str, results: str) -> dict[str, Any]:
        """Make the kernel, keep results of its third call: JITs replay from that on."""
        peer = importlib.import_module(self.module)
        self.run = peer.kernel(kind, peers_known.load_arrays(arrays))
        start = time.perf_counter()
        self.run()
        first = time.perf_counter() - start
        self.run()
        peers_known.save_arrays(results, peer.values(self.run()))
        return {"first_s": first}


if __name__ == "__main__":
    main()
