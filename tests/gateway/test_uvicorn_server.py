"""A server stops on request, as soon as the requests in progress are answered."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from branchline.gateway import uvicorn_server
from branchline.gateway.uvicorn_server import UvicornServer, bind_socket
from tests.gateway.harness import run

LOST_BY_ASYNCIO = "asyncio drops the connection and closes it at the next garbage collection (gh-109564)"
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass
class App:
    """Answers when `may_answer` is set, also a client that has disconnected."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    request_count: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.request_count += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class RunningServer:
    app: App
    server: UvicornServer
    port: int
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def stop(self) -> None:
        self.server.stop()
        await self.task

    async def start_stop(self) -> asyncio.Task[None]:
        """A stop that has closed the listener and waits for requests."""
        stopping = asyncio.create_task(self.stop())
        await self.wait_until(lambda: not self.server.servers[0].is_serving())
        assert not stopping.done()
        return stopping

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def running_server() -> AsyncIterator[RunningServer]:
    app, listener = App(), bind_socket("127.0.0.1", 0)
    server, port = UvicornServer(app), listener.getsockname()[1]
    server.config.timeout_keep_alive = 1000  # no connection closes by a timeout
    task = asyncio.create_task(server.serve(sockets=[listener]))
    running = RunningServer(app, server, port, task)
    await running.wait_until(lambda: server.started)
    try:
        yield running
    finally:
        server.stop()
        server.force_exit = True
        await task


def test_stop_closes_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_server() as running, httpx.AsyncClient() as http:
            running.app.may_answer.set()
            assert (await http.get(running.url)).text == "ok"
            assert running.server.server_state.connections
            await running.stop()
            assert not running.server.server_state.connections

    monkeypatch.setattr(uvicorn_server, "_TICK_S", 1000)  # a stop does not wait for the next date header
    run(test)


def test_stop_waits_for_requests_in_progress() -> None:
    async def test() -> None:
        async with running_server() as running, httpx.AsyncClient() as http:
            answer = asyncio.create_task(http.get(running.url))
            await running.wait_until(lambda: running.app.request_count == 1)
            stopping = await running.start_stop()
            running.app.may_answer.set()
            assert (await answer).text == "ok"
            await stopping

    run(test)


def test_stop_waits_for_a_request_whose_client_disconnected() -> None:
    async def test() -> None:
        async with running_server() as running:
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(REQUEST)
            await running.wait_until(lambda: running.app.request_count == 1)
            writer.close()
            await running.wait_until(lambda: not running.server.server_state.connections)
            stopping = await running.start_stop()
            running.app.may_answer.set()
            await stopping

    run(test)


def test_force_exit_ends_a_stop_with_requests_in_progress() -> None:
    async def test() -> None:
        async with running_server() as running:
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(REQUEST)
            await running.wait_until(lambda: running.app.request_count == 1)
            stopping = await running.start_stop()
            running.server.force_exit = True
            await stopping
            assert len(running.server.server_state.tasks) == 1
            running.app.may_answer.set()
            await running.wait_until(lambda: not running.server.server_state.connections)
            writer.close()

    run(test)


@pytest.mark.parametrize(
    "iterations",
    [
        0,
        pytest.param(
            1, marks=pytest.mark.xfail(sys.version_info >= (3, 13), reason=LOST_BY_ASYNCIO, strict=False)
        ),
        *range(2, 8),
    ],
)
def test_connection_accepted_during_a_stop_is_closed(iterations: int) -> None:
    async def test() -> None:
        async with running_server() as running:
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.setblocking(False)
                for _ in range(iterations):
                    await asyncio.sleep(0)
                await running.stop()
                with suppress(ConnectionResetError):  # it was never accepted
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
            assert running.app.request_count == 0
            await running.wait_until(lambda: not running.server.server_state.connections)

    run(test)


def test_date_header_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_server() as running, httpx.AsyncClient() as http:
            running.app.may_answer.set()
            assert (await http.get(running.url)).headers["date"].endswith(" GMT")
            first = running.server.server_state.default_headers
            await running.wait_until(lambda: running.server.server_state.default_headers is not first)
            assert [name for name, _ in running.server.server_state.default_headers] == [b"date", b"server"]

    monkeypatch.setattr(uvicorn_server, "_TICK_S", 0)
    run(test)


def test_websocket_upgrade_is_answered_as_plain_http() -> None:
    async def test() -> None:
        async with running_server() as running, httpx.AsyncClient() as http:
            running.app.may_answer.set()
            headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
            answer = await http.get(
                running.url, headers={**headers, "sec-websocket-key": "eHh4eHh4eHh4eHh4eHh4eA=="}
            )
            assert (answer.status_code, answer.text) == (200, "ok")

    run(test)


def test_disconnect_is_reported_to_every_pipelined_request() -> None:
    async def test() -> None:
        received: list[str] = []
        started = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["type"] == "http.request"
            started.set()
            received.append((await receive())["type"])

        async with running_server() as running:
            running.server.config.loaded_app = app
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(2 * REQUEST)
            await started.wait()
            writer.close()
            await running.wait_until(lambda: not running.server.server_state.tasks)
            assert received == ["http.disconnect"]

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        async with running_server() as running:
            running.app.may_answer.set()
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            for count in (3, 1, 2, 1):
                writer.write(count * REQUEST)
                for _ in range(count):
                    assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
            assert running.app.request_count == 7
            writer.close()

    run(test)
