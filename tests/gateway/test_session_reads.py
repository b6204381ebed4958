"""What a control key reads is built in parts, and the event loop runs in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from branchline.gateway import session_reads
from branchline.gateway.session_reads import _in_turns, _next_bytes
from tests.gateway.harness import Agent, agent, run


class CountingLoop:
    """Runs what threads give it at once, and counts it."""

    count = 0

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.count += 1
        callback()


def test_a_thread_waits_for_the_event_loop_after_each_millisecond_of_work() -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(5):
            time.sleep(0.002)
            yield b"x"

    loop = CountingLoop()
    assert b"".join(_in_turns(parts(), cast(asyncio.AbstractEventLoop, loop))) == b"xxxxx"
    assert loop.count == 5


def test_a_body_is_sent_in_pieces_of_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reads, "_STREAM_BYTES", 4)
    parts = iter([b"abc", b"de", b"fghij", b"k"])
    assert [_next_bytes(parts) for _ in range(4)] == [b"abcde", b"fghij", b"k", b""]


def test_short_work_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reads, "_BUILD_S", 60.0)
    loop = asyncio.new_event_loop()  # never runs
    assert list(_in_turns(iter([b"a", b"b"]), loop)) == [b"a", b"b"]
    loop.close()


def test_a_thread_does_not_wait_for_ever_for_a_loop_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reads, "_BUILD_S", 0.0)
    monkeypatch.setattr(session_reads, "_LOOP_WAIT_S", 0.01)
    loop = asyncio.new_event_loop()  # never runs
    assert list(_in_turns(iter([b"a", b"b"]), loop)) == [b"a", b"b"]
    loop.close()


@pytest.mark.parametrize("question_count", [0, 5])
def test_a_body_in_many_parts_is_the_same_json(question_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(a: Agent, path: str) -> Any:
        url = f"{a.gateway.url}/sessions/{a.session.id}{path}"
        response = await a.http.get(url, headers=a.control_headers)
        assert response.headers["content-type"] == "application/json"
        return json.loads(response.raise_for_status().content)

    async def test() -> None:
        async with agent(rule=lambda _: "yes") as a:
            for index in range(question_count):
                await a.ask_text(f"question {index}")
            paths = ("/tree", "/timelines", "/samples")
            at_once = [await read(a, path) for path in paths]
            monkeypatch.setattr(session_reads, "_STREAM_BYTES", 1)
            monkeypatch.setattr(session_reads, "_BUILD_S", 0.0)
            assert [await read(a, path) for path in paths] == at_once
            assert len(at_once[1]["timelines"]) == question_count
            url = f"{a.gateway.url}/sessions/{a.session.id}/finalize"
            final = (await a.http.post(url, headers=a.control_headers)).json()
            assert final["state"] == "finalized"
            assert final["id"] == a.session.id
            assert {name: final[name] for name in ("samples", "report")} == at_once[2]

    run(test)
