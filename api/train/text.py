"""Training of a model of text, character by character: what GPT and LSTM have in common."""

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
from eggpu.train.run import Result, Run, not_negative, settings
from eggpu.train.task import Batch, Task, initial_state, training_step

STEPS, MINUTES = 2500, 2.5  # whichever ends first, unless told otherwise
_EVALUATED = 32  # batches of validation text


@dataclass(frozen=True, slots=True)
class Writing:
    """The text that the trained model writes."""

    prompt: str = "\n"
    length: int = 300
    temperature: float = 0.8

    def __post_init__(self) -> None:
        not_negative(self, "length", "temperature")


@dataclass(frozen=True, slots=True)
class TextModel:
    """A kind of model: its settings (with context, batch, lr, weight_decay, clip and seed besides
    its shape), how to make one for a number of characters, and how it writes.
    """

    name: str
    title: str
    config: type[Any]
    shape: tuple[str, ...]  # settings that a checkpoint fixes
    build: Callable[[Any, int], nn.Module]
    sample: Callable[..., str]  # as sample_text
    words: str  # of the shape, to be filled in


def loss(model: Any, tokens: eg.Array, targets: eg.Array) -> eg.Array:
    """Nats a character."""
    return nn.cross_entropy(model(tokens), targets)


def train_text(
    kind: TextModel, changes: Mapping[str, Any], text: Sequence[str | Path], run: Run,
    writing: Writing,
) -> Result:  # fmt: skip
    """Train a model of a kind; see train_gpt."""
    config, saved = settings(kind.config, kind.name, changes, run, kind.shape)
    run = run.limited(saved.get("steps") or STEPS, MINUTES)
    text = text or saved.get("text", ())
    vocabulary = Vocabulary(saved["characters"]) if saved else None
    corpus = data.corpus(text, vocabulary=vocabulary)
    task = _task(kind, config, corpus, text, run)
    task.resume(run)
    task.model, task.state = run.group.broadcast((task.model, task.state))
    shown = display(run.silent)
    shown.say(_introduction(kind, task, corpus, run))
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    _conclude(kind, task, corpus, result, run, writing, shown)
    return result


def _task(
    kind: TextModel, config: Any, corpus: Corpus, text: Sequence[str | Path], run: Run
) -> Task:
    model = kind.build(config, corpus.vocabulary.size)
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
            name=kind.name,
            run=run,
        ),
        evaluate=_evaluation(kind, data.even_batches(corpus.valid, *size, _EVALUATED)),
        batch=batch,
        model=model,
        state=initial_state(model),
        config={
            kind.name: dataclasses.asdict(config),
            "steps": run.steps,
            "characters": corpus.vocabulary.characters,
            "text": [str(Path(p).resolve()) for p in text],
        },
        items=whole * config.context,
        unit="tokens",
        group=run.group,
    )


def _evaluation(kind: TextModel, batches: Sequence[Batch]) -> Callable[[Any], float]:
    compiled = eg.compile(loss, name=f"{kind.name}_loss")
    return lambda model: float(np.mean([float(compiled(model, *b)) for b in batches]))


def _introduction(kind: TextModel, task: Task, corpus: Corpus, run: Run) -> str:
    shape = kind.words.format(**task.config[kind.name])
    resumed = f", from step {task.start}" if task.start else ""
    return (
        f"{kind.title}: {shape}, {nn.count_parameters(task.model):,} parameters\n"
        f"text: {len(corpus.train) + len(corpus.valid):,} characters of {corpus.source}, "
        f"{corpus.vocabulary.size} different\n"
        f"device: {run.machines}{resumed}\n"
        "compiling the training step"
    )


def _conclude(
    kind: TextModel, task: Task, corpus: Corpus, result: Result, run: Run, writing: Writing,
    shown: Display,
) -> None:  # fmt: skip
    unigram = corpus.unigram_entropy
    text = kind.sample(
        result.model, corpus.vocabulary, prompt=writing.prompt, length=writing.length,
        temperature=writing.temperature, seed=task.config[kind.name]["seed"],
    )  # fmt: skip
    (run.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    about = report.write_report(task, result, run, kind.title, ("unigram entropy", unigram))
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
