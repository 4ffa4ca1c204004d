"""`eggpu compile MODULE:FUNCTION`: a function through every stage of the compiler, not run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler import pytree
from eggpu.compiler.errors import EggpuError, TypeMismatch
from eggpu.compiler.pipeline import Options
from eggpu.compiler.schedule.show import plan_text

_EXAMPLE = "eggpu compile model.py:loss --arg f32[8,64] --arg model.py:weights --grad --dump out"


class CommandError(EggpuError):
    """An argument of the command line that names nothing."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser = commands.add_parser(
        "compile",
        parents=[common],
        help="compile a function and show the plan",
        description="Compile a function for arguments of given types and show its plan.",
        epilog=f"example: {_EXAMPLE}",
    )
    add_function(parser)
    parser.add_argument("--dump", metavar="DIR", type=Path, help="write every stage and the WGSL")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan for eggpu.load")
    parser.add_argument(
        "--precision", choices=("float32", "mixed"),
        help="mixed: activations and operands of products as f16 (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", metavar="BYTES", type=int,
        help="bytes that a call may take; above it values are computed again",
    )  # fmt: skip
    parser.add_argument(
        "--tune", action="store_true", help="time the best tilings of each kernel on the device"
    )
    add_profile(parser, "run it on the arguments and show every kernel's time")
    parser.set_defaults(run=run)


def add_profile(parser: Any, what: str) -> None:
    """The flag that measures kernels."""
    parser.add_argument(
        "--profile", metavar="FILE", nargs="?", const="", default=None,
        help=f"{what}, GFLOP/s, GB/s and part of the device's roof; FILE gets a trace for "
        "ui.perfetto.dev",
    )  # fmt: skip


def add_function(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is compiled."""
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="a module or a file, and a function in it"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="TYPE",
        help="the next argument: a type such as f32[8,64], i32[] or bool[4], or MODULE:NAME for an "
        "object such as a model",
    )  # fmt: skip
    parser.add_argument(
        "--grad", action="store_true",
        help="compile value and gradients with respect to every argument that holds floats",
    )  # fmt: skip
    parser.add_argument("--no-optimize", action="store_true", help="a kernel for every operation")
    parser.add_argument(
        "--relaxed", action="store_true",
        help="also rules that change float32 results by more than rounding",
    )  # fmt: skip
    parser.add_argument(
        "--without", action="append", default=[], metavar="RULE", help="leave a rewrite rule out"
    )
    parser.add_argument(
        "--force", action="append", default=[], metavar="KERNEL",
        help="a kernel, such as attention_split, that computes whatever it can",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compile and print the plan."""
    given = {"precision": args.precision, "max_memory": args.max_memory, "tune": args.tune}
    compiled, arguments = compiled_of(args, **{k: v for k, v in given.items() if v})
    compilation = compiled.compile(*arguments)
    print(plan_text(compilation.plan))
    seconds = ", ".join(f"{name} {s:.2f} s" for name, s in compilation.seconds.items())
    if compilation.memory_price is not None:
        print(compilation.memory_price)
    print(f"compiled in {sum(compilation.seconds.values()):.2f} s ({seconds})")
    if args.dump is not None:
        print(f"every stage is in {compiled.dump(args.dump)}")
    if args.save is not None:
        compiled.save(args.save)
        print(f"the plan is in {args.save}")
    if args.profile is not None:
        profile = compiled.profile(*arguments)
        print(profile)
        if args.profile:
            print(f"the trace for ui.perfetto.dev is in {profile.save(args.profile)}")
    return 0


def compiled_of(args: argparse.Namespace, **options: Any) -> tuple[eg.Compiled, list[Any]]:
    """The function that the flags name with their options, and its arguments. One that is compiled
    in its module keeps the options that it has there."""
    function, arguments = function_of(args)
    found = named(args.function)
    known = found.options if isinstance(found, eg.Compiled) else Options()
    donate = found.donated if isinstance(found, eg.Compiled) and not args.grad else ()
    options |= {"optimize": False} if args.no_optimize else {}
    options |= {"relaxed": True} if args.relaxed else {}
    options["without"] = (*known.without, *args.without)
    options["force"] = (*known.force, *args.force)
    return eg.compile(function, donate=donate, options=known, **options), arguments


def function_of(args: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    """The function that the flags name, with gradients if asked for, and its arguments."""
    if args.device is not None:
        eg.device(args.device)
    function = named(args.function)
    if isinstance(function, eg.Compiled):
        function = function.function
    if not callable(function):
        raise CommandError(f"{args.function} is a {type(function).__name__}, not a function")
    arguments = [argument(text) for text in args.arg]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise CommandError(f"{args.function}: {error}; arguments are given by --arg") from None
    return (with_gradients(function, arguments) if args.grad else function), arguments


def argument(text: str) -> Any:
    """A value of the type that `text` names, or the object MODULE:NAME."""
    if ":" in text:
        return named(text)
    try:
        type_ = eg.parse_type(text)
    except TypeMismatch as error:
        raise CommandError(f"--arg {text}: {str(error).splitlines()[0]}") from None
    return np.zeros(type_.shape, type_.dtype.numpy)


def with_gradients(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """`function` with its gradients by all arguments that hold floats."""
    leaves = [[eg.array(v) for v in pytree.flatten(a)[0]] for a in arguments]
    floats = [k for k, found in enumerate(leaves) if any(v.dtype.kind == "f" for v in found)]
    if not floats:
        raise CommandError("--grad needs an argument that holds floats, such as --arg f32[8,64]")
    return eg.value_and_grad(function, floats)


def named(text: str) -> Any:
    """The object of MODULE:NAME; MODULE is imported from the current folder too, or is a file."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise CommandError(f"needs MODULE:NAME, such as model.py:loss, got {text!r}")
    module = load(where)
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        has = ", ".join(public) or "nothing to call"
        raise CommandError(f"{where} has no {name}; it has {has}") from None
    return found


def load(where: str) -> ModuleType:
    """A module by name or by file. Raises CommandError when it is missing or fails to import."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise CommandError(f"file {where} does not exist")
    if not is_file and importlib.util.find_spec(where.partition(".")[0]) is None:
        raise CommandError(f"no module {where} here ({Path.cwd()}) or among the installed ones")
    try:
        return _from_file(path) if is_file else importlib.import_module(where)
    except Exception as error:  # whatever the module does
        raise CommandError(f"importing {where} failed: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
