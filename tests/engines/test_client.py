from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.engines.client import (
    KEEPALIVE_EXPIRY_S,
    MAX_KEEPALIVE_CONNECTIONS,
    HttpClient,
    ServerConfig,
    SseParser,
)
from tests.engines.manual_clock import advance, run_with_frozen_clock, yield_to_loop

CERTIFICATE = Path(__file__).parent / "localhost.pem"
"""Self-signed, for localhost and 127.0.0.1."""
CLOSE = b""
"""The server closes the connection instead of answering."""


def http_response(body: bytes = b"{}", *headers: bytes, status: int = 200) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


class CannedServer:
    """Sends canned responses on each connection, then waits or closes it."""

    def __init__(self, connections: Sequence[Sequence[bytes]], *, closes: bool) -> None:
        self.connections = iter(connections)
        self.closes = closes
        self.request_heads: list[list[bytes]] = []
        """The heads of the requests of each connection."""
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def wait_closed(self) -> None:
        """Returns when every connection is closed; its client has done so."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._respond(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads: list[bytes] = []
        self.request_heads.append(heads)
        for response in next(self.connections):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
            writer.write(response)
            if response == CLOSE:
                break
        else:
            if not self.closes:
                await reader.read()


async def wait_for_request(server: CannedServer) -> None:
    """Returns when the head of a request has arrived."""
    while not any(server.request_heads):
        await asyncio.sleep(0)


@asynccontextmanager
async def canned_server(
    *connections: Sequence[bytes], tls: bool = False, closes: bool = False, **options: Any
) -> AsyncGenerator[tuple[HttpClient, CannedServer], None]:
    """A client, and a server that accepts these connections."""
    canned = CannedServer(connections, closes=closes)
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
    # A connection beyond the backlog would be retried after a second.
    server = await asyncio.start_server(canned.serve, "127.0.0.1", 0, ssl=context, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    canned.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    client = HttpClient(ServerConfig(canned.url, **options), canned.url)
    try:
        yield client, canned
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
        await canned.wait_closed()


async def read_all_events(client: HttpClient) -> list[bytes]:
    response = client.request("POST", "/events", b"{}")
    events: list[bytes] = []
    try:
        while more := await response.next_events():
            events += more
    finally:
        await response.close()
    return events


def test_connection_is_reused() -> None:
    async def main() -> None:
        async with canned_server(
            [http_response(b'{"a": 1}'), http_response(), http_response(b"data: 1\n\n"), http_response()]
        ) as (client, server):
            assert await client.get_json("/a") == {"a": 1}
            assert await client.post_control("/b")
            assert await read_all_events(client) == [b"1"]
            assert await client.get_json("/c") == {}
            lines = [head.split(b"\r\n")[0] for head in server.request_heads[0]]
            assert lines == [
                b"GET /a HTTP/1.1",
                b"POST /b HTTP/1.1",
                b"POST /events HTTP/1.1",
                b"GET /c HTTP/1.1",
            ]

    run_with_frozen_clock(main())


def test_reused_connection_that_the_server_closed_is_replaced_once() -> None:
    async def main() -> None:
        async with canned_server([http_response(), CLOSE], [http_response(b"data: 1\n\n")]) as (
            client,
            server,
        ):
            await client.get_json("/a")
            assert await read_all_events(client) == [b"1"]
            assert [len(heads) for heads in server.request_heads] == [2, 1]
        async with canned_server([http_response(), CLOSE], [CLOSE]) as (client, server):
            await client.get_json("/a")
            with pytest.raises(EngineError, match="lost before the response ended: closed by the server"):
                await read_all_events(client)
            assert [len(heads) for heads in server.request_heads] == [2, 1]

    run_with_frozen_clock(main())


def test_idle_connection_that_the_server_closed_is_not_used() -> None:
    async def main() -> None:
        async with canned_server([http_response()], [http_response(b"data: 1\n\n")], closes=True) as (
            client,
            server,
        ):
            await client.get_json("/a")
            while not client._idle[0].transport.is_closing():
                await asyncio.sleep(0)
            assert await read_all_events(client) == [b"1"]
            assert [len(heads) for heads in server.request_heads] == [1, 1]

    run_with_frozen_clock(main())


def test_last_event_without_its_empty_line_is_read() -> None:
    async def main() -> None:
        async with canned_server([http_response(b"data: 1\n\ndata: 2\n")]) as (client, _):
            assert await read_all_events(client) == [b"1", b"2"]

    run_with_frozen_clock(main())


def test_new_connection_that_the_server_closed_is_not_replaced() -> None:
    async def main() -> None:
        async with canned_server([CLOSE]) as (client, server):
            with pytest.raises(EngineError, match="lost before the response ended"):
                await client.get_json("/a")
            assert len(server.request_heads) == 1

    run_with_frozen_clock(main())


def test_request_is_not_sent_again_once_its_response_has_begun() -> None:
    async def main() -> None:
        half = http_response(b"data: 1\n\ndata: 2")[:-3]
        async with canned_server([http_response(), half], closes=True) as (client, server):
            await client.get_json("/a")
            response = client.request("POST", "/events", b"{}")
            assert await response.next_events() == [b"1"]
            with pytest.raises(EngineError, match="lost before the response ended"):
                await response.next_events()
            assert [len(heads) for heads in server.request_heads] == [2]

    run_with_frozen_clock(main())


@pytest.mark.parametrize("close", [b"connection: close", b"Connection: Close"])
def test_connection_that_the_server_will_close_is_not_reused(close: bytes) -> None:
    async def main() -> None:
        async with canned_server([http_response(b"{}", close)], [http_response(b"{}", close)]) as (
            client,
            server,
        ):
            await client.get_json("/a")
            await client.get_json("/b")
            assert len(server.request_heads) == 2

    run_with_frozen_clock(main())


def test_connection_that_was_idle_for_long_is_not_used() -> None:
    async def main() -> None:
        async with canned_server([http_response()] * 3, [http_response()]) as (client, server):
            await client.get_json("/a")
            await advance(KEEPALIVE_EXPIRY_S - 1)
            await client.get_json("/b")
            await advance(KEEPALIVE_EXPIRY_S + 1)
            await client.get_json("/c")
            assert [len(heads) for heads in server.request_heads] == [2, 1]

    run_with_frozen_clock(main())


def test_number_of_idle_connections_is_limited() -> None:
    async def main() -> None:
        async with canned_server(*[[http_response()]] * (MAX_KEEPALIVE_CONNECTIONS + 3)) as (client, _):
            await asyncio.gather(*[client.get_json("/a") for _ in range(MAX_KEEPALIVE_CONNECTIONS + 3)])
            await asyncio.sleep(0)
            assert len(client._idle) == len(client.connections) == MAX_KEEPALIVE_CONNECTIONS

    run_with_frozen_clock(main())


def test_control_request_returns_whether_the_server_supports_it() -> None:
    async def main() -> None:
        responses = [http_response(status=404), http_response(status=405), http_response(status=204)]
        async with canned_server(responses) as (client, _):
            assert [await client.post_control("/x") for _ in responses] == [False, False, True]
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

    run_with_frozen_clock(main())


def test_request_without_a_response_times_out() -> None:
    async def main() -> None:
        async with canned_server([b"HTTP/1.1 200 OK\r\n"], read_timeout_s=20) as (client, server):
            waiting: asyncio.Task[Any] = asyncio.create_task(read_all_events(client))
            await wait_for_request(server)
            await advance(19)
            assert not waiting.done()
            await advance(1)
            with pytest.raises(EngineError, match=r"127.0.0.1:\d+: no data for 20 s"):
                await waiting
        async with canned_server([b"HTTP/1.1 200 OK\r\n"]) as (client, server):
            waiting = asyncio.create_task(client.post_control("/x", timeout_s=20))
            await wait_for_request(server)
            await advance(19)
            assert not waiting.done()
            await advance(1)
            with pytest.raises(EngineError, match=r"/x: no response within 20 s"):
                await waiting
            assert not client.connections, "closed after the timeout"

    run_with_frozen_clock(main())


def test_connect_timeout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        client = HttpClient(ServerConfig("http://host:1", connect_timeout_s=20), "http://host:1")
        waiting = asyncio.create_task(client.get_json("/x"))
        await yield_to_loop()
        await advance(19)
        assert not waiting.done()
        await advance(1)
        with pytest.raises(EngineError, match=r"host:1: cannot connect: no connection within 20 s"):
            await waiting

    run_with_frozen_clock(main())


def test_request_closed_while_it_connects_is_not_sent() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (client, server):
            response = client.request("POST", "/never", b"{}")
            reading = asyncio.create_task(response.next_events())
            await asyncio.sleep(0)
            await response.close()
            assert await reading == []
            await client.get_json("/a")
            assert [head.split(b"\r\n")[0] for head in server.request_heads[0]] == [b"GET /a HTTP/1.1"]

    run_with_frozen_clock(main())


def test_connection_made_after_the_client_closed_is_closed() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (client, server):
            response = client.request("POST", "/never", b"{}")
            reading = asyncio.create_task(response.next_events())
            await asyncio.sleep(0)
            await response.close()
            await client.close()
            assert await reading == []
            while client.connections:
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="closed by the client"):
                await client.get_json("/a")
            assert server.request_heads in ([], [[]])

    run_with_frozen_clock(main())


def test_tls_certificate_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with canned_server([http_response()], tls=True) as (client, _):
            with pytest.raises(EngineError, match=r"cannot connect: .*certificate verify failed"):
                await client.get_json("/a")
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        async with canned_server(
            [http_response(b"data: 1\n\n"), http_response(b"data: 2\n\n")], tls=True
        ) as (client, server):
            assert await read_all_events(client) == [b"1"]
            assert await read_all_events(client) == [b"2"]
            assert len(server.request_heads) == 1

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("user", "key", "header"),
    [
        ("", "", None),
        ("", "secret", b"Bearer secret"),
        ("me:p%40ss@", "", b"Basic " + base64.b64encode(b"me:p@ss")),
        ("me:pass@", "secret", b"Bearer secret"),
    ],
)
def test_credentials_are_sent_as_authorization_header(user: str, key: str, header: bytes | None) -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (_, server):
            url = server.url.replace("//", f"//{user}")
            client = HttpClient(ServerConfig(url, api_key=key), url)
            await client.get_json("/a")
            lines = dict(
                line.split(b": ", 1) for line in server.request_heads[0][0].split(b"\r\n")[1:] if line
            )
            assert lines.get(b"authorization") == header
            assert lines[b"host"] == server.url.removeprefix("http://").encode()
            await client.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="url: got"):
        ServerConfig(url)


def test_name_and_repr_contain_no_secrets() -> None:
    server = ServerConfig("http://user:hidden@host:8000/v1", api_key="secret")
    assert server.host_port == "host:8000"
    assert "secret" not in repr(server)


@pytest.mark.parametrize("key", ["two\nlines", "sch\xf6n", "tab\t"])
def test_api_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="api_key") as raised:
        ServerConfig("http://host", api_key=key)
    assert key not in str(raised.value)


def test_server_url_may_have_a_path() -> None:
    async def main() -> None:
        async with canned_server([http_response()]) as (_, server):
            config = ServerConfig(server.url + "/below/v1")
            client = HttpClient(config, config.base_url)
            await client.get_json("/health")
            assert server.request_heads[0][0].startswith(b"GET /below/health HTTP/1.1\r\n")
            await client.close()

    run_with_frozen_clock(main())


def test_request_headers_are_sent() -> None:
    async def main() -> None:
        async with canned_server([http_response(), http_response()]) as (client, server):
            for headers in ({"x-call": "turn-1"}, None):
                response = client.request("GET", "/a", headers=headers)
                assert await response.read() == (200, b"{}")
                await response.close()
            first, second = server.request_heads[0]
            assert b"\r\nx-call: turn-1\r\n" in first
            assert b"x-call" not in second
            with pytest.raises(InputError, match=r"x-call: got 'two\\r\\nlines', expected printable ASCII"):
                client.request("GET", "/a", headers={"x-call": "two\r\nlines"})

    run_with_frozen_clock(main())


def test_retry_after_header_is_returned() -> None:
    async def main() -> None:
        busy = http_response(b"busy", b"Retry-After: 3", status=429)
        async with canned_server([busy, http_response(b"data: 1\n\n"), CLOSE], [CLOSE]) as (client, _):
            response = client.request("POST", "/a")
            assert (await response.read_status(), response.headers.get("retry-after", "")) == (429, "3")
            assert await response.read() == (429, b"busy")
            await response.close()
            response = client.request("POST", "/a")
            assert (await response.read_status(), response.headers.get("retry-after", "")) == (200, "")
            assert await response.next_events() == [b"1"]
            await response.close()
            response = client.request("POST", "/a")
            assert await response.read_status() == 0
            with pytest.raises(EngineError, match="closed by the server"):
                await response.next_events()

    run_with_frozen_clock(main())


def test_clients_share_the_tls_context() -> None:
    first, second = [HttpClient(ServerConfig("https://host"), "https://host") for _ in range(2)]
    assert first._tls_context is second._tls_context is not None


DATA = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).map(str.encode)
COMMENTS = st.sampled_from([b": keep-alive", b":", b"event: ping", b"id: 7", b"retry: 100"])


def parse_events(body: bytes, cuts: list[int]) -> list[bytes]:
    """The events of a body that arrives in pieces."""
    parser = SseParser()
    positions = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    events = []
    for start, end in pairwise(positions):
        events += parser.feed(body[start:end])
    return events + parser.feed(b"\n\n")


@given(
    events=st.lists(DATA.filter(lambda data: data != b"[DONE]" and not data.startswith(b" "))),
    comments=st.lists(COMMENTS, max_size=3),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    space=st.sampled_from([b"", b" "]),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_any_split_of_the_bytes_gives_the_same_events(
    events: list[bytes], comments: list[bytes], newline: bytes, space: bytes, cuts: list[int]
) -> None:
    body = b""
    for event in events:
        body += b"".join(comment + newline for comment in comments)
        body += b"data:" + space + event + newline * 2
    body += b"data: [DONE]" + newline * 2
    assert parse_events(body, cuts) == events
    assert parse_events(body, list(range(len(body)))) == events, "one byte at a time"


def test_data_lines_of_one_event_are_joined() -> None:
    assert parse_events(b"data: a\ndata:b\ndata\ndata:\n\ndata: c\n\n", []) == [b"a\nb\n", b"c"]


def test_comments_and_events_without_data_are_dropped() -> None:
    assert parse_events(b"\n\n: hello\n\nevent: ping\n\ndata: [DONE]\n\n\r\n", []) == []


OBJECTS = st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=2)
LINES = OBJECTS.map(lambda value: b"data: " + json.dumps(value).encode()) | st.sampled_from(
    [
        b"data: {}",
        b"data:{}",
        b"data:  {}",
        b"data: ",
        b"data: [DONE]",
        b"data: {\r}",
        b": {}",
        b"",
        b"}",
        b"data: {",
        b"data: }",
    ]
)


@example([[(b"data: {}", b"\n\n"), (b"data: [DONE]", b"\n\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {}\r", b"\n\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {}", b"\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {", b"\n\n"), (b"data: }", b"\n\n")]])
@given(
    pieces=st.lists(
        st.lists(st.tuples(LINES, st.sampled_from([b"\n\n", b"\n\n", b"\n", b"\r\n\r\n"])), max_size=4),
        max_size=5,
    )
)
def test_complete_events_are_parsed_as_if_they_arrived_byte_by_byte(
    pieces: list[list[tuple[bytes, bytes]]],
) -> None:
    bodies = [b"".join(line + end for line, end in piece) for piece in pieces]
    complete, bytewise = SseParser(), SseParser()
    for body in bodies:
        assert complete.feed(body) == [
            event for i in range(len(body)) for event in bytewise.feed(body[i : i + 1])
        ]
    assert complete.feed(b"\n\n") == bytewise.feed(b"\n\n")
