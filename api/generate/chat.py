"""Chat templates: the Jinja text of a model's file that makes one prompt of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from eggpu.importers.tensors import ModelFileError
from eggpu.templates.chat import render_untrusted

_MOST_CHARACTERS, _MOST_FORM = 1 << 20, 1000

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    begin: str = "",
    end: str = "",
    prompt: bool = True,
) -> str:
    """The prompt for messages ({"role": ..., "content": ...}); with `prompt`, up to where the model
    answers. Raises ModelFileError for a template that fails or refuses the messages."""
    if len(template) > _MOST_CHARACTERS:
        raise ModelFileError(f"the chat template has {len(template)} characters")
    values = {
        "messages": list(messages), "add_generation_prompt": prompt, "bos_token": begin,
        "eos_token": end, "raise_exception": _refuse, "strftime_now": _now,
    }  # fmt: skip
    try:
        return render_untrusted(template, values, {"tojson": _json})
    except ModelFileError:
        raise
    except Exception as error:  # whatever a template does
        raise ModelFileError(f"the chat template failed: {error}") from error


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=_indent(options.get("indent")))


def _indent(given: Any) -> int | None:
    return min(max(given, 0), 16) if isinstance(given, int) else None


def _now(form: str) -> str:
    if len(form) > _MOST_FORM or re.search(r"\d{3}", form):  # C's strftime takes widths
        raise ModelFileError(
            f"the chat template has a form of dates that is too wide: {form!r:.40}"
        )
    return datetime.now().strftime(form)


def _refuse(message: str) -> str:
    raise ModelFileError(f"the chat template refuses these messages: {message}")
