"""The thread that steps a batcher, and texts of it for asynchronous readers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from eggpu.generate.batching import Batcher, BusyError, Continuation, Token
from eggpu.generate.generator import GenerationError
from eggpu.generate.language import LanguageModel
from eggpu.generate.sampling import Sampling
from eggpu.generate.text import TextStream
from eggpu.serve.errors import RequestError

_log = logging.getLogger("eggpu.serve")
_IDLE = 1.0  # seconds between looks at whether to stop
_MOST_FAILURES = 3  # steps that fail in a row before the server calls itself ill


@dataclass(frozen=True, slots=True)
class Event:
    """New text with its tokens. The last one has the reason: stop, length, cancel or error: ..."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish: str = ""


class Reply:
    """One text being generated, read by `async for`. Closing it ends the text."""

    def __init__(self, engine: Engine, ids: Sequence[int], stop: Sequence[str]) -> None:
        self.engine, self.ids = engine, ids
        self.count = 0  # tokens so far
        self._text = TextStream(engine.language.tokenizer, stop)
        self._untold: list[Token] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self.handle: Continuation | None = None

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended = bool(event.finish)
        if event.finish.startswith("error: "):
            raise RequestError(event.finish.removeprefix("error: "), status=500)
        return event

    def __aiter__(self) -> Reply:
        return self

    def close(self) -> None:
        """End the text if it goes on; a reader that leaves calls this."""
        if self.handle is not None and not self._ended:
            self.engine.batcher.cancel(self.handle)

    # Both are called by the engine's thread.

    def take(self, token: Token) -> str:
        if token.id in self.engine.language.tokenizer.end:
            return "stop"
        self.count += 1
        self._untold.append(token)
        ready = self._text.push(token.id)
        if ready:
            self._tell(ready)
        return "stop" if self._text.stopped else ""

    def end(self, reason: str) -> None:
        rest = self._text.rest() if reason in ("stop", "length") else ""
        if self._text.stopped:
            self._untold = []  # the tokens of the stop string
        self._tell(rest, "stop" if self._text.stopped else reason)

    def _tell(self, text: str, finish: str = "") -> None:
        event = Event(text, tuple(self._untold), finish)
        self._untold = []
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the reader's loop is closed: nobody listens
            self.close()


class Engine:
    """A language model that continues several texts at once, in a thread of its own."""

    def __init__(self, language: LanguageModel, batcher: Batcher) -> None:
        self.language, self.batcher = language, batcher
        self.failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eggpu-serve", daemon=True)

    @property
    def healthy(self) -> bool:
        """Whether texts are being continued."""
        return self._thread.is_alive() and self.failures < _MOST_FAILURES

    def start(self) -> None:
        """Begin; `stop` ends it."""
        self._thread.start()

    def end(self) -> None:
        """End all texts soon, and the thread; takes no lock, as signal handlers need."""
        self._stopping.set()

    def stop(self) -> None:
        """End all texts and the thread, and wait for that."""
        self.end()
        self.batcher.wake()
        if self._thread.is_alive():
            self._thread.join()

    def reply(
        self, ids: Sequence[int], sampling: Sampling, most: int, stop: Sequence[str], top: int
    ) -> Reply:
        """Start a text. Raises RequestError: 400 for a prompt that does not fit, 429 when too many
        wait, 503 when the server is stopping."""
        if self._stopping.is_set():
            raise RequestError("the server is stopping", status=503)
        context = self.batcher.context
        if len(ids) > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens, the prompt has "
                f"{len(ids)}", "prompt", code="context_length_exceeded",
            )  # fmt: skip
        reply = Reply(self, ids, stop)
        room = context - len(ids) + 1
        try:
            reply.handle = self.batcher.submit(
                ids, reply.take, reply.end, sampling=sampling, most=min(most or room, room), top=top
            )
        except GenerationError as error:
            raise RequestError(str(error), "prompt") from None
        except BusyError as error:
            raise RequestError(str(error), status=429, code="busy") from None
        return reply

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                busy = self.batcher.step()
                self.failures = 0 if busy else self.failures
            except Exception as error:  # noqa: BLE001 - whatever it is, the readers are told
                _log.exception("a step failed")
                self.failures += 1
                self.batcher.fail(str(error).splitlines()[0] if str(error) else repr(error))
                busy = False
            if not busy:
                self.batcher.wait(_IDLE)
        self.batcher.fail("the server is stopping")
