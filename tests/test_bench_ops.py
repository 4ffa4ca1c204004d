"""bench/ops.py runs, checks what it times, and has every kind of op."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from eggpu.compiler.ir import Kind

PATH = Path(__file__).parents[1] / "bench" / "ops.py"


def test_every_kind_is_timed() -> None:
    spec = importlib.util.spec_from_file_location("bench_ops", PATH)
    assert spec
    assert spec.loader
    bench = sys.modules["bench_ops"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.torch = None
    rows = [bench.measure(case, blocks=1, seconds=0.0) for case in bench.cases(32)]
    leaves = {Kind.INPUT, Kind.CONSTANT, Kind.LITERAL, Kind.IOTA, Kind.GET}
    assert {r["kind"] for r in rows} == {k.value for k in Kind if k not in leaves}
    assert all(r["eggpu_ms"] > 0 and r["numpy_ms"] > 0 for r in rows)
