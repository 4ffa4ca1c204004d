"""Image models on handwritten digits: short runs of each, and the CNN's accuracy."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import cli, nn
from eggpu.checkpoints import read_metadata
from eggpu.train import Run, TrainingError, train_images
from eggpu.train.images import shifted
from eggpu.train.pictures import grid, write_png


def run(out: Path, steps: int, **changes: Any) -> Run:
    return Run(out, steps, quiet=True, log_every=1, **changes)


@pytest.mark.timeout(400)
def test_the_cnn_tells_98_of_100_unseen_digits_right(tmp_path: Path) -> None:
    train_images("cnn", run=Run(tmp_path, 300, quiet=True))
    last = (tmp_path / "log.csv").read_text().splitlines()[-1].split(",")
    assert last[0] == "300"
    assert float(last[3]) >= 0.98
    assert (tmp_path / "loss.png").is_file()
    assert (tmp_path / "best.safetensors").is_file()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "steps", "changes"),
    [
        ("resnet", 30, {"channels": 4, "blocks": 2, "lr": 0.02}),
        ("vit", 80, {"layers": 1, "width": 16, "heads": 2, "patch": 4, "lr": 0.01}),
    ],
)
def test_short_runs_learn(name: str, steps: int, changes: dict[str, Any], tmp_path: Path) -> None:
    result = train_images(name, changes | {"batch": 32}, run=run(tmp_path, steps))
    losses = [loss for _, loss in result.history.train]
    assert np.mean(losses[-9:]) < np.mean(losses[:5]) - 0.2
    assert read_metadata(result.checkpoint).config[name]["batch"] == 32


@pytest.mark.timeout(400)
def test_the_autoencoder_draws_what_it_makes(tmp_path: Path) -> None:
    changes = {"channels": 4, "batch": 32, "lr": 0.01}
    result = train_images("autoencoder", changes, run=run(tmp_path, 30))
    losses = [loss for _, loss in result.history.train]
    assert losses[-1] < 0.7 * losses[0]
    data = (tmp_path / "pictures.png").read_bytes()
    assert struct.unpack(">2I", data[16:24]) == (16 * 34 + 2, 2 * 34 + 2)


@pytest.mark.timeout(300)
def test_the_command_takes_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--channels", "2", "--batch", "8", "--code", "2", "--steps", "2", "--quiet"]
    assert cli.main(["train", "autoencoder", *flags, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "pictures.png").is_file()
    with pytest.raises(TrainingError, match="there is no model lenet; there are cnn, resnet"):
        train_images("lenet", run=Run(tmp_path, 1))


def test_a_residual_network_moves_all_its_statistics() -> None:
    model = nn.ResNet(1, 5, key=0, width=3, blocks=2)
    x = eg.array(np.random.default_rng(0).standard_normal((4, 1, 8, 8)).astype(np.float32))
    y, after = model.train(x)
    assert y.shape == model(x).shape == (4, 5)
    before, now = nn.state_dict(model), nn.state_dict(after)
    changed = {n for n in before if (before[n].numpy() != now[n].numpy()).any()}
    assert changed == {n for n in before if "running" in n}


def test_a_vision_transformer_reads_every_patch() -> None:
    model = nn.ViT(1, 8, 3, key=0, patch=4, layers=1, width=8, heads=2)
    x = np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)
    whole = model(eg.array(x)).numpy()
    for y, z in ((0, 0), (0, 7), (7, 0), (7, 7)):
        other = x.copy()
        other[0, 0, y, z] += 3
        assert (model(eg.array(other)).numpy() != whole).any()
    with pytest.raises(ValueError, match="a size that its patch divides, got 8 and 3"):
        nn.ViT(1, 8, 3, key=0, patch=3)


def test_shifts_keep_the_picture() -> None:
    x = np.zeros((20, 1, 5, 5), np.float32)
    x[:, 0, 2, 2] = 1
    moved, y = shifted((x, np.arange(20)), np.random.default_rng(0))
    assert moved.shape == x.shape
    assert (moved.sum((1, 2, 3)) == 1).all()
    places = {tuple(np.argwhere(m[0])[0]) for m in moved}
    assert len(places) > 4
    assert all(1 <= a <= 3 and 1 <= b <= 3 for a, b in places)
    np.testing.assert_array_equal(y, np.arange(20))


def test_pictures(tmp_path: Path) -> None:
    picture = grid(np.array([[[0.0, 1.0]], [[2.0, -1.0]], [[0.5, 0.5]]]), 2, zoom=1, gap=1)
    assert picture.tolist() == [
        [96] * 7, [96, 0, 255, 96, 255, 0, 96], [96] * 7, [96, 128, 128, 96, 96, 96, 96], [96] * 7,
    ]  # fmt: skip
    data = write_png(tmp_path / "a.png", picture).read_bytes()
    at = data.index(b"IDAT")
    size = struct.unpack(">I", data[at - 4 : at])[0]
    lines = np.frombuffer(zlib.decompress(data[at + 4 : at + 4 + size]), np.uint8).reshape(5, 8)
    np.testing.assert_array_equal(lines[:, 1:], picture)
