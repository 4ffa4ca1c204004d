"""Hugging Face folders: config.json, safetensors in one file or several, tokenizer and settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eggpu.importers.safetensors_file import parse, tensors
from eggpu.importers.tensors import ModelFileError, Weights

_MOST_JSON = 64 << 20  # bytes
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder: its settings and its tensors."""

    path: Path
    config: dict[str, Any]
    weights: Weights

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file beside config.json; {} where there is none."""
        path = self.path / name
        return read_json(path) if path.is_file() else {}


def open_folder(path: str | Path) -> Folder:
    """A folder as `save_pretrained` writes it. Raises ModelFileError where it is incomplete."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ModelFileError(f"{path} is no model: it has no config.json")
    return Folder(path, read_json(path / "config.json"), _weights(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size."""
    size = path.stat().st_size
    if size > _MOST_JSON:
        raise ModelFileError(f"{path} has {size} bytes; at most {_MOST_JSON} are read")
    return parse(path.read_bytes(), path)


def _weights(folder: Path) -> Weights:
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    if (folder / _SINGLE).is_file():
        return Weights(tensors(folder / _SINGLE), str(folder))
    others = ", ".join(sorted(p.name for p in folder.glob("*.bin"))[:4])
    instead = f"; pickled weights ({others}) are not read" if others else ""
    raise ModelFileError(f"{folder} has neither {_SINGLE} nor {_INDEX}{instead}")


def _sharded(folder: Path) -> Weights:
    index = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise ModelFileError(f"{folder / _INDEX} needs a weight_map from tensors to files")
    files = {}
    for name in sorted(set(index.values())):
        # os.path takes names that no file can have: too long, or with a zero byte
        if Path(name).name != name or not os.path.isfile(folder / name):
            raise ModelFileError(
                f"{folder / _INDEX} names the file {name!r:.80}, which is not there"
            )
        files[name] = tensors(folder / name)
    for tensor, name in index.items():
        if tensor not in files[name]:
            raise ModelFileError(f"{folder}: tensor {tensor!r} is not in {name}, as the index says")
    return Weights({tensor: files[name][tensor] for tensor, name in index.items()}, str(folder))
