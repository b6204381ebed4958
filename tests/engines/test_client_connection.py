from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import InputError
from branchline.engines.client import HttpClient, HttpConnection, HttpResponse, ServerConfig
from tests.engines.fake_transport import FakeTransport, chunked_body
from tests.engines.manual_clock import advance, run_with_frozen_clock, yield_to_loop

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def new_client(**config: Any) -> HttpClient:
    return HttpClient(ServerConfig("http://host:1", **config), "http://host:1")


def send_request(*, is_generation: bool = False, **config: Any) -> tuple[HttpConnection, HttpResponse]:
    """A new connection, and the response to the request that it sent; `config` are fields of ServerConfig."""
    client = new_client(**config)
    connection, response = HttpConnection(client), client.request("GET", "/a", is_generation=is_generation)
    FakeTransport(connection)
    connection.send_request(response)
    return connection, response


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """An encoded response, its body, and whether it ends with its connection."""
    pieces = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    body = b"".join(pieces)
    framing = draw(st.sampled_from(["chunked", "length", "close"]))
    head = CONTINUE * draw(st.integers(0, 2)) + b"HTTP/1.1 200 OK\r\nX-Other: 1\r\n"
    if framing == "chunked":
        extension, trailer = draw(st.sampled_from([(b"", b""), (b";a=b", b"x-sum: 1\r\n")]))
        encoded = chunked_body(pieces, extension, trailer)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + encoded, body, False
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body, False
    return head + b"\r\n" + body, body, True


@given(encoded_response=responses(), cuts=st.lists(st.integers(0, 1000), max_size=20))
def test_any_split_of_the_bytes_gives_the_same_body(
    encoded_response: tuple[bytes, bytes, bool], cuts: list[int]
) -> None:
    encoded, body, ends_with_connection = encoded_response

    async def main() -> None:
        connection, response = send_request()
        positions = [0, *sorted(cut % (len(encoded) + 1) for cut in cuts), len(encoded)]
        received = b""
        for start, end in pairwise(positions):
            connection.data_received(encoded[start:end])
            received += response.read_nowait()
        if ends_with_connection:
            assert not response.is_ended
            connection.connection_lost(None)
        assert (received, response.status, response.is_ended, response.error) == (body, 200, True, "")
        await response.wait()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    "framing", [b"transfer-encoding: chunked\r\n\r\n3\r\nab", b"content-length: 3\r\n\r\nab"]
)
@pytest.mark.parametrize("error", [None, ConnectionResetError("reset by peer")])
def test_lost_response_keeps_the_data_that_arrived(framing: bytes, error: Exception | None) -> None:
    async def main() -> None:
        connection, response = send_request()
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + framing)
        connection.connection_lost(error)
        assert response.read_nowait() == b"ab"
        assert "lost before the response ended" in response.error
        assert ("reset by peer" in response.error) == (error is not None)
        assert not response.is_resent, "the response had begun"

    run_with_frozen_clock(main())


async def is_waiting(response: HttpResponse) -> bool:
    waiting = asyncio.ensure_future(response.wait())
    await yield_to_loop(3)
    return waiting.cancel()


@pytest.mark.parametrize(("status", "wakes"), [(200, True), (500, False)])
def test_only_a_successful_response_wakes_its_reader_before_the_end(status: int, wakes: bool) -> None:
    async def main() -> None:
        connection, response = send_request()
        connection.data_received(CONTINUE)
        assert await is_waiting(response)
        connection.data_received(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\na" % status)
        assert await is_waiting(response) != wakes
        connection.data_received(b"b")
        assert not await is_waiting(response)
        assert (response.status, response.read_nowait()) == (status, b"ab")

    run_with_frozen_clock(main())


@pytest.mark.parametrize("wakes_by", ["time", "end"])
def test_wait_returns_not_before_its_time_unless_the_response_ends(wakes_by: str) -> None:
    async def main() -> None:
        connection, response = send_request()
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na")
        waiting = asyncio.ensure_future(response.wait(asyncio.get_running_loop().time() + 10))
        await advance(9)
        assert not waiting.done()
        if wakes_by == "time":
            await advance(1)
        else:
            connection.data_received(b"b")
            await yield_to_loop()
        assert waiting.done()

    run_with_frozen_clock(main())


def test_response_without_a_length_may_follow_a_response_with_one() -> None:
    async def main() -> None:
        connection, first = send_request()
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na")
        second = new_client().request("GET", "/b")
        connection.send_request(second)
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nbc")
        connection.connection_lost(None)
        assert (first.read_nowait(), second.read_nowait(), second.error) == (b"a", b"bc", "")

    run_with_frozen_clock(main())


def test_request_on_a_lost_connection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: FakeTransport, data: bytes) -> None:
        raise RuntimeError("the handler is closed")  # As uvloop does; asyncio drops the data.

    async def main() -> None:
        connection, _ = send_request()
        monkeypatch.setattr(FakeTransport, "write", write)
        connection.connection_lost(None)
        response = new_client().request("GET", "/b")
        connection.send_request(response)
        await response.wait()
        assert response.error == "the connection was lost before the request was sent"

    run_with_frozen_clock(main())


