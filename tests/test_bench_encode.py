"""bench/encode.py runs: recording through raw functions takes less than through wgpu's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).parents[1] / "bench" / "encode.py"


def test_recording_a_dispatch_costs_less_than_by_wgpu() -> None:
    spec = importlib.util.spec_from_file_location("bench_encode", PATH)
    assert spec
    assert spec.loader
    bench = sys.modules["bench_encode"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    row = bench.measure(dispatches=200, rounds=9)
    assert min(row[k] for k in ("record", "finish", "submit", "call")) > 0
    assert row["ratio"] > 1.5  # three to four times on a quiet machine
    assert "goal 1.5" in bench.text(row)
