"""`eggpu inspect`, also by its name `explain`."""

from __future__ import annotations

import json

from eggpu.cli import main

MODULE = """
from eggpu import nn

def attend(q, k, v):
    p = nn.softmax(q @ k.swapaxes(-1, -2), -1)
    return p @ v, p
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attending.py").write_text(MODULE)
    argv = ["inspect", "attending.py:attend", *["--arg", "f32[2,24,8]"] * 3]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "recognized: softmax x1, attention 1/1" in text
    assert main([*argv, "--misses"]) == 0
    assert capsys.readouterr().out.startswith("attention not formed at attending.py:6: ")
    assert main([*argv, "--kernel", "0"]) == 0
    assert capsys.readouterr().out.startswith("kernel 0 ")
    assert main([*argv, "--line", "attending.py:5"]) == 0
    assert "attending.py:5" in capsys.readouterr().out
    assert main([*argv, "--kernel", "nothing"]) == 2
    assert main([*argv, "--line", "attending.py:99"]) == 2
    assert "no kernel computes attending.py:99" in capsys.readouterr().err


COMPILED = """
import eggpu as eg
from eggpu import nn

@eg.compile(without=("attention",))
def attend(q, k, v):
    return nn.softmax(q @ k.swapaxes(-1, -2), -1) @ v
"""


def test_the_command_by_its_other_name_tells_results_and_takes_options(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_attending.py").write_text(MODULE)
    (tmp_path / "module_compiled.py").write_text(COMPILED)
    types = ["--arg", "f32[2,24,8]"] * 3
    argv = ["explain", "module_attending.py:attend", *types]
    assert main([*argv, "--result", "0"]) == 0
    assert capsys.readouterr().out.startswith("result 0 f32[2, 24, 8]: kernel ")
    assert main([*argv, "--result", "9"]) == 2
    assert "no result '9'; there are 0, 1" in capsys.readouterr().err
    assert main([*argv, "--json", "--force", "attention"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert any(k["name"] == "attention" for k in data["kernels"])
    assert main([*argv, "--without", "softmax"]) == 0
    assert "recognized: softmax" not in capsys.readouterr().out
    assert main([*argv, "--without", "nothing"]) == 2
    assert "without names 'nothing', which is no rule" in capsys.readouterr().err
    assert main(["inspect", "module_compiled.py:attend", *types, "--misses"]) == 0
    assert "the rule attention is left out" in capsys.readouterr().out  # as its module says
