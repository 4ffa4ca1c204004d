"""Times a training step of the models that are compared with other frameworks; prints JSON.

    python bench/peers.py --task gpt --json

Weights and batches are those of common.py in the folder --peers where there is one, else the same
numbers made here. `ms` is the best mean over blocks of ten steps, each ended by reading a loss.
`first_s` is the first step with all compilation, cold where EGGPU_CACHE_DIR and
MESA_SHADER_CACHE_DIR are empty folders.

Peers take the same steps, their blocks in turn with ours and a pause before each, since threads of
one go on spinning for a while: eager torch in this process, tinygrad (WebGPU and CPU) and jax in a
child process each. Losses of ten steps are compared. `ratio` is our time over torch's, `jax_ratio`
over jax's and so on; each has its `ms`, its `first_s`, and `loss_error`, the largest difference
from our losses, which has to be below TOLERANCE. Blocks of a peer that is slow have fewer steps
(about a second). What is not installed is left out with a line on stderr; --against names peers
that have to be there, --python the interpreter of an environment that has them:

    pip install torch                      # in the environment of this script
    python -m venv peers
    peers/bin/pip install tinygrad dawn-python jax
    apt-get install clang mesa-vulkan-drivers    # for tinygrad: its CPU backend, lavapipe
    python bench/peers.py --against torch,tinygrad-webgpu,tinygrad-cpu,jax --python peers/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_children
import peers_data
from peers_children import Here, Peers
from peers_data import Arrays, Batches, GPTSize, MLPSize

import eggpu as eg
from eggpu import nn, optim

ROOT = Path(__file__).parents[1]
PAUSE, BLOCK = 0.25, 1.0  # seconds before a block, and of a block of a slow peer
TOLERANCE = 1e-4  # of losses
_GPT_NAMES = {  # of common.py: ours
    "wte": "tokens.weight", "wpe": "positions.weight",
    "lnf": "norm", "ln1": "norm1", "ln2": "norm2",
    "g": "weight", "b": "bias", "w": "weight", "head": "head",
    "wq": "attention.query.weight", "bq": "attention.query.bias",
    "wk": "attention.key.weight", "bk": "attention.key.bias",
    "wv": "attention.value.weight", "bv": "attention.value.bias",
    "wo": "attention.output.weight", "bo": "attention.output.bias",
    "w1": "feed_forward.up.weight", "b1": "feed_forward.up.bias",
    "w2": "feed_forward.down.weight", "b2": "feed_forward.down.bias",
}  # fmt: skip
_MLP_NAMES = {
    "w1": "layers.0.weight", "b1": "layers.0.bias", "w2": "layers.1.weight", "b2": "layers.1.bias",
}  # fmt: skip


def main() -> None:
    """Train, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("mlp", "gpt"), default="gpt")
    parser.add_argument("--peers", type=Path, default=ROOT.parent / "shared" / "peers")
    parser.add_argument("--json", action="store_true", help="a line of JSON, which is the default")
    peers_children.add_arguments(parser)
    parser.add_argument("--blocks", type=int, default=10, help="of ten steps")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--dump", type=Path, help="write every stage of the compiler")
    parser.add_argument("--profile", action="store_true", help="print the time of every kernel")
    args = parser.parse_args()
    with peers_children.start(parser, args) as others:
        if args.device is not None:
            eg.device(args.device)
        weights, batches = numbers(args.task, args.peers)
        trainer = Trainer(args.task, weights, batches)
        others.each(lambda _, side: side.train(args.task, weights, batches))
        print(json.dumps(measure(trainer, args.blocks, others)))
    if args.dump is not None:
        trainer.step.dump(args.dump)
    if args.profile:
        print(trainer.step.profile(trainer.model, trainer.state, *batches[0]))


class Trainer:
    """A model and the optimizer's state between steps."""

    def __init__(self, task: str, weights: Arrays, batches: Batches) -> None:
        self.model = nn.load_state_dict(empty(task), weights)
        self.optimizer = optimizer(task)
        self.state: Any = self.optimizer.init(self.model)
        self.batches = batches
        self.done = 0
        self.task = task
        update = training_step(self.optimizer)
        self.step = eg.compile(update, donate=("model", "state"), name=task)

    def advance(self) -> Any:
        """One step; its loss."""
        batch = self.batches[self.done % len(self.batches)]
        self.model, self.state, loss = self.step(self.model, self.state, *batch)
        self.done += 1
        return loss


