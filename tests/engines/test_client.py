from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.engines.client import KEEPALIVE_EXPIRY_S, MAX_KEEPALIVE_CONNECTIONS, HttpClient, ServerConfig
from tests.engines.fake_model import run
from tests.engines.fake_servers import FakeVllm
from tests.engines.fake_transport import END, HEAD, InMemoryServer, yield_to_loop
from tests.engines.manual_clock import ManualClockLoop

CERTIFICATE = Path(__file__).parent / "localhost.pem"
"""Of localhost and 127.0.0.1, signed by itself; used nowhere else."""
CLOSE = b""
"""The connection is closed instead of an answer."""


def http_response(body: bytes = b"{}", *headers: bytes, status: int = 200) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


class CannedServer:
    """A server that says one answer after another on each connection, and then waits or closes it."""

    def __init__(self, connections: Sequence[Sequence[bytes]], *, closes: bool) -> None:
        self.connections = iter(connections)
        self.closes = closes
        self.request_heads: list[list[bytes]] = []
        """The request lines and headers of each connection."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads: list[bytes] = []
        self.request_heads.append(heads)
        for answer in next(self.connections):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
            writer.write(answer)
            if answer == CLOSE:
                break
        else:
            if not self.closes:
                await reader.read()
        writer.close()


@asynccontextmanager
async def canned_server(
    *connections: Sequence[bytes], tls: bool = False, closes: bool = False, **options: Any
) -> AsyncGenerator[tuple[HttpClient, CannedServer], None]:
    """A client of a server with so many connections to give."""
    there = CannedServer(connections, closes=closes)
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
    # Room for all of them to come at once: who finds none comes again after a second.
    server = await asyncio.start_server(there.serve, "127.0.0.1", 0, ssl=context, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    there.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    client = HttpClient(ServerConfig(there.url, **options), there.url)
    try:
        yield client, there
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def read_all_events(client: HttpClient, *, whole: bool = False) -> list[bytes]:
    reply = client.post("/events", b"{}", whole=whole)
    events: list[bytes] = []
    try:
        while more := await reply.events():
            events += more
    finally:
        await reply.close()
    return events


def test_a_connection_is_used_again_and_again() -> None:
    async def main() -> None:
        async with canned_server(
            [http_response(b'{"a": 1}'), http_response(), http_response(b"data: 1\n\n"), http_response()]
        ) as (client, there):
            assert await client.get_json("/a") == {"a": 1}
            assert await client.post_control("/b")
            assert await read_all_events(client) == [b"1"]
            assert await client.get_json("/c") == {}
            lines = [head.split(b"\r\n")[0] for head in there.request_heads[0]]
            assert lines == [
                b"GET /a HTTP/1.1",
                b"POST /b HTTP/1.1",
                b"POST /events HTTP/1.1",
                b"GET /c HTTP/1.1",
            ]

    run(main())


@pytest.mark.parametrize("whole", [False, True])
def test_a_kept_connection_that_the_server_closed_is_replaced_once(whole: bool) -> None:
    async def main() -> None:
        async with canned_server([http_response(), CLOSE], [http_response(b"data: 1\n\n")]) as (
            client,
            there,
        ):
            await client.get_json("/a")
            assert await read_all_events(client, whole=whole) == [b"1"]
            assert [len(heads) for heads in there.request_heads] == [2, 1]
        async with canned_server([http_response(), CLOSE], [CLOSE]) as (client, there):
            await client.get_json("/a")
            with pytest.raises(EngineError, match="broke before the answer ended: closed by the server"):
                await read_all_events(client, whole=whole)
            assert [len(heads) for heads in there.request_heads] == [2, 1]

    run(main())


def test_a_kept_connection_whose_end_was_seen_is_not_used() -> None:
    async def main() -> None:
        async with canned_server([http_response()], [http_response(b"data: 1\n\n")], closes=True) as (
            client,
            there,
        ):
            await client.get_json("/a")
            while client._connections:
                await asyncio.sleep(0)
            assert await read_all_events(client) == [b"1"]
            assert [len(heads) for heads in there.request_heads] == [1, 1]

    run(main())


def test_a_last_event_without_its_empty_line_is_read() -> None:
    async def main() -> None:
        async with canned_server([http_response(b"data: 1\n\ndata: 2\n")]) as (client, _):
            assert await read_all_events(client) == [b"1", b"2"]

    run(main())


def test_a_new_connection_that_the_server_closed_is_not_replaced() -> None:
    async def main() -> None:
        async with canned_server([CLOSE]) as (client, there):
            with pytest.raises(EngineError, match="broke before the answer ended"):
                await client.get_json("/a")
            assert len(there.request_heads) == 1

    run(main())


def test_an_answer_that_had_begun_is_not_asked_for_again() -> None:
    async def main() -> None:
        half = http_response(b"data: 1\n\ndata: 2")[:-3]
        async with canned_server([http_response(), half], closes=True) as (client, there):
            await client.get_json("/a")
            reply = client.post("/events", b"{}")
            assert await reply.next_events() == [b"1"]
            with pytest.raises(EngineError, match="broke before the answer ended"):
                await reply.next_events()
            assert [len(heads) for heads in there.request_heads] == [2]

    run(main())


@pytest.mark.parametrize("close", [b"connection: close", b"Connection: Close"])
def test_a_server_that_keeps_no_connection_gets_a_new_one_each_time(close: bytes) -> None:
    async def main() -> None:
        async with canned_server([http_response(b"{}", close)], [http_response(b"{}", close)]) as (
            client,
            there,
        ):
            await client.get_json("/a")
            await client.get_json("/b")
            assert len(there.request_heads) == 2

    run(main())


def run_with_manual_clock(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        runner.run(main)


def test_a_connection_that_was_silent_for_long_is_not_trusted() -> None:
    async def main() -> None:
        async with canned_server([http_response()] * 3, [http_response()]) as (client, there):
            await client.get_json("/a")
            ManualClockLoop.running().offset_s += KEEPALIVE_EXPIRY_S - 1
            await client.get_json("/b")
            ManualClockLoop.running().offset_s += KEEPALIVE_EXPIRY_S + 1
            await client.get_json("/c")
            assert [len(heads) for heads in there.request_heads] == [2, 1]

    run_with_manual_clock(main())


def test_only_so_many_connections_are_kept() -> None:
    async def main() -> None:
        async with canned_server(*[[http_response()]] * (MAX_KEEPALIVE_CONNECTIONS + 3)) as (client, _):
            await asyncio.gather(*[client.get_json("/a") for _ in range(MAX_KEEPALIVE_CONNECTIONS + 3)])
            await asyncio.sleep(0)
            assert len(client._idle) == len(client._connections) == MAX_KEEPALIVE_CONNECTIONS

    run(main())


def test_control_says_whether_the_server_has_it() -> None:
    async def main() -> None:
        answers = [http_response(status=404), http_response(status=405), http_response(status=204)]
        async with canned_server(answers) as (client, _):
            assert [await client.post_control("/x") for _ in answers] == [False, False, True]
        async with canned_server([http_response(b'{"detail": "busy"}', status=503)]) as (client, _):
            with pytest.raises(EngineError, match="status 503: busy"):
                await client.post_control("/x")
        async with canned_server(
            [http_response(b'{"detail": "no"}', status=400), http_response(b"<html>")]
        ) as (client, _):
            with pytest.raises(EngineInputError, match="status 400: no"):
                await client.get_json("/x")
            with pytest.raises(EngineError, match="/y: not JSON: b'<html>'"):
                await client.get_json("/y")

    run(main())


def test_silence_ends_a_request() -> None:
    async def main() -> None:
        async with canned_server([b"HTTP/1.1 200 OK\r\n"], read_timeout_s=0.02) as (client, _):
            with pytest.raises(EngineError, match=r"127.0.0.1:\d+: nothing came for 0.02 s"):
                await read_all_events(client)
        async with canned_server([b"HTTP/1.1 200 OK\r\n"]) as (client, _):
            with pytest.raises(EngineError, match=r"/x: no answer within 0.02 s"):
                await client.post_control("/x", timeout_s=0.02)
            assert not client._connections, "what was given up is closed"

    run(main())


def test_a_connection_that_does_not_come_about_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        client = HttpClient(ServerConfig("http://host:1", connect_timeout_s=0.02), "http://host:1")
        with pytest.raises(EngineError, match=r"host:1: cannot connect: nothing came for 0.02 s"):
            await client.get_json("/x")

    run(main())


def test_a_request_that_is_cut_while_it_connects_is_never_sent() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (client, there):
            reply = client.post("/never", b"{}")
            reading = asyncio.create_task(reply.next_events())
            await asyncio.sleep(0)
            await reply.close()
            assert await reading == []
            await client.get_json("/a")
            assert [head.split(b"\r\n")[0] for head in there.request_heads[0]] == [b"GET /a HTTP/1.1"]

    run(main())


def test_a_connection_that_comes_about_after_the_end_is_closed() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (client, there):
            reply = client.post("/never", b"{}")
            reading = asyncio.create_task(reply.next_events())
            await asyncio.sleep(0)
            await reply.close()
            await client.close()
            assert await reading == []
            while client._connections:
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="closed by us"):
                await client.get_json("/a")
            assert there.request_heads in ([], [[]])

    run(main())


def test_tls_is_spoken_with_servers_that_can_be_trusted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with canned_server([http_response()], tls=True) as (client, _):
            with pytest.raises(EngineError, match=r"cannot connect: .*certificate verify failed"):
                await client.get_json("/a")
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        async with canned_server(
            [http_response(b"data: 1\n\n"), http_response(b"data: 2\n\n")], tls=True
        ) as (client, there):
            assert await read_all_events(client) == [b"1"]
            assert await read_all_events(client) == [b"2"]
            assert len(there.request_heads) == 1

    run(main())


@pytest.mark.parametrize(
    ("user", "key", "header"),
    [
        ("", "", None),
        ("", "secret", b"Bearer secret"),
        ("me:p%40ss@", "", b"Basic " + base64.b64encode(b"me:p@ss")),
        ("me:pass@", "secret", b"Bearer secret"),
    ],
)
def test_who_we_are_is_said_in_a_header(user: str, key: str, header: bytes | None) -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (_, there):
            url = there.url.replace("//", f"//{user}")
            client = HttpClient(ServerConfig(url, api_key=key), url)
            await client.get_json("/a")
            lines = dict(
                line.split(b": ", 1) for line in there.request_heads[0][0].split(b"\r\n")[1:] if line
            )
            assert lines.get(b"authorization") == header
            assert lines[b"host"] == there.url.removeprefix("http://").encode()
            await client.close()

    run(main())


@pytest.mark.parametrize("key", ["two\nlines", "sch\xf6n", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_at_once(key: str) -> None:
    with pytest.raises(InputError, match="api_key") as raised:
        ServerConfig("http://host", api_key=key)
    assert key not in str(raised.value)


def test_a_server_may_live_below_a_path() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (_, there):
            server = ServerConfig(there.url + "/below/v1")
            client = HttpClient(server, server.base_url)
            await client.get_json("/health")
            assert there.request_heads[0][0].startswith(b"GET /below/health HTTP/1.1\r\n")
            await client.close()

    run(main())


def test_a_request_may_have_headers_of_its_own() -> None:
    async def main() -> None:
        async with canned_server([http_response(), http_response()]) as (client, there):
            for headers in ({"x-call": "turn-1"}, None):
                assert await client.request("GET", "/a", headers=headers, whole=True).content() == (
                    200,
                    b"{}",
                )
            first, second = there.request_heads[0]
            assert b"\r\nx-call: turn-1\r\n" in first
            assert b"x-call" not in second
            with pytest.raises(InputError, match=r"x-call: got 'two\\r\\nlines', expected printable ASCII"):
                client.request("GET", "/a", headers={"x-call": "two\r\nlines"})

    run(main())


def test_a_refusal_may_say_when_to_come_again() -> None:
    async def main() -> None:
        busy = http_response(b"busy", b"Retry-After: 3", status=429)
        async with canned_server([busy, http_response(b"data: 1\n\n"), CLOSE], [CLOSE]) as (client, _):
            reply = client.request("POST", "/a")
            assert (await reply.read_status(), reply.retry_after) == (429, "3")
            assert await reply.read() == (429, b"busy")
            reply = client.request("POST", "/a")
            assert (await reply.read_status(), reply.retry_after) == (200, "")
            assert await reply.next_events() == [b"1"]
            reply = client.request("POST", "/a")
            assert await reply.read_status() == 0
            with pytest.raises(EngineError, match="closed by the server"):
                await reply.next_events()

    run(main())


def test_clients_share_what_takes_long_to_make() -> None:
    one, other = [HttpClient(ServerConfig("https://host"), "https://host")._tls_context for _ in range(2)]
    assert one is other is not None


def test_events_are_told_whole_and_an_end_to_the_wait_is_not_the_end() -> None:
    async def main() -> None:
        line = InMemoryServer(FakeVllm())
        client = HttpClient(ServerConfig("http://host:1"), "http://host:1")
        reply = client.post(line.fake_server.generate_path, b"{}")
        told: list[list[bytes]] = []

        def hear(events: list[bytes]) -> bool:
            told.append(events)
            return events != [b"3"]

        reply.listen(hear)
        reading = asyncio.create_task(reply.next_events())
        await yield_to_loop()
        line.send(HEAD)
        line.send_chunks(b"data: 1\n\ndata: 2\n\nda", b"ta: 3\n", b"\n")
        assert told == [[b"1", b"2"], [b"3"]], "a piece of an event is nothing to tell"
        assert await reading == []
        assert not reply.is_ended
        line.send_chunks(b"data: 4\n\nda")
        assert await reply.next_events() == [b"4"], "came while nobody waited"
        reading = asyncio.create_task(reply.next_events())
        await yield_to_loop()
        line.send_chunks(b"ta: 5\n\n", b"data: 6\n")
        line.send(END)
        assert await reading == [b"6"], "the end ended it"
        assert told[2:] == [[b"5"]]
        assert await reply.next_events() == []
        await client.close()

    run(main())


def test_one_who_listens_no_more_is_given_what_comes() -> None:
    async def main() -> None:
        line = InMemoryServer(FakeVllm())
        client = HttpClient(ServerConfig("http://host:1"), "http://host:1")
        reply = client.post(line.fake_server.generate_path, b"{}")
        told: list[list[bytes]] = []
        reply.listen(lambda events: not told.append(events))
        reading = asyncio.create_task(reply.next_events())
        await yield_to_loop()
        line.send(HEAD)
        line.send_chunks(b"data: 1\n\n")
        reply.listen(None)
        line.send_chunks(b"data: 2\n\n")
        assert (told, await reading) == ([[b"1"]], [b"2"])
        await client.close()

    run(main())
