"""A connection cannot make the server wait or collect bytes beyond its limits; others are not disturbed."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.gateway import server_connection, uvicorn_server
from branchline.gateway.uvicorn_server import UvicornServer
from tests.engines.manual_clock import ManualClockLoop
from tests.gateway.harness import run
from tests.gateway.limited_server import GET, EchoApp, limited_server, read_response

HEADER_LIMIT = 2000
LATE_S = 1000.0
"""A time limit that is reached only because the test moves the clock."""


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "_TICK_S", 0.01)
    monkeypatch.setattr(server_connection, "_LINGER_S", 0.05)


# -- size of the head --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless",
    [b"GET /" + b"a" * 100, b"GET / HTTP/1.1\r\nx: " + b"a" * 100, b"GET / HTTP/1.1\r\n" + b"a" * 100],
    ids=["request line", "header value", "header name"],
)
def test_endless_head_is_refused_soon_after_the_limit(
    endless: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with limited_server(max_header_bytes=HEADER_LIMIT) as limited:
            reader, writer = await limited.connect()
            writer.write(endless)
            sent = len(endless)
            while not limited.server._logged_at and sent < 100 * HEADER_LIMIT:
                await limited.wait_for_bytes(sent)
                writer.write(b"a" * 500)
                sent += 500
            # Every byte was read before the next ones were sent, but for the last 500.
            assert sent <= len(endless) + HEADER_LIMIT + 1000
            response = await read_response(reader)
            assert response.startswith(b"HTTP/1.1 431 ")
            assert b"expected at most 2000" in response
            assert await reader.read() == b""
            assert not limited.app.scopes

    with caplog.at_level(logging.WARNING, "branchline.gateway"):
        run(test)
    (line,) = caplog.messages
    assert line.startswith("max_header_bytes: got ")
    assert "127.0.0.1" in line


@pytest.mark.parametrize(("extra", "status"), [(0, b"200"), (1, b"431")])
def test_limit_on_the_head_is_exact_when_it_arrives_at_once(extra: int, status: bytes) -> None:
    async def test() -> None:
        async with limited_server(max_header_bytes=HEADER_LIMIT) as limited:
            reader, writer = await limited.connect()
            # The path, and each header with its separator and line end.
            value = b"v" * (HEADER_LIMIT - len("/") - len("x: \r\n") + extra)
            writer.write(b"GET / HTTP/1.1\r\nx:" + value + b"\r\n\r\n")
            assert (await read_response(reader)).split()[1] == status

    run(test)


def test_trailers_of_a_chunked_body_count_as_headers() -> None:
    async def test() -> None:
        async with limited_server(max_header_bytes=HEADER_LIMIT) as limited:
            reader, writer = await limited.connect()
            writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx: ")
            while not limited.server._logged_at:
                writer.write(b"a" * 500)
                await asyncio.sleep(0.001)
            assert (await read_response(reader)).startswith(b"HTTP/1.1 431 ")
            await limited.wait_until(lambda: limited.app.disconnects == 1)

    run(test)


@settings(max_examples=40)
@given(st.data())
def test_bodies_do_not_count_however_the_bytes_arrive(data: st.DataObject) -> None:
    chunked = data.draw(st.booleans())
    bodies = [b"b" * size for size in data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=3))]
    sent = b""
    for body in bodies:
        if chunked:
            parts = [body[at : at + 700] for at in range(0, len(body), 700)]
            sent += b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            sent += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            sent += b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))

    async def test() -> None:
        async with limited_server(max_header_bytes=200) as limited:
            reader, writer = await limited.connect()
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                writer.write(sent[start:end])
                await asyncio.sleep(0)
            for body in bodies:
                assert (await read_response(reader)).endswith(b"\r\n\r\n" + body)

    run(test)


# -- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nx: y\r\n", GET + b"GET /"])
def test_head_that_does_not_arrive_is_answered_with_408(sent: bytes) -> None:
    async def test() -> None:
        async with limited_server(header_timeout_s=LATE_S, connection_idle_s=9 * LATE_S) as limited:
            reader, writer = await limited.connect()
            writer.write(sent)
            await limited.wait_until(lambda: limited.connections == 1)
            await limited.wait_for_bytes(len(sent))
            if sent.startswith(GET):
                assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            await limited.pass_time(LATE_S / 2)
            assert not limited.server._logged_at
            await limited.pass_time(LATE_S)
            assert "header_timeout_s" in limited.server._logged_at
            assert (await read_response(reader)).startswith(b"HTTP/1.1 408 ")
            assert await reader.read() == b""
            await limited.wait_until(lambda: limited.connections == 0)

    run(test, ManualClockLoop)


def test_one_byte_at_a_time_does_not_extend_the_time_for_headers() -> None:
    async def test() -> None:
        async with limited_server(header_timeout_s=LATE_S) as limited:
            reader, writer = await limited.connect()
            head = b"GET / HTTP/1.1\r\nx: "
            writer.write(head)
            for count in range(4):
                await limited.wait_for_bytes(len(head) + count)
                assert not limited.server._logged_at
                await limited.pass_time(0.3 * LATE_S)
                writer.write(b"a")
            assert "header_timeout_s" in limited.server._logged_at
            assert (await read_response(reader)).startswith(b"HTTP/1.1 408 ")

    run(test, ManualClockLoop)


def test_silent_body_is_answered_with_408_and_the_app_sees_a_disconnect() -> None:
    async def test() -> None:
        async with limited_server(body_timeout_s=LATE_S) as limited:
            reader, writer = await limited.connect()
            sent = b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc"
            writer.write(sent)
            await limited.wait_for_bytes(len(sent))
            await limited.pass_time(LATE_S / 2)
            assert not limited.server._logged_at
            await limited.pass_time(LATE_S)
            assert "body_timeout_s" in limited.server._logged_at
            assert (await read_response(reader)).startswith(b"HTTP/1.1 408 ")
            await limited.wait_until(lambda: limited.app.disconnects == 1)

    run(test, ManualClockLoop)


def test_request_in_progress_is_not_closed_by_any_timeout() -> None:
    async def test() -> None:
        times = {"header_timeout_s": LATE_S, "body_timeout_s": LATE_S, "write_timeout_s": LATE_S}
        async with limited_server(answers=False, connection_idle_s=LATE_S, **times) as limited:
            reader, writer = await limited.connect()
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc")
            await limited.wait_until(lambda: bool(limited.app.scopes))
            await limited.wait_until(lambda: limited.app.is_complete)
            for _ in range(3):
                await limited.pass_time(2 * LATE_S)
            limited.app.may_answer.set()
            assert (await read_response(reader)).endswith(b"abc")
            await limited.pass_time(2 * LATE_S)
            assert limited.connections == 0  # connection_idle_s is over
            assert await reader.read() == b""

    run(test, ManualClockLoop)


def test_connection_without_a_further_request_is_closed_after_its_idle_time() -> None:
    async def test() -> None:
        async with limited_server(connection_idle_s=LATE_S) as limited:
            reader, writer = await limited.connect()
            writer.write(GET)
            assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            await limited.pass_time(LATE_S / 2)
            assert limited.connections == 1  # although uvicorn's own 5 s are over
            await limited.pass_time(LATE_S)
            assert limited.connections == 0
            assert await reader.read() == b""

    run(test, ManualClockLoop)


def test_body_sent_after_its_answer_may_take_a_limited_time() -> None:
    async def test() -> None:
        async with limited_server(body_timeout_s=LATE_S, connection_idle_s=9 * LATE_S) as limited:
            limited.app.reads_body = False
            reader, writer = await limited.connect()
            sent = b"POST / HTTP/1.1\r\ncontent-length: 900000\r\n\r\nabc"
            writer.write(sent)
            assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            for count in range(4):
                await limited.wait_for_bytes(len(sent) + count)
                assert limited.connections == 1
                await limited.pass_time(0.3 * LATE_S)
                writer.write(b"a")
            assert limited.connections == 0

    run(test, ManualClockLoop)


def test_client_that_does_not_read_its_answer_is_disconnected() -> None:
    async def test() -> None:
        async with limited_server(write_timeout_s=LATE_S) as limited:
            limited.app.answer = b"x" * 50_000_000
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                client.connect(("127.0.0.1", limited.port))
                client.sendall(GET)
                await limited.wait_until(lambda: bool(limited.app.scopes))
                await limited.pass_time(LATE_S / 2)
                assert limited.connections == 1
                while limited.connections:  # It counts from when the server first finds bytes unread.
                    await limited.pass_time(LATE_S)
                assert "write_timeout_s" in limited.server._logged_at

    run(test, ManualClockLoop)


def test_a_limit_during_an_answer_closes_the_connection_without_a_second_one() -> None:
    async def test() -> None:
        async with limited_server(max_header_bytes=HEADER_LIMIT) as limited:
            limited.app.answer, limited.app.stops_halfway = b"x" * 1000, True
            reader, writer = await limited.connect()
            writer.write(GET)
            assert (await reader.readuntil(b"x")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"nonsense\r\n\r\n")
            with suppress(ConnectionError):
                assert b"HTTP/1.1" not in await reader.read()
            await limited.wait_until(lambda: limited.connections == 0)

    run(test)


# -- number of connections ---------------------------------------------------------------------------


def test_new_connection_replaces_the_one_that_was_idle_longest() -> None:
    async def test() -> None:
        async with limited_server(max_connections=3) as limited:
            streams = [await limited.connect() for _ in range(3)]
            for reader, writer in reversed(streams):  # the last one is now idle longest
                writer.write(GET)
                assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            reader, writer = await limited.connect()
            writer.write(GET)
            assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await streams[2][0].readexactly(1)
            for reader, writer in streams[:2]:
                writer.write(GET)
                assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            assert limited.connections == 3

    run(test)


def test_connection_is_refused_if_all_others_have_a_request_in_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with limited_server(answers=False, max_connections=2) as limited:
            busy = [await limited.connect() for _ in range(2)]
            for _, writer in busy:
                writer.write(GET)
            await limited.wait_until(lambda: len(limited.app.scopes) == 2)
            for _ in range(3):
                reader, writer = await limited.connect()
                assert (await read_response(reader)).startswith(b"HTTP/1.1 503 ")
            limited.app.may_answer.set()
            for reader, _ in busy:
                assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")

    with caplog.at_level(logging.WARNING, "branchline.gateway"):
        run(test)
    assert caplog.messages == [
        "max_connections: got 3, expected at most 2; a connection from 127.0.0.1 was closed, "
        "0 others since the last such line"
    ]


def test_limit_on_connections_is_lowered_to_what_the_process_may_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for files, limit in ((None, 8192), (1_000_000, 8192), (1024, 480), (10, 1)):
        monkeypatch.setattr(uvicorn_server, "open_file_limit", lambda files=files: files)
        assert UvicornServer(EchoApp()).max_connections == limit
    assert "lowered from 8192 to 480, because the process may open 1024 files" in caplog.text


# -- other protocols ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 200), st.sampled_from([b"h2c", b"websocket", b"TLS/1.0"]), st.booleans())
def test_upgrade_is_ignored_and_the_body_is_kept(cut: int, protocol: bytes, chunked: bool) -> None:
    async def test() -> None:
        async with limited_server() as limited:
            head = b"POST /p?q=1 HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol
            head += b"\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
            if chunked:
                sent = head + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
            else:
                sent = head + b"content-length: 5\r\n\r\nhello"
            reader, writer = await limited.connect()
            for part in (sent[:cut], sent[cut:], GET):
                writer.write(part)
                await asyncio.sleep(0)
            assert (await read_response(reader)).endswith(b"\r\n\r\nhello")
            assert (await read_response(reader)).startswith(b"HTTP/1.1 200 ")
            assert limited.app.scopes[0]["path"] == "/p"
            assert limited.app.scopes[0]["query_string"] == b"q=1"
            names = [name for name, _ in limited.app.scopes[0]["headers"]]
            # A WebSocket is refused by the app, where its clients then use HTTP.
            assert (b"upgrade" in names) == (protocol == b"websocket")
            assert b"http2-settings" in names

    run(test)


@pytest.mark.parametrize("sent", [b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"nonsense\r\n\r\n"])
def test_what_is_no_request_for_a_path_is_answered_with_400(sent: bytes) -> None:
    async def test() -> None:
        async with limited_server() as limited:
            reader, writer = await limited.connect()
            writer.write(sent)
            assert (await read_response(reader)).startswith(b"HTTP/1.1 400 ")
            assert await reader.read() == b""
            assert not limited.app.scopes

    run(test)