def test_response_that_is_not_http_is_an_error() -> None:
    async def main() -> None:
        connection, response = send_request()
        connection.data_received(b"SSH-2.0-OpenSSH\r\n")
        assert response.is_ended
        assert "not an HTTP/1.1 response" in response.error
        assert connection.transport.is_closing()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("together", [False, True])
def test_response_without_a_request_closes_the_connection(together: bool) -> None:
    async def main() -> None:
        connection, response = send_request()
        first, more = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", b"HTTP/1.1 200 OK\r\n"
        for data in [first + more] if together else [first, more]:
            connection.data_received(data)
        assert (response.read_nowait(), response.is_ended, response.error) == (b"a", True, "")
        assert connection.transport.is_closing()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
def test_connection_stays_open_unless_the_server_closes_it(header: bytes) -> None:
    async def main() -> None:
        connection, response = send_request()
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + header + b"content-length: 1\r\n\r\na")
        assert (response.read_nowait(), response.is_ended, response.error) == (b"a", True, "")
        assert connection.transport.is_closing() == bool(header)

    run_with_frozen_clock(main())


def test_read_timeout_counts_from_the_last_data() -> None:
    async def main() -> None:
        connection, response = send_request(read_timeout_s=10)
        await advance(9)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na")
        await advance(9)
        assert not response.is_ended
        connection.data_received(b"b")
        await advance(11)
        await response.wait()
        assert (response.read_nowait(), response.error) == (b"ab", "no data for 10 s")
        assert connection.transport.is_closing()

    run_with_frozen_clock(main())


def test_generation_has_one_timeout_until_its_first_token_and_one_between_tokens() -> None:
    async def main() -> None:
        config = {"first_token_timeout_s": 100, "token_timeout_s": 10, "read_timeout_s": 1}
        connection, response = send_request(is_generation=True, **config)
        for _ in range(9):
            await advance(11)
        assert not response.is_ended
        await advance(2)
        assert (response.error, response.timed_out) == ("no first token for 100 s", True)
        connection, response = send_request(is_generation=True, **config)
        await advance(99)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nab")
        for _ in range(3):
            await advance(9)
            assert not response.is_ended
            connection.data_received(b"c")
        await advance(11)
        assert (response.error, response.timed_out) == ("no further token for 10 s", True)
        assert response.read_nowait() == b"abccc"
        assert connection.transport.is_closing()

    run_with_frozen_clock(main())


def test_headers_and_comments_are_no_tokens() -> None:
    async def main() -> None:
        config = {"first_token_timeout_s": 10, "token_timeout_s": 10}
        connection, response = send_request(is_generation=True, **config)
        await advance(9)
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.data_received(b"8\r\n: ping\n\n\r\n")
        await advance(2)
        assert response.error == "no first token for 10 s"
        connection, response = send_request(is_generation=True, **config)
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nd\r\n")
        await advance(9)
        connection.data_received(b"8\r\n: ping\n\n\r\n")
        await advance(2)
        assert response.error == "no further token for 10 s"

    run_with_frozen_clock(main())


def test_comments_keep_a_response_that_is_no_generation() -> None:
    """The agent loop reads streams of a gateway, which sends comments while it waits for an engine."""

    async def main() -> None:
        connection, response = send_request(read_timeout_s=10)
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(5):
            connection.data_received(b"8\r\n: ping\n\n\r\n")
            await advance(9)
        assert not response.is_ended

    run_with_frozen_clock(main())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("error", [None, ConnectionResetError("reset by peer")])
def test_post_on_a_reused_connection_that_was_reset_is_not_sent_again(
    method: str, error: Exception | None
) -> None:
    async def main() -> None:
        connection, _ = send_request()
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na")
        response = new_client().request(method, "/generate")
        connection.send_request(response)
        connection.connection_lost(error)
        is_unread = error is None or method == "GET"
        assert (response.is_resent, response.is_ended) == (is_unread, not is_unread)

    run_with_frozen_clock(main())


@pytest.mark.parametrize("name", ["first_token_timeout_s", "token_timeout_s", "read_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_timeout_that_is_not_positive_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name}: got {value}, expected seconds, more than 0"):
        new_client(**{name: value})
