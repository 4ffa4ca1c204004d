"""`eggpu inspect MODULE:FUNCTION`: what the e-graph found in a function, what it chose, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from eggpu.commands import compile as compile_
from eggpu.report import Report

_EXAMPLE = "eggpu inspect model.py:loss --arg f32[8,64] --arg model.py:weights --kernel 0"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser = commands.add_parser(
        "inspect",
        aliases=["explain"],
        parents=[common],
        help="say why a function is compiled as it is",
        description="What the e-graph found in a function, what was chosen, and why.",
        epilog=f"example: {_EXAMPLE}",
    )
    compile_.add_function(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--kernel", metavar="N|NAME", help="only a kernel: its number, or a buffer that it writes"
    )
    shown.add_argument(
        "--result", metavar="NAME", help="only a result, and the kernel that gives it"
    )
    shown.add_argument("--line", metavar="FILE:N", help="only the kernels of a line")
    shown.add_argument("--misses", action="store_true", help="only what was almost recognized")
    shown.add_argument("--json", action="store_true", help="everything as data")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, not run, and print the report or a part of it."""
    compiled, arguments = compile_.compiled_of(args)
    compiled.compile(*arguments)
    print(part(compiled.report, args))
    return 0


def part(report: Report, args: argparse.Namespace) -> str:
    """What was asked for. Raises CommandError for a kernel, result or line that there is not."""
    if args.json:
        return json.dumps(report.data(), indent=1)
    if args.result is not None:
        try:
            result = report.result(args.result)
        except KeyError as error:
            raise compile_.CommandError(error.args[0]) from None
        kernel = [] if result.kernel is None else [str(report.kernel(result.kernel))]
        return "\n".join([str(result), *kernel])
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
