"""What goes on at the same time: calls and the host, pipelines; and copies to mapped memory."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import eggpu as eg
from eggpu.runtime import native
from eggpu.runtime.pipelines import Pipelines


def test_a_call_returns_while_the_device_computes() -> None:
    on = eg.device()
    n = 1024 if on.target.kind == "cpu" else 8192
    product = eg.compile(lambda a, b: a @ b, cache=False)
    a, b = (eg.put(np.full((n, n), v, np.float32)) for v in (0.5, 0.25))
    product(a, b)
    eg.synchronize()
    assert native.idle(on.gpu)
    before = on.counters.copy()
    out = product(a, b)
    with on.lock:
        on.flush()
    assert not native.idle(on.gpu)
    assert "downloads" not in on.counters.since(before)  # nothing is read until someone asks
    assert float(out.numpy()[-1, -1]) == n / 8
    assert on.counters.since(before)["downloads"] == 1


def test_large_copies_on_cpus_go_to_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on = eg.device()
    if not on.mappable:
        pytest.skip("device memory cannot be mapped")
    calls: list[str] = []
    for owner, name in ((native, "mapped"), (native, "write_buffer"), (on, "take_staging")):
        real = getattr(owner, name)

        def noted(*args, real=real, name=name, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    eg.synchronize()
    on.trim()  # so that memory is fresh
    x = np.random.default_rng(0).standard_normal(100_003, np.float32)
    buffer = on.upload(x)
    assert calls == ["mapped"]
    assert np.array_equal(on.download(buffer, x.shape, "f32"), x)
    assert calls == ["mapped"] * 2


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_pipelines_are_compiled_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    compile_, names = Pipelines._compile, []

    def both(self, wgsl, accesses, unchecked, name):
        names.append(name)
        if len(names) <= 2:
            together.wait(timeout=20)  # raises unless another thread comes as well
        return compile_(self, wgsl, accesses, unchecked, name)

    monkeypatch.setattr(Pipelines, "_compile", both)
    x = np.linspace(0.1, 0.9, 41, dtype=np.float32)
    chain = eg.compile(lambda x: eg.cosh(eg.tan(x * 0.37)), optimize=False, cache=False)
    np.testing.assert_allclose(chain(x).numpy(), np.cosh(np.tan(x * 0.37)), rtol=1e-5)
    assert len(set(names)) >= 3
