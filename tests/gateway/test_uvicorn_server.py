"""A listener stops when it is told to, as soon as those it must wait for have left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from branchline.gateway import uvicorn_server
from branchline.gateway.uvicorn_server import Direct, UvicornServer, bind_socket
from tests.gateway.harness import run
from tests.gateway.streaming import decode_chunked

Delays = list[float]


@dataclass
class App:
    """Answers when it may; a client that leaves does not stop it."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class RunningServer:
    app: App
    listener: UvicornServer
    port: int
    serving: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def stop(self) -> None:
        self.listener.stop()
        await self.serving

    async def stopping(self) -> asyncio.Task[None]:
        """A stop that has come as far as it comes by itself, and has not ended."""
        stopping = asyncio.create_task(self.stop())
        await self.wait_until(lambda: not self.listener.servers[0].is_serving())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stopping.done()
        return stopping

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0)


@asynccontextmanager
async def running_server() -> AsyncIterator[RunningServer]:
    app, sock = App(), bind_socket("127.0.0.1", 0)
    listener, port = UvicornServer(app), sock.getsockname()[1]
    listener.config.timeout_keep_alive = 1000  # no connection ends because time has passed
    one = RunningServer(app, listener, port, asyncio.create_task(listener.serve(sockets=[sock])))
    await one.wait_until(lambda: listener.started)
    try:
        yield one
    finally:
        listener.stop()
        listener.exit_now()
        await one.serving


