"""Jinja for text from model files: nothing of Python can be reached or changed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_untrusted(
    template: str, values: Mapping[str, Any], filters: Mapping[str, Callable[..., Any]]
) -> str:
    """The text of a chat template, with the functions and blocks that such templates use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters.update(filters)
    return environment.from_string(template).render(**values)
