from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.engines.connection import HttpConnection, ResponseBuffer
from tests.engines.fake_model import run
from tests.engines.fake_transport import FakeTransport, chunked_body, http_chunk, yield_to_loop
from tests.engines.manual_clock import ManualClockLoop

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def make_connection(kept: list[HttpConnection] | None = None, timeout_s: float = 60) -> HttpConnection:
    connection = HttpConnection((kept if kept is not None else []).append, lambda _: None, timeout_s)
    FakeTransport(connection)
    return connection


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """An answer as it is sent, what it says, and whether it lasts as long as its connection."""
    pieces = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    body = b"".join(pieces)
    framing = draw(st.sampled_from(["chunked", "length", "close"]))
    head = CONTINUE * draw(st.integers(0, 2)) + b"HTTP/1.1 200 OK\r\nX-Other: 1\r\n"
    if framing == "chunked":
        extension, trailer = draw(st.sampled_from([(b"", b""), (b";a=b", b"x-sum: 1\r\n")]))
        return (
            head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked_body(pieces, extension, trailer),
            body,
            False,
        )
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body, False
    return head + b"\r\n" + body, body, True


@given(answer=responses(), cuts=st.lists(st.integers(0, 1000), max_size=20), whole=st.booleans())
def test_any_cut_of_the_bytes_gives_the_same_body(
    answer: tuple[bytes, bytes, bool], cuts: list[int], whole: bool
) -> None:
    said, body, ends_by_close = answer

    async def main() -> None:
        kept: list[HttpConnection] = []
        connection = make_connection(kept)
        inbox = ResponseBuffer(whole=whole)
        connection.send_request(b"GET", inbox)
        places = [0, *sorted(cut % (len(said) + 1) for cut in cuts), len(said)]
        taken = b""
        for start, end in pairwise(places):
            connection.data_received(said[start:end])
            taken += inbox.read_nowait()
        if ends_by_close:
            assert not inbox.is_ended
            connection.connection_lost(None)
        assert (taken, inbox.status, inbox.is_ended, inbox.error) == (body, 200, True, "")
        assert kept == ([] if ends_by_close else [connection])
        await inbox.wait()

    run(main())


@pytest.mark.parametrize(
    "framing", [b"transfer-encoding: chunked\r\n\r\n3\r\nab", b"content-length: 3\r\n\r\nab"]
)
@pytest.mark.parametrize("error", [None, ConnectionResetError("reset by peer")])
def test_an_answer_that_breaks_keeps_what_came(framing: bytes, error: Exception | None) -> None:
    async def main() -> None:
        connection = make_connection()
        inbox = ResponseBuffer(whole=False)
        connection.send_request(b"GET", inbox)
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + framing)
        connection.connection_lost(error)
        assert inbox.read_nowait() == b"ab"
        assert "broke before the answer ended" in inbox.error
        assert ("reset by peer" in inbox.error) == (error is not None)
        assert not inbox.is_stale, "a byte of it had come"

    run(main())


