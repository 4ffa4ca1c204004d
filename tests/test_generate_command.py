"""`eggpu generate` on a small folder: its own choice of tokens, what a terminal is shown."""

from __future__ import annotations

import io
import json
import sys

import pytest
from model_files import tiny_folder

from eggpu.cli import main
from eggpu.generate import Generator, Sampling, load_language_model
from eggpu.generate.suggested import described, suggested
from eggpu.importers import ModelFileError

SETTINGS = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1,
    "eos_token_id": [1, 40, 41], "transformers_version": "4.51.0", "max_length": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_folder(tmp_path_factory.mktemp("chosen") / "model", context=600, ends=False)
    (path / "generation_config.json").write_text(json.dumps(SETTINGS))
    return path


def test_the_settings_of_a_folder_are_used(folder):
    language = load_language_model(str(folder))
    want = Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert language.sampling == want
    assert language.tokenizer.end == {1, 40, 41}
    generator = Generator(language.model, context=64, sizes=(1, 16))
    ids = language.prompt("hello")
    texts = [
        "".join(p.text for p in language.stream(generator, ids, chosen, most=24))
        for chosen in (None, want, Sampling())
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, Sampling()),
        ({"do_sample": None, "top_k": None}, Sampling()),
        ({"temperature": 0.7, "top_p": 0.8}, Sampling(temperature=0, top_p=0.8)),
        ({"do_sample": False, "repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.0, "min_p": 0.1}, Sampling(min_p=0.1)),
    ],
    ids=str,
)
def test_drawing_is_only_with_do_sample(values, want):
    assert suggested(values, "here") == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": "yes"}, "here needs true or false as 'do_sample', got 'yes'"),
        ({"do_sample": True, "temperature": -1}, "here: temperature needs a number 0 or more"),
        ({"do_sample": True, "temperature": float("nan")}, "a finite number 'temperature'"),
        ({"top_p": 0}, "here: top_p needs a number more than 0 and at most 1, got 0"),
        ({"top_k": 2.5}, "here needs an integer 'top_k', got 2.5"),
        ({"top_k": True}, "here needs an integer 'top_k', got True"),
        ({"repetition_penalty": [1]}, "here needs a number 'repetition_penalty'"),
        ({"min_p": 10**400}, "here needs a finite number 'min_p', got 1000"),
    ],
    ids=lambda v: str(v)[:50],
)
def test_settings_that_are_no_options_are_told(values, message):
    with pytest.raises(ModelFileError, match=message):
        suggested(values, "here")


def test_a_damaged_file_of_settings_names_itself(folder, tmp_path):
    for text in ("[1]", '{"top_k": "x"}', "{", '{"temperature": 1e999, "do_sample": true}'):
        path = folder / "generation_config.json"
        kept = path.read_text()
        path.write_text(text)
        try:
            with pytest.raises(ModelFileError, match=r"generation_config\.json"):
                load_language_model(str(folder))
        finally:
            path.write_text(kept)


def test_a_choice_in_words():
    assert described(Sampling()) == "likeliest tokens"
    assert described(Sampling(repetition_penalty=1.2)) == "likeliest tokens, repetition penalty 1.2"
    chosen = Sampling(temperature=0.6, top_k=20, min_p=0.05, seed=3)
    assert described(chosen) == "temperature 0.6, top k 20, min p 0.05, seed 3"


def run(folder, *flags):
    return main(["generate", "--model", str(folder), "--max-tokens", "6", *flags, "hello"])


def test_flags_go_before_the_settings(folder, capsys):
    assert run(folder, "--stats", "--top-k", "5", "--context", "64") == 0
    told = capsys.readouterr().err
    chosen = "temperature 0.6, top k 5, top p 0.95, repetition penalty 1.1, seed 0"
    assert f"tokens are chosen by: {chosen}\n" in told
    assert run(folder, "--stats", "--temperature", "0", "--context", "64") == 0
    assert "chosen by: likeliest tokens, repetition penalty 1.1\n" in capsys.readouterr().err
    assert run(folder, "--top-p", "2") == 2
    assert "top_p needs a number more than 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "as in the model's generation_config.json" in text
    assert "(default: of the model, or 0)" in text


def test_explain_tells_the_kernels_of_a_step(folder, capsys):
    assert run(folder, "--explain", "--context", "64") == 0
    text = capsys.readouterr().out
    assert "recognized: softmax" in text
    assert "  chosen     attention_" in text
    assert "us more (" in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_told_how_far_a_prompt_is(folder, capsys, monkeypatch):
    prompt = "a" * 280
    arguments = ["generate", "--model", str(folder), "--raw", "--max-tokens", "3", prompt]
    assert main(arguments) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert main(arguments) == 0
    assert capsys.readouterr().out == quiet.out
    lines = [part for part in shown.getvalue().split("\r\x1b[K")[1:] if part]
    assert lines[0] == f"reading {folder} ..."
    assert lines[1] == "compiling for a prompt of 280 tokens ..."
    assert lines[2] == "prompt: 256 of 280 tokens"
    assert lines[3].startswith("prompt: 280 of 280 tokens, ")
    assert shown.getvalue().endswith("\x1b[K")
    shown.truncate(0)
    assert main(["generate", "--model", "/nowhere", "x"]) == 2
    assert shown.getvalue().split("\x1b[K")[-1].startswith("eggpu: error: no file or folder")
