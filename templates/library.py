"""The WGSL functions `eg_*` of lib/: a kernel gets the ones that it calls, and what those call."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from . import render

_CALL = re.compile(r"\beg_\w+(?=\()")
_DEFINED = re.compile(r"\bfn (eg_\w+)\(")
_DEFINITION = re.compile(r"^fn (eg_\w+)\(.*?^}$", re.MULTILINE | re.DOTALL)


@cache
def definitions() -> dict[str, str]:
    """Every function of lib/ by name."""
    found: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / "lib").glob("*.wgsl.j2")):
        for match in _DEFINITION.finditer(render(f"lib/{path.name}")):
            assert match[1] not in found, f"{match[1]} is defined twice in templates/lib"
            found[match[1]] = match[0]
    return found


@cache
def _calls(name: str) -> tuple[str, ...]:
    """The other functions that one of lib/ calls."""
    found = dict.fromkeys(_CALL.findall(definitions()[name]))
    return tuple(called for called in found if called != name)


def functions(text: str) -> str:
    """The definitions of the library functions that `text` needs, called ones first."""
    known, done = definitions(), dict[str, str]()

    present = set(_DEFINED.findall(text))

    def visit(name: str) -> None:
        if name in done or name in present:
            return
        if name not in known:
            raise KeyError(f"templates/lib has no function {name}")
        for called in _calls(name):
            visit(called)
        done[name] = known[name]

    for name in dict.fromkeys(_CALL.findall(text)):
        visit(name)
    return "\n".join(done.values())
