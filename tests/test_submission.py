"""Short calls of one submission: counted, in order, and never late for what is read."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import eggpu as eg


@pytest.fixture
def device(monkeypatch):
    on = eg.device()
    on.synchronize()
    monkeypatch.setattr(on, "batching", True)
    monkeypatch.setattr("eggpu.runtime.device._ENOUGH", 1e9)  # kernels are slow here
    yield on
    on.synchronize()


def submits(device, run) -> int:
    before = device.counters.submits
    run()
    return device.counters.submits - before


def test_short_calls_share_submissions(device):
    double = eg.compile(lambda x: x * 2, cache=False)
    x = eg.put(np.full(32, 2.0**-40, np.float32))
    double(x).numpy()

    def run():
        now = x
        for _ in range(40):
            now = double(now)
        np.testing.assert_array_equal(now.numpy(), np.ones(32, np.float32))

    gone = submits(device, run)
    assert 2 <= gone <= 3  # 40 calls by 32, and a read, which may need one of its own
    device.batching = False
    assert submits(device, run) >= 40


def test_long_calls_do_not_wait(device, monkeypatch):
    monkeypatch.setattr("eggpu.runtime.device._ENOUGH", 1.0)
    double = eg.compile(lambda x: x * 2, cache=False)
    x = eg.put(np.ones(32, np.float32))
    double(x)
    assert submits(device, lambda: double(x)) == 1


def test_synchronize_submits_what_waits(device):
    double = eg.compile(lambda x: x * 2, cache=False)
    x = eg.put(np.ones(32, np.float32))
    double(x).numpy()
    assert submits(device, lambda: double(x)) == 0
    assert submits(device, eg.synchronize) == 1
    assert submits(device, eg.synchronize) == 0


@pytest.mark.parametrize("n", [8, 1 << 14])  # a queued write and, on CPUs, a mapped one
def test_an_upload_does_not_overtake_a_call_that_waits(device, n):
    total = eg.compile(lambda x: x.sum(), cache=False)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n).astype(np.float32) for _ in range(30)]
    found = []
    for value in values:
        x = eg.put(value)
        found.append(total(x))
        del x  # its memory is the next upload's
        gc.collect(0)
    got = [float(v) for v in found]
    np.testing.assert_allclose(got, [v.sum() for v in values], rtol=1e-3, atol=1e-3)


def test_donated_state_of_calls_that_wait(device):
    step = eg.compile(lambda s, x: (s * 0.5 + x, s.sum()), donate=(0,), cache=False)
    state = eg.put(np.ones(16, np.float32))
    want, sums, given = np.ones(16, np.float32), [], []
    for k in range(25):
        given.append(want.sum())
        want = want * np.float32(0.5) + np.float32(k)
        state, total = step(state, np.full(16, k, np.float32))
        sums.append(total)
    np.testing.assert_allclose(state.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose([float(s) for s in sums], given, rtol=1e-5)


def test_a_long_run_of_calls_is_submitted_in_growing_parts(device, monkeypatch):
    double = eg.compile(lambda x: x * 2, cache=False)
    x = eg.put(np.full(32, 2.0**-120, np.float32))
    double(x).numpy()
    (ns,) = (k.predicted_ns for k in double.plan.kernels)
    monkeypatch.setattr("eggpu.runtime.device._ENOUGH", 1.5 * ns)  # two calls
    eg.synchronize()

    def run(count):
        now = x
        for _ in range(count):
            now = double(now)
        return now

    assert submits(device, lambda: run(16)) == 8
    later = submits(device, lambda: run(60))  # of an eighth of what was sent before
    assert 8 <= later <= 20
    np.testing.assert_array_equal(run(60).numpy(), np.full(32, 2.0**-60, np.float32))
    assert submits(device, lambda: run(16)) >= 4  # a read starts anew
