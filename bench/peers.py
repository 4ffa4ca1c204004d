"""Times a training step of the models that are compared with other frameworks; prints JSON.

    python bench/peers.py --task gpt --json

Weights and batches are those of common.py in the folder --peers where there is one, else the same
numbers made here. `ms` is the best mean over blocks of ten steps, each ended by reading a loss.
`first_s` is the first step with all compilation, cold where EGGPU_CACHE_DIR and
MESA_SHADER_CACHE_DIR are empty folders.
Where torch is installed, eager torch on the CPU takes the same steps, its blocks in turn with ours
and a pause before each, since its threads go on spinning; losses are compared, and `ratio` is our
time over its.
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
THREADS, PAUSE = 2, 0.25  # of torch; seconds before a block
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
    parser.add_argument("--without-torch", action="store_true", help="our side alone")
    parser.add_argument("--blocks", type=int, default=10, help="of ten steps")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--dump", type=Path, help="write every stage of the compiler")
    parser.add_argument("--profile", action="store_true", help="print the time of every kernel")
    args = parser.parse_args()
    if args.device is not None:
        eg.device(args.device)
    weights, batches = numbers(args.task, args.peers)
    trainer = Trainer(args.task, weights, batches)
    other = None if args.without_torch else torch_side(args.task, weights, batches)
    print(json.dumps(measure(trainer, args.blocks, other)))
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


def torch_side(task: str, weights: Arrays, batches: Batches) -> Any:
    """The same in eager torch on two threads; None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import peers_torch

    return peers_torch.Trainer(task, weights, batches, THREADS)


def measure(trainer: Trainer, blocks: int, other: Any = None) -> dict[str, Any]:
    """Losses of the first ten steps, then the best of `blocks` blocks of ten, of both sides.

    Raises ValueError where the losses of the two differ.
    """
    sides = {"": trainer} if other is None else {"": trainer, "torch_": other}
    start = time.perf_counter()
    losses = {"": [float(trainer.advance())]}
    first = time.perf_counter() - start
    for name, side in sides.items():
        known = losses.setdefault(name, [])
        known += [float(side.advance()) for _ in range(10 - len(known))]
    for name, found in losses.items():
        worst = max(abs(a - b) for a, b in zip(found, losses[""], strict=True))
        if not worst < TOLERANCE:
            raise ValueError(f"losses need to agree within {TOLERANCE}, {name}losses: {worst:.2g}")
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(blocks):
        for name, side in sides.items():
            if len(sides) > 1:
                time.sleep(PAUSE)
            best[name] = min(best[name], block(side.advance))
    plan = trainer.step.plan
    row = {
        "bench": "peers",
        "task": trainer.task,
        "device": eg.device().target.name,
        **{f"{name}ms": round(seconds * 1e3, 3) for name, seconds in best.items()},
        "losses": losses[""],
        "first_s": round(first, 3),
        "compile_s": round(trainer.step.compile_seconds, 3),
        "dispatches": len(plan.kernels),
        "peak_bytes": plan.peak_bytes,
    }
    return row if other is None else row | {"ratio": round(best[""] / best["torch_"], 3)}


def block(advance: Callable[[], Any]) -> float:
    """Seconds a step, of ten of which the last one's loss is read."""
    start = time.perf_counter()
    for _ in range(10):
        loss = advance()
    float(loss)
    return (time.perf_counter() - start) / 10


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
