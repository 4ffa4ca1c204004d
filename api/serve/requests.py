"""Requests of the chat and completions endpoints, read from JSON."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eggpu.generate.sampling import Sampling
from eggpu.serve.errors import RequestError
from eggpu.serve.fields import Fields, unicode

MOST_CHOICES = 16
_MOST_STOPS, _MOST_PROMPTS = 4, 64
_COMMON = (
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop",
    "presence_penalty", "frequency_penalty", "logit_bias", "user", "seed", "logprobs",
    "top_k", "min_p", "repetition_penalty",
)  # fmt: skip
_CHAT = (
    *_COMMON, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "metadata", "store",
    "service_tier", "modalities", "audio", "prediction", "reasoning_effort",
)  # fmt: skip
_COMPLETION = (*_COMMON, "prompt", "suffix", "echo", "best_of")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, checked. `most` 0 is as much as there is room for."""

    model: str
    sampling: Sampling
    most: int
    stop: tuple[str, ...]
    n: int
    stream: bool
    usage: bool  # a last chunk with the counts
    top: int  # likeliest tokens told with each

    def choice(self, number: int) -> Sampling:
        """The options of one of several choices."""
        return replace(self.sampling, seed=self.sampling.seed + number)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer."""

    request: Request
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """Texts to continue, or lists of token ids."""

    request: Request
    prompts: tuple[str | tuple[int, ...], ...]


def chat(body: Mapping[str, Any], base: Sampling | None = None) -> Chat:
    """A request of /v1/chat/completions. What it leaves open is as in `base`, the model's own
    choice of tokens; the temperature is OpenAI's 1 where that has none."""
    f = Fields(body)
    f.only(_CHAT)
    for key in ("tools", "functions"):
        f.refuse(key, [])
    for key in ("audio", "prediction", "reasoning_effort"):
        f.refuse(key)
    f.refuse("response_format", {"type": "text"})
    f.refuse("modalities", ["text"])
    f.refuse("tool_choice", "none", "auto")
    f.refuse("function_call", "none", "auto")
    told = f.flag("logprobs")
    top = f.integer("top_logprobs", 0, 0, 20)
    if top and not told:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return Chat(_request(f, limit, told, top, base), _messages(body.get("messages")))


def completion(body: Mapping[str, Any], base: Sampling | None = None) -> Completion:
    """A request of /v1/completions, with `base` as for `chat`."""
    f = Fields(body)
    f.only(_COMPLETION)
    f.refuse("suffix", "")
    f.refuse("echo", False)
    f.refuse("best_of", 1)
    told = body.get("logprobs") is not None
    top = f.integer("logprobs", 0, 0, 5)
    request = _request(f, "max_tokens", told, top, base)
    if not request.most:
        request = replace(request, most=16)  # what OpenAI takes
    return Completion(request, _prompts(body.get("prompt")))


def _request(f: Fields, limit: str, told: bool, top: int, base: Sampling | None) -> Request:
    base = base or Sampling()
    for key in ("presence_penalty", "frequency_penalty"):
        f.refuse(key, 0, 0.0)
    f.refuse("logit_bias", {})
    f.text("user")
    options = f.object("stream_options")
    options.only(("include_usage", "include_obfuscation"))
    seed = f.integer("seed", secrets.randbits(63), -(2**63), 2**63 - 1)
    sampling = Sampling(
        temperature=f.number("temperature", base.temperature or 1.0, 0, 2),
        top_p=max(f.number("top_p", base.top_p, 0, 1), 1e-9),
        top_k=f.integer("top_k", base.top_k, 0, 2**31 - 1),
        min_p=f.number("min_p", base.min_p, 0, 1),
        repetition_penalty=f.number("repetition_penalty", base.repetition_penalty, 0.01, 100),
        seed=seed % 2**64,
        logprobs=told,
    )
    return Request(
        f.text("model"), sampling, f.integer(limit, 0, 1, 2**31 - 1), f.texts("stop", _MOST_STOPS),
        f.integer("n", 1, 1, MOST_CHOICES), f.flag("stream"), options.flag("include_usage"), top,
    )  # fmt: skip


def _messages(given: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise RequestError("'messages' needs a list of at least one message", "messages")
    return tuple(_message(m, f"messages[{k}]") for k, m in enumerate(given))


def _message(given: Any, name: str) -> Mapping[str, str]:
    if not isinstance(given, dict):
        raise RequestError(f"'{name}' needs an object with role and content", name)
    f = Fields(given, f"{name}.")
    f.only(("role", "content", "name", "refusal", "tool_call_id", "tool_calls"))
    f.refuse("tool_calls", [])
    role = f.text("role")
    if role not in _ROLES:
        raise RequestError(f"'{name}.role' is one of {', '.join(_ROLES)}", f"{name}.role")
    role = "system" if role == "developer" else role
    return {"role": role, "content": _content(given.get("content"), f"{name}.content")}


def _content(given: Any, name: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(given, str):
        return unicode(given, name)
    if not isinstance(given, list) or not given:
        raise RequestError(f"'{name}' needs a string or a list of text parts", name)
    texts = []
    for k, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(f"'{name}[{k}]' needs a part of the type text", name)
        texts.append(Fields(part, f"{name}[{k}].").text("text"))
    return "".join(texts)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    needed = "'prompt' needs a string, a list of strings, of token ids, or of lists of those"
    alone = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and all(map(_is_id, given))
    )
    several = [given] if alone else given
    if not isinstance(several, list) or not several:
        raise RequestError(needed, "prompt")
    if len(several) > _MOST_PROMPTS:
        raise RequestError(f"'prompt' takes at most {_MOST_PROMPTS} texts", "prompt")
    out: list[str | tuple[int, ...]] = []
    for one in several:
        if isinstance(one, str):
            out.append(unicode(one, "prompt"))
        elif isinstance(one, list) and one and all(map(_is_id, one)):
            out.append(tuple(one))
        else:
            raise RequestError(needed, "prompt")
    return tuple(out)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
