"""What goes wrong in user code, told with the op, the types that came and the user's line."""

from __future__ import annotations


class EggpuError(Exception):
    """The base of every error that eggpu raises on purpose."""


class TypeMismatch(EggpuError, TypeError):
    """An op got operands of shapes or dtypes that it cannot take."""


class ShapeMismatch(TypeMismatch, ValueError):
    """An op got operands whose shapes do not fit."""


class TraceError(EggpuError):
    """Traced code did what only concrete values allow, such as branching on an array."""


class IRError(EggpuError):
    """A graph or an IR text is not well formed."""


class CompileError(EggpuError):
    """A program that a target cannot run, or a compiler pass that found no legal way."""
