"""Below api/ imports are relative, and none reaches api/ (import-linter checks the rest)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW_API = ("compiler", "runtime", "templates")


def violation(node: ast.AST, depth: int) -> str | None:
    """What is wrong with an import in a module that lies `depth` folders below the root."""
    match node:
        case ast.Import(names=names) if any(n.name.split(".")[0] == "eggpu" for n in names):
            return "should be relative"
        case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "eggpu":
            return "should be relative"
        case ast.ImportFrom(module=module, names=names, level=level) if level > depth:
            reached = {module.split(".")[0]} if module else {n.name for n in names}
            return None if reached <= set(BELOW_API) else "imports from api/"
    return None


@pytest.mark.parametrize("folder", BELOW_API)
def test_imports_are_relative_and_stay_below_api(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert modules, f"no modules in {folder}/"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {wrong}: {ast.unparse(node)}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (wrong := violation(node, len(path.relative_to(ROOT).parts) - 1))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import eggpu.nn", "should be relative"),
        ("from eggpu.compiler import ir", "should be relative"),
        ("from ... import nn", "imports from api/"),
        ("from ...nn.gpt import GPT", "imports from api/"),
        ("from ... import templates", None),
        ("from ...templates import render", None),
        ("from ..ir import Node", None),
        ("from . import ops", None),
        ("import numpy", None),
    ],
)
def test_violation_from_two_folders_down(line: str, expected: str | None) -> None:
    assert violation(ast.parse(line).body[0], depth=2) == expected


def test_no_module_hides_a_public_name():
    """Importing `eggpu.x` sets the attribute x: a function of that name would be lost."""
    import pkgutil
    import types

    import eggpu

    modules = {m.name for m in pkgutil.iter_modules(eggpu.__path__)}
    names = {n for n in dir(eggpu) if not isinstance(getattr(eggpu, n), types.ModuleType)}
    assert not names & modules
