"""`eggpu inspect MODULE:FUNCTION`: what the e-graph found in a function, what it chose, and why."""

from __future__ import annotations

import argparse
from typing import Any

import eggpu as eg
from eggpu.commands import compile as compile_
from eggpu.report import Report

_EXAMPLE = "eggpu inspect model.py:loss --arg f32[8,64] --arg model.py:weights --kernel 0"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser = commands.add_parser(
        "inspect",
        parents=[common],
        help="say why a function is compiled as it is",
        description="What the e-graph found in a function, what was chosen, and why.",
        epilog=f"example: {_EXAMPLE}",
    )
    compile_.add_function(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--kernel", metavar="N|NAME", help="only a kernel, or the one of a result")
    shown.add_argument("--line", metavar="FILE:N", help="only the kernels of a line")
    shown.add_argument("--misses", action="store_true", help="only what was almost recognized")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, not run, and print the report or a part of it."""
    function, arguments = compile_.function_of(args)
    compiled = eg.compile(function, optimize=not args.no_optimize)
    compiled.compile(*arguments)
    print(part(compiled.report, args))
    return 0


def part(report: Report, args: argparse.Namespace) -> str:
    """What was asked for. Raises CommandError for a kernel that there is not."""
    if args.kernel is not None:
        which = int(args.kernel) if args.kernel.isdecimal() else args.kernel
        try:
            return str(report.kernel(which))
        except KeyError as error:
            raise compile_.CommandError(error.args[0]) from None
    if args.line is not None:
        found = report.at(args.line)
        if not found:
            lines = dict.fromkeys(line for k in report.kernels for line in k.lines)
            what = f"no kernel computes {args.line}; lines that kernels compute: {', '.join(lines)}"
            raise compile_.CommandError(what)
        return "\n".join(map(str, found))
    if args.misses:
        return "\n".join(map(str, report.near_misses)) or "no near misses"
    return str(report).rstrip()
