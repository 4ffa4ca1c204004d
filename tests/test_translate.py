"""lavapipe's translation of kernels: each once, on several devices, and given up as a process
ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.runtime import host, translate

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import eggpu as eg
from eggpu.runtime import device as devices, translate

translate._LONG = -1.0  # further devices begin at once
rng = np.random.default_rng(0)
sizes = [64, 128, 192, 256, 320]
ws = [rng.standard_normal((k, n)).astype(np.float32) / k**0.5 for k, n in zip(sizes, sizes[1:])]
x = rng.standard_normal((128, 64)).astype(np.float32)

@eg.compile
def f(x, *ws):
    for w in ws:
        x = eg.tanh(x @ w)
        x = x / (1 + (x * x).sum(-1, keepdims=True))
    return x

f.compile(x, *ws)
if sys.argv[1] == "interrupted":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
if sys.argv[1] == "run":
    want = x.astype(np.float64)
    for w in ws:
        want = np.tanh(want @ w)
        want /= 1 + (want * want).sum(-1, keepdims=True)
    assert np.abs(f(x, *ws).numpy() - want).max() < 1e-5
    kernels = {(k.wgsl, tuple(b.access for b in k.bindings)) for k in f.plan.kernels}
    files = [p for p in Path(os.environ["EGGPU_CACHE_DIR"]).rglob("mesa*/**/*") if p.is_file()]
    images = {(i.width, i.rows) for i in f.plan.images}
    print(eg.device().target.kind, len(kernels), len(files), len(images), len(devices._alive),
          sum(len(d.pipelines._pipelines) for d in eg.device().others))
"""


def start(how: str, cache: Path, **settings: str) -> list[str]:
    folders = {"EGGPU_CACHE_DIR": str(cache), "MESA_SHADER_CACHE_DIR": str(cache / "mesa")}
    environment = {**os.environ, **folders, **settings}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_each_kernel_is_translated_once(tmp_path: Path) -> None:
    kind, kernels, files, images, devices, kept = start("run", tmp_path)
    if kind != "cpu" or int(images) == 0:
        return
    assert int(kernels) > 3
    assert int(files) <= int(kernels) + 2  # the probe, and the list of files
    assert int(devices) == min(host.processors(), 4)
    assert int(kept) == 0  # of kernels on the devices that only translate
    assert start("run", tmp_path)[2] == files  # it finds all in the cache


def test_a_cache_that_keeps_nothing(tmp_path: Path) -> None:
    kind, *_, files, _, devices, _ = start("run", tmp_path, MESA_SHADER_CACHE_DISABLE="true")
    if kind == "cpu":
        assert int(files) == 0
        assert int(devices) == 1


def test_a_process_may_end_while_kernels_are_translated(tmp_path: Path) -> None:
    assert start("leave", tmp_path) == []


def test_ctrl_c_while_kernels_are_translated(tmp_path: Path) -> None:
    folders = {"EGGPU_CACHE_DIR": str(tmp_path), "MESA_SHADER_CACHE_DIR": str(tmp_path / "mesa")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "interrupted"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **folders},
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_who_stops_waits_for_no_kernel_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    on = eg.device()
    if on.target.kind != "cpu":
        pytest.skip("GPUs' drivers translate when a pipeline is made")
    begun: list[object] = []
    real = on.pipelines.translate

    def slow(key: object) -> int | None:
        begun.append(key)
        time.sleep(0.1)
        return real(key)

    monkeypatch.setattr(on.pipelines, "translate", slow)
    monkeypatch.setattr(translate, "_devices", lambda: 1)
    rng = np.random.default_rng(0)
    sizes = [64 + 16 * k for k in range(13)]
    ws = [rng.standard_normal((m, n), np.float32) / 8 for m, n in itertools.pairwise(sizes)]
    x = rng.standard_normal((64, 64), np.float32)

    @eg.compile(cache=False)
    def f(x: eg.Array, *ws: eg.Array) -> eg.Array:
        for w in ws:
            x = eg.tanh(x @ w * 0.731)
        return x

    f.compile(x, *ws)
    on.pipelines.stop()
    assert len({k.wgsl for k in f.plan.kernels}) > 8
    assert 1 <= len(begun) <= 3
    want = x.astype(np.float64)
    for w in ws:
        want = np.tanh(want @ w * 0.731)
    np.testing.assert_allclose(f(x, *ws).numpy(), want, atol=1e-4)  # the rest as it first runs
