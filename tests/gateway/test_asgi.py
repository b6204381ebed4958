"""Requests on plain ASGI: large and incomplete bodies, wrong methods and paths, streams."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine
from branchline.gateway.asgi import AsgiRequest, BodyTooLargeError, read_body_parts
from branchline.gateway.config import GatewayConfig
from branchline.runtime.message_cache import parse_json
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run


def _asgi_request(*parts: bytes, length: str = "") -> tuple[AsgiRequest, list[bytes]]:
    """A request whose body arrives in parts, and the parts that were not read yet."""
    unread = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(b"content-length", length.encode())] if length else []
    return AsgiRequest({"method": "POST", "headers": headers}, receive, send), unread


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("retry_after", ["7", ""])
def test_busy_engine_keeps_its_status_and_retry_after(status: int, retry_after: str) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.refusal, server.retry_after = (status, b"queue is full"), retry_after
            engine = Replicas([VllmEngine(server.url)])
            async with agent(gateway_engine=engine) as a:
                response = await a.ask("p")
        assert response.status_code == status
        # A 503 without it would be a broken journal.
        assert response.headers.get("retry-after", "") == (retry_after or ("1" if status == 503 else ""))

    run(test)


@pytest.mark.parametrize("length", ["101", "9" * 5000])
def test_body_with_a_too_large_content_length_is_not_read(length: str) -> None:
    http, unread = _asgi_request(b"{}", length=length)
    with pytest.raises(BodyTooLargeError, match="expected at most 100 bytes"):
        asyncio.run(read_body_parts(http.receive, http.headers, 100))
    assert unread


def test_reading_stops_at_the_size_limit() -> None:
    http, unread = _asgi_request(b" " * 60, b" " * 60, b"{}")
    with pytest.raises(BodyTooLargeError, match="expected at most 100 bytes"):
        asyncio.run(read_body_parts(http.receive, http.headers, 100))
    assert unread == [b"{}"]


def test_body_at_the_limit_is_accepted() -> None:
    http, _ = _asgi_request(b" " * 49, b" " * 49 + b"{}", length="100")
    assert parse_json(b"".join(asyncio.run(read_body_parts(http.receive, http.headers, 100)))) == {}


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
            refused = await a.http.request(method, a.gateway.url + path, headers=a.admin_headers)
            assert refused.status_code == 405
            assert refused.headers["allow"] == allowed
            assert refused.json()["error"]["message"] == f"{method}: not for this path"

    run(test)


def test_models_answers_head() -> None:
    async def test() -> None:
        async with agent("x") as a:
            response = await a.http.head(f"{a.session.base_url}/models", headers=a.api_headers)
            assert (response.status_code, response.content) == (200, b"")
            assert (await a.http.head(f"{a.session.base_url}/models")).status_code == 401

    run(test)


@pytest.mark.parametrize("path", ["/nope", "/sessions/s/nope", "/v1", "/v1/nope"])
def test_unknown_path_is_404_as_json(path: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.get(a.gateway.url + path, headers=a.admin_headers)
            assert refused.status_code == 404
            assert refused.json()["error"]["type"] == "not_found_error"

    run(test)


@pytest.mark.parametrize("body", [b"[]", b"0", b'""', b"false"])
def test_options_that_are_not_an_object_open_no_session(body: bytes) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.post(f"{a.gateway.url}/sessions", content=body, headers=a.admin_headers)
            assert refused.status_code == 400
            assert len(a.gateway.sessions) == 1

    run(test)


# -- streams ------------------------------------------------------------------------------------------


class SlowServer:
    """A server whose `send` blocks on messages of one kind until `go` is set; `sent` are the others."""

    def __init__(self, blocked_kind: str) -> None:
        self._blocked_type = f"http.response.{blocked_kind}"
        self.sent: list[Any] = []
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] == self._blocked_type:
            self.waiting.set()
            await self.go.wait()
        self.sent.append(message.get("body", message["type"]))

    def request(self) -> AsgiRequest:
        async def receive() -> Any:
            raise AssertionError("the body was read")

        return AsgiRequest({"method": "POST", "headers": []}, receive, self.send)


async def _cancelled_chunk(server: SlowServer) -> AsgiRequest:
    """A request whose first chunk was cancelled while the server blocked."""
    http = server.request()
    sending = asyncio.ensure_future(http.send_chunk(b"a"))
    await server.waiting.wait()
    sending.cancel()
    await asyncio.wait([sending])
    server.go.set()
    return http


def test_error_response_is_possible_if_the_start_was_cancelled() -> None:
    async def test() -> None:
        server = SlowServer("start")
        http = await _cancelled_chunk(server)
        assert not http.is_streaming
        await http.send_json({"why": 1}, 409)
        assert server.sent == ["http.response.start", b'{"why":1}']

    run(test)


def test_error_is_an_event_if_the_stream_has_started() -> None:
    async def test() -> None:
        server = SlowServer("body")
        http = await _cancelled_chunk(server)
        assert http.is_streaming
        await http.send_chunk(b"why", last=True)
        assert server.sent == ["http.response.start", b"why"]

    run(test)
