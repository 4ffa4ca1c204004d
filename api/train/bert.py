"""Trains a BERT on text: a share of the characters is hidden, and guessed from both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.data import Batch, Corpus, Vocabulary
from eggpu.train import report
from eggpu.train.callbacks import Best, CSVLog
from eggpu.train.images import options
from eggpu.train.loop import fit
from eggpu.train.progress import display
from eggpu.train.run import Result, Run, below_one, not_negative, positive, settings
from eggpu.train.trainer import Trainer

STEPS = 1500  # unless told otherwise
_EVALUATED = 16  # batches of validation text
_SHAPE = ("layers", "width", "heads", "context")
_MASK = "_"  # how a hidden character is shown


@dataclass(frozen=True, slots=True)
class BERTConfig:
    """The model, the batches and the optimizer."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 16
    hidden: float = 0.15  # share of the characters to guess
    lr: float = 3e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, *_SHAPE, "batch", "hidden", "lr", "clip")
        not_negative(self, "seed", "weight_decay")
        below_one(self, "hidden")

    @property
    def guesses(self) -> int:
        """Characters to guess in a window."""
        return max(1, min(self.context, round(self.hidden * self.context)))


@dataclass(frozen=True, slots=True)
class MaskedText:
    """Batches of windows: with characters hidden, their places, and what they are.

    Of the places to guess four fifths show the mask, a tenth another character, and a tenth the
    right one, so that every place has to be understood (Devlin et al., 2018).
    """

    tokens: np.ndarray
    config: BERTConfig
    size: int  # windows in a batch
    mask: int  # the mask's id, above those of characters

    def __len__(self) -> int:
        return max(1, len(self.tokens) // (self.size * self.config.context))

    def __getitem__(self, i: int) -> Batch:
        generator = np.random.default_rng((self.config.seed, i))
        windows = data.batch(self.tokens, self.size, self.config.context, generator)[0]
        return self.masked(windows, generator)

    def masked(self, windows: np.ndarray, generator: np.random.Generator) -> Batch:
        """Windows with some characters hidden, the places (i32) and the characters there."""
        order = generator.random(windows.shape).argsort(1)
        places = np.sort(order[:, : self.config.guesses], 1).astype(np.int32)
        right = np.take_along_axis(windows, places, 1)
        chance = generator.random(places.shape)
        other = generator.integers(0, self.mask, places.shape).astype(np.int32)
        shown = np.where(chance < 0.8, self.mask, np.where(chance < 0.9, other, right))
        hidden = windows.copy()
        np.put_along_axis(hidden, places, shown.astype(np.int32), 1)
        return hidden, places, right


def loss(model: nn.BERT, tokens: Any, places: Any, right: Any) -> Any:
    """Nats a hidden character."""
    return nn.cross_entropy(model(tokens, places), right)


def accuracy(model: nn.BERT, tokens: Any, places: Any, right: Any) -> Any:
    """The share of hidden characters that are guessed."""
    return (model(tokens, places).argmax(-1) == right).astype("f32").mean()


def fill(model: nn.BERT, vocabulary: Vocabulary, text: str) -> str:
    """`text` with the likeliest character at every "_"; it may have `model.context` characters."""
    ids = vocabulary.encode(text)[None]
    holes = np.array([[c == _MASK for c in text]])
    ids = np.where(holes, vocabulary.size, ids).astype(np.int32)
    logits = eg.compile(lambda model, ids: model(ids), name="bert_fill")(model, ids)
    scores = np.array(logits)[..., : vocabulary.unknown]
    return "".join(
        vocabulary.decode([scores[0, i].argmax()]) if c == _MASK else c for i, c in enumerate(text)
    )


def train_bert(
    changes: Mapping[str, Any] | None = None, text: Sequence[str | Path] = (), *, run: Run
) -> Result:
    """Train a BERT on the text of files and folders; see train_gpt for `changes` and `run`."""
    config, saved = settings(BERTConfig, "bert", changes or {}, run, (*_SHAPE, "seed"))
    if run.steps is None:
        run = dataclasses.replace(run, steps=saved.get("steps") or STEPS)
    text = text or saved.get("text", ())
    vocabulary = Vocabulary(saved["characters"]) if saved else None
    corpus = data.corpus(text, vocabulary=vocabulary)
    trainer = _trainer(config, corpus, text, run)
    task, shown = trainer.task(run), display(run.silent)
    count = nn.count_parameters(trainer.model)
    shown.say(f"BERT, {count:,} parameters, on {run.machines}\ntext: {corpus.source}")
    result = fit(task, run, shown)
    if report.nothing_more(result, run):
        return result
    baseline = ("unigram entropy", corpus.unigram_entropy)
    about = report.write_report(task, result, run, "BERT", baseline)
    trainer.model, trainer.state = task.model, task.state
    sample = _sample(trainer, corpus, config)
    (run.out / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    right = trainer.evaluate()["accuracy"]
    shown.say(
        f"\nafter {result.steps} steps in {result.seconds:.0f} s: validation loss "
        f"{result.valid:.4f} nats a hidden character (unigram entropy {baseline[1]:.4f}), "
        f"{right:.1%} of them guessed\n\n{sample}\n\n{about}"
    )
    return result


def _trainer(config: BERTConfig, corpus: Corpus, text: Sequence[str | Path], run: Run) -> Trainer:
    assert run.steps is not None
    mask, shape = corpus.vocabulary.size, {name: getattr(config, name) for name in _SHAPE}
    model = nn.BERT(vocab=mask + 1, **shape, key=config.seed)
    schedule = optim.cosine(
        config.lr, steps=run.steps, warmup=run.steps // 20, floor=config.lr * 0.02
    )
    adamw = optim.adamw(schedule, b2=0.99, weight_decay=config.weight_decay)
    how: dict[str, Any] = options("bert", config, run) | {"unit": "windows"}
    how["config"] |= {
        "characters": corpus.vocabulary.characters,
        "text": [str(Path(p).resolve()) for p in text],
    }
    unseen = MaskedText(corpus.valid, config, config.batch, mask)
    return Trainer(
        model, loss, optim.clipped(adamw, norm=config.clip),
        MaskedText(corpus.train, config, config.batch * run.parts, mask),
        valid=[unseen[i] for i in range(_EVALUATED)], metrics={"accuracy": accuracy},
        callbacks=(Best(), CSVLog()), **how,
    )  # fmt: skip


def _sample(trainer: Trainer, corpus: Corpus, config: BERTConfig) -> str:
    """A few unseen windows: as they are, with every tenth character hidden, and filled in."""
    starts = np.linspace(0, len(corpus.valid) - config.context, 4).astype(int)[1:3]
    lines = []
    for start in starts:
        text = corpus.vocabulary.decode(corpus.valid[start : start + config.context])
        text = text.replace(_MASK, "-")
        holes = "".join(_MASK if i % 8 == 4 else c for i, c in enumerate(text))
        filled = fill(trainer.model, corpus.vocabulary, holes)
        shown = (("text", text), ("hidden", holes), ("filled", filled))
        lines += [f"{what:<7}| {line!r}" for what, line in shown]
    return "\n".join(lines)
