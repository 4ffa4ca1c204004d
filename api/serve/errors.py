"""What a client is told of its mistakes: a status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from eggpu.compiler.errors import EggpuError

KINDS = {
    400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


class RequestError(EggpuError):
    """A request that gets no answer, and why: `param` is the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        kind = KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
