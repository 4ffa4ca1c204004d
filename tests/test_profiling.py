"""Profiles: times with rates and parts of the roof, and a trace in the Trace Event Format."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu.cli import main
from eggpu.compiler.schedule.target import Profile as Rates
from eggpu.profiling import Profile

RATES = Rates(
    launch=1000, bandwidth=10, contract=100, attention=50, elementwise=20, rows=16, onchip=1 << 16
)


def program(x, w):
    return eg.tanh(x @ w)


@pytest.fixture(scope="module")
def profile() -> Profile:
    rng = np.random.default_rng(0)
    compiled = eg.compile(program, name="small")
    return compiled.profile(*(rng.standard_normal((64, 64), np.float32) for _ in range(2)))


@pytest.fixture(scope="module")
def known(profile) -> Profile:
    """The same plan with times and rates that are known."""
    kernels = tuple(
        replace(k, flops=10_000, bytes_read=3_000, bytes_written=1_000, template=t)
        for k, t in zip(profile.plan.kernels * 2, ("contract_x.wgsl.j2", "rowwise_x.wgsl.j2"))
    )
    target = replace(profile.target, profile=RATES)
    return Profile(replace(profile.plan, kernels=kernels), (1_000, 2_000), target)


def test_rates_and_parts_of_the_roof(known):
    product, rows = known.kernels
    assert (product.us, product.start_us, rows.start_us) == (1.0, 0.0, 1.0)
    assert product.gflops == 10.0
    assert product.gbytes == 4.0
    assert product.roof == pytest.approx(0.4)  # 400 ns for bytes, 100 ns for arithmetic
    assert product.bound == "memory"
    assert rows.roof == pytest.approx(0.25)  # 400 and 500 of 2000 ns
    assert rows.bound == "arithmetic"
    assert known.roof == pytest.approx(0.3)
    assert known.us == 3.0


def test_the_table_has_a_line_a_kernel(known):
    lines = str(known).splitlines()
    assert "2 kernels, 3.0 us measured, 30% of the roof" in lines[0]
    titles = "# kernel template us share GFLOP/s GB/s roof"
    assert lines[1].split()[:8] == titles.split()
    assert "33.3%" in lines[2]
    assert "40%  memory" in lines[2]
    assert "25%  arithmetic" in lines[3]


def check_trace(trace) -> None:
    """What ui.perfetto.dev needs of a file in the Trace Event Format's JSON object form."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        if event["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in event["args"].values())


def test_a_trace_has_an_event_a_kernel_in_order(known, tmp_path):
    trace = json.loads(known.save(tmp_path / "deep" / "step.json").read_text())
    check_trace(trace)
    whole = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in whole] == [(0.0, 1.0), (1.0, 2.0)]
    assert whole[0]["args"]["GB/s"] == 4.0
    assert whole[0]["args"]["roof %"] == 40.0
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "GB/s"]
    assert [(e["ts"], e["args"]["GB/s"]) for e in counters] == [(0.0, 4.0), (1.0, 2.0), (3.0, 0.0)]


def test_a_measured_profile_is_plausible(profile):
    assert len(profile.ns) == len(profile.plan.kernels)
    assert all(1_000 < ns < 1_000_000_000 for ns in profile.ns)
    assert all(0 < k.roof < 20 for k in profile.kernels)
    data = json.loads(json.dumps(profile.data()))
    assert data["device"] == eg.device().target.name
    assert [k["name"] for k in data["kernels"]] == [k.name for k in profile.plan.kernels]


def test_compile_shows_and_writes_a_profile(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.py").write_text(
        "import eggpu as eg\n\ndef f(x):\n    return eg.tanh(x) * 2\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "small.py:f", "--arg", "f32[32,8]", "--profile", "f.json"]) == 0
    out = capsys.readouterr().out
    assert "profile of f on" in out
    assert "f.json" in out
    check_trace(json.loads((tmp_path / "f.json").read_text()))


def test_compile_takes_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "less.py").write_text(
        "import eggpu as eg\n\ndef f(x):\n    return eg.tanh(x @ x)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--max-memory", "100000", "--precision", "float32"]
    assert main(["compile", "less.py:f", "--arg", "f32[32,32]", *options]) == 0
    assert "max_memory 100000 bytes: peak" in capsys.readouterr().out
    assert main(["compile", "less.py:f", "--arg", "f32[32,32]", "--max-memory", "100"]) == 2
    assert "the least found" in capsys.readouterr().err


def test_train_shows_and_writes_a_profile(tmp_path, capsys):
    out, trace = tmp_path / "run", tmp_path / "step.json"
    arguments = ["train", "mlp", "--steps", "3", "--hidden", "8", "--out", str(out)]
    assert main([*arguments, "--profile", str(trace)]) == 0
    assert "profile of" in capsys.readouterr().out
    check_trace(json.loads(trace.read_text()))