async def timers_of(work: Awaitable[Any], monkeypatch: pytest.MonkeyPatch) -> Delays:
    """How long the work asked the clock to wait, each time it did."""
    loop, delays = asyncio.get_running_loop(), Delays()
    later = loop.call_later

    def noted(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return later(delay, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", noted)
        await work
    return delays


def test_a_stop_never_waits_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_server() as alone:
            assert await timers_of(alone.stop(), monkeypatch) == []
        async with running_server() as visited, httpx.AsyncClient() as http:
            visited.app.may_answer.set()
            assert (await http.get(visited.url)).text == "ok"
            assert visited.listener.server_state.connections  # kept alive, and idle
            assert await timers_of(visited.stop(), monkeypatch) == []

    monkeypatch.setattr(uvicorn_server, "_DATE_S", 1000)
    run(test)


def test_whoever_is_being_answered_gets_the_answer() -> None:
    async def test() -> None:
        async with running_server() as one, httpx.AsyncClient() as http:
            asking = asyncio.create_task(http.get(one.url))
            await one.wait_until(lambda: one.app.asked == 1)
            stopping = await one.stopping()
            one.app.may_answer.set()
            assert (await asking).text == "ok"
            await stopping

    run(test)


def test_a_request_whose_client_has_left_is_waited_for_too() -> None:
    async def test() -> None:
        async with running_server() as one:
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await one.wait_until(lambda: one.app.asked == 1)
            writer.close()
            await one.wait_until(lambda: not one.listener.server_state.connections)
            stopping = await one.stopping()
            one.app.may_answer.set()
            await stopping

    run(test)


def test_nobody_is_waited_for_any_more_once_it_may_leave() -> None:
    async def test() -> None:
        async with running_server() as one:
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await one.wait_until(lambda: one.app.asked == 1)
            stopping = await one.stopping()
            one.listener.exit_now()
            await stopping
            assert len(one.listener.server_state.tasks) == 1
            one.app.may_answer.set()
            await one.wait_until(lambda: not one.listener.server_state.connections)
            writer.close()

    run(test)


@pytest.mark.parametrize("turns", range(8))
def test_a_client_that_comes_while_it_stops_is_sent_away_and_never_held(turns: int) -> None:
    async def test() -> None:
        async with running_server() as one:
            with socket.create_connection(("127.0.0.1", one.port)) as client:
                client.setblocking(False)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await one.stop()
                with suppress(ConnectionResetError):  # it was never accepted
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
            assert one.app.asked == 0
            await one.wait_until(lambda: not one.listener.server_state.connections)

    run(test)


def test_answers_carry_a_date_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_server() as one, httpx.AsyncClient() as http:
            one.app.may_answer.set()
            assert (await http.get(one.url)).headers["date"].endswith(" GMT")
            first = one.listener.server_state.default_headers
            await one.wait_until(lambda: one.listener.server_state.default_headers is not first)
            assert [name for name, _ in one.listener.server_state.default_headers] == [b"date", b"server"]

    monkeypatch.setattr(uvicorn_server, "_DATE_S", 0)
    run(test)


def test_who_asks_for_a_web_socket_is_answered_without_one() -> None:
    async def test() -> None:
        async with running_server() as one, httpx.AsyncClient() as http:
            one.app.may_answer.set()
            asked = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
            answer = await http.get(
                one.url, headers={**asked, "sec-websocket-key": "eHh4eHh4eHh4eHh4eHh4eA=="}
            )
            assert (answer.status_code, answer.text) == (200, "ok")

    run(test)


def test_a_client_that_leaves_has_left_all_its_requests() -> None:
    """Also where it had sent the next one before it was answered."""

    async def test() -> None:
        left: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["type"] == "http.request"
            asked.set()
            left.append((await receive())["type"])

        asked = asyncio.Event()
        async with running_server() as one:
            one.listener.config.loaded_app = app
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(2 * b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asked.wait()
            writer.close()
            await one.wait_until(lambda: not one.listener.server_state.tasks)
            assert left == ["http.disconnect"]

    run(test)


def test_requests_that_are_sent_together_are_answered_in_turn_and_then_forgotten() -> None:
    async def test() -> None:
        async with running_server() as one:
            one.app.may_answer.set()
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for together in (3, 1, 2, 1):
                writer.write(together * b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                for _ in range(together):
                    assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
            assert one.app.asked == 7
            (connection,) = one.listener.server_state.connections
            assert len(connection._cycles) == 1  # type: ignore[union-attr]
            writer.close()

    run(test)


# -- the short way to a client ------------------------------------------------------------------------


@dataclass
class Streaming:
    """Begins an answer with these headers, and says what short way there is behind it."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    cycle: Any = None
    direct: Direct | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert Direct.behind(send) is None  # nothing has begun
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        self.cycle, self.direct = send.__self__, Direct.behind(send)
        self.has_begun.set()
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"end"})


@asynccontextmanager
async def streamed(
    app: Streaming, version: str = "1.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The client of an answer that has begun."""
    async with running_server() as one:
        one.listener.config.loaded_app = app
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(f"GET / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        await app.has_begun.wait()
        try:
            yield reader, writer
        finally:
            app.may_end.set()
            writer.close()
            await one.wait_until(lambda: not one.listener.server_state.tasks)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_what_is_written_directly_stands_in_the_answer_where_it_was_written(version: str) -> None:
    async def test() -> None:
        app = Streaming()
        async with streamed(app, version) as (reader, _):
            assert app.direct is not None
            assert app.direct.is_open
            app.direct.write(b"a" * 300)
            app.direct.write("é\r\n0\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            app.may_end.set()
            data = await reader.readuntil(b"end\r\n0\r\n\r\n")
            assert decode_chunked(data) == (b"a" * 300 + "é\r\n0\r\n\r\n".encode() + b"end", b"")

    run(test)


def test_there_is_no_short_way_where_an_answer_is_not_in_chunks() -> None:
    async def test() -> None:
        app = Streaming([(b"content-length", b"3")])
        async with streamed(app) as (reader, _):
            assert app.cycle is not None
            assert app.direct is None
            app.may_end.set()
            assert (await reader.readuntil(b"end")).endswith(b"\r\n\r\nend")

    run(test)


def test_there_is_no_short_way_behind_another_servers_send() -> None:
    class Cycle:
        chunked_encoding = True

        async def send(self, message: Any) -> None: ...

    async def send(message: Any) -> None: ...

    assert [Direct.behind(one) for one in (send, Cycle().send, lambda message: None, None)] == [None] * 4


def test_the_short_way_is_closed_while_a_client_does_not_read_and_when_it_has_left() -> None:
    async def test() -> None:
        app = Streaming()
        async with streamed(app) as (_, writer):
            assert app.direct is not None
            app.cycle.transport.set_write_buffer_limits(high=10)
            assert _is_open(app.direct)
            for _ in range(64):  # the kernel holds some of it, but not as much as this
                app.direct.write(b"x" * 2**20)
                if not app.direct.is_open:
                    break
            assert app.cycle.flow.write_paused
            assert not _is_open(app.direct)
            app.cycle.flow.resume_writing()
            assert _is_open(app.direct)
            writer.transport.abort()
            while not app.cycle.disconnected:
                await asyncio.sleep(0)
            assert not _is_open(app.direct)

    run(test)


def _is_open(direct: Direct) -> bool:
    return direct.is_open
