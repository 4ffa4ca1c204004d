"""The settings of a model file, read with errors that name what is missing or of the wrong type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eggpu.importers.tensors import ModelFileError

_LARGEST = 2**31
_MOST_LAYERS = 4096


class Config:
    """Values by name, and the file that they come from. An entry that is null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = dict(values), where

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default."""
        value = self._values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A value that must be there."""
        if self._values.get(key) is None:
            raise ModelFileError(f"{self.where} has no {key!r}")
        return self._values[key]

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.where} has no {key!r}")
        if type(value) is not int or not 0 < value < _LARGEST:
            raise ModelFileError(
                f"{self.where} needs a positive integer {key!r}, got {value!r:.60}"
            )
        return value

    def layers(self, key: str) -> int:
        """A number of layers."""
        count = self.size(key)
        if count > _MOST_LAYERS:
            raise ModelFileError(
                f"{self.where} has {count} layers; at most {_MOST_LAYERS} are read"
            )
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.where} has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(f"{self.where} needs a number {key!r}, got {value!r:.60}")
        if (isinstance(value, int) and abs(value) >= _LARGEST**8) or not math.isfinite(value):
            raise ModelFileError(f"{self.where} needs a finite number {key!r}, got {value!r:.60}")
        return float(value)
