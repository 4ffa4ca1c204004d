"""How a run shows where it is: a line that updates itself, plain lines in a log, or nothing."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_SECONDS = 10.0  # between plain lines


@dataclass(frozen=True, slots=True)
class Status:
    """A moment of a run: `rate` in `unit` per second, `left` in seconds, NaN while not known."""

    step: int
    total: int
    loss: float
    rate: float
    unit: str
    left: float

    @property
    def text(self) -> str:
        """Loss, rate and time left."""
        if math.isnan(self.rate):
            return f"loss {self.loss:.4f}"
        left = f"{int(self.left) // 60}:{int(self.left) % 60:02d} left"
        return f"loss {self.loss:.4f}  {self.rate:,.0f} {self.unit}/s  {left}"


class Display(Protocol):
    """Shows the moments of a run, and lines between them."""

    def show(self, status: Status) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Shows nothing."""

    def show(self, status: Status) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain:
    """A line now and then, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def show(self, status: Status) -> None:
        """A line, if the last one is old or this is the end."""
        now = time.monotonic()
        if now >= self._next or status.step >= status.total:
            self._next = now + _SECONDS
            self.say(f"step {status.step}/{status.total}  {status.text}")

    def say(self, line: str) -> None:
        """A line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left to do."""


class Bar:
    """One line that updates itself."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
        )
        self._console = console
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None

    def show(self, status: Status) -> None:
        """Update the line."""
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=status.total)
        text, done = status.text, status.step
        self._progress.update(self._task, total=status.total, completed=done, description=text)

    def say(self, line: str) -> None:
        """A line above the one that updates itself."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._task is not None:
            self._progress.stop()
            self._task = None


def display(quiet: bool, console: Console | None = None) -> Display:
    """The display that fits standard output."""
    if quiet:
        return Quiet()
    console = console or Console()
    return Bar(console) if console.is_terminal else Plain(console)
