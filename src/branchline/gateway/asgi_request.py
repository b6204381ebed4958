"""One HTTP request and its answer, on plain ASGI: the model API's hot path needs no more than this."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from branchline.core.errors import MessageError
from branchline.core.reader import decode_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

_JSON_HEADER = (b"content-type", b"application/json")
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientDisconnectedError(Exception):
    """Nobody is there to be answered."""


class BodyTooLargeError(MessageError):
    """A body with more bytes than are taken."""

    def __init__(self, size: str, most: int) -> None:
        super().__init__("body", size, f"at most {most} bytes")


class AsgiRequest:
    """A request as it came in, and the ways to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self._raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.is_streaming = False
        """Whether an answer is under way, so that an error can only be told inside it."""
        self.is_sending = False
        """Whether bytes of a stream are waiting to leave."""
        self.sent_count = 0
        """How many pieces of a stream have left."""
        self.extra_headers: list[tuple[bytes, bytes]] = []
        """What every answer says in its headers, whatever becomes of the request."""
        self.body = b""
        """The body as it came, once it has been read."""

    @cached_property
    def headers(self) -> Mapping[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._raw_headers}

    @property
    def api_key(self) -> str:
        """The key that came with it: a bearer token, or the header Anthropic's clients use."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else self.headers.get("x-api-key", "")

    async def read_json(self, max_bytes: int, decode: Callable[[bytes], object] = decode_json) -> Any:
        """The body, read and decoded. One that says of itself that it is too large is not even read."""
        told = self.headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > max_bytes:
            raise BodyTooLargeError(f"{told[:20]} bytes", max_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise BodyTooLargeError(f"{size} bytes and more", max_bytes)
            if not message.get("more_body", False):
                break
        self.body = data = b"".join(parts) if len(parts) > 1 else parts[0]
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError("body", data[:60], f"JSON ({error})") from error

    async def send_json(
        self, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers with JSON, all at once."""
        data = msgspec.json.encode(body)
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(data)).encode())
        start = [_JSON_HEADER, length, *self.extra_headers, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": start})
        await self._send({"type": "http.response.body", "body": data})

    async def send_chunk(self, data: bytes, *, last: bool = False) -> None:
        """Sends the next bytes of a stream of events."""
        self.is_sending = True
        if not self.is_streaming:
            start = [*_SSE_HEADERS, *self.extra_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": start})
            # Not before: who is cancelled while the start waits has told its client nothing.
            self.is_streaming = True
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.is_sending = False
        self.sent_count += 1

    async def run_until_disconnect(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> T:
        """The work's result; a client that hangs up before cancels it, and so may whoever holds `tasks`."""
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        is_working, is_gone = True, False

        def cancel(watch: asyncio.Task[None]) -> None:
            nonlocal is_gone
            if is_working and not watch.cancelled():
                # However the watch ended, nobody is there any more.
                watch.exception()
                is_gone = task.cancel()

        watch = asyncio.ensure_future(self._wait_for_disconnect())
        watch.add_done_callback(cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if not is_gone:
                raise
            raise ClientDisconnectedError from None
        finally:
            is_working = False
            if is_gone:
                task.uncancel()
            watch.cancel()
            tasks.discard(task)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
