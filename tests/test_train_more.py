"""Short runs of the diffusion model, the BERT and the adapters of a GPT, and what they leave."""

from __future__ import annotations

import csv
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import cli, data, nn
from eggpu.checkpoints import CheckpointError, read_metadata
from eggpu.train import Run, TrainingError, bert, diffusion, lora, train_bert, train_diffusion
from eggpu.train.bert import BERTConfig, MaskedText
from eggpu.train.diffusion import DiffusionConfig

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "8"]
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def losses(out: Path, column: str) -> list[float]:
    with (out / "loss.csv").open(encoding="utf-8") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


@pytest.mark.timeout(400)
def test_a_short_diffusion_run_learns_and_draws(tmp_path: Path) -> None:
    changes = {"width": 48, "layers": 2, "batch": 64, "denoise": 8, "average": 0.9}
    run = Run(tmp_path, 150, quiet=True, log_every=1)
    result = train_diffusion(changes, run=run)
    first = [loss for _, loss in result.history.train]
    assert np.mean(first[-10:]) < 0.65 * np.mean(first[:3])
    size = struct.unpack(">2I", (tmp_path / "pictures.png").read_bytes()[16:24])
    assert size == (10 * 50 + 2, 8 * 50 + 2)
    assert (tmp_path / "loss.png").is_file()
    assert read_metadata(result.checkpoint).config["diffusion"]["denoise"] == 8


def test_drawing_follows_the_velocities() -> None:
    """With the velocities of one known picture every drawing becomes that picture."""
    target = np.linspace(-1, 1, 64, dtype=np.float32)

    def known(x: Any, t: Any, label: Any) -> Any:  # x = a p + s e, so e = (x - a p) / s
        t = t.reshape((-1, 1))
        a, s = eg.cos(t * (np.pi / 2)), eg.sin(t * (np.pi / 2))
        return a * (x - a * target) / s - s * target

    pixels = diffusion.draw(known, np.arange(3), 5)  # type: ignore[arg-type]
    np.testing.assert_allclose(pixels, np.tile((target + 1) / 2, (3, 1)), atol=1e-4)


def test_the_denoiser_is_told_time_and_digit() -> None:
    model = DiffusionConfig(width=8, layers=1).model()
    model = model.replace(last=nn.Linear(8, 64, key=5))  # it starts near 0
    x = eg.array(np.zeros((1, 64), np.float32))

    def given(t: float, label: int) -> np.ndarray:
        return model(x, eg.array(np.array([t], np.float32)), eg.array(np.array([label]))).numpy()

    assert np.abs(given(0.2, 3) - given(0.7, 3)).max() > 1e-3
    assert np.abs(given(0.2, 3) - given(0.2, 4)).max() > 1e-3


def test_recognizing_digits() -> None:
    digits = data.digits()
    assert diffusion.recognized(digits.valid_x, digits.valid_y, digits) > 0.95
    assert diffusion.recognized(digits.valid_x, (digits.valid_y + 1) % 10, digits) < 0.05


def test_hidden_characters(text: Path) -> None:
    tokens = data.corpus([text]).train
    mask = int(tokens.max()) + 2
    source = MaskedText(tokens, BERTConfig(context=32, hidden=0.25), 64, mask)
    hidden, places, right = source[3]
    assert hidden.shape == (64, 32)
    assert places.shape == right.shape == (64, 8)
    assert (np.diff(places, axis=1) > 0).all()
    shown = np.take_along_axis(hidden, places, 1)
    masked, kept = (shown == mask).mean(), (shown == right).mean()
    assert 0.72 < masked < 0.88
    assert 0.05 < kept < 0.2
    whole = hidden.copy()
    np.put_along_axis(whole, places, right, 1)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, 32)
    assert all((rows == row).all(1).any() for row in whole[:4])
    for one, again in zip(source[3], source[3]):
        np.testing.assert_array_equal(one, again)


@pytest.mark.timeout(400)
def test_a_short_bert_run_learns_and_fills(text: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "layers": 1, "width": 32, "heads": 2, "context": 32, "lr": 0.01, "hidden": 0.2
    }  # fmt: skip
    result = train_bert(changes, [text], run=Run(tmp_path, 80, quiet=True, eval_every=40))
    assert result.valid < result.history.train[0][1] - 0.4
    assert (tmp_path / "best.safetensors").is_file()
    sample = (tmp_path / "sample.txt").read_text().splitlines()
    assert [line.split("|")[0].strip() for line in sample] == ["text", "hidden", "filled"] * 2
    assert "_" not in sample[2]
    config = read_metadata(result.checkpoint).config
    model = result.model
    vocabulary = data.Vocabulary(config["characters"])
    filled = bert.fill(model, vocabulary, "quick _rown fox")
    assert (filled[:6], filled[7:]) == ("quick ", "rown fox")
    assert filled[6] in vocabulary.characters


@pytest.mark.timeout(400)
def test_adapters_of_a_gpt(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = tmp_path / "base", tmp_path / "lora"
    quiet = ["--quiet", "--text", str(text)]
    assert cli.main(["train", "gpt", *TINY, *quiet, "--steps", "30", "--out", str(base)]) == 0
    other = tmp_path / "other.txt"
    other.write_text("pack my box with five dozen jugs of liquor; then pack it all again.\n" * 60)
    flags = ["--base", str(base / "checkpoint.safetensors"), "--text", str(other)]
    flags += ["--rank", "4", "--batch", "8", "--lr", "0.02", "--steps", "60", "--out", str(out)]
    assert cli.main(["train", "lora", *flags]) == 0
    said = capsys.readouterr().out
    assert "LoRA of rank 4" in said
    assert "merged.safetensors" in said
    before = float(said.split("validation loss ")[1].split()[0])
    after = losses(out, "valid")[-1]
    assert after < before - 0.08
    merged = lora.load_base(out / "merged.safetensors")  # as `eggpu train gpt` writes them
    tuned = lora.load_base(base / "checkpoint.safetensors")
    names = [n for n, v in nn.state_dict(merged.model).items()
             if (v.numpy() != nn.state_dict(tuned.model)[n].numpy()).any()]  # fmt: skip
    assert names
    assert all(n.startswith("blocks.") and n.endswith(".weight") for n in names)


def test_a_base_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="does not exist: train a base with `eggpu train gpt`"):
        lora.load_base(tmp_path / "none")
    flags = ["--hidden", "4", "--steps", "1", "--quiet", "--out", str(tmp_path)]
    assert cli.main(["train", "mlp", *flags]) == 0
    with pytest.raises(CheckpointError, match="is no checkpoint of `eggpu train gpt`"):
        lora.load_base(tmp_path / "checkpoint.safetensors")
    assert lora.documentation().is_file()


def test_the_commands_explain_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("diffusion", "steps from noise to a digit"), ("bert", "share of the characters to guess"),
        ("lora", "columns of an adapter"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            cli.main(["train", name, "--help"])
        assert words in " ".join(capsys.readouterr().out.split())
