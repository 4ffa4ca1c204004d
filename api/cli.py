"""The command `eggpu`. Errors of users are told in a line; --debug shows the traceback."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

import eggpu
from eggpu.commands import calibrate, devices, doctor, embed, generate, inspect, rules, serve, train
from eggpu.commands import compile as compile_
from eggpu.script import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 2 for an error that the user can mend, 130 for
    Ctrl-C, 141 for a reader of its output that has left."""
    args = parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: args.run(args), "eggpu", args.debug)


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with its own usage; argparse's subcommands would pass
    it up to be refused with the usage of `eggpu`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments as a namespace, and nothing left over."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._near(unknown)}")
        return known, unknown

    def _near(self, unknown: Sequence[str]) -> str:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        near = [n for word in wrong for n in difflib.get_close_matches(word, flags, 1)]
        return f"; did you mean {', '.join(near)}?" if near else ""


def parser() -> Parser:
    """The parser of all commands."""
    out = Parser(
        prog="eggpu", description="Compile tensor programs with an e-graph, run them with WebGPU."
    )
    out.add_argument("--version", action="version", version=f"eggpu {eggpu.__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    chosen = argparse.ArgumentParser(add_help=False, parents=[common])
    chosen.add_argument(
        "--device", metavar="NAME", help="part of a device's name, or its number in `eggpu devices`"
    )
    commands = out.add_subparsers(title="commands", metavar="COMMAND", required=True)
    devices.add(commands, common)
    rules.add(commands, common)
    for command in (train, generate, serve, embed, compile_, inspect, calibrate, doctor):
        command.add(commands, chosen)
    return out
