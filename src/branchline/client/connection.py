"""Requests to the control API of one gateway, repeated until they are answered.

Every request can be repeated: reading changes nothing, and each change has an idempotency key that all its
attempts share, so that the gateway makes it once. A request is repeated if its connection fails, and after
429, 502, 503 or 504, with Retry-After and exponential backoff, up to a deadline. A failure that the gateway
itself reports for good, such as an engine that is not reachable, is raised at once.
"""

from __future__ import annotations

import logging
import math
import secrets
from typing import Any, TypeVar

import msgspec

from branchline.core.errors import EngineError, GatewayError
from branchline.engines.client import HttpClient, ServerConfig
from branchline.loop.gateway_responses import error_from_response
from branchline.loop.http_model import Retry
from branchline.runtime.headers import IDEMPOTENCY_HEADER

log = logging.getLogger("branchline.client")

T = TypeVar("T")
_TEMPORARY_STATUSES = frozenset({429, 502, 503, 504})


class GatewayConnection:
    """Sends requests to a gateway. It belongs to the event loop of its first request."""

    def __init__(self, url: str, admin_key: str, *, retry_timeout_s: float, read_timeout_s: float) -> None:
        server = ServerConfig(url.rstrip("/"), read_timeout_s=read_timeout_s)
        self.url = server.url
        self._admin_key = admin_key
        self._retry_timeout_s = retry_timeout_s
        self._http = HttpClient(server, server.url)
        self._is_closed = False

    async def close(self) -> None:
        """Closes all connections; requests in progress fail."""
        self._is_closed = True
        await self._http.close()

    async def send(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: Any = None,
        key: str = "",
        retry_timeout_s: float | None = None,
        accepted: int = 200,
    ) -> T:
        """Returns the answer, decoded; the plain content if `kind` is bytes.

        `key` replaces the admin key; `retry_timeout_s` can shorten the time for attempts; `accepted` is a
        status that is an answer too. Raises the error that the gateway reported, or GatewayError.
        """
        headers = {} if method == "GET" else {IDEMPOTENCY_HEADER: secrets.token_urlsafe(24)}
        if key or self._admin_key:
            # Not as `authorization`: that may hold the credentials of a URL, for a proxy.
            headers["x-api-key"] = key or self._admin_key
        content = b"" if body is None else msgspec.json.encode(body)
        request = f"{method} {path.partition('?')[0]}"
        retry_s = min(self._retry_timeout_s, math.inf if retry_timeout_s is None else retry_timeout_s)
        retry = Retry(retry_s)
        is_repeated = False
        while True:
            response = self._http.request(method, path, content, headers=headers)
            try:
                status, answer = await response.read()
            except EngineError as error:
                if not is_repeated and not self._is_closed:
                    log.warning("%s: %s; trying again for up to %g s", request, error, retry_s)
                if self._is_closed or not await retry.wait(retry_after="0"):
                    raise GatewayError(f"{request}: {error}") from error
                is_repeated = True
                continue
            finally:
                await response.close()
            if status // 100 == 2 or status == accepted:
                return _decode(answer, kind, request)
            retry_after, is_gateway = response.headers.get("retry-after", ""), _is_gateway_error(answer)
            is_temporary = status == 429 or not is_gateway or bool(retry_after)
            if status in _TEMPORARY_STATUSES and is_temporary and await retry.wait(retry_after):
                is_repeated = True
                continue
            if not is_gateway:
                text = answer[:200].decode(errors="replace") or "no content"
                raise GatewayError(f"{request}: status {status}: not a gateway's response: {text}", status)
            raise error_from_response(status, answer, retry_after, request)


def _decode(answer: bytes, kind: type[T], request: str) -> T:
    if kind is bytes:
        return answer  # type: ignore[return-value]
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError(f"{request}: not a gateway's response: {answer[:200]!r}: {error}") from error


class _ErrorFields(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _is_gateway_error(answer: bytes) -> bool:
    try:
        msgspec.json.decode(answer, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
