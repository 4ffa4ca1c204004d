"""The runtime on hand-written plans: values, memory, donation, counts of work, and errors."""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.schedule.plan import Binding, Constant
from eggpu.runtime import (
    Device,
    DeviceError,
    DonatedError,
    Executable,
    KernelError,
    open_device,
    synchronize,
)
from eggpu.runtime.buffers import bucket

sys.path.insert(0, str(Path(__file__).parent))
from runtime_plans import buffer, chain, double, increment, kernel, plan, values


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


# values


@pytest.mark.parametrize("n", [1, 3, 64, 65, 1000, 100_003])
def test_one_kernel(device, n):
    x = values(n)
    (out,) = Executable(double(n), device)([device.upload(x)])
    np.testing.assert_array_equal(device.download(out, (n,), "f32"), 2 * x)


@pytest.mark.parametrize("length", [2, 3, 10])
def test_chain_through_the_arena(device, length):
    x = values(1000)
    exe = Executable(chain(1000, length), device)
    for _ in range(2):
        (out,) = exe([device.upload(x)])
        got = device.download(out, (1000,), "f32")
        np.testing.assert_allclose(got, 2 * x + (length - 1), rtol=1e-6, atol=1e-6)


def test_a_call_of_more_dispatches_than_one_command_buffer_holds(device):
    exe = Executable(chain(8, 4500), device)
    before = device.counters.copy()
    (out,) = exe([device.upload(np.zeros(8, np.float32))])
    assert device.counters.since(before)["dispatches"] == 4500
    assert device.counters.since(before)["submits"] == 2
    np.testing.assert_array_equal(device.download(out, (8,), "f32"), np.full(8, 4499.0))


def test_constants(device):
    n, c = 300, values(300, seed=1)
    buffers = [
        buffer("x", (n,), ("input", 0)),
        buffer("c", (n,), ("constant", 0)),
        buffer("out", (n,), ("output", 0)),
    ]
    made = kernel("v0 * v1", [(0, "read"), (1, "read")], (2, "read_write"), n)
    constants = [Constant((n,), "f32", c.tobytes())]
    exe = Executable(plan(buffers, [made], [0], [2], constants=constants), device)
    x = values(n)
    (out,) = exe([device.upload(x)])
    np.testing.assert_array_equal(device.download(out, (n,), "f32"), x * c)


def test_results_that_the_plan_itself_keeps_are_copies(device):
    """A caller may donate a result; that must not write into a constant or the scratch block."""
    c = values(1000)
    buffers = [
        buffer("c", (1000,), ("constant", 0)),
        buffer("x", (1000,), ("input", 0)),
        buffer("t", (1000,), ("arena", 0, 0)),
    ]
    made = kernel("v0 * 2.0", [(1, "read")], (2, "read_write"), 1000)
    constants = [Constant((1000,), "f32", c.tobytes())]
    exe = Executable(plan(buffers, [made], [0], [0, 2], constants=constants, arena=[4096]), device)
    exe_increment, x = Executable(increment(), device), device.upload(c)
    for _ in range(2):
        kept, doubled = exe([x])
        np.testing.assert_array_equal(device.download(kept, (1000,), "f32"), c)
        np.testing.assert_array_equal(device.download(doubled, (1000,), "f32"), 2 * c)
        exe_increment([kept, doubled])


def test_kernels_without_workgroups_are_skipped(device):
    exe = Executable(double(8, grid=(0, 1, 1)), device)
    before = device.counters.copy()
    exe([device.upload(values(8))])
    assert not {"submits", "dispatches"} & set(device.counters.since(before))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_arrays_without_elements(device, shape):
    exe = Executable(double(0, grid=(0, 1, 1)), device)
    empty = device.upload(np.zeros(shape, np.float32))
    assert empty.nbytes == 4
    (out,) = exe([empty])
    assert device.download(out, shape, "f32").shape == shape
    assert device.download(device.upload(np.zeros(shape, bool)), shape, "bool").dtype == bool


# copies between host and device


def test_an_upload_does_not_disturb_a_call_that_still_runs(device):
    """The memory of a dropped argument is handed out again while kernels may still read it."""
    n = 1 << 18
    exe = Executable(double(n), device)
    for start in range(0, 200, 10):
        results = [
            exe([device.upload(np.full(n, float(i), np.float32))])[0]
            for i in range(start, start + 10)
        ]
        for i, out in enumerate(results, start):
            assert (device.download(out, (n,), "f32") == 2 * i).all()


