"""bench/choices.py: what it forces differs from what was chosen, computes the same, has a price."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.egraph.force import forced
from eggpu.compiler.egraph.snapshot import from_nodes
from eggpu.compiler.library import nn as F
from eggpu.compiler.reference import evaluate, evaluate_selection
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import choices
import choices_plans
import choices_work
import two_steps


def block(x, w, b):
    return F.softmax(x @ w + b) * 2.0, (x @ w).sum(0)


@pytest.mark.parametrize("target", [FLOOR, LLVMPIPE], ids=lambda t: t.kind)
def test_forced_programs_are_other_programs_of_the_same_values(target: Target) -> None:
    graph = trace(block, *map(parse_type, ("f32[16, 24]", "f32[24, 32]", "f32[32]")))
    choice = forced(from_nodes(list(graph.outputs)), target, graph)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n.shape).astype(np.float32) for n in graph.inputs]
    wanted = evaluate(graph, values)
    others = list(choice.others())
    groups = {tuple(g.outputs for g in o.selection.groups) for o in others}
    assert len(groups) > 4
    for other in others:
        assert other.predicted_ns >= choice.chosen.predicted_ns - 1
        for a, b in zip(wanted, evaluate_selection(other.selection, values), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    draft = choice.search.draft
    assert draft.check() == pytest.approx(choice.chosen.predicted_ns)  # as it was before


def test_tiles_and_parts_are_priced() -> None:
    workload = choices_work.of("p", lambda a, b: (a @ b, a.sum(1)), (8, 4096), (4096, 64))
    found = choices_plans.plans(workload, LLVMPIPE)
    assert found[0].name == "chosen"
    assert len({c.name for c in found if "TM" in c.name}) > 4
    assert any("splits 2" in c.name for c in found)
    assert all(c.predicted_us > 0 for c in found)
    kernels = {tuple((k.wgsl, k.grid, k.bindings) for k in c.plan.kernels) for c in found}
    assert len(kernels) == len(found)


def test_the_grid_is_large_and_has_every_kind() -> None:
    names = [w.name for w in choices_work.workloads()]
    assert len(set(names)) == len(names) >= 60
    for word in ("decode 8192", "2048x2048x2048", "1x576x49152", "softmax", "norm", "chain"):
        assert any(word in n for n in names), word


def test_files_are_kept_and_regret_is_summed_up(tmp_path: Path) -> None:
    workload = choices_work.of("a b", lambda x: x.sum(0), (64, 64))
    where = tmp_path / choices.file_name(workload.name)
    assert choices_plans.export(workload, replace(FLOOR, name="here"), where) >= 1
    assert choices.names(tmp_path, "") == ["a b"]
    rows = [
        {"regret": 1.0, "device": "d", "seconds": 2.5},
        {"regret": 1.21, "device": "d"},
        {"error": "no", "seconds": 1.0},
    ]
    found = choices.summary(rows)
    assert found["regret_mean"] == pytest.approx(1.1)
    assert (found["regret_worst"], found["errors"], found["seconds"]) == (1.21, 1, 3.5)


def test_tilings_of_gradients_are_forced_pass_by_pass() -> None:
    shape = (2, 2, 32, 16)
    workload = choices_work.of("g", choices_work.gradients, *(shape,) * 4)
    found = choices_plans.plans(workload, LLVMPIPE)
    kernels = found[0].plan.kernels
    assert [k.template for k in kernels].count("attention_bwd_cpu.wgsl.j2") == 2
    for word in ("grad q", "grad kv", "attention_cpu QR", "attention_tile_cpu TM"):
        others = [c for c in found if word in c.name]
        assert others, word
        assert all(c.predicted_us != found[0].predicted_us for c in others)


def test_a_training_step_in_one_search_and_in_two_steps_gives_the_same() -> None:
    small = "--layers 1 --width 16 --heads 2 --vocab 32 --context 8 --rounds 1 --calls 1 --json"
    found = two_steps.main(small.split())
    assert found["predicted_ratio"] <= 1
    assert found["kernels"] != found["two_steps_kernels"]
    assert found["losses"] == pytest.approx(found["two_steps_losses"], rel=1e-5)
    assert found["losses"][1] < found["losses"][0]  # weights and state were written over
    assert found["ratio"] > 0
