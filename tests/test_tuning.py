"""Timed tilings: the candidates, the child that times them and may crash or hang, what is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import tuning
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule.target import FLOOR
from eggpu.compiler.tracing import trace_call
from eggpu.compiler.variants import group_key, ranked, variants, worth_timing
from eggpu.runtime import Executable

CHILD = """
import os, sys, time
import eggpu.tuning_child as child
real, at = child.measure, int(sys.argv[2])
def measure(plan, device):
    global at
    at += 1
    if at - 1 == 1:
        {what}
    return real(plan, device)
child.measure = measure
child.main(sys.argv[1:])
"""


def program(x, w):
    return eg.tanh(x @ w)


def values(n=96):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 64), np.float32), rng.standard_normal((64, 80), np.float32)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def target():
    return eg.device().target


def groups(target):
    graph = trace_call(program, values()).graph
    return compile_graph(graph, target).selection.groups


def plans(target):
    (group,) = groups(target)
    return variants(group, target, 4)


def test_candidates_differ_and_give_the_same(target):
    found = plans(target)
    assert len(found) >= 2
    assert min(found) == 0
    device, given = eg.device(), values()
    want = np.tanh(given[0].astype(np.float64) @ given[1])
    for plan in found.values():
        order = [int(plan.buffers[n].shape == (64, 80)) for n in plan.inputs]
        (out,) = Executable(plan, device)([device.upload(given[k]) for k in order])
        np.testing.assert_allclose(
            device.download(out, (96, 80), "f32"), want, rtol=1e-4, atol=1e-4
        )


def test_rows_have_a_choice_too(target):
    graph = trace_call(lambda x: eg.sum(x, axis=1), (np.zeros((64, 4096), np.float32),)).graph
    (group,) = compile_graph(graph, target).selection.groups
    assert len(variants(group, target, 2)) == 2


def test_ranks_choose_kernels(target):
    (group,) = groups(target)
    found = plans(target)
    rank = max(found)
    wgsl = ranked({group_key(group): rank})(group, target)[0].text
    assert wgsl != ranked({})(group, target)[0].text


def test_equal_groups_have_equal_keys(target):
    (one,), (other,) = groups(target), groups(target)
    assert group_key(one) == group_key(other)
    assert list(worth_timing((one, other), launch=1.0)) == [group_key(one)]
    assert worth_timing((one,), launch=1e12) == {}


def test_tuning_is_done_once_and_kept(kept, target, monkeypatch):
    asked = []
    real = tuning.time_plans

    def time_plans(plans, *rest):
        asked.append(len(plans))
        return real(plans, *rest)

    monkeypatch.setattr(tuning, "time_plans", time_plans)
    monkeypatch.setattr(
        "eggpu.compiler.variants.worth_timing", lambda g, _: {group_key(g[0]): g[0]}
    )
    x, w = values()
    for _ in range(2):
        run = eg.compile(program, tune=True, cache=False)
        np.testing.assert_allclose(run(x, w).numpy(), np.tanh(x @ w), rtol=1e-4, atol=1e-4)
        assert "tune" in run.seconds
    assert len(asked) == 1
    assert asked[0] >= 2
    (where,) = (kept / "tuned").iterdir()
    assert where == tuning.path(target)
    (rank,) = json.loads(where.read_text())["ranks"].values()
    assert rank in plans(target)
    assert tuning.load(replace(target, driver="another")) == {}


def test_what_is_kept_ends_with_the_compiler_that_found_it(kept, target, monkeypatch):
    tuning.store(target, {"a": 1})
    assert tuning.load(target) == {"a": 1}
    monkeypatch.setattr("eggpu.cache.versions", lambda: ("another",))
    assert tuning.load(target) == {}
    tuning.path(target).write_text("{")
    assert tuning.load(target) == {}


def child(what: str) -> tuple[str, ...]:
    return sys.executable, "-c", CHILD.format(what=what)


def test_a_child_that_crashes_costs_its_plan_only(target):
    three = list(plans(target).values())[:2] * 2
    found = tuning.time_plans(three[:3], target, child("os.abort()"))
    assert [t.ns is None for t in found] == [False, True, False]
    assert "ended with status -6" in found[1].why
    assert all(t.ns > 1000 for t in (found[0], found[2]))


def test_a_child_that_hangs_is_ended(target, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 8.0)
    two = list(plans(target).values())[:2]
    found = tuning.time_plans(two, target, child("time.sleep(60)"))
    assert found[0].ns is not None
    assert found[1].ns is None
    assert "hung" in found[1].why


def test_a_child_that_cannot_start_is_told_and_nothing_is_kept(kept, target, monkeypatch):
    monkeypatch.setattr(
        "eggpu.compiler.variants.worth_timing", lambda g, _: {group_key(g[0]): g[0]}
    )
    started = kept / "started"
    says = f"open({str(started)!r}, 'a').write('x'); raise SystemExit(3)"
    selection = compile_graph(trace_call(program, values()).graph, target).selection
    for count in range(1, tuning.TRIES + 2):  # no tiling is to blame: none is ever given up
        tuner = tuning.Tuning((sys.executable, "-c", says))
        with pytest.warns(UserWarning, match=r"could not be timed, of dot_tanh: .* status 3"):
            assert list(tuner(selection, target).values()) == [0]
        assert started.read_text() == "x" * count  # one child, not one for each tiling
        assert not tuner.complete
        assert tuning.load(target) == {}


def test_a_kernel_that_does_not_compile_has_no_time(target):
    good, other = list(plans(target).values())[:2]
    broken = replace(other, kernels=(replace(other.kernels[0], wgsl="fn main( {"),))
    found = tuning.time_plans([good, broken], target)
    assert found[0].ns is not None
    assert found[1].ns is None
    assert found[1].refused
    assert "does not compile" in found[1].why


def timed_as(monkeypatch, first, others):
    """Let time_plans find these timings."""
    monkeypatch.setattr(
        "eggpu.compiler.variants.worth_timing", lambda g, _: {group_key(g[0]): g[0]}
    )
    found = lambda plans, *_: [first, *[others] * (len(plans) - 1)]  # noqa: E731
    monkeypatch.setattr(tuning, "time_plans", found)


def test_crashing_tilings_are_never_chosen_and_given_up_in_the_end(kept, target, monkeypatch):
    timed_as(monkeypatch, tuning.Timing(100.0), tuning.Timing(None, "crashed"))
    selection = compile_graph(trace_call(program, values()).graph, target).selection
    (key,) = worth_timing(selection.groups, 1.0)
    for tries in range(1, tuning.TRIES + 1):
        tuner = tuning.Tuning()
        with pytest.warns(UserWarning, match="of dot_tanh: crashed; until they are, the fastest"):
            assert tuner(selection, target) == {key: 0}
        last = tries == tuning.TRIES
        assert tuner.complete == last
        assert tuning.load(target) == ({key: 0} if last else {})
        assert tuning.failures(target) == ({} if last else {key: tries})
    tuner = tuning.Tuning()
    assert tuner(selection, target) == {key: 0}
    assert tuner.complete


def test_where_the_predicted_best_fails_the_fastest_of_the_others_is_taken(
    kept, target, monkeypatch
):
    timed_as(monkeypatch, tuning.Timing(None, "hung for 20 s"), tuning.Timing(100.0))
    selection = compile_graph(trace_call(program, values()).graph, target).selection
    with pytest.warns(UserWarning, match="hung for 20 s"):
        (rank,) = tuning.Tuning()(selection, target).values()
    assert rank == min(r for r in plans(target) if r)


def test_a_tiling_that_the_device_refuses_is_none(kept, target, monkeypatch):
    refused = tuning.Timing(None, "does not compile", refused=True)
    timed_as(monkeypatch, tuning.Timing(100.0), refused)
    selection = compile_graph(trace_call(program, values()).graph, target).selection
    tuner = tuning.Tuning()
    assert list(tuner(selection, target).values()) == [0]
    assert tuner.complete
    assert list(tuning.load(target).values()) == [0]


def test_a_plan_is_not_kept_when_the_child_that_timed_it_died(kept, target, monkeypatch):
    """The next process finds no plan on disk, and times it: a child that works has the last
    word."""
    monkeypatch.setattr(
        "eggpu.compiler.variants.worth_timing", lambda g, _: {group_key(g[0]): g[0]}
    )
    x, w = values()
    with monkeypatch.context() as dying:
        tuner = tuning.Tuning(child("os.abort()"))
        dying.setattr("eggpu.session._tuning", lambda options: tuner)
        with pytest.warns(UserWarning, match="ended with status -6"):
            out = eg.compile(program, tune=True)(x, w)
    np.testing.assert_allclose(out.numpy(), np.tanh(x @ w), rtol=1e-4, atol=1e-4)
    assert not list(kept.glob("plans/*"))
    assert tuning.load(target) == {}
    run = eg.compile(program, tune=True)
    np.testing.assert_allclose(run(x, w).numpy(), np.tanh(x @ w), rtol=1e-4, atol=1e-4)
    assert "tune" in run.seconds
    assert len(tuning.load(target)) == 1
    assert len(list(kept.glob("plans/*.plan"))) == 1
    again = eg.compile(program, tune=True)
    again(x, w)
    assert "tune" not in again.seconds


def test_gpu_tilings_are_candidates():
    gpu = replace(FLOOR, name="gpu", max_bindings=16)
    big = trace_call(program, (np.zeros((512, 512), np.float32), np.zeros((512, 512), np.float32)))
    (group,) = compile_graph(big.graph, gpu).selection.groups
    assert len(variants(group, gpu, 4)) >= 3
