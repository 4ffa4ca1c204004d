"""The generated table is fresh, and the examples of the pages on dtypes and gradients run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_table_of_ops_is_fresh() -> None:
    path = ROOT / "scripts" / "write_ops_table.py"
    spec = importlib.util.spec_from_file_location("write_ops_table", path)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    fresh = script.table()
    assert len(fresh.splitlines()) > 200
    stale = "docs/ops.md is stale: python scripts/write_ops_table.py"
    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == fresh, stale


@pytest.mark.parametrize("page", ["dtypes", "gradients"])
def test_examples_of_the_page_run(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), scope)
