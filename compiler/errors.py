"""What goes wrong in user code, told with the op, the types that came and the user's line."""

from __future__ import annotations

import linecache
import sys
from types import FrameType


class EggpuError(Exception):
    """The base of every error that eggpu raises on purpose."""


class _AtUserLine(EggpuError):
    """An error that ends with the line of user code that caused it."""

    def __init__(self, message: str) -> None:
        super().__init__(message + user_line())


class TypeMismatch(_AtUserLine, TypeError):
    """An op got operands of shapes or dtypes that it cannot take."""


class ShapeMismatch(TypeMismatch, ValueError):
    """An op got operands whose shapes do not fit."""


class TraceError(_AtUserLine):
    """Traced code did what only concrete values allow, such as branching on an array."""


class IRError(EggpuError):
    """A graph or an IR text is not well formed."""


class CompileError(EggpuError):
    """A program that a target cannot run, or a compiler pass that found no legal way."""


_PROGRAMS = {"commands", "generate", "models", "train"}  # of eggpu itself, but users of its arrays


def user_frame() -> FrameType | None:
    """The innermost frame outside eggpu's own machinery."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package != "eggpu" or rest.partition(".")[0] in _PROGRAMS:
            return frame
        frame = frame.f_back
    return None


def user_line() -> str:
    """The line of user code that is at work, as errors end with it; "" where there is none."""
    frame = user_frame()
    if frame is None:
        return ""
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()
    return f"\n  at {frame.f_code.co_name}, {path.rsplit('/', 1)[-1]}:{number}" + (
        f": {text}" if text else ""
    )