def test_small_queued_writes_land_in_order(device):
    for n in (8, 2000):
        exe = Executable(double(n), device)
        for i in range(20):
            first = device.upload(np.full(n, 1000.0 + i, np.float32))
            del first
            (out,) = exe([device.upload(np.full(n, float(i), np.float32))])
            assert (device.download(out, (n,), "f32") == 2 * i).all()


# donation and results


def test_a_donated_argument_is_written_over(device):
    exe = Executable(increment(), device)
    x, y = values(1000), values(1000, seed=1)
    state, step = device.upload(x), device.upload(y)
    memory = state.storage
    for _ in range(3):
        old = state
        (state,) = exe([state, step])
        assert state.storage is memory
        assert old.donated
    np.testing.assert_allclose(device.download(state, (1000,), "f32"), x + y + y + y, rtol=1e-6)


def test_a_donated_argument_is_gone(device):
    exe = Executable(increment(), device)
    state, step = device.upload(values(1000)), device.upload(values(1000))
    exe([state, step])
    message = "argument 0 of plan was donated to it and holds no value now; use the value"
    with pytest.raises(DonatedError, match=message):
        exe([state, step])
    with pytest.raises(DonatedError, match=message):
        device.download(state, (1000,), "f32")
    assert "donated" in repr(state)


def test_a_donated_argument_that_is_not_written_is_freed(device):
    base = double()
    exe = Executable(replace(base, donated=(0,)), device)
    x = device.upload(values(1000))
    serial = x.storage.serial
    exe([x])
    assert x.donated
    device.pool.acquire(1)  # sorts in what was freed
    assert serial in [free for free, _ in device.pool._buckets[bucket(4000)]]


def test_results_that_are_arguments_come_back_as_they_are(device):
    buffers = [buffer("x", (1000,), ("input", 0)), buffer("out", (1000,), ("output", 0))]
    made = kernel("v0 * 2.0", [(0, "read")], (1, "read_write"), 1000)
    for donated in ((), (0,)):
        exe = Executable(plan(buffers, [made], [0], [0, 1, 1], donated=donated), device)
        x = device.upload(values(1000))
        out = exe([x])
        assert out[0] is x
        assert not x.donated
        assert out[1] is out[2]
        np.testing.assert_array_equal(device.download(x, (1000,), "f32"), values(1000))


def test_a_written_argument_cannot_be_another_one(device):
    exe = Executable(increment(), device)
    x = device.upload(values(1000))
    with pytest.raises(ValueError, match=r"argument 0 of plan is written over.*argument 1"):
        exe([x, x])
    assert not x.donated


def test_one_buffer_may_be_read_twice(device):
    buffers = [buffer(n, (8,), ("input", i)) for i, n in enumerate("xy")]
    buffers.append(buffer("out", (8,), ("output", 0)))
    made = kernel("v0 + v1", [(0, "read"), (1, "read")], (2, "read_write"), 8)
    x = device.upload(values(8))
    (out,) = Executable(plan(buffers, [made], [0, 1], [2]), device)([x, x])
    np.testing.assert_array_equal(device.download(out, (8,), "f32"), 2 * values(8))


def test_a_plan_may_only_write_over_what_is_donated(device):
    with pytest.raises(ValueError, match=r"writes over arguments \[0\], which are not donated"):
        Executable(replace(increment(), donated=()), device)


def test_arguments_must_fit(device):
    exe = Executable(double(), device)
    with pytest.raises(ValueError, match="plan needs 1 buffers, got 2"):
        exe([device.upload(values(1000))] * 2)
    with pytest.raises(
        ValueError, match=r"argument 0 \(x\) of plan needs 4000 bytes for f32\[1000\], got 8"
    ):
        exe([device.upload(values(2))])
    other = Device(device.adapter, device.gpu)
    with pytest.raises(DeviceError, match="needs a buffer of"):
        exe([other.upload(values(1000))])


# counts


