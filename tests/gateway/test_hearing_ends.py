"""Answers that are being heard while something happens: nothing is lost, doubled or out of turn."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from branchline.core.call import Delivery
from branchline.gateway import model
from branchline.gateway.config import GatewayConfig
from branchline.gateway.pulse import Pulse
from branchline.gateway.record import CallRecord
from tests.engines.model import round_trip
from tests.gateway.hearing import (
    END,
    Mouth,
    body_of,
    connection_of,
    engine_of,
    json_events,
    recorded,
    said_in,
    speaking,
    streaming,
    until,
    watch,
)
from tests.gateway.protocols.every import BODIES, PROTOCOLS
from tests.gateway.running import Agent, run

CHAT = "chat/completions"
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


async def _is_cancelled(a: Agent) -> None:
    tree = a.session.live.session.tree
    await until(lambda: bool(tree.calls) and tree.delivery(tree.calls[-1]) == Delivery.CANCELLED)


# -- clients that do not read, or leave ---------------------------------------------------------------


class Narrow:
    """A client that reads only when it is told to, on a socket that holds next to nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""

    @classmethod
    @asynccontextmanager
    async def asking(
        cls, a: Agent, mouth: Mouth, protocol: str = CHAT, times: int = 1
    ) -> AsyncIterator[Narrow]:
        """The same as often as it is told to, without waiting for an answer."""
        host, _, port = a.gateway.url.removeprefix("http://").rpartition(":")
        body = json.dumps({**BODIES[protocol]("q"), "stream": True}).encode()
        head = f"POST /v1/{protocol} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {a.session.api_key}\r\n"
        loop, before = asyncio.get_running_loop(), len(mouth.requests)
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            await loop.sock_connect(sock, (host, int(port)))
            asked = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            await loop.sock_sendall(sock, times * asked)
            await until(lambda: len(mouth.requests) > before)
            yield cls(sock)

    async def heard(self, words: bytes) -> None:
        """Reads until this has arrived."""
        while words not in self._data:
            await self._read()

    async def _read(self) -> None:
        piece = await asyncio.get_running_loop().sock_recv(self._sock, 2**16)
        assert piece, self._data
        self._data += piece

    async def rest(self) -> bytes:
        """The answer's body, whose chunks must be chunks."""
        while not self._data.endswith(b"\r\n0\r\n\r\n"):
            await self._read()
        head, _, chunks = self._data.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        body, behind = body_of(chunks)
        assert not behind
        return body


def test_a_client_that_does_not_read_is_waited_for_and_gets_all_of_it_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = watch(monkeypatch)
    said = bytearray()

    def say(mouth: Mouth) -> None:
        said.append(97 + len(said) % 26)
        mouth.say(said[-1:])

    async def test() -> None:
        async with speaking() as (a, mouth), Narrow.asking(a, mouth) as client:
            connection = connection_of(a)
            transport = connection.transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            transport.set_write_buffer_limits(high=2000)
            # Heard, as long as there is room for it; then told, and the telling waits.
            while not connection.flow.write_paused:
                say(mouth)
                await until(lambda: noted.count == len(said))
            heard, held = len(noted.heard), transport.get_write_buffer_size()
            assert heard == len(said) - 1
            for _ in range(300):
                say(mouth)
            await _arrived(a, mouth)
            assert transport.get_write_buffer_size() <= held
            assert len(noted.heard) == heard
            assert noted.count < len(said)
            mouth.say(END, "stop")
            events = json_events(await client.rest())
            assert said_in(CHAT, events) == said.decode()
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
            assert recorded(a)[0][0] == [*said, *END]

    run(test)


async def _arrived(a: Agent, mouth: Mouth) -> None:
    """All that was said has come to the gateway, whether anybody looked at it or not."""
    await until(mouth.requests[-1].empty)
    await round_trip(engine_of(a))


