"""Checkpoints: the arrays of a pytree, a step and settings in one safetensors file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from eggpu.compiler.errors import EggpuError
from eggpu.nn.module import StateError, load_state_dict, state_dict

FORMAT = "eggpu-checkpoint"
VERSION = 1


class CheckpointError(EggpuError):
    """A checkpoint cannot be written, read, or does not fit what it is loaded into."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint tells besides its arrays."""

    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)  # what JSON can hold


def save_checkpoint(
    path: str | Path, tree: Any, *, step: int = 0, config: Mapping[str, Any] | None = None
) -> Path:
    """Write the arrays of a pytree, by dotted name, with a step and settings.

    The file appears whole or not at all: it is written beside `path`, then renamed.
    """
    path = Path(path)
    arrays = {k: np.asarray(v.numpy(), order="C") for k, v in state_dict(tree).items()}
    text = json.dumps(dict(config or {}), sort_keys=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "step": str(step), "config": text}
    try:
        _write(path, save(arrays, metadata))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_metadata(path: str | Path) -> Metadata:
    """The step and settings of a checkpoint, without its arrays."""
    with _opened(Path(path)) as file:
        return _metadata(Path(path), file)


def load_checkpoint(path: str | Path, like: Any) -> tuple[Any, Metadata]:
    """A pytree as `like`, with the arrays of a checkpoint, and the checkpoint's step and settings.

    Raises CheckpointError for a file that is missing or damaged, and by name for arrays that are
    missing, not expected, or of another shape or dtype than in `like`.
    """
    path = Path(path)
    with _opened(path) as file:
        metadata = _metadata(path, file)
        try:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        return load_state_dict(like, arrays), metadata
    except StateError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp lets only the owner read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut; not every system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _opened(path: Path) -> Any:
    if not path.is_file():
        what = "is a folder, not a checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}")
    try:
        return safe_open(path, framework="np")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors file: {error}") from error


def _metadata(path: Path, file: Any) -> Metadata:
    found = file.metadata() or {}
    if found.get("format") != FORMAT:
        hint = "to load arrays alone use safetensors.numpy.load_file and nn.load_state_dict"
        raise CheckpointError(f"{path} is not a checkpoint of eggpu; {hint}")
    if found.get("version") != str(VERSION):
        came = found.get("version")
        raise CheckpointError(f"{path} has version {came}, this eggpu reads version {VERSION}")
    try:
        return Metadata(int(found["step"]), json.loads(found["config"]))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: wrong metadata ({error})") from error
