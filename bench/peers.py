"""Times a training step of the models that are compared with other frameworks; prints JSON.

    python bench/peers.py --task gpt

Weights and batches are those of common.py in the folder --peers where there is one, else the same
numbers made here. `ms` is the best mean over blocks of ten steps, each ended by reading a loss.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_data
from peers_data import Arrays, Batches, GPTSize, MLPSize

import eggpu as eg
from eggpu import nn, optim

ROOT = Path(__file__).parents[1]
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
    parser.add_argument("--blocks", type=int, default=10, help="of ten steps")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--dump", type=Path, help="write every stage of the compiler")
    parser.add_argument("--profile", action="store_true", help="print the time of every kernel")
    args = parser.parse_args()
    if args.device is not None:
        eg.device(args.device)
    weights, batches = numbers(args.task, args.peers)
    trainer = Trainer(args.task, weights, batches)
    print(json.dumps(measure(trainer, args.blocks)))
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


def measure(trainer: Trainer, blocks: int) -> dict[str, Any]:
    """Losses of the first ten steps, then the best of `blocks` blocks of ten."""
    losses = [float(trainer.advance()) for _ in range(10)]
    best = float("inf")
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(10):
            loss = trainer.advance()
        float(loss)
        best = min(best, (time.perf_counter() - start) / 10)
    plan = trainer.step.plan
    return {
        "bench": "peers",
        "task": trainer.task,
        "device": eg.device().target.name,
        "ms": round(best * 1e3, 3),
        "losses": losses,
        "compile_s": round(trainer.step.compile_seconds, 3),
        "dispatches": len(plan.kernels),
        "peak_bytes": plan.peak_bytes,
    }


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
