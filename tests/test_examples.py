"""The examples run, for a few steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
def test_cnn(tmp_path: Path) -> None:
    right = example("cnn").main(30, tmp_path)
    assert right > 0.5  # guessing: 0.1
    assert (tmp_path / "best.safetensors").is_file()


@pytest.mark.timeout(300)
def test_autoencoder(tmp_path: Path) -> None:
    assert example("autoencoder").main(3, tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_lstm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    last = example("lstm").main(40, (str(tmp_path / "text.txt"),))
    assert last < 2.5  # guessing: log(29) = 3.4
    assert "the model writes" in capsys.readouterr().out
