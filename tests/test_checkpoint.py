"""Checkpoints: what goes in comes out, and what is wrong is told by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eggpu import nn, optim
from eggpu.checkpoints import CheckpointError, Metadata, load_checkpoint, read_metadata
from eggpu.checkpoints import save_checkpoint as save
from eggpu.compiler import pytree
from eggpu.compiler.tracing import array


def training_tree(seed: int) -> dict[str, Any]:
    model = nn.MLP((3, 4, 2), key=seed)
    state = optim.adamw(0.1).init(model)
    return {"model": model, "state": state}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = {"width": 4, "vocabulary": ["a", "\n", "é"]}
    return save(tmp_path / "a" / "c.safetensors", training_tree(0), step=7, config=config)


def test_everything_comes_back(saved: Path) -> None:
    tree, metadata = load_checkpoint(saved, training_tree(1))
    assert metadata == Metadata(7, {"width": 4, "vocabulary": ["a", "\n", "é"]})
    assert read_metadata(saved) == metadata
    expected = pytree.flatten(training_tree(0))[0]
    for found, value in zip(pytree.flatten(tree)[0], expected, strict=True):
        assert found.type == value.type
        np.testing.assert_array_equal(found.numpy(), value.numpy())
    assert "model.layers.0.weight" in load_file(saved)


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    values = {
        "f32": np.array([1.5, np.nan, np.inf], np.float32),
        "f16": np.array([[1.5, -0.0]], np.float16),
        "i32": np.array(-3, np.int32),
        "u32": np.array([2**32 - 1], np.uint32),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = save(tmp_path / "c.safetensors", {k: array(v) for k, v in values.items()})
    loaded, _ = load_checkpoint(path, {k: array(np.zeros_like(v)) for k, v in values.items()})
    for name, value in values.items():
        assert loaded[name].numpy().dtype == value.dtype
        np.testing.assert_array_equal(loaded[name].numpy(), value)


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*c\.safetensors: No space left"):
        save(saved, training_tree(1))
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors does not exist"):
        load_checkpoint(tmp_path / "nothing.safetensors", {})
    with pytest.raises(CheckpointError, match="is a folder, not a checkpoint"):
        load_checkpoint(tmp_path, {})


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: b"garbage" * 1000,
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data + b"more",
    ],
    ids=["empty", "7 bytes", "in the header", "a byte short", "garbage", "huge", "longer"],
)
def test_a_damaged_file(saved: Path, damage: Callable[[bytes], bytes]) -> None:
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(saved, training_tree(0))


def test_arrays_that_do_not_fit_are_named(saved: Path) -> None:
    like = training_tree(0)
    like["model"] = nn.MLP((3, 5, 2), key=0)
    del like["state"]
    like["extra"] = array([1.0])
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(saved, like)
    text = str(error.value)
    assert "missing: extra" in text
    assert "not expected: state.first.layers.0.bias" in text
    assert "model.layers.0.weight needs f32[3, 5], got f32[3, 4]" in text


def test_wrong_dtypes_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c.safetensors", {"step": array(1.0)})
    with pytest.raises(CheckpointError, match=r"step needs i32\[\], got f32\[\]"):
        load_checkpoint(path, {"step": array(1)})


def test_other_safetensors_files_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of eggpu"):
        load_checkpoint(path, {"w": array([0.0, 0.0])})
    metadata = {"format": "eggpu-checkpoint", "version": "99", "step": "0", "config": "{}"}
    save_file({"w": np.zeros(2, np.float32)}, path, metadata)
    with pytest.raises(CheckpointError, match="has version 99, this eggpu reads version 1"):
        load_checkpoint(path, {"w": array([0.0, 0.0])})
    save_file({"w": np.zeros(2, np.float32)}, path, {**metadata, "version": "1", "step": "x"})
    with pytest.raises(CheckpointError, match="wrong metadata"):
        load_checkpoint(path, {"w": array([0.0, 0.0])})


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_others_may_read_a_checkpoint_as_they_may_other_files(saved: Path) -> None:
    other = saved.with_name("other")
    other.write_text("")
    assert saved.stat().st_mode == other.stat().st_mode
