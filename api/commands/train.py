"""`eggpu train gpt|mlp|cnn|resnet|vit|autoencoder`: small models through the compiled runtime."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import eggpu as eg
from eggpu.train import GPTConfig, MLPConfig, Result, Run, train_gpt, train_images, train_mlp
from eggpu.train import gpt as gpt_
from eggpu.train import images as images_
from eggpu.train import mlp as mlp_
from eggpu.train.gpt import Writing

_INTERRUPTED = 130

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
    _add_gpt(models, common)
    _add_mlp(models, common)
    for name in images_.CONFIGS:
        _add_images(name, models, common)


def _add_gpt(models: Any, common: argparse.ArgumentParser) -> None:
    text = "a GPT on characters of text (Python's standard library unless told otherwise)"
    parser = models.add_parser("gpt", parents=[common], help=text, description=f"Train {text}.")
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="PATH", help="text files and folders to train on"
    )
    _settings(parser, GPTConfig, _GPT_FLAGS)
    written = Writing()
    group = parser.add_argument_group("the text that the trained model writes")
    group.add_argument("--prompt", default=written.prompt, help="how it begins (default: new line)")
    group.add_argument(
        "--length", type=int, default=written.length, help=f"characters {_default(written.length)}"
    )
    group.add_argument(
        "--temperature", type=float, default=written.temperature,
        help=f"0 for the likeliest characters {_default(written.temperature)}",
    )  # fmt: skip
    _limits(parser, Path("runs/gpt"), gpt_.STEPS, gpt_.MINUTES)
    parser.set_defaults(run=run_gpt)


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
    _limits(parser, Path("runs") / name, images_.STEPS, None)
    parser.set_defaults(run=run_images, name=name)


def run_images(args: argparse.Namespace) -> int:
    """Train an image model."""
    changes = _changes(args, images_.CONFIGS[args.name])
    return _status(train_images(args.name, changes, run=_run(args)))


def run_gpt(args: argparse.Namespace) -> int:
    """Train a GPT."""
    writing = Writing(args.prompt, args.length, args.temperature)
    return _status(train_gpt(_changes(args, GPTConfig), args.text, run=_run(args), writing=writing))


def run_mlp(args: argparse.Namespace) -> int:
    """Train an MLP."""
    return _status(train_mlp(_changes(args, MLPConfig), run=_run(args)))


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
    run, most = Run(out), "" if minutes is None else f", and {minutes:g} minutes at most"
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
    group.add_argument("--quiet", action="store_true", help="print nothing")
    for name, what in (("log", "read the loss"), ("eval", "validate"), ("save", "save")):
        value = getattr(run, f"{name}_every")
        group.add_argument(
            f"--{name}-every", type=int, default=value, metavar="N",
            help=f"{what} every N steps {_default(value)}",
        )  # fmt: skip


def _default(value: object) -> str:
    return f"(default: {value})"


def _changes(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(config)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _run(args: argparse.Namespace) -> Run:
    if args.device is not None:
        eg.device(args.device)
    return Run(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Run)})


def _status(result: Result) -> int:
    return _INTERRUPTED if result.interrupted else 0