def test_a_training_loop_settles(device):
    """One submission a step; no new memory, bind groups or pipelines after the first steps."""
    n = 500
    buffers = [
        buffer("state", (n,), ("input", 0)),
        buffer("batch", (n,), ("input", 1)),
        buffer("t", (n,), ("arena", 0, 0)),
        buffer("loss", (n,), ("output", 1)),
    ]
    rw = "read_write"
    kernels = [
        kernel("v0 * v1", [(0, "read"), (1, "read")], (2, rw), n),
        kernel("v0 + v1", [(0, rw), (2, rw)], (0, rw), n),
        kernel("v0 - 1.0", [(2, rw)], (3, rw), n),
    ]
    exe = Executable(plan(buffers, kernels, [0, 1], [0, 3], donated=[0], arena=[2048]), device)
    state = device.upload(values(n))

    def run(steps):
        nonlocal state
        for i in range(steps):
            batch = device.upload(values(n, seed=i))
            state, loss = exe([state, batch])
        return loss

    run(5)
    synchronize(device)
    before = device.counters.copy()
    run(20)
    gained = device.counters.since(before)
    assert gained["submits"] == 20
    assert gained["dispatches"] == 60
    assert gained["upload_bytes"] == 20 * 4 * n
    assert set(gained) == {"submits", "dispatches", "uploads", "upload_bytes"}


def test_pipelines_are_compiled_once_a_device(device):
    Executable(double(777), device)
    before = device.counters.copy()
    Executable(double(777), device)
    Executable(replace(double(777), name="other"), device)
    assert "pipelines_compiled" not in device.counters.since(before)
    Executable(chain(321, 40), device)  # 40 kernels, 2 texts
    gained = device.counters.since(before)
    assert gained["pipelines_compiled"] == 2
    if device.target.kind == "cpu":  # reads a buffer and writes another
        assert gained["pipelines_translated"] == 2


def test_dropped_memory_leaves_the_bind_groups(device):
    exe = Executable(double(3000), device)
    exe([device.upload(values(3000))])
    gc.collect()
    device.trim()
    assert exe._groups == {}
    assert exe._recordings == {}
    x = values(3000)
    (out,) = exe([device.upload(x)])
    np.testing.assert_array_equal(device.download(out, (3000,), "f32"), 2 * x)


# limits and errors


def test_wgsl_errors_show_the_kernel_and_the_lines(device):
    broken = double(77)
    wgsl = broken.kernels[0].wgsl.replace("v0 * 2.0", "v0 * nothing")
    broken = replace(broken, kernels=(replace(broken.kernels[0], wgsl=wgsl),))
    with pytest.raises(KernelError) as error:
        Executable(broken, device)
    text = str(error.value)
    assert text.startswith("kernel test (test.wgsl) does not compile\n")
    assert "no definition in scope for identifier: `nothing`" in text
    assert ">    8 |   b1[i] = v0 * nothing;" in text
    assert "     7 |   let v0 = b0[i];" in text
    (out,) = Executable(double(77), device)([device.upload(values(77))])
    assert device.download(out, (77,), "f32")[0] == 2 * values(77)[0]


def test_bindings_that_do_not_fit_the_wgsl_are_an_error(device):
    wrong = double(78)
    bindings = (Binding(0, "read_write"), Binding(1, "read_write"))
    made = replace(wrong.kernels[0], bindings=bindings)
    with pytest.raises(KernelError, match="doesn't match the shader"):
        Executable(replace(wrong, kernels=(made,), donated=(0,)), device)


def changed(**changes):
    base = double(512)
    return replace(base, kernels=(replace(base.kernels[0], **changes),))


def test_limits_are_checked_before_the_driver_sees_a_kernel(device):
    target = device.target
    before = device.counters.copy()
    cases = [
        (changed(workgroup=(target.max_invocations + 1, 1, 1)), "workgroup of 1 to"),
        (changed(workgroup=(0, 1, 1)), "workgroup of 1 to"),
        (changed(grid=(1, target.max_groups + 1, 1)), "workgroups in each dimension"),
        (changed(bindings=()), "storage buffers"),
        (changed(bindings=(Binding(0, "read"),) * (target.max_bindings + 1)), "storage buffers"),
        (
            changed(wgsl=f"var<workgroup> s: array<f32, {target.max_workgroup_bytes}>;"),
            "bytes of workgroup memory",
        ),
        (changed(wgsl="fn main() { let y = f(&b0[1]); }"), "whole variables"),
        (changed(wgsl="(" * 600 + ")" * 600), "at most 500 nested brackets"),
    ]
    for refused, message in cases:
        with pytest.raises(KernelError, match=message):
            Executable(refused, device)
    assert device.counters.since(before) == {}


