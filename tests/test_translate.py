"""lavapipe's translation of kernels: each once, on several devices, and given up as a process
ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from eggpu.runtime import host

PROGRAM = """
import os, sys
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
