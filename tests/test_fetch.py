"""Results that the host reads are copied with the call, and trees are copied on the device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.errors import TraceError
from eggpu.runtime import DonatedError


def since(before):
    return eg.device().counters.since(before)


def counted(x):
    """A result to read, and the next state."""
    return x.sum(), x * 2


def test_a_fetched_result_comes_with_the_submission_of_its_call():
    step = eg.compile(counted, donate=(0,), fetch=0, cache=False)
    total, x = step(eg.put(np.ones(33, np.float32)))
    assert float(total.numpy()) == 33
    before = eg.device().counters.copy()
    total, x = step(x)
    assert float(total.numpy()) == 66
    gone = since(before)
    assert gone["submits"] == 1
    assert (gone["downloads"], gone["download_bytes"]) == (1, 4)


def test_fetched_results_are_right_in_any_order_of_reading():
    step = eg.compile(counted, donate=(0,), fetch=(0,), cache=False)
    x, totals = eg.put(np.ones(5, np.float32)), []
    for _ in range(20):
        total, x = step(x)
        totals.append(total)
    for k in (19, 0, 7, 7, 1):
        assert float(totals[k].numpy()) == 5 * 2**k
    del totals[3:9]
    assert float(totals[5].numpy()) == 5 * 2**11
    np.testing.assert_array_equal(x.numpy(), np.full(5, 2.0**20, np.float32))


def test_a_read_does_not_wait_for_later_calls(monkeypatch):
    """Every wait of the read is for the submission of its own call."""
    from eggpu.runtime import native

    step = eg.compile(counted, donate=(0,), fetch=(0,), cache=False)
    first, x = step(eg.put(np.ones(9, np.float32)))
    second, x = step(x)
    waited = []
    poll = native.poll

    def noted(gpu, wait, index=None):
        waited.append(index)
        poll(gpu, wait, index)

    monkeypatch.setattr(native, "poll", noted)
    assert float(first.numpy()) == 9
    assert float(second.numpy()) == 18
    assert len(waited) == 2
    assert None not in waited
    assert waited[0] < waited[1]


def test_several_types_whole_structures_and_results_that_are_arguments():
    def many(x, n):
        return {"half": x.astype("f16"), "n": n}, x > 1, n, x[:0], eg.zeros(3)

    run = eg.compile(many, fetch=(0, 1, 2, 3, 4), cache=False)
    x = np.arange(5, dtype=np.float32)
    for _ in range(2):
        tree, above, n, none, zeros = run(x, np.int32(7))
        assert tree["half"].numpy().tolist() == x.tolist()
        assert (int(tree["n"].numpy()), int(n.numpy())) == (7, 7)
        assert above.numpy().tolist() == (x > 1).tolist()
        assert none.numpy().shape == (0,)
        assert zeros.numpy().tolist() == [0, 0, 0]


def test_results_that_are_not_there_cannot_be_fetched():
    with pytest.raises(TraceError, match="fetch names result 2, but counted has 2"):
        eg.compile(counted, fetch=2, cache=False)(np.ones(3, np.float32))


def test_one_result_read_by_several_threads():
    run = eg.compile(lambda x: x + 1, fetch=0, cache=False)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(20):
            held = run(np.ones(3, np.float32)).storage
            found = [threads.submit(held.numpy) for _ in range(3)]
            assert [f.result(10).tolist() for f in found] == [[2, 2, 2]] * 3


def test_a_call_that_is_fetched_is_not_held_back(monkeypatch):
    """Where short calls share submissions, reading the first of two waits for the first alone."""
    on = eg.device()
    on.synchronize()
    monkeypatch.setattr(on, "batching", True)
    monkeypatch.setattr("eggpu.runtime.device._ENOUGH", 1e9)
    step = eg.compile(counted, donate=(0,), fetch=(0,), cache=False)
    step(eg.put(np.ones(9, np.float32)))  # its kernels are translated, which submits too
    on.synchronize()
    x = eg.put(np.ones(9, np.float32))
    before = on.counters.submits
    first, x = step(x)
    second, x = step(x)
    assert on.counters.submits - before == 2
    ours = [r.storage.buffer.fetched.submission for r in (first, second)]
    assert ours[0] < ours[1]
    assert (float(first.numpy()), float(second.numpy())) == (9, 18)
    assert on.counters.submits - before == 2
    assert x.numpy()[0] == 4


# ---- copies


def test_a_copy_outlives_donation_and_moves_no_bytes_over_the_host():
    tree = {"a": eg.put(np.arange(7, dtype=np.float32)), "b": (eg.put(np.int32(3)), 2.5, None)}
    eg.synchronize()
    before = eg.device().counters.copy()
    twin = eg.copy(tree)
    assert set(since(before)) <= {"submits", "buffers_created"}
    assert since(before).get("submits", 0) <= 1
    grow = eg.compile(lambda a, b: (a + 1, b * 2), donate=(0, 1), cache=False)
    grow(tree["a"], tree["b"][0])
    assert twin["a"].numpy().tolist() == list(range(7))
    assert (int(twin["b"][0].numpy()), twin["b"][1:]) == (3, (2.5, None))
    with pytest.raises(DonatedError):
        eg.copy(tree)


def test_a_copy_of_results_that_share_memory():
    """Values that lie in one buffer are copied out of it."""
    run = eg.compile(lambda *xs: tuple(x * 2 for x in xs), donate=tuple(range(4)), cache=False)
    xs = run(*(eg.put(np.full(5, k, np.float32)) for k in range(4)))
    kept = eg.copy(xs)
    run(*xs)
    assert [int(k.numpy()[0]) for k in kept] == [0, 2, 4, 6]


def test_a_copy_of_host_arrays_is_a_copy():
    x = np.zeros(3, np.float32)
    twin = eg.copy([x, eg.array([1, 2])])
    twin[0][:] = 1
    assert x.tolist() == [0, 0, 0]
    assert twin[1].numpy().tolist() == [1, 2]


def test_what_was_fetched_is_read_after_its_donation_as_often_as_wanted():
    step = eg.compile(lambda x: x + 1, donate="x", fetch=0, cache=False)
    x = step(eg.put(np.zeros(3, np.float32)))
    y = step(x)
    for _ in range(2):
        assert (x.numpy().tolist(), y.numpy().tolist()) == ([1, 1, 1], [2, 2, 2])
    with pytest.raises(DonatedError):
        step(x)