def test_placement_is_checked(device):
    base = chain(64)
    off = replace(base.buffers[1], place=("arena", 0, 4))
    with pytest.raises(KernelError, match=r"multiples of \d+ on .*got 4 of t0"):
        Executable(replace(base, buffers=(base.buffers[0], off, *base.buffers[2:])), device)
    with pytest.raises(KernelError, match="a range inside block 0 of 64 bytes"):
        Executable(replace(base, arena=(64,)), device)
    odd = replace(base.buffers[0], nbytes=6)
    with pytest.raises(ValueError, match="multiple of 4 bytes, at least 4, got 6"):
        Executable(replace(base, buffers=(odd, *base.buffers[1:])), device)


def test_features_are_checked(device):
    with pytest.raises(DeviceError, match="plan plan needs the device features ray-query"):
        Executable(replace(double(), features=("ray-query",)), device)


def test_profile_measures_and_changes_nothing(device):
    n = 1 << 18
    state, step = device.upload(values(n)), device.upload(np.ones(n, np.float32))
    exe = Executable(increment(n), device)
    times = exe.profile([state, step])
    assert len(times) == 1
    assert 1_000 < times[0] < 1_000_000_000
    np.testing.assert_array_equal(device.download(state, (n,), "f32"), values(n))
    assert not state.donated
    long = chain(64, 6)
    skipped = replace(long.kernels[3], grid=(0, 1, 1))
    long = replace(long, kernels=(*long.kernels[:3], skipped, *long.kernels[4:]))
    times = Executable(long, device).profile([device.upload(values(64))])
    assert len(times) == 6
    assert times[3] == 0
    assert min(times[:3] + times[4:]) > 0


def test_short_kernels_are_timed_several_times_on_gpus(device, monkeypatch):
    from eggpu.runtime import timing

    monkeypatch.setattr(device, "target", replace(device.target, kind="gpu"))
    counts = []
    real = timing._one_pass
    monkeypatch.setattr(
        timing, "_one_pass", lambda d, steps, times: counts.append(times) or real(d, steps, times)
    )
    exe = Executable(chain(64, 3), device)
    times = exe.profile([device.upload(values(64))])
    assert counts[0] == [1, 1, 1]
    assert max(counts[-1]) > 1
    assert all(100 < t < 1_000_000_000 for t in times)
    n = 256
    state, step = device.upload(values(n)), device.upload(np.ones(n, np.float32))
    counts.clear()
    Executable(increment(n), device).profile([state, step])  # in place: not the same when repeated
    assert set(map(tuple, counts)) == {(1,)}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_total_time_of_a_call(device, monkeypatch, kind):
    monkeypatch.setattr(device, "target", replace(device.target, kind=kind))
    n = 1 << 16
    state, step = device.upload(values(n)), device.upload(np.ones(n, np.float32))
    assert 1_000 < Executable(increment(n), device).total([state, step]) < 1_000_000_000
    np.testing.assert_array_equal(device.download(state, (n,), "f32"), values(n))


def test_profile_of_one_pass_a_kernel(device):
    from eggpu.runtime import timing

    exe = Executable(chain(1 << 16, 3), device)
    places = exe._places([device.upload(values(1 << 16))])
    times = timing._pass_each(device, exe._recording(places).steps)
    assert len(times) == 3
    assert all(1_000 < t < 1_000_000_000 for t in times)


@pytest.mark.parametrize(("kind", "n"), [("cpu", 1233), ("gpu", 1234)])
def test_trusted_modules_compile_and_compute(device, monkeypatch, kind, n):
    """Without bounds checks on GPUs only; here the target is made to look like one."""
    monkeypatch.setattr(device, "target", replace(device.target, kind=kind))
    x = values(n)
    trusted = double(n, trusted=True)
    (out,) = Executable(trusted, device)([device.upload(x)])
    np.testing.assert_array_equal(device.download(out, (n,), "f32"), 2 * x)
    broken = replace(trusted.kernels[0], wgsl="fn main( {")
    with pytest.raises(KernelError, match=r"kernel test .* does not compile"):
        Executable(replace(trusted, kernels=(broken,)), device)
    monkeypatch.setattr(device, "debug", True)
    before = device.counters.copy()
    Executable(trusted, device)
    assert device.counters.since(before)["pipelines_compiled"] == 1


# devices and threads


def test_several_threads_share_a_device(device):
    exe = Executable(chain(4096, 5), device)
    failures: list[BaseException] = []

    def work(seed):
        try:
            x = values(4096, seed)
            for _ in range(30):
                (out,) = exe([device.upload(x)])
                np.testing.assert_allclose(
                    device.download(out, (4096,), "f32"), 2 * x + 4, rtol=1e-6, atol=1e-6
                )
            Executable(double(5000 + seed), device)([device.upload(values(5000 + seed))])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
