"""What goes wrong with data."""

from __future__ import annotations

from eggpu.compiler.errors import EggpuError


class DataError(EggpuError):
    """Data that is missing, empty, damaged, or too short."""
