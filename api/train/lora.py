"""Fine-tunes a trained GPT on other text with low-rank adapters, and merges them into it."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eggpu import data, nn, optim
from eggpu.checkpoints import CheckpointError, load_checkpoint, read_metadata, save_checkpoint
from eggpu.data import TokenBatches, Vocabulary, even_batches
from eggpu.train import report
from eggpu.train.callbacks import Best, CSVLog
from eggpu.train.gpt import GPTConfig, loss
from eggpu.train.images import options
from eggpu.train.loop import fit
from eggpu.train.progress import display
from eggpu.train.run import Result, Run, TrainingError, not_negative, positive, settings
from eggpu.train.sample import sample_text
from eggpu.train.task import initial_state
from eggpu.train.trainer import Trainer

STEPS = 400  # unless told otherwise
BASE = Path("runs/gpt/checkpoint.safetensors")
_EVALUATED = 16  # batches of validation text
_SHAPE = ("layers", "width", "heads", "context")  # of the base
_LAYERS = ("blocks.*",)  # all linear layers of the transformer blocks


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The adapters, the batches and the optimizer."""

    rank: int = 8
    alpha: float = 16.0
    batch: int = 16
    lr: float = 3e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "rank", "alpha", "batch", "lr", "clip")
        not_negative(self, "seed", "weight_decay")


@dataclass(frozen=True, slots=True)
class Base:
    """A trained GPT: the model, its vocabulary, and all that its checkpoint says."""

    model: nn.GPT
    vocabulary: Vocabulary
    config: dict[str, Any]


def load_base(path: Path) -> Base:
    """The GPT of a checkpoint of `eggpu train gpt`."""
    if not path.exists():
        raise TrainingError(f"{path} does not exist: train a base with `eggpu train gpt` first, or "
                            "name its checkpoint with --base")  # fmt: skip
    saved = read_metadata(path).config
    try:
        config, characters = GPTConfig(**saved["gpt"]), saved["characters"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is no checkpoint of `eggpu train gpt`") from None
    vocabulary = Vocabulary(characters)
    shape = {name: getattr(config, name) for name in _SHAPE}
    model = nn.GPT(vocab=vocabulary.size, **shape, key=config.seed)
    tree = {"model": model, "state": initial_state(model)}
    return Base(load_checkpoint(path, tree)[0]["model"], vocabulary, saved)


def documentation() -> Path:
    """Python's own documentation as text: English, where the base was trained on code."""
    return Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"


def train_lora(
    changes: Mapping[str, Any] | None = None, text: Sequence[str | Path] = (), *, run: Run,
    base: Path | None = None,
) -> Result:  # fmt: skip
    """Fine-tune a GPT on the text of files and folders; see train_gpt for `changes` and `run`.

    Without text on Python's documentation. `run.out` gets merged.safetensors, a checkpoint as
    `eggpu train gpt` writes them.
    """
    config, saved = settings(LoRAConfig, "lora", changes or {}, run, ("rank", "alpha"))
    if run.steps is None:
        run = dataclasses.replace(run, steps=saved.get("steps") or STEPS)
    path = base or Path(saved.get("base", BASE))
    found = load_base(path)
    text = text or saved.get("text") or [documentation()]
    trainer = _trainer(config, found, path, text, run)
    task, shown = trainer.task(run), display(run.silent)
    sizes = {n: v.size for n, v in nn.named_parameters(trainer.model).items() if "lora_" in n}
    before = trainer.evaluate()["loss"] if run.first else float("nan")
    shown.say(
        f"LoRA of rank {config.rank} on {path}: {sum(sizes.values()):,} numbers to train beside "
        f"{nn.count_parameters(found.model):,} that stay, on {run.machines}\n"
        f"validation loss {before:.4f} nats a character before"
    )
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    merged = nn.merge_lora(task.model)
    kept = save_checkpoint(
        run.out / "merged.safetensors", {"model": merged, "state": initial_state(merged)},
        config=found.config,
    )  # fmt: skip
    about = report.write_report(task, result, run, "LoRA", ("before", before))
    sample = sample_text(merged, found.vocabulary, seed=config.seed)
    (run.out / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    told = "\n".join("  | " + line for line in sample.splitlines())
    shown.say(
        f"\nafter {result.steps} steps in {result.seconds:.0f} s: validation loss "
        f"{result.valid:.4f}, {before - result.valid:.4f} less\n\nthe merged model writes:\n"
        f"{told}\n\nmerged       {kept}\n{about}"
    )
    return result


def _trainer(
    config: LoRAConfig, base: Base, path: Path, text: Sequence[str | Path], run: Run
) -> Trainer:
    assert run.steps is not None
    corpus = data.corpus(text, vocabulary=base.vocabulary)
    size = (config.batch, base.model.context)
    model = nn.add_lora(base.model, config.rank, _LAYERS, config.alpha, key=config.seed)
    schedule = optim.cosine(
        config.lr, steps=run.steps, warmup=run.steps // 20, floor=config.lr * 0.02
    )
    adamw = optim.adamw(schedule, b2=0.99, weight_decay=config.weight_decay)
    clipped = optim.clipped(adamw, norm=config.clip)
    how: dict[str, Any] = options("lora", config, run) | {"unit": "windows"}
    how["config"] |= {
        "base": str(path.resolve()),
        "text": [str(Path(p).resolve()) for p in text],
    }
    return Trainer(
        model, loss, optim.groups(optim.frozen(), {nn.ADAPTERS: clipped}),
        TokenBatches(corpus.train, config.batch * run.parts, size[1], seed=config.seed),
        valid=even_batches(corpus.valid, *size, _EVALUATED), callbacks=(Best(), CSVLog()), **how,
    )  # fmt: skip
