"""The command line of a script, from the signature of its main function; `examples/` use it."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from eggpu.compiler.errors import EggpuError
from eggpu.runtime import DeviceError, DonatedError, KernelError

# What a user can mend. Anything else is a mistake in eggpu and shows its traceback.
_USER_ERRORS = (EggpuError, DeviceError, KernelError, DonatedError, OSError)
INTERRUPTED = 130  # as shells count it: 128 + SIGINT
_PIPE = 141  # 128 + SIGPIPE

_HELP = {
    "steps": "training steps",
    "files": "text files and folders to train on (default: Python's standard library)",
    "out": "folder for checkpoints, logs and pictures",
}


def run(main: Callable[..., Any]) -> None:
    """Call `main` with the command line's arguments and leave Python with the exit status.

    An int is a positional count, a tuple of strings takes the rest of the line, a Path is a flag;
    each has a default. `--help` shows the docstring of the function's module. What a user can mend
    is told in a line (status 2); Ctrl-C gives 130.
    """
    raise SystemExit(status(main, sys.argv[1:]))


def status(main: Callable[..., Any], argv: Sequence[str]) -> int:
    """The exit status of `main` with these arguments; SystemExit for ones that do not parse."""
    parsed = parser(main)
    args = vars(parsed.parse_args(argv))

    def call() -> int:
        main(**args)
        return 0

    return guarded(call, parsed.prog)


def guarded(call: Callable[[], int], name: str, debug: bool = False) -> int:
    """What `call` returns; 2 for an error that the user can mend, 130 for Ctrl-C, 141 for a reader
    of the output that has left."""
    try:
        done = call()
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # `eggpu rules | head`: who reads has enough, also of what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE
    except _USER_ERRORS as error:
        if debug:
            raise
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser(main: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of a main function's parameters."""
    about = inspect.cleandoc(inspect.unwrap(main).__globals__.get("__doc__") or "").splitlines()
    out = argparse.ArgumentParser(
        description="\n".join(line for line in about if not line.endswith("--help")).strip(),
        epilog="EGGPU_DEVICE=NAME takes another device of `eggpu devices`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = get_type_hints(main)
    for name, parameter in inspect.signature(main).parameters.items():
        _add(out, name, kinds[name], parameter.default)
    return out


def _add(out: argparse.ArgumentParser, name: str, kind: Any, default: Any) -> None:
    text = _HELP.get(name, "")
    if kind is int:
        text = f"{text} (default: {default})".lstrip()
        out.add_argument(
            name, nargs="?", type=_count, default=default, metavar=name.upper(), help=text
        )
    elif kind == tuple[str, ...]:
        out.add_argument(name, nargs="*", default=default, metavar="PATH", help=text)
    elif kind is Path:
        text = f"{text} (default: {default})".lstrip()
        out.add_argument(f"--{name}", type=Path, default=default, metavar="DIR", help=text)
    else:
        raise TypeError(f"a script takes int, tuple[str, ...] and Path, got {kind} for {name}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of 1 or more, got {text!r}")
    return int(text)
