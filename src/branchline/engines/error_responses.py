"""Error responses of servers as exceptions, with the server's own message."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from branchline.core.errors import ContextLengthError, EngineBusyError, EngineError, EngineInputError

# A request with such a response fails on every server, so it is not sent to another one.
INVALID_REQUEST_STATUSES = frozenset({400, 413, 422})
TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE = 429, 503
# Messages of servers that have no error code for a prompt that is too long.
_CONTEXT_LENGTH_MESSAGE = re.compile(r"maximum context length|model's context length")


def error_from_response(server: str, status: int, body: bytes, retry_after: str = "") -> EngineError:
    """Returns the error for a response without success, with the server's own message."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = None
    reason = _error_message(content) or body.decode(errors="replace").strip()[:500] or "no reason given"
    message = f"{server}: status {status}: {reason}"
    if status in (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE):
        return EngineBusyError(message, retry_after, is_overloaded=status == SERVICE_UNAVAILABLE)
    is_invalid = status in INVALID_REQUEST_STATUSES
    is_too_long = is_invalid and _CONTEXT_LENGTH_MESSAGE.search(reason)
    if is_too_long or _error_code(content) == "context_length_exceeded":
        return ContextLengthError(message)
    return EngineInputError(message) if is_invalid else EngineError(message)


def error_from_event(server: str, event: bytes, default_status: int = 500) -> EngineError:
    """Returns the error of a stream's error event: `{"error": {"message": …, "code": 400}}` and variants.

    `default_status` is the status of an event without a code.
    """
    code = _error_code(msgspec.json.decode(event))
    return error_from_response(server, code if isinstance(code, int) else default_status, event)


def _error_code(content: Any) -> Any:
    error = content.get("error") if isinstance(content, dict) else None
    fields = error if isinstance(error, dict) else content
    return fields.get("code") if isinstance(fields, dict) else None


def _error_message(content: Any) -> str:
    while isinstance(content, dict):
        content = next((content[key] for key in ("error", "message", "detail") if content.get(key)), "")
    return content if isinstance(content, str) else str(content or "")
