"""The examples run, for a few steps; those that take long beside the tests of models, since tests
of `eggpu train` cover the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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


def test_mlp() -> None:
    assert example("mlp").main(100) > 0.8  # guessing: 0.1


@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "steps"), [("resnet", 50), ("vit", 200)])
def test_other_classifiers(name: str, steps: int, tmp_path: Path) -> None:
    assert example(name).main(steps, tmp_path) > 0.3
    assert (tmp_path / "best.safetensors").is_file()


@pytest.mark.models
@pytest.mark.timeout(300)
def test_gpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    assert example("gpt").main(16, (str(tmp_path / "text.txt"),), tmp_path) < 2.0
    assert "nats a character" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_autoencoder(tmp_path: Path) -> None:
    assert example("autoencoder").main(3, tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_lstm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    last = example("lstm").main(40, (str(tmp_path / "text.txt"),))
    assert last < 2.5  # guessing: log(29) = 3.4
    assert "the model writes" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_lora(tmp_path: Path) -> None:
    right, before, after = example("lora").main(120, tmp_path)
    assert right > 0.9
    assert before < 0.6
    assert after > before + 0.2


@pytest.mark.models
@pytest.mark.timeout(300)
def test_diffusion(tmp_path: Path) -> None:
    assert example("diffusion").main(2, tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.models
@pytest.mark.timeout(300)
def test_bert(tmp_path: Path) -> None:
    lines = example("bert").main(2, tmp_path)
    assert [len(line) for line in lines] == [42, 24, 9]
    assert "_" not in lines[2]


@pytest.mark.timeout(300)
def test_data_parallel(tmp_path: Path) -> None:
    assert example("data_parallel").main(30, tmp_path) < 1.5  # guessing: 2.3


@pytest.mark.models
@pytest.mark.timeout(300)
def test_data_parallel_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "eggpu.distributed",
        "2",
        str(EXAMPLES / "data_parallel.py"),
        "10",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = example("data_parallel").main(10, tmp_path)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("process"))
    assert [line[:27] for line in lines] == [f"process {k} of 2 (gloo): loss" for k in (0, 1)]
    assert abs(float(lines[0].split()[-1]) - expected) < 1e-4
