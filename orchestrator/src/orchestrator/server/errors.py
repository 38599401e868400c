"""Errors as clients of each protocol expect them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = _OPENAI | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer other than 200. `body` overrides the usual shape (the recipe's own words)."""

    def __init__(
        self, status: int, message: str, *, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.body = status, message, headers or {}, body


def busy(message: str, retry_after: float, status: int = 429) -> ApiError:
    """A refusal that is worth trying again after `retry_after` seconds."""
    return ApiError(status, message, headers={"retry-after": str(max(1, int(retry_after + 0.999)))})


def is_messages(path: str) -> bool:
    """Whether a path belongs to the Anthropic protocol, whose errors look different."""
    return path.startswith("/v1/messages")


def error_body(error: ApiError, *, messages: bool) -> dict[str, Any]:
    """The JSON object of an error: OpenAI's shape, or Anthropic's with ``"type": "error"`` on top."""
    if messages:
        if error.body is not None:
            return {"type": "error", **error.body}
        kind = _ANTHROPIC.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    if error.body is not None:
        return error.body
    kind = _OPENAI.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": kind}}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The HTTP answer for an error on `path`."""
    return JSONResponse(error_body(error, messages=is_messages(path)), error.status, headers=error.headers)


def stream_error(error: ApiError, protocol: str) -> bytes:
    """An error inside a stream that has already begun."""
    if protocol == "messages":
        return b"event: error\ndata: " + _dump(error_body(error, messages=True)) + b"\n\n"
    if protocol == "responses":
        event = {"type": "error", "code": "server_error", "message": error.message, "param": None}
        return b"event: error\ndata: " + _dump(event) + b"\n\n"
    return b"data: " + _dump(error_body(error, messages=False)) + b"\n\n"


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
