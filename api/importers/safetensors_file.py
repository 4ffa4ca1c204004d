"""safetensors: a JSON header of names, types and byte ranges, then the bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeGuard

from eggpu.importers.small_floats import SMALL_FLOATS
from eggpu.importers.tensors import PLAIN, ModelFileError, Tensor, Weights, apart, placed

_MOST_HEADER = 100 << 20  # bytes, the format's own limit
_FORMATS = {name: name for name in (*PLAIN, *SMALL_FLOATS)} | {"F8_E4M3FN": "F8_E4M3"}


def open_safetensors(path: str | Path) -> Weights:
    """The tensors of a file. Raises ModelFileError, which names the tensor, where one is wrong."""
    path = Path(path)
    return Weights(tensors(path), str(path))


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file by name, its bytes checked to lie in the file."""
    if not path.is_file():
        raise ModelFileError(f"{path} is no file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise ModelFileError(
                f"{path} is no safetensors file: a header of {length} bytes in {size} bytes"
            )
        text = file.read(length)
    header = parse(text, path)
    found = {
        name: _tensor(path, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return dict(apart(found, path))


def parse(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object whose keys are there once. Raises ModelFileError for anything else."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ModelFileError(f"{path}: {counts.most_common(1)[0][0]!r:.80} is there twice")
        return made

    try:
        found = json.loads(text, object_pairs_hook=once)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} holds no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} needs a JSON object, got a {type(found).__name__}")
    return found


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> Tensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ModelFileError(f"{where} needs dtype, shape and data_offsets, got {entry!r:.80}")
    format_, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(format_, str) or format_ not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ModelFileError(f"{where} has the dtype {format_!r:.40}; known are {known}")
    if not _integers(shape) or not _integers(span) or len(span) != 2:
        raise ModelFileError(f"{where} needs integers as shape and two data_offsets")
    first, last = span
    if not 0 <= first <= last:
        raise ModelFileError(f"{where} has the data_offsets {first}:{last}")
    return placed(name, shape, _FORMATS[format_], path, start + first, last - first, size)


def _integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int for v in value)
