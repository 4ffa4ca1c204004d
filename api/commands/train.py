"""`eggpu train MODEL`: small models through the compiled runtime."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eggpu as eg
from eggpu import distributed
from eggpu.commands.compile import add_profile
from eggpu.runtime import adapters
from eggpu.script import INTERRUPTED
from eggpu.train import (
    BERTConfig,
    DiffusionConfig,
    GPTConfig,
    LoRAConfig,
    LSTMConfig,
    MLPConfig,
    Result,
    Run,
    TrainingError,
    train_bert,
    train_diffusion,
    train_gpt,
    train_images,
    train_lora,
    train_lstm,
    train_mlp,
)
from eggpu.train import bert as bert_
from eggpu.train import diffusion as diffusion_
from eggpu.train import images as images_
from eggpu.train import lora as lora_
from eggpu.train import mlp as mlp_
from eggpu.train import text as text_
from eggpu.train.text import Writing

_GPT_FLAGS = {
    "layers": "transformer blocks",
    "width": "numbers a token",
    "heads": "attention heads; they divide the width",
    "context": "characters that the model sees",
    "batch": "windows of text a step",
    "lr": "highest learning rate: warm-up, then a cosine",
    "weight_decay": "of AdamW",
    "clip": "limit of the gradients' norm",
    "seed": "of weights, batches and the sample",
}
_LSTM_FLAGS = _GPT_FLAGS | {
    "layers": "LSTM layers, one on the other",
    "width": "numbers a character",
    "hidden": "hidden units of a layer",
    "context": "characters of a window; each starts from a state of 0",
}
_MLP_FLAGS = {
    "hidden": "hidden units",
    "batch": "digits a step",
    "lr": "highest learning rate: warm-up, then a cosine",
    "weight_decay": "of AdamW",
    "clip": "limit of the gradients' norm",
    "seed": "of weights, batches and the split",
}
_IMAGE_FLAGS = {
    "batch": "digits a step",
    "lr": "highest learning rate: warm-up, then a cosine",
    "weight_decay": "of AdamW; biases have none",
    "seed": "of weights, batches and the split",
    "channels": "of the first convolution",
    "dropout": "share of numbers dropped in training",
    "blocks": "residual blocks",
    "layers": "transformer blocks",
    "width": "numbers a patch",
    "heads": "attention heads; they divide the width",
    "patch": "side of a patch; it divides 8",
    "code": "numbers that a picture is squeezed into",
}
_DIFFUSION_FLAGS = _IMAGE_FLAGS | {
    "weight_decay": "of AdamW",
    "width": "numbers in a layer",
    "layers": "residual layers",
    "average": "how slowly the weights that draw follow those in training",
    "denoise": "steps from noise to a digit",
}
_BERT_FLAGS = _GPT_FLAGS | {"hidden": "share of the characters to guess"}
_LORA_FLAGS = _GPT_FLAGS | {
    "rank": "columns of an adapter",
    "alpha": "an adapter's results are multiplied by alpha / rank",
}
_IMAGE_TEXTS = {
    "cnn": "a convolutional network on scikit-learn's handwritten digits",
    "resnet": "a small residual network on scikit-learn's handwritten digits",
    "vit": "a small vision transformer on scikit-learn's handwritten digits",
    "autoencoder": "an autoencoder of scikit-learn's handwritten digits, with pictures",
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "train a small model"
    parser = commands.add_parser("train", help=text, description=text)
    models = parser.add_subparsers(title="models", metavar="MODEL", required=True)
    _add_text("gpt", "a GPT", GPTConfig, _GPT_FLAGS, models, common)
    _add_text("lstm", "an LSTM", LSTMConfig, _LSTM_FLAGS, models, common)
    _add_mlp(models, common)
    for name in images_.CONFIGS:
        _add_images(name, models, common)
    _add_diffusion(models, common)
    _add_bert(models, common)
    _add_lora(models, common)


def _add_text(
    name: str, title: str, config: Any, flags: dict[str, str], models: Any,
    common: argparse.ArgumentParser,
) -> None:  # fmt: skip
    text = f"{title} on characters of text (Python's standard library unless told otherwise)"
    parser = models.add_parser(name, parents=[common], help=text, description=f"Train {text}.")
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="PATH", help="text files and folders to train on"
    )
    _settings(parser, config, flags)
    written = Writing()
    group = parser.add_argument_group("the text that the trained model writes")
    group.add_argument(
        "--prompt", default=written.prompt, metavar="TEXT",
        help="how it begins (default: new line)",
    )  # fmt: skip
    group.add_argument(
        "--length", type=int, default=written.length, metavar="N",
        help=f"characters {_default(written.length)}",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, default=written.temperature, metavar="X",
        help=f"0 for the likeliest characters {_default(written.temperature)}",
    )  # fmt: skip
    _limits(parser, Path("runs") / name, text_.STEPS, text_.MINUTES)
    parser.set_defaults(run=run_text, name=name)


def _add_mlp(models: Any, common: argparse.ArgumentParser) -> None:
    text = "a multilayer perceptron on scikit-learn's handwritten digits"
    parser = models.add_parser("mlp", parents=[common], help=text, description=f"Train {text}.")
    _settings(parser, MLPConfig, _MLP_FLAGS)
    _limits(parser, Path("runs/mlp"), mlp_.STEPS, mlp_.MINUTES)
    parser.set_defaults(run=run_mlp)


def _add_images(name: str, models: Any, common: argparse.ArgumentParser) -> None:
    text, config = _IMAGE_TEXTS[name], images_.CONFIGS[name]
    parser = models.add_parser(name, parents=[common], help=text, description=f"Train {text}.")
    _settings(parser, config, _IMAGE_FLAGS)
    _limits(parser, Path("runs") / name, images_.STEPS[name], None)
    parser.set_defaults(run=run_images, name=name)


def _add_diffusion(models: Any, common: argparse.ArgumentParser) -> None:
    text = "a diffusion model that draws handwritten digits, with pictures"
    parser = models.add_parser(
        "diffusion", parents=[common], help=text, description=f"Train {text}."
    )
    _settings(parser, DiffusionConfig, _DIFFUSION_FLAGS)
    _limits(parser, Path("runs/diffusion"), diffusion_.STEPS, None)
    parser.set_defaults(run=run_diffusion)


def _add_bert(models: Any, common: argparse.ArgumentParser) -> None:
    text = "a BERT that guesses hidden characters of text (Python's standard library by default)"
    parser = models.add_parser("bert", parents=[common], help=text, description=f"Train {text}.")
    _text(parser)
    _settings(parser, BERTConfig, _BERT_FLAGS)
    _limits(parser, Path("runs/bert"), bert_.STEPS, None)
    parser.set_defaults(run=run_bert)


def _add_lora(models: Any, common: argparse.ArgumentParser) -> None:
    text = "low-rank adapters of a trained GPT on other text (Python's documentation by default)"
    parser = models.add_parser("lora", parents=[common], help=text, description=f"Train {text}.")
    parser.add_argument(
        "--base", type=Path, metavar="CHECKPOINT",
        help=f"of `eggpu train gpt` {_default(lora_.BASE)}",
    )  # fmt: skip
    _text(parser)
    _settings(parser, LoRAConfig, _LORA_FLAGS)
    _limits(parser, Path("runs/lora"), lora_.STEPS, None)
    parser.set_defaults(run=run_lora)


def _text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="PATH", help="text files and folders to train on"
    )


def run_diffusion(args: argparse.Namespace) -> int:
    """Train a diffusion model."""
    changes = _changes(args, DiffusionConfig)
    return _trained(args, lambda run: train_diffusion(changes, run=run))


def run_bert(args: argparse.Namespace) -> int:
    """Train a BERT."""
    changes = _changes(args, BERTConfig)
    return _trained(args, lambda run: train_bert(changes, args.text, run=run))


def run_lora(args: argparse.Namespace) -> int:
    """Fine-tune a GPT."""
    changes = _changes(args, LoRAConfig)
    return _trained(args, lambda run: train_lora(changes, args.text, run=run, base=args.base))


def run_images(args: argparse.Namespace) -> int:
    """Train an image model."""
    changes = _changes(args, images_.CONFIGS[args.name])
    return _trained(args, lambda run: train_images(args.name, changes, run=run))


def run_text(args: argparse.Namespace) -> int:
    """Train a model of text."""
    train, config = {"gpt": (train_gpt, GPTConfig), "lstm": (train_lstm, LSTMConfig)}[args.name]
    writing = Writing(args.prompt, args.length, args.temperature)
    changes = _changes(args, config)
    return _trained(args, lambda run: train(changes, args.text, run=run, writing=writing))


def run_mlp(args: argparse.Namespace) -> int:
    """Train an MLP."""
    return _trained(args, lambda run: train_mlp(_changes(args, MLPConfig), run=run))


def _settings(parser: argparse.ArgumentParser, config: Any, flags: dict[str, str]) -> None:
    """A flag for every field of `config`; one that is not given leaves no trace, so that what a
    checkpoint says counts."""
    group = parser.add_argument_group("model and optimizer")
    for f in dataclasses.fields(config):
        kind = float if isinstance(f.default, float) else int
        group.add_argument(
            f"--{f.name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS,
            metavar="X" if kind is float else "N", help=f"{flags[f.name]} {_default(f.default)}",
        )  # fmt: skip


def _limits(parser: argparse.ArgumentParser, out: Path, steps: int, minutes: float | None) -> None:
    """Flags of the run; without default `minutes` it ends by steps alone."""
    unit = "minute" if minutes == 1 else "minutes"
    run, most = Run(out), "" if minutes is None else f", and {minutes:g} {unit} at most"
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--steps", type=int, metavar="N",
        help=f"train so many steps (default: {steps}{most})",
    )  # fmt: skip
    if minutes is None:
        parser.set_defaults(minutes=None)
    else:
        group.add_argument(
            "--minutes", type=float, metavar="X",
            help="train this long, without compiling; the learning rate still comes to its end",
        )  # fmt: skip
    group.add_argument(
        "--out", type=Path, default=out, metavar="DIR", help=f"folder {_default(out)}"
    )
    group.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from a checkpoint")
    group.add_argument(
        "--data-parallel", type=_count, nargs="?", const=0, metavar="N",
        help="train in N processes, each with a --batch of its own, gradients averaged (without N "
        "one for each GPU); inside mpirun or torchrun it joins the processes started there",
    )  # fmt: skip
    group.add_argument(
        "--devices", type=_numbers, metavar="N,N",
        help="several devices for this process, by their numbers in `eggpu devices`, each with a "
        "--batch of its own",
    )  # fmt: skip
    group.add_argument("--quiet", action="store_true", help="print nothing")
    add_profile(group, "show every kernel of a training step at the end: time")
    for name, what in (("log", "read the loss"), ("eval", "validate"), ("save", "save")):
        value = getattr(run, f"{name}_every")
        group.add_argument(
            f"--{name}-every", type=int, default=value, metavar="N",
            help=f"{what} every N steps {_default(value)}",
        )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of processes, got {text!r}")
    return int(text)


def _numbers(text: str) -> str:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"needs numbers with commas between them, got {text!r}")
    return text


def _default(value: object) -> str:
    return f"(default: {value})"


def _changes(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(config)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _trained(args: argparse.Namespace, train: Callable[[Run], Result]) -> int:
    """Train in this process, as one of a group, or in processes started here; the exit status."""
    group = distributed.init() if args.data_parallel is not None else distributed.Group()
    if args.data_parallel is not None and group.size == 1:
        return distributed.launch(args.data_parallel or _processes(), ["-m", "eggpu", *args.argv])
    if args.data_parallel not in (None, 0, group.size):
        came = f"{group.size} were started"
        raise TrainingError(f"--data-parallel {args.data_parallel} needs as many processes: {came}")
    interrupted = train(_run(args, group)).interrupted
    group.close()
    return INTERRUPTED if interrupted else 0


def _processes() -> int:
    """One for each of the best devices of a kind, and two at least."""
    found = adapters()
    return max(2, sum((a.kind, a.backend) == (found[0].kind, found[0].backend) for a in found))


def _run(args: argparse.Namespace, group: distributed.Group) -> Run:
    devices = tuple(eg.device(int(n)) for n in args.devices.split(",")) if args.devices else ()
    if devices:
        eg.device(int(args.devices.split(",")[0]))
    elif args.device is not None:
        eg.device(args.device)
    else:
        distributed.local_device(group)
    names = [f.name for f in dataclasses.fields(Run) if f.name not in ("group", "devices")]
    return Run(**{name: getattr(args, name) for name in names}, group=group, devices=devices)
