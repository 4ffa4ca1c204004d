"""`eggpu devices`: a table of what compiled functions can run on."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from eggpu import profiles
from eggpu.runtime import Adapter, DeviceError, adapters, open_device


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "list the devices found; the first is the default"
    parser = commands.add_parser("devices", parents=[common], help=text, description=text)
    parser.add_argument("--opengl", action="store_true", help="OpenGL's devices (slow, not tested)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, best device first. Raises DeviceError when there is none."""
    backend = "gl" if args.opengl else None
    found = adapters(backend)
    if not found:
        open_device(None, backend)  # says what to install
        raise DeviceError("no device was found")
    table = Table(box=None, pad_edge=False, header_style="")
    for column in ("#", "name", "kind", "backend", "driver", "rates"):
        table.add_column(column, overflow="fold")
    for a in found:
        table.add_row(str(a.index), a.name, a.kind, a.backend, a.driver, rates(a))
    Console(highlight=False, markup=False).print(table)
    return 0


def rates(adapter: Adapter) -> str:
    """Which profile the cost model uses: measured by `eggpu calibrate`, or built in."""
    found = profiles.load(adapter.name, adapter.driver, adapter.backend)
    return "built-in" if found is None else "measured"
