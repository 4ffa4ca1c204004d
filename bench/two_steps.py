"""A GPT-2 training step by one search for e-nodes and kernels, and by e-nodes first and fusion
afterwards: both plans predicted, run on this device in turns, and their results compared.

    python bench/two_steps.py --json  # GPT-2 124M, a batch of 1 x 64
    python bench/two_steps.py --layers 2 --width 128 --heads 4 --vocab 512   # small

Weights, AdamW's state and what a step gives are on the device: 3 GB for GPT-2 124M. `ratio` is the
time of the searched plan over the other's, the best of rounds in which each side runs in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler import pytree
from eggpu.compiler.codegen import lower
from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.egraph.force import Alternative, forced
from eggpu.compiler.ir import Graph
from eggpu.compiler.pipeline import Options, saturation
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.tracing import trace_call
from eggpu.runtime import Executable, synchronize


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compile, run, print and return the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 12), ("width", 768), ("heads", 12), ("vocab", 50257), ("batch", 1),
        ("context", 64), ("rounds", 5), ("calls", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args(argv)
    found = measured(args)
    print(json.dumps(found) if args.json else "\n".join(f"{k:24} {v}" for k, v in found.items()))
    return found


def training_step(args: argparse.Namespace) -> tuple[Graph, list[Any]]:
    """The graph of forward, backward and AdamW, and its arguments."""
    model = nn.GPT(
        vocab=args.vocab, layers=args.layers, width=args.width, heads=args.heads,
        context=args.context, key=eg.random.key(0),
    )  # fmt: skip
    optimizer = optim.adamw(1e-4, weight_decay=0.1)

    def step(model: Any, state: Any, tokens: Any, targets: Any) -> Any:
        def loss(model: Any) -> Any:
            return nn.cross_entropy(model(tokens), targets)

        value, grads = eg.value_and_grad(loss)(model)
        model, state = optimizer.update(model, state, grads)
        return model, state, value

    rng = np.random.default_rng(0)
    ids = rng.integers(0, args.vocab, (args.batch, args.context + 1)).astype(np.int32)
    arguments = (model, optimizer.init(model), ids[:, :-1], ids[:, 1:])
    graph = trace_call(step, arguments, name="gpt2").graph
    kept = len(pytree.flatten(arguments[:2])[0])
    leaves = [eg.array(leaf) for leaf in pytree.flatten(arguments)[0]]
    return graph.replace(donated=tuple(range(kept))), leaves


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured times of both plans in ms, and the loss that each gives."""
    graph, leaves = training_step(args)
    on = eg.device()
    snapshot, _ = saturate_graph(graph, saturation(Options()))
    choice = forced(snapshot, on.target, graph)
    two_steps = next(choice.others())
    assert two_steps.name == "greedy, then fused"
    sides = [_Side(a, on, leaves) for a in (choice.chosen, two_steps)]
    for _ in range(args.rounds):
        for side in sides:
            side.time(args.calls)
    joint, other = sides
    return {
        "device": on.target.name,
        "kernels": len(joint.plan.kernels),
        "two_steps_kernels": len(other.plan.kernels),
        "predicted_ms": joint.predicted_ms,
        "two_steps_predicted_ms": other.predicted_ms,
        "predicted_ratio": round(joint.predicted_ms / other.predicted_ms, 4),
        "ms": joint.ms,
        "two_steps_ms": other.ms,
        "ratio": round(joint.ms / other.ms, 4),
        "losses": joint.losses,  # of the first two steps
        "two_steps_losses": other.losses,
    }


class _Side:
    """One of the plans, ready to run."""

    def __init__(self, alternative: Alternative, on: Any, leaves: Sequence[Any]) -> None:
        self.on, self.buffers = on, [on.upload(leaf.numpy()) for leaf in leaves]
        self.plan = assemble(alternative.selection, on.target, lower)
        self.predicted_ms = round(alternative.predicted_ns / 1e6, 3)
        self.executable = Executable(self.plan, on)
        self.losses: list[float] = []
        for _ in range(2):
            self.step()
            self.losses.append(self.loss())
        self.ms = float("inf")

    def step(self) -> None:
        """Run once; the weights and the state lie where they were."""
        self.results = self.executable(self.buffers)
        kept = len(self.results) - 1
        self.buffers = [*self.results[:kept], *self.buffers[kept:]]

    def time(self, calls: int) -> None:
        """Keep the best time of a call."""
        start = time.perf_counter()
        for _ in range(calls):
            self.step()
        synchronize(self.on)
        self.ms = min(self.ms, round(1e3 * (time.perf_counter() - start) / calls, 3))

    def loss(self) -> float:
        """The last result of the last call."""
        place = self.plan.buffers[self.plan.outputs[-1]]
        return float(self.on.download(self.results[-1], place.shape, place.dtype))


if __name__ == "__main__":
    main()
