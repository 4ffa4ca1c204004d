"""The command line: what it prints, what it writes, and how it says what is wrong."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.cli import main, parser
from eggpu.commands import doctor

MODULE = """
import eggpu as eg
from eggpu import nn

weights = nn.Linear(8, 3, key=0)

def loss(x, layer):
    return (layer(x) ** 2).mean()

@eg.compile
def double(x):
    return x * 2

def count(ids):
    return ids.sum()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module that a user wrote."""
    (tmp_path / "their_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    return tmp_path


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails says."""
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert text.startswith("eggpu: error: ")
    assert "Traceback" not in text
    return text.removeprefix("eggpu: error: ").rstrip("\n")


def test_version_and_module() -> None:
    for argv in (["--version"], ["-h"]):
        done = subprocess.run(
            [sys.executable, "-m", "eggpu", *argv], capture_output=True, text=True, check=True
        )
        assert re.search(r"eggpu \d+\.\d+\.\d+" if argv == ["--version"] else "doctor", done.stdout)


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `eggpu rules | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "eggpu", "rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["#", "name", "kind", "backend", "driver", "rates"]
    assert lines[1].startswith("0")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text
    assert re.search(r"^ok    egglog +\d+\.", text, re.MULTILINE)
    assert "softmax(x @ w) is right to" in text
    assert text.endswith("all is well\n")


def test_doctor_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> list[object]:
        raise eg.DeviceError("no adapter was found. Install a driver: apt-get ...")

    monkeypatch.setattr(doctor, "adapters", none)
    monkeypatch.setattr(doctor, "_PACKAGES", ("numpy", "no-such-package"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"FAIL  no-such-package +not installed\n +-> pip install no-such-pack", text)
    assert re.search(r"FAIL  device +none\n +-> no adapter was found\. Install a driver", text)
    assert text.endswith("2 of what eggpu needs is missing\n")


def test_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    text = error_of(["train", "mlp", "--device", "no such device"], capsys)
    assert text.startswith("no device has the index or a name with 'no such device'; there are")


def test_compile_shows_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "their_model:double", "--arg", "f32[8, 64]", "--dump", "out"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan double: 1 kernel")
    assert "every stage is in out" in text
    assert (folder / "out" / "4-plan.txt").read_text().startswith("plan double: 1 kernel")
    assert list((folder / "out" / "kernels").glob("*.wgsl"))


def test_compile_a_saved_plan_with_gradients(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "compile",
        "their_model.py:loss",
        "--arg",
        "f32[4,8]",
        "--arg",
        "their_model.py:weights",
    ]
    assert main([*argv, "--grad", "--save", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith("plan grad_loss: ")
    x = np.ones((4, 8), np.float32)
    w, b = np.full((8, 3), 0.5, np.float32), np.zeros(3, np.float32)
    value, dx, dw, db = eg.load(folder / "plan.json")(x, w, b)
    assert float(value) == pytest.approx(16)
    np.testing.assert_allclose(dx.numpy(), np.full((4, 8), 2 * 4 * 0.5 * 3 / 12), rtol=1e-6)
    assert (dw.shape, db.shape) == ((8, 3), (3,))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere:f"], "no module nowhere here"),
        (["nowhere.py:f"], "file nowhere.py does not exist"),
        (["their_model"], "needs MODULE:NAME, such as model.py:loss, got 'their_model'"),
        (["their_model:f"], "their_model has no f; it has weights, loss, double, count"),
        (["their_model:number"], "their_model:number is a int, not a function"),
        (["their_model:double", "--arg", "f31[8]"], "--arg f31[8]: unknown dtype 'f31'"),
        (["their_model:double", "--arg", "f32[8"], "--arg f32[8: a type looks like f32[8, 64]"),
        (["their_model:count", "--arg", "i32[8]", "--grad"], "--grad needs an argument that holds"),
        (["their_model:double", "--arg", "f32[8]", "--grad"], "a float scalar result, got f32[8]"),
        (["their_model:loss", "--arg", "f32[4,9]", "--arg", "their_model:weights"], "f32[8, 3]"),
        (["their_model:double"], "missing a required argument: 'x'"),
    ],
)
def test_compile_says_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in error_of(["compile", *argv], capsys)


def test_compile_tells_why_a_module_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken_model.py").write_text("import not_installed_at_all")
    for name in ("broken_model", "broken_model.py"):
        text = error_of(["compile", f"{name}:f"], capsys)
        assert f"importing {name} failed: ModuleNotFoundError: No module named 'not_ins" in text


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(eg.EggpuError, match="no module nowhere"):
        main(["compile", "nowhere:f", "--debug"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpt", "--text", "none.txt"], "text none.txt does not exist"),
        (["gpt", "--text", "empty.txt"], "no text in empty.txt"),
        (["gpt", "--text", "short.txt"], "a context of 64 needs at least 65 characters"),
        (["gpt", "--layers", "0"], "layers must be above 0, got 0"),
        (["gpt", "--heads", "3"], "attention needs a width that its heads divide"),
        (["lstm", "--hidden", "0"], "hidden must be above 0, got 0"),
        (["gpt", "--minutes", "-1"], "minutes must be above 0, got -1.0"),
        (["gpt", "--resume", "none.safetensors"], "none.safetensors does not exist"),
        (["gpt", "--resume", "short.txt"], "short.txt is damaged, or no safetensors file"),
        (["mlp", "--seed", "-1"], "seed must be 0 or above, got -1"),
        (["gpt", "--temperature", "-1"], "temperature must be 0 or above, got -1.0"),
        (["bert", "--hidden", "2"], "hidden must be below 1, got 2.0"),
        (["cnn", "--dropout", "1"], "dropout must be below 1, got 1.0"),
        (["diffusion", "--average", "1"], "average must be below 1, got 1.0"),
        (["lora", "--weight-decay", "nan"], "weight-decay must be 0 or above, got nan"),
        (["mlp", "--log-every", "0"], "log-every must be above 0, got 0"),
        (["mlp", "--steps", "1", "--out", "short.txt/runs"], "Not a directory"),
    ],
)
def test_train_says_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("a text of a few words")
    assert message in error_of(["train", *argv], capsys)
    assert not (folder / "runs").exists()


def test_unknown_flags_and_values_are_told_by_the_parser(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for argv in (["train", "gpt", "--layres", "2"], ["train", "mlp", "--steps", "many"], []):
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        assert exit_.value.code == 2
    assert "unrecognized arguments: --layres 2; did you mean --layers?" in capsys.readouterr().err


def commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands below one."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield below
                yield from commands(below)


def test_each_command_tells_of_unknown_flags_with_its_own_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = list(commands(parser()))
    assert {"eggpu doctor", "eggpu train", "eggpu train gpt", "eggpu serve"} <= {
        p.prog for p in found
    }
    for of in found:
        given = ["x" for a in of._actions if not a.option_strings and a.nargs in (None, "+")]
        chosen = [a for a in of._actions if isinstance(a, argparse._SubParsersAction)]
        given = ["gpt", "--steps", "1"] if chosen else given
        with pytest.raises(SystemExit):
            main([*of.prog.split()[1:], *given, "--bogus"])
        says = capsys.readouterr().err
        prog = of.prog + (" gpt" if chosen else "")
        assert says.startswith(f"usage: {prog} [-h]"), says
        assert f"\n{prog}: error: unrecognized arguments: --bogus" in says


def test_flags_before_the_command_have_the_usage_of_eggpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--bogus", "doctor"])
    says = capsys.readouterr().err
    assert says.startswith("usage: eggpu [-h]")
    assert "eggpu: error: unrecognized arguments: --bogus" in says
