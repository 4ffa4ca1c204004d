"""The examples run, for a few steps; those that take long beside the tests of models, since tests
of `eggpu train` cover the same."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eggpu import script

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    """An example started as a reader would start it."""
    return subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    with pytest.raises(SystemExit) as exit_:
        script.status(module.main, ["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert (module.__doc__ or "").splitlines()[0] in shown
    parameters = inspect.signature(module.main).parameters
    assert f"training steps (default: {parameters['steps'].default})" in " ".join(shown.split())
    assert ("--out DIR" in shown) == ("out" in parameters)
    assert ("[PATH ...]" in shown) == ("files" in parameters)
    assert (EXAMPLES / f"{name}.py").read_text().endswith("    script.run(main)\n")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", ["0", "-3", "many", "1.5"])
def test_steps_are_a_number(name: str, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        script.status(example(name).main, ["--", steps])
    assert exit_.value.code == 2
    needed = f"error: argument STEPS: needs a number of 1 or more, got '{steps}'"
    assert needed in capsys.readouterr().err


def test_help_as_it_is_typed(tmp_path: Path) -> None:
    done = run(EXAMPLES / "data_parallel.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: data_parallel.py [-h] [--out DIR] [STEPS]")
    assert "mpirun -n 2 python examples/data_parallel.py  " in done.stdout


def test_errors_take_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, file = tmp_path / "short.txt", str(tmp_path / "none.txt")
    short.write_text("a few words")
    for name, argv, says in (
        ("gpt", ["1", file], f"text {file} does not exist"),
        ("gpt", ["1", str(short)], "needs 65 tokens, got 2"),
        ("lstm", ["1", str(short)], "needs 544 characters to train on, got 9"),
        ("cnn", ["1", "--out", str(short / "runs")], "Not a directory"),
    ):
        assert script.status(example(name).main, argv) == 2
        err = capsys.readouterr().err
        assert "error: " in err
        assert says in err
        assert "Traceback" not in err


def test_ctrl_c_and_a_reader_that_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(steps: int = 3) -> None:
        raise KeyboardInterrupt

    def mistaken(steps: int = 3) -> None:
        raise ValueError("not what a user can mend")

    assert script.status(interrupted, []) == 130
    assert capsys.readouterr().err.endswith(": interrupted\n")
    with pytest.raises(ValueError, match="not what a user can mend"):
        script.status(mistaken, [])


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
