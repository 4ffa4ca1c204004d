"""The same graph and profile give the same plan, byte for byte: in every process, whatever
PYTHONHASHSEED, and with the Python of EGGPU_OTHER_PYTHON, which may have another egglog.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGEST = """
import hashlib, sys
sys.path[:0] = sys.argv[1:]
from choices_work import workloads
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule.serialize import plan_to_json
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type
names = ("attention gradients 64 8x32", "linear step 128x256", "cross entropy 64x1000")
for w in workloads():
    if w.name in names:
        graph = trace(w.function, *map(parse_type, w.types))
        for target in (FLOOR, LLVMPIPE):
            text = plan_to_json(compile_graph(graph, target).plan)
            print(w.name, target.kind, hashlib.sha256(text.encode()).hexdigest())
"""
BENCH = str(Path(__file__).parent.parent / "bench")


def plans(python: str, seed: str, paths: list[str]) -> str:
    run = subprocess.run(
        [python, "-c", DIGEST, BENCH, *paths],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert run.stdout.count("\n") == 6
    return run.stdout


@pytest.fixture(scope="module")
def once() -> str:
    return plans(sys.executable, "0", [p for p in sys.path if p])


def test_whatever_the_hash_seed(once: str) -> None:
    assert plans(sys.executable, "4711", [p for p in sys.path if p]) == once


@pytest.mark.skipif(not os.environ.get("EGGPU_OTHER_PYTHON"), reason="no EGGPU_OTHER_PYTHON")
def test_with_another_python(once: str) -> None:
    assert plans(os.environ["EGGPU_OTHER_PYTHON"], "1", []) == once
