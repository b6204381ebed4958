"""No connection reaches another, and none is late while its bytes wait to be read.

The time-outs are too long for a test; `age` lets them pass at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from branchline.gateway import uvicorn_server
from tests.gateway.harness import AsyncTest, run
from tests.gateway.limited_server import GET, LimitedServer, limited_server, read_response

TIMEOUT_S = 1000
TIMES: dict[str, Any] = dict.fromkeys(
    ("header_timeout_s", "body_timeout_s", "connection_idle_s", "write_timeout_s"), TIMEOUT_S
)
HALF_HEAD = b"GET / HTTP/1.1\r\nx: y\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\ncontent-length: 6\r\n\r\nabc"
LONG_ANSWER = b"x" * 30_000_000
RESET = struct.pack("ii", 1, 0)
"""Linger for no time: a close resets the connection."""

RunOnLoop = Callable[[AsyncTest], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run_on(request: pytest.FixtureRequest) -> RunOnLoop:
    """Runs a test on each of the two event loops."""
    factory: Any = None
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    return lambda test: run(test, factory)


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "_TICK_S", 0.01)


def the_connection(limited: LimitedServer) -> Any:
    """The only connection of the server."""
    (connection,) = limited.server.server_state.connections
    return connection


def age(connection: Any, seconds: float = 2 * TIMEOUT_S) -> None:
    """Lets time pass for one connection."""
    connection.active_at -= seconds
    connection._head_begun_at -= seconds
    connection._answered_at -= seconds
    if connection._unread_since is not None:
        connection._unread_since -= seconds
    if connection.timeout_keep_alive_task is not None and seconds > TIMEOUT_S:
        connection.timeout_keep_alive_handler()


async def raw_client(limited: LimitedServer, sent: bytes = b"") -> socket.socket:
    """A client that does nothing by itself; what it has sent was read."""
    before = set(limited.server._connections)
    client = socket.create_connection(("127.0.0.1", limited.port))
    limited.clients.append(client)
    client.setblocking(False)
    await limited.wait_until(lambda: bool(set(limited.server._connections) - before))
    (connection,) = set(limited.server._connections) - before
    if sent:
        client.sendall(sent)
        await limited.wait_until(lambda: bool(connection.scope))
    return client


async def receive(client: socket.socket, size: int = 100_000) -> bytes:
    return await asyncio.get_running_loop().sock_recv(client, size)


async def before_a_check(limited: LimitedServer, act: Callable[[], object]) -> None:
    """Does something right before overdue connections are closed: the event loop has read nothing since."""
    server, done = limited.server, asyncio.Event()

    async def on_tick(counter: int) -> bool:
        del server.on_tick  # type: ignore[method-assign]
        act()
        done.set()
        return await server.on_tick(counter)

    server.on_tick = on_tick  # type: ignore[method-assign]
    await done.wait()


async def assert_serves(limited: LimitedServer) -> None:
    """A new client is answered, and the server has not ended."""
    client = await raw_client(limited, GET)
    assert (await receive(client)).startswith(b"HTTP/1.1 200 ")
    assert not limited.task.done()


# -- a client that is gone ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("sent", [HALF_HEAD, HALF_BODY, GET], ids=["head", "body", "idle"])
def test_client_that_disconnects_when_its_time_is_over_ends_nothing(
    run_on: RunOnLoop, sent: bytes, is_reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client = await raw_client(limited, sent)
            if sent == GET:
                await receive(client)

            def disconnect() -> None:
                if is_reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                client.close()
                age(the_connection(limited))

            await before_a_check(limited, disconnect)
            await limited.wait_until(lambda: limited.connections == 0)
            await assert_serves(limited)

    run_on(test)
    assert not caplog.messages  # it has disconnected, and was not closed


@pytest.mark.parametrize("sent", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_client_that_disconnects_while_it_is_answered_ends_nothing(run_on: RunOnLoop, sent: bytes) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client = await raw_client(limited, sent)
            connection = the_connection(limited)
            refuse = connection._refuse

            def disconnect_and_refuse(*args: Any) -> None:
                client.close()
                refuse(*args)

            connection._refuse = disconnect_and_refuse
            age(connection)
            await limited.wait_until(lambda: limited.connections == 0 or limited.task.done())
            await assert_serves(limited)

    run_on(test)


def test_client_that_is_gone_before_it_is_refused_ends_nothing(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(answers=False, max_connections=1) as limited:
            client = await raw_client(limited, GET)
            socket.create_connection(("127.0.0.1", limited.port)).close()
            await limited.wait_until(lambda: "max_connections" in limited.server._logged_at)
            await limited.wait_until(lambda: limited.connections == 1)
            limited.app.may_answer.set()
            assert (await receive(client)).startswith(b"HTTP/1.1 200 ")

    run_on(test)


# -- an error of one connection ----------------------------------------------------------------------


def raise_error(*_: Any) -> Any:
    raise ValueError("of one connection")


class BrokenParser:
    feed_data = raise_error


class BrokenTransport:
    close = abort = is_closing = get_write_buffer_size = raise_error


@pytest.mark.parametrize("broken", ["find_overdue", "_refuse", "parser"])
def test_error_of_a_connection_closes_only_that_one(
    run_on: RunOnLoop, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            for _ in range(3):
                client = await raw_client(limited, HALF_HEAD)
                connection = the_connection(limited)
                setattr(connection, broken, BrokenParser() if broken == "parser" else raise_error)
                age(connection)
                client.sendall(b"z: ")
                await limited.wait_until(lambda: limited.connections == 0)
            await assert_serves(limited)

    run_on(test)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]  # once in ten seconds
    assert caplog.messages[0].startswith("ValueError: of one connection; a connection from 127.0.0.1 was cl")
    assert caplog.records[0].exc_info


@pytest.mark.parametrize("broken", ["shutdown", "transport"])
def test_error_of_a_connection_does_not_keep_a_stop_from_closing_the_others(
    run_on: RunOnLoop, broken: str
) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            await receive(await raw_client(limited, GET))
            connection = the_connection(limited)
            transport = connection.transport
            setattr(connection, broken, BrokenTransport() if broken == "transport" else raise_error)
            other = await raw_client(limited, GET)
            assert (await receive(other)).startswith(b"HTTP/1.1 200 ")
            limited.server.stop()
            await limited.task
            assert await receive(other) == b""
            assert limited.connections == 0
            transport.abort()

    run_on(test)


def test_idle_connection_that_cannot_be_closed_does_not_refuse_another(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(max_connections=1) as limited:
            await receive(await raw_client(limited, GET))
            connection = the_connection(limited)
            transport, connection.transport = connection.transport, BrokenTransport()
            client = socket.create_connection(("127.0.0.1", limited.port))
            limited.clients.append(client)
            client.setblocking(False)
            client.sendall(GET)
            assert (await receive(client)).startswith(b"HTTP/1.1 200 ")
            transport.abort()

    run_on(test)


def test_server_that_fails_closes_its_connections_and_sockets(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client = await raw_client(limited, HALF_BODY)
            limited.server.on_tick = raise_error  # type: ignore[assignment,method-assign]
            await limited.wait_until(limited.task.done)
            with pytest.raises(ValueError, match="of one connection"):
                limited.task.result()
            assert await receive(client) == b""
            await limited.wait_until(lambda: limited.app.disconnects == 1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", limited.port))

    run_on(test)


# -- a check that comes late -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "rest", "body"),
    [(HALF_HEAD, b"\r\n", b""), (HALF_BODY, b"def", b"abcdef"), (b"", GET, b"")],
    ids=["head", "body", "nothing"],
)
def test_request_that_arrived_while_the_event_loop_was_busy_is_not_late(
    run_on: RunOnLoop, sent: bytes, rest: bytes, body: bytes
) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client = await raw_client(limited, sent)

            def send_the_rest() -> None:
                age(the_connection(limited))
                client.sendall(rest)

            await before_a_check(limited, send_the_rest)
            answer = await receive(client)
            assert (answer[:13], answer.partition(b"\r\n\r\n")[2]) == (b"HTTP/1.1 200 ", body)

    run_on(test)


def test_request_that_arrives_at_the_end_of_the_idle_time_is_answered(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client = await raw_client(limited, GET)
            await receive(client)

            def send_the_next() -> None:
                client.sendall(GET)
                age(the_connection(limited))

            await before_a_check(limited, send_the_next)
            assert (await receive(client)).startswith(b"HTTP/1.1 200 ")
            age(the_connection(limited))
            assert await receive(client) == b""

    run_on(test)


def test_pipelined_request_is_not_late_while_it_is_not_read(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(answers=False, **TIMES) as limited:
            limited.app.reads_body = False  # to read it is to read on
            client = await raw_client(limited, GET + GET + HALF_HEAD)
            connection = the_connection(limited)
            assert connection.flow.read_paused
            client.sendall(b"\r\n")
            await before_a_check(limited, lambda: age(connection))
            await before_a_check(limited, lambda: None)
            limited.app.may_answer.set()
            answers = b""
            while answers.count(b"HTTP/1.1 200 ") < 3:
                answers += (data := await receive(client))
                assert data
            assert b"408" not in answers

    run_on(test)


async def _unread_answer(limited: LimitedServer) -> socket.socket:
    """A client that does not read its answer, after that was noticed."""
    limited.app.answer = LONG_ANSWER
    client = await raw_client(limited, GET)
    connection = the_connection(limited)
    await limited.wait_until(lambda: connection._unread_since is not None)
    return client


async def _receive_all(client: socket.socket, received: int = 0) -> None:
    while received < len(LONG_ANSWER):
        data = await receive(client, 4_000_000)
        assert data, f"closed after {received} bytes"
        received += len(data)


def test_client_that_read_while_the_event_loop_was_busy_gets_its_whole_answer(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client, received = await _unread_answer(limited), 0

            def read_some() -> None:
                nonlocal received
                with suppress(BlockingIOError):
                    while True:
                        received += len(client.recv(4_000_000))
                age(the_connection(limited))

            await before_a_check(limited, read_some)
            await _receive_all(client, received)

    run_on(test)


def test_client_that_reads_slowly_gets_its_whole_answer(run_on: RunOnLoop) -> None:
    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            client, received = await _unread_answer(limited), 0
            connection = the_connection(limited)
            for count in range(1, 5):
                unsent = connection._unsent_bytes
                while received < count * 3_000_000:
                    received += len(await receive(client, 1_000_000))
                await limited.wait_until(lambda unsent=unsent: connection._unsent_bytes < unsent)  # type: ignore[misc]
                age(connection, 0.6 * TIMEOUT_S)
            await _receive_all(client, received)

    run_on(test)


@pytest.mark.skipif(sys.platform != "linux", reason="how much the kernel takes differs")
@pytest.mark.parametrize("closes", [False, True])
def test_connection_with_an_answer_that_nobody_reads_is_closed(run_on: RunOnLoop, closes: bool) -> None:
    """Also if the answer is so short that the app is done with it."""

    async def test() -> None:
        async with limited_server(**TIMES) as limited:
            limited.app.answer = LONG_ANSWER
            client = await raw_client(limited, b"GET / HTTP/1.1\r\n")
            connection = the_connection(limited)
            connection.transport.set_write_buffer_limits(high=2**30)
            client.sendall(b"connection: close\r\n\r\n" if closes else b"\r\n")
            await limited.wait_until(lambda: connection._unread_since is not None)
            assert connection.is_idle
            age(connection)
            await limited.wait_until(lambda: limited.connections == 0)

    run_on(test)


# -- the buffer that all connections share -----------------------------------------------------------


@pytest.mark.parametrize("size", [1, uvicorn_server._RECEIVE_BYTES, 3 * uvicorn_server._RECEIVE_BYTES + 1])
def test_bodies_that_arrive_at_the_same_time_stay_apart(run_on: RunOnLoop, size: int) -> None:
    async def test() -> None:
        async with limited_server(max_body_bytes=2**30) as limited:

            async def echo(content: bytes) -> bytes:
                reader, writer = await limited.connect()
                writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(content))
                for half in (content[: size // 2], content[size // 2 :]):
                    writer.write(half)
                    await writer.drain()
                    await asyncio.sleep(0)
                return (await read_response(reader)).partition(b"\r\n\r\n")[2]

            contents = [bytes([number]) * size for number in range(8)]
            assert await asyncio.gather(*map(echo, contents)) == contents

    run_on(test)


def test_asyncio_receives_without_allocating_a_buffer_for_each_read() -> None:
    async def test() -> None:
        async with limited_server() as limited:
            await raw_client(limited, GET)
            assert limited.server.receive_buffer[: len(GET)] == GET

    run(test)