def test_whoever_has_caught_up_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth) as client:
                await client.hear("ab")
                connection = connection_of(a)
                connection.pause_writing()
                mouth.say(b"c")
                await until(lambda: noted.count == 3)
                mouth.say(b"d")
                await _arrived(a, mouth)
                connection.resume_writing()
                while said_in(CHAT, client.events) != "abcd":
                    await client.piece()
                assert bytes(noted.heard) == b"b"
                await client.hear("e")
                assert bytes(noted.heard) == b"be"
                mouth.say(END, "stop")
                await client.rest()
            assert recorded(a)[0][0] == [*b"abcde", *END]

    run(test)


@protocols
def test_a_client_that_hangs_up_leaves_all_that_was_heard_and_goes_on_behind_it(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking(sampling_defaults={"max_tokens": 100}) as (a, mouth):
            async with streaming(a, mouth, protocol, {"x-branchline-call": "turn"}) as client:
                await client.hear("abcd")
            await _is_cancelled(a)
            assert bytes(noted.heard) == b"bcd"
            ((ids, logprobs, versions, (text, _, _), finish),) = recorded(a)
            assert (ids, versions, text, finish) == ([*b"abcd"], [(4, 0)], "abcd", "cancelled")
            await mouth.aborted.wait()
            async with streaming(a, mouth, protocol, {"x-branchline-resume": "turn"}) as client:
                while said_in(protocol, client.events) != "abcd":
                    await client.piece()
                await client.hear("ef")
                mouth.say(END, "stop")
                await client.rest()
            assert said_in(protocol, client.events) == "abcdef"
            # What was there before is told; so the answer has begun, and the first new token is heard.
            assert bytes(noted.heard) == b"bcdef"
            assert mouth.bodies[1]["prompt"] == [*mouth.bodies[0]["prompt"], *b"abcd"]
            resumed = recorded(a)[-1]
            assert resumed[0] == [*b"abcdef", *END]
            assert resumed[1][:4] == logprobs
            samples = (await a.get("/samples"))["report"]
            assert samples["trained_tokens"] == samples["sampled_tokens"] == 7

    run(test)


def test_a_client_that_had_asked_for_more_already_and_leaves_is_one_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with Narrow.asking(a, mouth, times=2) as client:
                for letter in b"abc":
                    mouth.say([letter])
                    await client.heard(b'"content":"%c"' % letter)
            await _is_cancelled(a)
            await mouth.aborted.wait()
            assert recorded(a)[0][0] == [*b"abc"]
            assert len(mouth.requests) == 1

    run(test)


def test_the_wait_for_the_first_token_is_over_when_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)
    records: list[CallRecord] = []

    def noted_record(*args: Any, **options: Any) -> CallRecord:
        records.append(CallRecord(*args, **options))
        return records[-1]

    monkeypatch.setattr(model, "CallRecord", noted_record)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth, headers={"x-branchline-call": "turn"}) as client:
                await client.hear("a")
            await _is_cancelled(a)
            async with streaming(a, mouth, headers={"x-branchline-resume": "turn"}) as client:
                await client.piece()
                assert set(records[-1].seconds) == {"prepare"}
                await client.hear("b")
                assert bytes(noted.heard) == b"b"
                assert list(records[-1].seconds) == ["prepare", "queue"]
                waited_s = records[-1].seconds["queue"]
                await client.hear("c")
                mouth.say(END, "stop")
                await client.rest()
            assert list(records[-1].seconds) == ["prepare", "queue", "generate", "commit"]
            assert records[-1].seconds["queue"] == waited_s
            assert records[-1].done is not None
            assert records[-1].done.sampled_tokens == 4
            await until(lambda: b'_count{phase="queue"} 1.0' in a.gateway.app.metrics.text())

    run(test)


# -- beats and errors ---------------------------------------------------------------------------------