def empty(task: str) -> Any:
    """The model with weights that do not count."""
    if task == "mlp":
        s = MLPSize()
        return nn.MLP((s.inputs, s.hidden, s.outputs), key=0)
    s = GPTSize()
    return nn.GPT(s.vocab, s.layers, s.width, s.heads, s.context, key=0)


def optimizer(task: str) -> Any:
    """SGD for the perceptron, AdamW without decay for the language model."""
    return optim.sgd(MLPSize().lr) if task == "mlp" else optim.adamw(GPTSize().lr, weight_decay=0.0)


def training_step(opt: Any) -> Callable[..., Any]:
    """Forward, backward and update."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.cross_entropy(model(x), y)

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = eg.value_and_grad(loss)(model, x, y)
        model, state = opt.update(model, state, grads)
        return model, state, value

    return step


def measure(trainer: Trainer, blocks: int, others: Peers) -> dict[str, Any]:
    """Losses of the first ten steps, then the best of `blocks` blocks of ten, of all sides.

    Raises ValueError where the losses of two differ.
    """
    ours = Here(trainer)
    losses, first = ours.steps(10)
    known = others.each(lambda _, side: side.steps(10))
    errors = {name: compare(name, losses, found) for name, (found, _) in known.items()}
    best = {"": float("inf")}
    for _ in range(blocks):
        if others.sides:
            time.sleep(PAUSE)
        best[""] = min(best[""], ours.block(10))

        def timed(name: str, side: Any) -> None:
            time.sleep(PAUSE)
            before = best.get(name, known[name][1])
            seconds = side.block(min(10, max(1, int(BLOCK / before))))
            best[name] = min(best.get(name, seconds), seconds)

        others.each(timed)
    plan = trainer.step.plan
    row = {
        "bench": "peers",
        "task": trainer.task,
        "device": eg.device().target.name,
        "ms": round(best[""] * 1e3, 3),
        "losses": losses,
        "first_s": round(first, 3),
        "compile_s": round(trainer.step.compile_seconds, 3),
        "dispatches": len(plan.kernels),
        "peak_bytes": plan.peak_bytes,
    }
    for name in others.sides:
        row |= columns(name, best, known[name], errors[name])
    return row | ({"ratio": row["torch_ratio"]} if "torch" in others.sides else {})


def columns(
    name: str, best: dict[str, float], known: tuple[list[float], float], error: float
) -> dict[str, Any]:
    """What a row says of a peer."""
    key = name.replace("-", "_")
    return {
        f"{key}_ms": round(best[name] * 1e3, 3),
        f"{key}_ratio": round(best[""] / best[name], 3),
        f"{key}_losses": known[0],
        f"{key}_first_s": round(known[1], 3),
        f"{key}_loss_error": float(f"{error:.3g}"),
    }


def compare(name: str, ours: list[float], theirs: list[float]) -> float:
    """The largest difference of losses; raises ValueError where it is not below what is allowed."""
    worst = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    if not worst < TOLERANCE:
        raise ValueError(f"losses need to agree within {TOLERANCE}, {name}_losses: {worst:.2g}")
    return worst


def numbers(task: str, peers: Path) -> tuple[Arrays, Batches]:
    """First weights by our names, and batches."""
    if (peers / "common.py").is_file():
        return shared(task, peers / "common.py")
    if task == "mlp":
        return peers_data.mlp_weights(), peers_data.mlp_batches()
    return peers_data.gpt_weights(), peers_data.gpt_batches()


def shared(task: str, path: Path) -> tuple[Arrays, Batches]:
    """The numbers of the file that all frameworks share."""
    spec = importlib.util.spec_from_file_location("peers_common", path)
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    if task == "mlp":
        return {_MLP_NAMES[k]: v for k, v in common.init_mlp().items()}, common.mlp_batches()
    return {renamed(k): v for k, v in common.init_gpt().items()}, common.gpt_batches()


def renamed(name: str) -> str:
    """`h0.ln1.g` is blocks.0.norm1.weight."""
    parts = [f"blocks.{p[1:]}" if p[0] == "h" and p[1:].isdecimal() else p for p in name.split(".")]
    return ".".join(_GPT_NAMES.get(p, p) for p in parts)


if __name__ == "__main__":
    main()
