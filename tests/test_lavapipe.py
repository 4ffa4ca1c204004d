"""The driver's settings: which vector width is chosen, and results with each width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eggpu.runtime import lavapipe

WIDE = "flags\t\t: fpu avx512f avx512bw avx512cd avx512dq avx512vl\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a lavapipe of a version on a machine with wide vectors, and clears the settings."""
    for name in (lavapipe.WIDTH, lavapipe.SHADERS, "MESA_SHADER_CACHE_DISABLE", "VK_DRIVER_FILES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lavapipe, "_has_wide_vectors", lambda: True)

    def install(version: str) -> None:
        library = tmp_path / "libvulkan_lvp.so"
        library.write_bytes(b"\0llvmpipe\0Mesa " + version.encode() + b" (LLVM 15.0.6)\0")
        manifest = tmp_path / "lvp.json"
        manifest.write_text(json.dumps({"ICD": {"library_path": "./libvulkan_lvp.so"}}))
        monkeypatch.setenv("VK_ICD_FILENAMES", str(manifest))

    return install


def test_wide_vectors_with_shaders_of_their_own(driver, tmp_path: Path) -> None:
    driver("22.3.6")
    lavapipe.prepare()
    assert os.environ[lavapipe.WIDTH] == "512"
    assert os.environ[lavapipe.SHADERS] == str(tmp_path / "cache" / "mesa-512")
    assert (tmp_path / "cache" / "mesa-512").is_dir()
    lavapipe.prepare()  # as a process does that inherits the settings
    assert os.environ[lavapipe.SHADERS] == str(tmp_path / "cache" / "mesa-512")


@pytest.mark.parametrize("version", ["25.0.7", "21.2.6"])
def test_other_versions_are_left_alone(driver, version: str) -> None:
    driver(version)
    lavapipe.prepare()
    assert lavapipe.WIDTH not in os.environ
    assert lavapipe.SHADERS not in os.environ


def test_the_users_choice_counts(driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("22.3.6")
    monkeypatch.setenv(lavapipe.WIDTH, "256")
    monkeypatch.setenv(lavapipe.SHADERS, str(tmp_path / "mine"))
    lavapipe.prepare()
    assert os.environ[lavapipe.WIDTH] == "256"
    assert os.environ[lavapipe.SHADERS] == str(tmp_path / "mine")


def test_no_shaders_of_another_width_in_the_users_folder(
    driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("22.3.6")
    monkeypatch.setenv(lavapipe.SHADERS, str(tmp_path / "mine"))
    lavapipe.prepare()
    assert os.environ[lavapipe.SHADERS] == str(tmp_path / "mine" / "width-512")


def test_without_a_cache_the_drivers_is_off_too(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("22.3.6")
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    lavapipe.prepare()
    assert os.environ["MESA_SHADER_CACHE_DISABLE"] == "true"


@pytest.mark.parametrize(
    ("names", "count", "workers"),
    [
        ("python llvmpipe-0 llvmpipe-1 python python python:disk$0 python", 2, [3, 4]),
        ("llvmpipe-0 llvmpipe-1 python python", 4, []),  # it does not use all processors
        ("llvmpipe-0 llvmpipe-1 python python:disk$0", 2, []),  # another order
        ("llvmpipe-0 llvmpipe-1 python", 2, []),
        ("llvmpipe-0 python", 1, []),
        ("python python", 2, []),
    ],
)
def test_which_threads_run_workgroups(names: str, count: int, workers: list[int]) -> None:
    assert lavapipe._workers(list(enumerate(names.split())), "python", count) == workers


SPREAD = """
import os
from pathlib import Path
import eggpu as eg

kind = eg.device().target.kind
allowed = os.sched_getaffinity(0)
pinned = [os.sched_getaffinity(int(t.name)) for t in Path("/proc/self/task").iterdir()]
print(kind, len(allowed), sum(len(a) == 1 for a in pinned), len(set().union(*pinned)))
"""


@pytest.mark.parametrize("pin", ["", "0"])
def test_each_worker_has_a_processor(pin: str) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads cannot be given processors here")
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, lavapipe.PINNED: pin},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kind, allowed, pinned, used = done.stdout.split()
    if kind == "cpu" and allowed != "1" and lavapipe.driver_versions() == {22}:
        assert pinned == ("0" if pin == "0" else allowed)
        assert used == allowed


PROGRAM = """
import numpy as np
import eggpu as eg
import eggpu.nn

rng = np.random.default_rng(0)
x, w = (rng.standard_normal(s).astype(np.float32) for s in ((70, 36), (36, 50)))
b = rng.standard_normal(50).astype(np.float32)

def f(x, w, b):
    h = eg.tanh(x @ w + b)
    h = (h - h.mean(-1, keepdims=True)) * (1.0 / (1.0 + (h * h).sum(-1, keepdims=True)))
    s = (h @ h.T).reshape(7, 10, 70)
    return (eg.nn.softmax(s, -1) @ h), (h * h).sum(0)

out, columns = (v.numpy() for v in eg.compile(f)(x, w, b))
h = np.tanh(x.astype(np.float64) @ w + b)
h = (h - h.mean(-1, keepdims=True)) / (1 + (h * h).sum(-1, keepdims=True))
s = (h @ h.T).reshape(7, 10, 70)
e = np.exp(s - s.max(-1, keepdims=True))
assert np.abs(out - e / e.sum(-1, keepdims=True) @ h).max() < 1e-5
assert np.abs(columns - (h * h).sum(0)).max() < 1e-5
print(eg.device().target.kind, eg.device().target.subgroup)
"""


@pytest.mark.parametrize(("width", "lanes"), [("256", "8"), ("128", "4")])
def test_narrower_vectors_give_the_same(width: str, lanes: str, tmp_path: Path) -> None:
    environment = {**os.environ, lavapipe.WIDTH: width, "EGGPU_CACHE_DIR": str(tmp_path)}
    environment.pop(lavapipe.SHADERS, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kind, got = done.stdout.split()
    if kind == "cpu":
        assert got == lanes
