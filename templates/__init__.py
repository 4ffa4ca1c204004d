"""The one Jinja environment: WGSL templates in, WGSL text out.

A template is WGSL first. Directives are line comments (`//% for ...`), template comments start with `//#`.
How a template reads and writes its operands is the caller's business: see `protocol`.
"""

from __future__ import annotations

import struct
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from .protocol import Axis, Load, Store, StoreRow, swapped

__all__ = ["Axis", "Load", "Store", "StoreRow", "number", "render", "swapped"]


def number(value: float) -> str:
    """A finite float32 literal in the shortest decimal form that reads back as the same float32."""
    single = struct.unpack("<f", struct.pack("<f", value))[0]
    if single - single != 0.0:
        raise ValueError(f"a WGSL literal must be finite, got {value}")
    for digits in range(6, 10):
        text = f"{single:.{digits}g}"
        if struct.pack("<f", min(max(float(text), -3.4028234e38), 3.4028234e38)) == struct.pack("<f", single):
            break
    return text if any(c in text for c in ".e") else text + ".0"


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
    extensions=["jinja2.ext.do"],
)
_environment.filters["f32"] = number


def render(name: str, **values: Any) -> str:
    """The WGSL of template `name` ("contract_cpu.wgsl.j2"); a value that is missing raises UndefinedError."""
    return _indented(_environment.get_template(name).render(**values))
