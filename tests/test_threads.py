"""Threads that trace, compile and run at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.egraph.language import families
from eggpu.compiler.ir import make, recording
from eggpu.compiler.ops import input_node
from eggpu.compiler.ops.elementwise import ELEMENTWISE
from eggpu.compiler.types import DTYPES, Type
from eggpu.data import Prefetch
from eggpu.runtime import Device

AT_ONCE = """
import sys, threading
import numpy as np
import eggpu as eg

sys.setswitchinterval(1e-5)
functions = (
    lambda x: (eg.exp(x) + x).sum(),
    lambda x: eg.nn.softmax(x @ x.T) @ x,
    lambda x: (x * x).mean(1),
    lambda x: eg.where(x > 0, x, x * x).max(0),
    lambda x: eg.grad(lambda x: eg.sum(eg.tanh(x @ x)))(x),
    lambda x: eg.scan(lambda c, y: (c + y, c), x[0], x)[1],
)
x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
start, found = threading.Barrier(len(functions)), {}

def work(k):
    start.wait()
    found[k] = np.asarray(eg.compile(functions[k])(x))

threads = [threading.Thread(target=work, args=(k,)) for k in range(len(functions))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(found) == list(range(len(functions)))
for k, function in enumerate(functions):
    np.testing.assert_array_equal(found[k], np.asarray(eg.compile(function)(x)))
"""


def test_threads_of_a_new_process_compile_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_op_families_made_twice_are_the_same() -> None:
    assert families.__wrapped__() == families()


def test_nodes_are_one_object_for_all_threads() -> None:
    """An infer that lets the other thread make the same node first."""
    first, second = threading.Event(), threading.Event()
    made: list[object] = []

    class Slow:
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return type(other) is Slow

        def infer(self) -> Type:
            if threading.current_thread() is thread:
                first.set()
                assert second.wait(60)
            return Type((), DTYPES["f32"])

    thread = threading.Thread(target=lambda: made.append(make(Slow())))  # type: ignore[arg-type]
    thread.start()
    assert first.wait(60)
    made.append(make(Slow()))  # type: ignore[arg-type]
    second.set()
    thread.join()
    assert made[0] is made[1]


def test_lines_of_nodes_are_noted_by_the_thread_that_traces() -> None:
    here: dict = {}
    there: dict = {}

    def elsewhere() -> None:
        with recording(there):
            make(ELEMENTWISE["sin"], input_node(0, "x", Type((3,), DTYPES["f32"])))

    with recording(here):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        make(ELEMENTWISE["cos"], input_node(0, "x", Type((3,), DTYPES["f32"])))
    assert [node.op.name for node in here] == ["input", "cos"]
    assert [node.op.name for node in there] == ["input", "sin"]


def test_a_block_with_another_device_is_its_threads_own(second: Device) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with eg.using(second):
            inside.set()
            assert leave.wait(60)

    usual = eg.device()
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    try:
        assert eg.device() is usual
        with eg.using(second):
            assert eg.device() is second
            leave.set()
            thread.join()
            assert eg.device() is second
        assert eg.device() is usual
    finally:
        leave.set()


def test_batches_are_made_on_the_device_of_the_block(second: Device) -> None:
    class Devices:
        def __getitem__(self, i: int) -> tuple[Device]:
            return (eg.device(),)

    with eg.using(second), Prefetch(Devices(), 0, 2) as ahead:  # type: ignore[arg-type]
        assert [one[0] for one in ahead] == [second, second]


def test_a_device_chosen_in_a_block_is_left_with_it(second: Device) -> None:
    usual = eg.device()
    with eg.using(second):
        assert eg.device(usual.adapter.index) is usual
        assert eg.device() is usual
    assert eg.device() is usual
    with eg.using(second):
        eg.synchronize()
    np.testing.assert_array_equal(eg.compile(lambda x: x + 1)(np.zeros(3, np.float32)), 1)
