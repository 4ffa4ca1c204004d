"""The web application: OpenAI's chat and completions endpoints over an engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eggpu.importers.tensors import ModelFileError
from eggpu.serve import requests
from eggpu.serve.answers import Answer, ChatAnswer, CompletionAnswer
from eggpu.serve.engine import Engine, Event, Reply
from eggpu.serve.errors import RequestError
from eggpu.serve.fields import parse

MOST_BODY = 1 << 20  # bytes
_GONE = 499  # in place of a status: the client has left


def application(
    engine: Engine, name: str, *, most_tokens: int = 0, most_body: int = MOST_BODY
) -> Starlette:
    """The application that serves `engine` as the model `name`, with at most `most_tokens` a text
    (0: what the context holds) and bodies of at most `most_body` bytes. Its lifespan starts and
    stops the engine."""
    server = _Server(engine, name, most_tokens, most_body)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(engine.stop)

    return Starlette(
        routes=[
            Route("/health", server.health),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.completions, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(
            (RequestError, HTTPException, ClientDisconnect, Exception), _told
        ),
        lifespan=lifespan,
    )


async def _told(_: HttpRequest, error: Exception) -> Response:
    """Any error as OpenAI's JSON."""
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):
        error = RequestError(str(error.detail), status=error.status_code)
    elif isinstance(error, ClientDisconnect):  # in the middle of its body: nobody reads this
        error = RequestError("the client left", status=_GONE)
    elif not isinstance(error, RequestError):
        error = RequestError("the server failed; its log tells more", status=500)
    if error.status == 429:
        headers["Retry-After"] = "1"
    return JSONResponse(error.body(), error.status, headers)


class _Server:
    def __init__(self, engine: Engine, name: str, most_tokens: int, most_body: int) -> None:
        self.engine, self.name = engine, name
        self.most_tokens, self.most_body = most_tokens, most_body
        self.created = int(time.time())

    async def health(self, _: HttpRequest) -> Response:
        batcher = self.engine.batcher
        ok = self.engine.healthy
        state = {
            "status": "ok" if ok else "failed", "model": self.name, "running": batcher.running,
            "waiting": batcher.waiting, "slots": batcher.slots, "context": batcher.context,
        }  # fmt: skip
        return JSONResponse(state, 200 if ok else 503)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._known(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "eggpu"}

    def _known(self, name: str) -> None:
        if name not in ("", self.name):
            message = f"The model '{name:.80}' does not exist; this server has '{self.name}'"
            raise RequestError(message, "model", status=404, code="model_not_found")

    async def chat(self, request: HttpRequest) -> Response:
        body = parse(await self._body(request))
        asked = requests.chat(body, self.engine.language.sampling)
        self._known(asked.request.model)

        def prompts() -> list[list[int]]:
            try:
                return [self.engine.language.prompt(asked.messages)]
            except ModelFileError as error:
                raise RequestError(str(error), "messages") from None

        answer = ChatAnswer(self._id("chatcmpl"), self.name, asked.request, self.engine.language)
        return await self._answer(request, answer, prompts)

    async def completions(self, request: HttpRequest) -> Response:
        body = parse(await self._body(request))
        asked = requests.completion(body, self.engine.language.sampling)
        self._known(asked.request.model)

        def prompts() -> list[list[int]]:
            encode = self.engine.language.tokenizer.encode
            return [encode(p) if isinstance(p, str) else list(p) for p in asked.prompts]

        answer = CompletionAnswer(self._id("cmpl"), self.name, asked.request, self.engine.language)
        return await self._answer(request, answer, prompts)

    @staticmethod
    def _id(kind: str) -> str:
        return f"{kind}-{secrets.token_hex(12)}"

    async def _body(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                f"the content-type needs to be application/json, got {kind!r:.80}", status=415
            )
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self.most_body:
                raise RequestError(
                    f"the body has more than {self.most_body} bytes", status=413,
                )  # fmt: skip
        return body

    async def _answer(
        self, request: HttpRequest, answer: Answer, prompts: Callable[[], list[list[int]]]
    ) -> Response:
        replies = self._replies(answer, await run_in_threadpool(prompts))
        if answer.request.stream:
            return _EventStream(answer, replies)
        try:
            done = await _unless_gone(request, _collected(answer, replies))
        finally:
            for reply in replies:
                reply.close()
        return Response(status_code=_GONE) if done is None else JSONResponse(done)

    def _replies(self, answer: Answer, prompts: Sequence[list[int]]) -> list[Reply]:
        """A text for each choice of each prompt; none where one of them cannot be started."""
        r, out = answer.request, list[Reply]()
        most = min(r.most or self.most_tokens, self.most_tokens or r.most)
        asked, taken = len(prompts) * r.n, self.engine.batcher.most_waiting
        if asked > taken:
            raise RequestError(f"{asked} texts are asked for; at most {taken} are taken at once")
        try:
            for ids in prompts:
                for number in range(r.n):
                    out.append(self.engine.reply(ids, r.choice(number), most, r.stop, r.top))
        except RequestError:
            for reply in out:
                reply.close()
            raise
        return out


async def _collected(answer: Answer, replies: Sequence[Reply]) -> dict[str, Any]:
    """The whole answer, once all its texts have ended."""

    async def one(reply: Reply) -> list[Event]:
        return [event async for event in reply]

    return answer.whole(replies, await asyncio.gather(*map(one, replies)))


async def _unless_gone(
    request: HttpRequest, work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """The result of work; None, with the work canceled, when the client leaves before it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    """Return when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(Response):
    """An answer in server-sent events. When the client leaves, its texts end."""

    def __init__(self, answer: Answer, replies: Sequence[Reply]) -> None:
        super().__init__()
        self.answer, self.replies = answer, replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            gone.cancel()
            for reply in self.replies:
                reply.close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def tell(data: str) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for chunk in self.answer.chunks(self.replies):
                await tell(json.dumps(chunk, ensure_ascii=False))
            await tell("[DONE]")
        except RequestError as error:
            await tell(json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
