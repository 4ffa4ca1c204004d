"""Answers in OpenAI's form: whole objects and chunks of streams."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eggpu.generate.batching import Token
from eggpu.generate.language import LanguageModel
from eggpu.serve.engine import Event, Reply
from eggpu.serve.errors import RequestError
from eggpu.serve.requests import Request


@dataclass
class Answer(ABC):
    """What both endpoints have in common."""

    id: str
    model: str
    request: Request
    language: LanguageModel
    created: int = field(default_factory=lambda: int(time.time()))

    kind = ""  # of the whole answer
    part = ""  # of a chunk

    def whole(self, replies: Sequence[Reply], events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """The answer of texts that have ended."""
        choices = [self._whole_choice(k, e) for k, e in enumerate(events)]
        return {**self._head(self.kind), "choices": choices, "usage": _usage(self.request, replies)}

    async def chunks(self, replies: Sequence[Reply]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of all texts as they come. A text that fails raises RequestError."""
        for k in range(len(replies)):
            for choice in self._first(k):
                yield self._chunk([choice])
        queue: asyncio.Queue[tuple[int, Event | RequestError | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_pour(k, r, queue)) for k, r in enumerate(replies)]
        try:
            left = len(replies)
            while left:
                k, event = await queue.get()
                if isinstance(event, RequestError):
                    raise event
                if event is None:
                    left -= 1
                elif event.text or event.finish or event.tokens:
                    yield self._chunk([self._choice(k, event)])
        finally:
            for task in tasks:
                task.cancel()
        if self.request.usage:
            yield {**self._head(self.part), "choices": [], "usage": _usage(self.request, replies)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": None,
        }  # fmt: skip

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.part), "choices": choices}

    def _bytes(self, token: int) -> list[int]:
        return list(self._text(token).encode())

    def _text(self, token: int) -> str:
        return self.language.tokenizer.decode([token], special=True)

    def _first(self, index: int) -> list[dict[str, Any]]:
        """What comes before the text."""
        return []

    @abstractmethod
    def _whole_choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]: ...

    @abstractmethod
    def _choice(self, index: int, event: Event) -> dict[str, Any]: ...


async def _pour(k: int, reply: Reply, queue: asyncio.Queue[Any]) -> None:
    try:
        async for event in reply:
            queue.put_nowait((k, event))
        queue.put_nowait((k, None))
    except RequestError as error:
        queue.put_nowait((k, error))


def _usage(request: Request, replies: Sequence[Reply]) -> dict[str, int]:
    """Tokens read and written; a prompt counts once for all its choices."""
    read = sum(len(r.ids) for r in replies[:: request.n])
    written = sum(r.count for r in replies)
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
    }  # fmt: skip


def _joined(events: Sequence[Event]) -> tuple[str, tuple[Token, ...], str]:
    text = "".join(e.text for e in events)
    return text, tuple(t for e in events for t in e.tokens), events[-1].finish


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    kind, part = "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        text, tokens, finish = _joined(events)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index, "message": message, "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }  # fmt: skip

    def _first(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        return {
            "index": index, "delta": {"content": event.text} if event.text else {},
            "logprobs": self._logprobs(event.tokens) if event.tokens else None,
            "finish_reason": event.finish or None,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.request.sampling.logprobs:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self._text(token), "logprob": logprob, "bytes": self._bytes(token)}

        content = [
            {**entry(t.id, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    kind = part = "text_completion"

    def _whole_choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        text, tokens, finish = _joined(events)
        return self._choice(index, Event(text, tokens, finish))

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        return {
            "index": index, "text": event.text, "logprobs": self._logprobs(event.tokens),
            "finish_reason": event.finish or None,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.request.sampling.logprobs:
            return None
        texts = [self._text(t.id) for t in tokens]
        return {
            "tokens": texts, "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{self._text(i): p for i, p in t.top} for t in tokens],
            "text_offset": [sum(map(len, texts[:k])) for k in range(len(texts))],
        }  # fmt: skip