@protocols
def test_beats_stand_between_heard_tokens_and_not_inside_them(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = watch(monkeypatch)
    pulses: list[Pulse] = []
    enter = Pulse.__enter__

    def noted_enter(self: Pulse) -> Pulse:
        pulses.append(self)
        return enter(self)

    monkeypatch.setattr(Pulse, "__enter__", noted_enter)

    async def test() -> None:
        async with (
            speaking(sampling_defaults={"max_tokens": 100}) as (a, mouth),
            Narrow.asking(a, mouth, protocol) as client,
        ):
            (pulse,) = pulses
            for place, letter in enumerate(b"abcdefgh"):
                mouth.say([letter])
                await until(lambda place=place: noted.count > place)  # type: ignore[misc]
                if place % 3 == 2:
                    pulse._look()
                    pulse._look()
                    assert pulse.beating is not None
            mouth.say(END, "stop")
            events = json_events(await client.rest())
            assert said_in(protocol, events) == "abcdefgh"
            # Behind a beat the next token is told, for that is who looks whether the beat has left.
            assert bytes(noted.heard) == b"bcefh"
            if protocol == "responses":
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
            if protocol == "messages":
                assert [event["type"] for event in events].count("ping") == 2

    run(test)


def test_quick_beats_never_harm_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch)

    async def test() -> None:
        async with speaking(config=GatewayConfig(silence_s=0.002)) as (a, mouth):
            async with streaming(a, mouth, "responses") as client:
                for place, letter in enumerate("abcdefghij"):
                    while len(client.events) < 4 * place:  # so there were beats
                        await client.piece()
                    mouth.say(letter.encode())
                    while not said_in("responses", client.events).endswith(letter):
                        await client.piece()
                mouth.say(END, "stop")
                await client.rest()
            numbers = [event["sequence_number"] for event in client.events]
            assert numbers == list(range(len(numbers)))
            assert said_in("responses", client.events) == "abcdefghij"

    run(test)


@protocols
@pytest.mark.parametrize("by", ["event", "death", "end"])
def test_an_error_behind_heard_tokens_is_the_last_event(
    protocol: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking(sampling_defaults={"max_tokens": 100}) as (a, mouth):
            async with streaming(a, mouth, protocol) as client:
                await client.hear("abc")
                if by == "event":
                    mouth.event_after = (-1, {"error": {"message": "out of memory", "code": 500}})
                if by == "death":
                    mouth.kill()
                else:
                    mouth.end()
                await client.rest()
            assert bytes(noted.heard) == b"bc"
            assert said_in(protocol, client.events) == "abc"
            last = client.events[-1]
            assert "error" in last or last["type"] == "response.failed"
            assert ("out of memory" in str(last)) == (by == "event")
            assert not recorded(a)  # what fails changes nothing
            assert a.session.live.in_flight == 0

    run(test)


# -- ends from outside --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finalized", "aborted"])
def test_a_session_that_ends_stops_an_answer_that_is_heard(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth) as client:
                await client.hear("abc")
                await (a.session.finalize() if how == "finalized" else a.session.abort())
                await client.rest()
            assert how in client.events[-1]["error"]["message"]
            assert said_in(CHAT, client.events) == "abc"
            assert len(noted.direct) == 2
            assert not recorded(a)
            await mouth.aborted.wait()

    run(test)


def test_a_gateway_that_stops_lets_an_answer_be_heard_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking(config=GatewayConfig(drain_s=1000)) as (a, mouth):
            async with streaming(a, mouth) as client:
                await client.hear("ab")
                stopping = asyncio.create_task(a.gateway.stop())
                await until(a.gateway.app.control.stopping.is_set)
                await client.hear("cd")
                assert not stopping.done()
                mouth.say(END, "stop")
                assert (await client.rest()).endswith("data: [DONE]\n\n")
                await stopping
            assert bytes(noted.heard) == b"bcd"
            assert recorded(a)[0][0] == [*b"abcd", *END]

    run(test)


def test_a_gateway_that_waits_for_nobody_keeps_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking(config=GatewayConfig(drain_s=0)) as (a, mouth):
            async with streaming(a, mouth) as client:
                await client.hear("abcd")
                await a.gateway.stop()
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.rest()
            assert bytes(noted.heard) == b"bcd"
            assert recorded(a)[0][0] == [*b"abcd"]
            assert recorded(a)[0][4] == "cancelled"

    run(test)
