"""The e-graph's tests pass with the Python of EGGPU_OTHER_PYTHON, which may have another egglog;
`make test` finds one and sets its environment up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OTHER = os.environ.get("EGGPU_OTHER_PYTHON", "")
# What only searches small graphs that are given as e-nodes says nothing about egglog.
CASES = {
    "test_egraph.py": "",
    "test_engine_import.py": "",
    "test_rules.py": "",
    "test_rules_api.py": "",
    "test_extraction.py": "not random_graphs",
}
DROPPED = ("EGGPU_REQUIRE_DEVICE", "PYTEST_ADDOPTS")  # no device is used, no plugin but timeouts


@pytest.mark.skipif(not OTHER, reason="no EGGPU_OTHER_PYTHON")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", CASES)
def test_with_another_python(file: str) -> None:
    chosen = ["-k", CASES[file]] if CASES[file] else []
    run = subprocess.run(
        [OTHER, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(TESTS / file)],
        env={k: v for k, v in os.environ.items() if k not in DROPPED},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2_000:]
