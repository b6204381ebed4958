"""An ear is open only while nothing is on its way, and what is heard and what is told stay in one order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from branchline.chat.parsing.base import Delta
from branchline.engines.base import Tokens
from branchline.gateway import telling
from branchline.gateway.answers import Said
from branchline.gateway.exchange import Exchange
from branchline.gateway.telling import Telling
from tests.gateway.running import run

APART_S = 0.0005


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stream:
    """Says its texts as they are; nothing for an empty one."""

    def said(self, said: Said) -> bytes:
        return "".join(delta.text for delta in said.deltas).encode()

    def beat(self) -> bytes:
        return b"*"

    def end(self, done: Any) -> bytes:
        return b"."

    def failed(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return b"!"


@dataclass
class Wire:
    """Both ways to one client, and what came by them in the order it came."""

    taken: list[tuple[str, bytes]] = field(default_factory=list)
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    is_open: bool = True

    def write(self, data: bytes) -> None:
        self.taken.append(("heard", data))

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.waiting.set()
            await self.may_send.wait()
            self.taken.append(("told", message["body"]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(telling, "monotonic", clock)
    return clock


def _telling(wire: Wire) -> tuple[Telling, Exchange]:
    async def receive() -> Any:
        raise AssertionError("nobody reads")

    exchange = Exchange({"method": "POST", "headers": []}, receive, wire.send)
    wire.may_send.set()
    return Telling(exchange, Stream(), 60), exchange


def _said(text: str) -> Said:
    return Said(0, [Delta(text=text)], Tokens([1], [-1.0], 0))


def _hears(client: Telling) -> bool:
    return client.is_open


def _is_still(client: Telling) -> bool:
    return client._pulse.beating is None


async def _begun(client: Telling, exchange: Exchange, wire: Wire, clock: Clock) -> None:
    """An answer that has begun, some time ago, on a server of ours."""
    await client.tell(_said("a"))
    exchange.direct = wire  # type: ignore[assignment]
    clock.now += 1


def test_before_an_answer_has_begun_nobody_hears(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            assert not client.is_open
            await client.tell(_said("a"))
            assert exchange.direct is None  # a server that is not ours
            clock.now += 1
            assert not client.is_open

    run(test)


def test_what_is_heard_leaves_at_once_and_counts_as_sent(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            assert client.is_open
            client.hear(_said("b"))
            assert wire.taken == [("told", b"a"), ("heard", b"b")]
            assert exchange.sent == 2
            await client.tell(_said("c"))
            await client.end(b".")
            assert [data for _, data in wire.taken] == [b"a", b"b", b"c", b"."]

    run(test)


def test_a_token_that_says_nothing_sends_nothing(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await client.tell(_said(""))
            assert (wire.taken, exchange.is_streaming) == ([], False)
            await _begun(client, exchange, wire, clock)
            client.hear(_said(""))
            assert wire.taken == [("told", b"a")]
            assert exchange.sent == 1

    run(test)


@pytest.mark.parametrize("way", ["heard", "told"])
def test_tokens_that_come_close_behind_each_other_are_gathered(way: str, clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            if way == "heard":
                client.hear(_said("b"))
            else:
                await client.tell(_said("b"))
            assert not client.is_open
            clock.now += 0.8 * APART_S
            assert not client.is_open
            clock.now += 0.4 * APART_S
            assert client.is_open

    run(test)


def test_nobody_hears_while_something_waits_to_leave(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            wire.may_send.clear()
            wire.waiting.clear()
            sending = asyncio.ensure_future(client.tell(_said("b")))
            await wire.waiting.wait()
            assert not client.is_open
            wire.may_send.set()
            await sending
            clock.now += 1
            assert client.is_open

    run(test)


def test_nobody_hears_while_the_client_does_not_take_what_it_is_sent(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            wire.is_open = False
            assert not client.is_open
            wire.is_open = True
            assert client.is_open

    run(test)


def test_a_beat_is_never_overtaken_from_the_moment_it_is_made(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            client._pulse._look()
            client._pulse._look()
            assert client._pulse.beating is not None
            assert wire.taken == [("told", b"a")]  # made, and not sent yet
            assert not client.is_open
            await client.tell(_said("b"))
            clock.now += 1
            assert _hears(client)
            client.hear(_said("c"))
            assert [data for _, data in wire.taken] == [b"a", b"*", b"b", b"c"]

    run(test)


def test_there_is_no_beat_where_tokens_are_heard(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            for _ in range(3):
                client.hear(_said("b"))
                client._pulse._look()
            assert _is_still(client)
            client._pulse._look()
            assert not _is_still(client)

    run(test)


def test_the_last_bytes_come_behind_a_beat_and_none_comes_behind_them(clock: Clock) -> None:
    async def test() -> None:
        wire = Wire()
        client, exchange = _telling(wire)
        with client:
            await _begun(client, exchange, wire, clock)
            client.hear(_said("b"))
            client._pulse._look()
            client._pulse._look()
            await client.end(b"!")
            assert [data for _, data in wire.taken] == [b"a", b"b", b"*", b"!"]
            assert client._pulse._timer is None

    run(test)
