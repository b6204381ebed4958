"""Requests as plain HTTP has them: bodies too large or cut off, methods and paths that are not there."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from branchline.gateway.asgi import AsgiRequest, BodyTooLargeError
from branchline.gateway.config import GatewayConfig
from tests.gateway.harness import Agent, agent, run


def _asgi_request(*parts: bytes, length: str = "") -> tuple[AsgiRequest, list[bytes]]:
    """An exchange whose body comes in parts, and the parts that nobody has taken yet."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(b"content-length", length.encode())] if length else []
    return AsgiRequest({"method": "POST", "headers": headers}, receive, send), left


@pytest.mark.parametrize("length", ["101", "9" * 5000])
def test_body_with_a_too_large_content_length_is_not_read(length: str) -> None:
    exchange, left = _asgi_request(b"{}", length=length)
    with pytest.raises(BodyTooLargeError, match="expected at most 100 bytes"):
        asyncio.run(exchange.read_json(100))
    assert left


def test_reading_stops_at_the_size_limit() -> None:
    exchange, left = _asgi_request(b" " * 60, b" " * 60, b"{}")
    with pytest.raises(BodyTooLargeError, match="expected at most 100 bytes"):
        asyncio.run(exchange.read_json(100))
    assert left == [b"{}"]


def test_body_at_the_limit_is_accepted() -> None:
    exchange, _ = _asgi_request(b" " * 49, b" " * 49 + b"{}", length="100")
    assert asyncio.run(exchange.read_json(100)) == {}


def _admin(a: Agent) -> dict[str, str]:
    return {"authorization": f"Bearer {a.gateway.admin_key}"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/sessions"])
def test_large_body_is_413_before_it_is_sent(path: str) -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(max_body_bytes=1000)) as a:
            key = a.gateway.admin_key if path == "/sessions" else a.session.api_key
            reader, writer = await _open(a)
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                "content-length: 1001\r\n\r\n".encode()
            )
            status = await reader.readline()
            assert status.split()[1] == b"413"
            writer.close()

    run(test)


async def _open(a: Agent) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = a.gateway.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_disconnect_inside_a_body_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with agent("x") as a:
            for path in ("/sessions", f"/sessions/{a.session.id}/reward", "/v1/chat/completions"):
                key = a.session.api_key if path.startswith("/v1") else a.gateway.admin_key
                _, writer = await _open(a)
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
                writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    with caplog.at_level(logging.WARNING):
        run(test)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/sessions", "GET, HEAD, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/engines", "DELETE, GET, HEAD, POST"),
    ],
)
def test_wrong_method_is_405_with_the_allowed_methods(method: str, path: str, allowed: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.request(method, a.gateway.url + path, headers=_admin(a))
            assert refused.status_code == 405
            assert refused.headers["allow"] == allowed
            assert refused.json()["error"]["message"] == f"{method}: not for this path"

    run(test)


def test_models_answers_head() -> None:
    async def test() -> None:
        async with agent("x") as a:
            key = {"authorization": f"Bearer {a.session.api_key}"}
            told = await a.http.head(f"{a.session.base_url}/models", headers=key)
            assert (told.status_code, told.content) == (200, b"")
            assert (await a.http.head(f"{a.session.base_url}/models")).status_code == 401

    run(test)


@pytest.mark.parametrize("path", ["/nope", "/sessions/s/nope", "/v1", "/v1/nope"])
def test_unknown_path_is_404_as_json(path: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.get(a.gateway.url + path, headers=_admin(a))
            assert refused.status_code == 404
            assert refused.json()["error"]["type"] == "not_found_error"

    run(test)


@pytest.mark.parametrize("body", [b"[]", b"0", b'""', b"false"])
def test_options_that_are_not_an_object_open_no_session(body: bytes) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.post(f"{a.gateway.url}/sessions", content=body, headers=_admin(a))
            assert refused.status_code == 400
            assert len(a.gateway.sessions) == 1

    run(test)


# -- streams ------------------------------------------------------------------------------------------


class SlowSend:
    """A server whose `send` waits where it is told to; what it has taken, in order."""

    def __init__(self, *waits: str) -> None:
        self._waits = {f"http.response.{kind}" for kind in waits}
        self.taken: list[Any] = []
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] in self._waits:
            self.waiting.set()
            await self.go.wait()
        self.taken.append(message.get("body", message["type"]))

    def request(self) -> AsgiRequest:
        async def receive() -> Any:
            raise AssertionError("nobody reads")

        return AsgiRequest({"method": "POST", "headers": []}, receive, self.send)


def test_a_stream_is_sending_from_its_first_byte_until_it_has_left() -> None:
    async def test() -> None:
        server = SlowSend("body")
        exchange = server.request()
        assert (exchange.is_sending, exchange.sent_count, exchange.direct) == (False, 0, None)
        sending = asyncio.ensure_future(exchange.send_chunk(b"a"))
        await server.waiting.wait()
        assert (exchange.is_sending, exchange.is_streaming, exchange.sent_count) == (True, True, 0)
        server.go.set()
        await sending
        assert (exchange.is_sending, exchange.sent_count) == (False, 1)
        await exchange.send_chunk(b"b", last=True)
        assert server.taken == ["http.response.start", b"a", b"b"]
        assert exchange.sent_count == 2
        assert exchange.direct is None  # there is none behind a server that is not ours

    run(test)


def test_error_response_is_possible_if_the_start_was_cancelled() -> None:
    async def test() -> None:
        server = SlowSend("start")
        exchange = server.request()
        sending = asyncio.ensure_future(exchange.send_chunk(b"a"))
        await server.waiting.wait()
        sending.cancel()
        await asyncio.wait([sending])
        assert not exchange.is_streaming
        server.go.set()
        await exchange.send_json({"why": 1}, 409)
        assert server.taken == ["http.response.start", b'{"why":1}']

    run(test)


def test_error_is_an_event_if_the_stream_has_started() -> None:
    async def test() -> None:
        server = SlowSend("body")
        exchange = server.request()
        sending = asyncio.ensure_future(exchange.send_chunk(b"a"))
        await server.waiting.wait()
        sending.cancel()
        await asyncio.wait([sending])
        assert exchange.is_streaming
        assert exchange.is_sending  # nobody else may think that all has left
        server.go.set()
        await exchange.send_chunk(b"why", last=True)
        assert server.taken == ["http.response.start", b"why"]

    run(test)
