"""The engine takes egglog's compiled module alone, and lives beside the whole package."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENGINE = """
from eggpu.compiler.egraph.engine import Engine
engine = Engine()
engine.run("(sort S)(constructor A () S)(constructor B (S) S)(A)(B (A))")
assert engine.count(["A", "B"]) == (2, 2)
"""
PACKAGE = """
import egglog
from egglog import bindings
graph = bindings.EGraph()
graph.run_program(*graph.parse_program("(sort S)(constructor A () S)(A)"))
assert egglog.i64(1) is not None
assert egglog.bindings is bindings
"""


@pytest.mark.parametrize("program", [ENGINE, ENGINE + PACKAGE + ENGINE, PACKAGE + ENGINE + PACKAGE])
def test_engine_and_package_in_any_order(program: str) -> None:
    last = "import sys; print('egglog.builtins' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program + last],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str("import egglog" in program)


def test_errors_are_told() -> None:
    from eggpu.compiler.egraph.engine import Engine
    from eggpu.compiler.errors import CompileError

    with pytest.raises(CompileError, match="the e-graph refused"):
        Engine().run("(nothing)")
