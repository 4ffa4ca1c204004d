"""The one Jinja environment: WGSL templates in, WGSL text out.

A template is WGSL first. Directives are line comments (`//% for ...`), template comments start with
`//#`. How a template reads and writes its operands is the caller's business: see `protocol`.
"""

from __future__ import annotations

import struct
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from .bytecode import Kept
from .protocol import Axis, Load, Store, swapped

__all__ = ["Axis", "Load", "Store", "number", "render", "rolled", "swapped"]


def _single(value: float | str) -> float:
    """The nearest float32; an infinity when there is none."""
    try:
        return struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return float("inf")


def number(value: float) -> str:
    """A finite float32 literal in the shortest decimal form that reads back as the same float32."""
    single = _single(value)
    if single - single != 0.0:
        raise ValueError(f"a WGSL literal must be finite, got {value}")
    text = next(
        t for t in (f"{single:.{digits}g}" for digits in range(6, 10)) if _single(t) == single
    )
    return text if any(c in text for c in ".e") else text + ".0"


def rolled(count: int) -> str:
    """The end of a loop of `count` rounds in a kernel for llvmpipe, where Mesa does not know it.

    Mesa writes short loops out, and takes milliseconds to translate each load that then stands in
    the text. Needs `group`, the workgroup's place.
    """
    return f"{count}u + (group.x >> 31u)"


def _indented(text: str) -> str:
    """The text without blank lines, each line indented by its depth in braces."""
    lines: list[str] = []
    depth = 0
    for raw in text.splitlines():
        line = raw.strip()
        if not line:
            continue
        closes = len(line) - len(line.lstrip("}"))
        lines.append("  " * (depth - closes) + line)
        depth += line.count("{") - line.count("}")
    return "\n".join(lines) + "\n"


_environment = Environment(
    loader=PackageLoader(__name__, ""),
    undefined=StrictUndefined,
    line_statement_prefix="//%",
    line_comment_prefix="//#",
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,
    keep_trailing_newline=True,
    bytecode_cache=Kept(),
    auto_reload=False,
)
_environment.filters |= {"f32": number, "rolled": rolled}


def render(name: str, **values: Any) -> str:
    """The WGSL of template `name`, such as "contract_cpu.wgsl.j2".

    A value that the template needs and does not get raises jinja2.UndefinedError.
    """
    return _indented(_environment.get_template(name).render(**values))