async def is_waiting(inbox: ResponseBuffer) -> bool:
    waiting = asyncio.ensure_future(inbox.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    return waiting.cancel()


@pytest.mark.parametrize(
    ("status", "whole", "wakes"), [(200, False, True), (200, True, False), (500, False, False)]
)
def test_only_a_good_answer_that_somebody_watches_wakes_before_its_end(
    status: int, whole: bool, wakes: bool
) -> None:
    async def main() -> None:
        connection = make_connection()
        inbox = ResponseBuffer(whole=whole)
        connection.send_request(b"GET", inbox)
        connection.data_received(CONTINUE)
        assert await is_waiting(inbox)
        connection.data_received(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\na" % status)
        assert await is_waiting(inbox) != wakes
        connection.data_received(b"b")
        assert not await is_waiting(inbox)
        assert (inbox.status, inbox.read_nowait()) == (status, b"ab")

    run(main())


def test_an_answer_without_a_length_may_follow_one_that_has_one() -> None:
    async def main() -> None:
        connection = make_connection()
        first, second = ResponseBuffer(whole=False), ResponseBuffer(whole=False)
        connection.send_request(b"GET", first)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na")
        connection.send_request(b"GET", second)
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nbc")
        connection.connection_lost(None)
        assert (first.read_nowait(), second.read_nowait(), second.error) == (b"a", b"bc", "")

    run(main())


def test_a_connection_that_is_lost_already_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: FakeTransport, data: bytes) -> None:
        raise RuntimeError("the handler is closed")  # as uvloop's do; asyncio's take it and drop it

    async def main() -> None:
        connection = make_connection()
        monkeypatch.setattr(FakeTransport, "write", write)
        connection.connection_lost(None)
        inbox = ResponseBuffer(whole=False)
        connection.send_request(b"GET", inbox)
        await inbox.wait()
        assert inbox.error == "the connection broke before anything was asked"

    run(main())


def test_what_is_not_http_is_an_error() -> None:
    async def main() -> None:
        connection = make_connection()
        inbox = ResponseBuffer(whole=False)
        connection.send_request(b"GET", inbox)
        connection.data_received(b"SSH-2.0-OpenSSH\r\n")
        assert inbox.is_ended
        assert "not an HTTP/1.1 answer" in inbox.error
        assert not connection.is_open

    run(main())


@pytest.mark.parametrize("together", [False, True])
def test_bytes_that_nobody_asked_for_close_the_connection(together: bool) -> None:
    async def main() -> None:
        connection = make_connection()
        inbox = ResponseBuffer(whole=False)
        connection.send_request(b"GET", inbox)
        answer, more = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", b"HTTP/1.1 200 OK\r\n"
        for said in [answer + more] if together else [answer, more]:
            connection.data_received(said)
        assert (inbox.read_nowait(), inbox.is_ended, inbox.error) == (b"a", True, "")
        assert not connection.is_open

    run(main())


def test_a_connection_that_will_not_be_kept_is_closed() -> None:
    async def main() -> None:
        kept: list[HttpConnection] = []
        connection = make_connection(kept)
        inbox = ResponseBuffer(whole=False)
        connection.send_request(b"GET", inbox)
        connection.data_received(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na")
        assert (inbox.read_nowait(), inbox.is_ended, inbox.error) == (b"a", True, "")
        assert kept == []
        assert not connection.is_open

    run(main())


def test_silence_is_measured_from_the_last_piece() -> None:
    async def passes(seconds: float) -> None:
        ManualClockLoop.running().offset_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    async def main() -> None:
        connection = make_connection(timeout_s=10)
        inbox = ResponseBuffer(whole=True)
        connection.send_request(b"GET", inbox)
        await passes(9)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na")
        await passes(9)
        assert not inbox.is_ended
        connection.data_received(b"b")
        await passes(11)
        await inbox.wait()
        assert (inbox.read_nowait(), inbox.error) == (b"ab", "nothing came for 10 s")
        assert not connection.is_open

    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        runner.run(main())


OK = b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_piece_is_told_only_to_one_who_waits_and_all_others_are_kept() -> None:
    async def main() -> None:
        told: list[bytes] = []

        def hear(piece: bytes) -> bool:
            told.append(piece)
            return piece != b"c"

        connection, inbox = make_connection(), ResponseBuffer(whole=False)
        inbox.hear = hear
        connection.send_request(b"GET", inbox)
        connection.data_received(OK % 200 + http_chunk(b"a"))
        assert told == [], "nobody waits yet"
        await inbox.wait()
        assert inbox.read_nowait() == b"a"
        waiting = asyncio.ensure_future(inbox.wait())
        await yield_to_loop()
        connection.data_received(http_chunk(b"b"))
        await yield_to_loop()
        assert not waiting.done()
        connection.data_received(http_chunk(b"c") + http_chunk(b"d"))
        await waiting
        assert told == [b"b", b"c"], "the wait ended with c"
        assert inbox.read_nowait() == b"d"
        waiting = asyncio.ensure_future(inbox.wait())
        await yield_to_loop()
        waiting.cancel()
        connection.data_received(http_chunk(b"e"))
        assert (told[2:], inbox.read_nowait()) == ([], b"e")
        waiting = asyncio.ensure_future(inbox.wait())
        await yield_to_loop()
        connection.data_received(http_chunk(b"f") + b"0\r\n\r\n")
        await waiting
        assert (told[2:], inbox.read_nowait(), inbox.is_ended) == ([b"f"], b"", True)

    run(main())


@pytest.mark.parametrize(("status", "whole"), [(200, True), (400, False), (503, False)])
def test_refusals_and_what_is_read_as_a_whole_are_not_told(status: int, whole: bool) -> None:
    async def main() -> None:
        told: list[bytes] = []
        connection, inbox = make_connection(), ResponseBuffer(whole=whole)
        inbox.hear = lambda piece: bool(told.append(piece))
        connection.send_request(b"GET", inbox)
        waiting = asyncio.ensure_future(inbox.wait())
        await yield_to_loop()
        connection.data_received(OK % status + http_chunk(b"a") + http_chunk(b"b"))
        await yield_to_loop()
        assert not waiting.done()
        connection.data_received(b"0\r\n\r\n")
        await waiting
        assert (told, inbox.read_nowait()) == ([], b"ab")

    run(main())
