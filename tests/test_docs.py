"""Every Python block of the tutorials runs, in the order of its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "egraph.md",
    "from-pytorch.md",
    "memory.md",
    "loops.md",
    "precision.md",
    "profiling.md",
    "tour.md",
)
TRAINING = ("checkpoints", "data", "distributed", "examples", "nn", "optim", "trainer")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [*PAGES, *(f"{name}.md" for name in TRAINING)])
def test_the_blocks_of_a_page_run(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 3
    names: dict[str, Any] = {"__name__": page}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], f"docs/{page}", "exec")
        exec(code, names)
