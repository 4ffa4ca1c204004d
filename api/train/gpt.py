"""Trains a small GPT on text, character by character."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn
from eggpu.data import Corpus, Vocabulary
from eggpu.distributed import share
from eggpu.train import report
from eggpu.train.loop import fit
from eggpu.train.progress import Display, display
from eggpu.train.run import Result, Run, positive, settings
from eggpu.train.sample import sample_text
from eggpu.train.task import Batch, Task, initial_state, training_step

STEPS, MINUTES = 2500, 2.5  # whichever ends first, unless told otherwise
_EVALUATED = 32  # batches of validation text
_SHAPE = ("layers", "width", "heads", "context")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The model, the batches and the optimizer."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 8
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, *_SHAPE, "batch", "lr", "clip")


@dataclass(frozen=True, slots=True)
class Writing:
    """The text that the trained model writes."""

    prompt: str = "\n"
    length: int = 300
    temperature: float = 0.8


def loss(model: nn.GPT, tokens: eg.Array, targets: eg.Array) -> eg.Array:
    """Nats a character."""
    return nn.cross_entropy(model(tokens), targets)


def train_gpt(
    changes: Mapping[str, Any] | None = None, text: Sequence[str | Path] = (), *,
    run: Run, writing: Writing | None = None,
) -> Result:  # fmt: skip
    """Train a GPT on the text of files and folders (Python's own library when there are none).

    `changes` are the fields of GPTConfig that differ from the defaults, or from the checkpoint's
    when the run resumes one. Everything is written to `run.out`.
    """
    config, saved = settings(GPTConfig, "gpt", changes or {}, run, _SHAPE)
    run = run.limited(saved.get("steps") or STEPS, MINUTES)
    text = text or saved.get("text", ())
    vocabulary = Vocabulary(saved["characters"]) if saved else None
    corpus = data.corpus(text, vocabulary=vocabulary)
    task = _task(config, corpus, text, run)
    task.resume(run)
    task.model, task.state = run.group.broadcast((task.model, task.state))
    shown = display(run.silent)
    shown.say(_introduction(task, corpus, run))
    result = fit(task, run, shown)
    if not run.first:
        return result
    report.write_losses(result.history, run.out / "loss.csv")
    if result.interrupted:
        print(f"stopped after {result.steps} steps; go on with --resume {result.checkpoint}")
        return result
    _conclude(task, corpus, result, run, writing or Writing(), shown)
    return result


def _task(config: GPTConfig, corpus: Corpus, text: Sequence[str | Path], run: Run) -> Task:
    shape = {name: getattr(config, name) for name in _SHAPE}
    model = nn.GPT(vocab=corpus.vocabulary.size, **shape, key=config.seed)
    size = (config.batch, config.context)
    whole = config.batch * run.parts

    def batch(i: int) -> Batch:
        generator = np.random.default_rng((config.seed, i))
        both = data.batch(corpus.train, whole, config.context, generator)
        return share(both, run.group.rank, run.group.size)

    return Task(
        step=training_step(
            loss,
            lr=config.lr,
            weight_decay=config.weight_decay,
            clip=config.clip,
            name="gpt",
            run=run,
        ),
        evaluate=_evaluation(data.even_batches(corpus.valid, *size, _EVALUATED)),
        batch=batch,
        model=model,
        state=initial_state(model),
        config={
            "gpt": dataclasses.asdict(config),
            "steps": run.steps,
            "characters": corpus.vocabulary.characters,
            "text": [str(Path(p).resolve()) for p in text],
        },
        items=whole * config.context,
        unit="tokens",
        group=run.group,
    )


def _evaluation(batches: Sequence[Batch]) -> Callable[[Any], float]:
    compiled = eg.compile(loss, name="gpt_loss")
    return lambda model: float(np.mean([float(compiled(model, *b)) for b in batches]))


def _introduction(task: Task, corpus: Corpus, run: Run) -> str:
    shape = "{layers} layers, width {width}, {heads} heads, context {context}"
    shape = shape.format(**task.config["gpt"])
    resumed = f", from step {task.start}" if task.start else ""
    return (
        f"GPT: {shape}, {nn.count_parameters(task.model):,} parameters\n"
        f"text: {len(corpus.train) + len(corpus.valid):,} characters of {corpus.source}, "
        f"{corpus.vocabulary.size} different\n"
        f"device: {run.machines}{resumed}\n"
        "compiling the training step"
    )


def _conclude(
    task: Task, corpus: Corpus, result: Result, run: Run, writing: Writing, shown: Display
) -> None:
    unigram = corpus.unigram_entropy
    text = sample_text(
        result.model, corpus.vocabulary, prompt=writing.prompt, length=writing.length,
        temperature=writing.temperature, seed=task.config["gpt"]["seed"],
    )  # fmt: skip
    (run.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    about = report.write_report(task, result, run, "GPT", ("unigram entropy", unigram))
    if run.quiet:
        return
    gap = unigram - result.valid
    shown.say(
        f"\nafter {result.steps} steps in {result.seconds:.0f} s:\n"
        f"validation loss {result.valid:.4f} nats a character, unigram entropy {unigram:.4f}: "
        f"{abs(gap):.4f} {'below' if gap > 0 else 'above'} it\n\n"
        f"the model writes (temperature {writing.temperature}):\n{_indented(text)}\n\n{about}"
    )


def _indented(text: str) -> str:
    return "\n".join("  | " + line for line in text.splitlines())
