"""HTTP in and out: bodies, errors as statuses. The only file that knows which error is which status."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from branchline.core.errors import (
    BranchlineError,
    CodecError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineInputError,
    InputError,
    JournalError,
    MessageError,
    SessionError,
)
from branchline.gateway.asgi_request import BodyTooLargeError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""What OpenAI calls a prompt that does not fit: clients compact when they read this, and not otherwise."""
_STATUS_BY_KIND = {
    "unknown": 404,
    "closed": 409,
    "out_of_calls": 409,
    "out_of_tokens": 409,
    "exists": 409,
    "conflict": 409,
    "forbidden": 403,
    "no_key": 401,
    "busy": 429,
}


def http_error(error: BranchlineError) -> tuple[int, str, str | None, dict[str, str]]:
    """An error as a status, its words, the field it names, and headers."""
    headers: dict[str, str] = {}
    if isinstance(error, SessionError):
        status = _STATUS_BY_KIND[error.kind]
        # SDKs try a 409 again unless they are told that it stays one.
        headers = {"retry-after": "1"} if error.kind == "busy" else {"x-should-retry": "false"}
    elif isinstance(error, BodyTooLargeError):
        status = 413
    elif isinstance(error, InputError | CodecError | EngineInputError):
        status = 400
    elif isinstance(error, JournalError):
        status = 503
    elif isinstance(error, EngineBusyError):
        status = 429
        headers = {"retry-after": error.retry_after} if error.retry_after else {}
    else:
        status = 502 if isinstance(error, EngineError) else 500
    name = error.field if isinstance(error, MessageError) else None
    return status, str(error), name, headers


def error_code(error: BranchlineError) -> str | None:
    """The word that programs know an error by, where it has one."""
    if isinstance(error, ContextLengthError):
        return CONTEXT_LENGTH_EXCEEDED
    return error.kind if isinstance(error, SessionError) else None


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
