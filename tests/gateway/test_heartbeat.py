"""A stream that has nothing to say says that it is alive; nothing it says comes twice or out of turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import anthropic
import openai
import pytest
from branchline.gateway.pulse import Pulse

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.asgi_request import AsgiRequest
from branchline.gateway.config import GatewayConfig
from branchline.gateway.model_api import PROTOCOLS
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_bodies import PROTOCOLS, events_in, request

CALL = Message("assistant", "I write.", tool_calls=(ToolCall("write", '{"text": "long"}'),))
FAST_PINGS = GatewayConfig(keepalive_s=0.01)
PINGS: dict[str, Any] = {
    "chat/completions": lambda event: event["choices"][0]["delta"] == {},
    "completions": lambda event: event["choices"][0]["text"] == "",
    "responses": lambda event: event["type"] == "response.in_progress",
    "messages": lambda event: event["type"] == "ping",
}
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


class HeldEngine(ScriptedEngine):
    """Says half of its answer, or nothing of it, and then waits."""

    def __init__(self, half: bool, said: Any = CALL) -> None:
        super().__init__(ToyCodec.chatml(), replies(said), chunk_size=len("I write.") + 4)
        self.go = asyncio.Event()
        self.half = half

    async def generate(self, *args: Any, **options: Any) -> Any:
        if not self.half:
            await self.go.wait()
        async for chunk in super().generate(*args, **options):
            yield chunk
            await self.go.wait()


async def _streamed(a: Agent, engine: HeldEngine, protocol: str, beats: int = 3) -> str:
    """The stream of an engine that goes on once so many beats were heard."""
    heard = ""
    response = await a.http.send(request(a, protocol, "q", stream=True), stream=True)
    assert response.status_code == 200
    async for text in response.aiter_text():
        heard += text
        if sum(map(PINGS[protocol], events_in(heard))) >= beats:
            engine.go.set()
    await response.aclose()
    return heard


@protocols
@pytest.mark.parametrize("half", [False, True])
def test_while_nothing_can_be_told_a_stream_says_that_it_is_alive(protocol: str, half: bool) -> None:
    async def test() -> None:
        engine = HeldEngine(half)
        async with agent(engine=engine, config=FAST_PINGS) as a:
            events = events_in(await _streamed(a, engine, protocol))
            assert sum(map(PINGS[protocol], events)) >= 3
            if protocol == "responses":
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
                items = events[-1]["response"]["output"]
                assert [item["type"] for item in items] == ["message", "function_call"]
            elif protocol == "messages":
                assert [event["type"] for event in events].count("message_start") == 1
                assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
            elif protocol == "chat/completions":
                deltas = [event["choices"][0]["delta"] for event in events]
                assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
                assert "role" in deltas[0]
                assert [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta] == [
                    {"name": "write", "arguments": '{"text": "long"}'}
                ]
            tree = a.session.managed.session.tree
            assert (await a.timelines())[0]["mask"].count(1) == len(ToyCodec.chatml().encode_reply(CALL))
            assert len(tree.calls) == 1

    run(test)


def _count_pings(monkeypatch: pytest.MonkeyPatch, protocol: str, heard: Callable[[int], None]) -> None:
    """Tells the number of each beat of a protocol."""
    stream: Any = PROTOCOLS[protocol].stream_encoder
    plain, numbers = stream.beat, count(1)

    def beat(self: Any) -> Any:
        heard(next(numbers))
        return plain(self)

    monkeypatch.setattr(stream, "beat", beat)


@protocols
def test_a_stream_that_flows_has_no_beats(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        heard: list[int] = []
        _count_pings(monkeypatch, protocol, heard.append)
        async with agent("I write.", codec=ToyCodec.chatml()) as a:
            assert events_in((await a.http.send(request(a, protocol, "q", stream=True))).text)
            assert not heard

    run(test)


@pytest.mark.parametrize("protocol", ["chat/completions", "responses", "messages"])
def test_sdks_read_over_beats(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = HeldEngine(half=True)
        _count_pings(monkeypatch, protocol, lambda number: engine.go.set() if number == 3 else None)
        async with agent(engine=engine, config=FAST_PINGS) as a:
            assert await _sdk_answer(a, protocol) == ("I write.", "write")

    run(test)


async def _sdk_answer(a: Agent, protocol: str) -> tuple[Any, str]:
    """The text and the tool that were called, as an SDK puts them together."""
    asked: list[Any] = [{"role": "user", "content": "q"}]
    if protocol == "messages":
        url, key = a.session.anthropic_base_url, a.session.api_key
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key=key) as claude,
            claude.messages.stream(model="m", max_tokens=500, messages=asked) as stream,
        ):
            text, tool = (await stream.get_final_message()).content
            assert isinstance(text, anthropic.types.TextBlock)
            assert isinstance(tool, anthropic.types.ToolUseBlock)
            return text.text, tool.name
    async with openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key) as sdk:
        if protocol == "responses":
            async with sdk.responses.stream(model="m", input="q") as items:
                response = await items.get_final_response()
            call = response.output[-1]
            assert call.type == "function_call"
            return response.output_text, call.name
        async with sdk.chat.completions.stream(model="m", messages=asked) as chunks:
            said = (await chunks.get_final_completion()).choices[0].message
        assert said.tool_calls is not None
        return said.content, said.tool_calls[0].function.name


def test_an_error_behind_a_beat_is_told_in_the_stream() -> None:
    async def test() -> None:
        engine = HeldEngine(half=False, said=EngineError("GPU on fire"))
        async with agent(engine=engine, config=FAST_PINGS) as a:
            events = events_in(await _streamed(a, engine, "responses", beats=2))
            assert events[-1]["type"] == "response.failed"
            assert events[-1]["response"]["error"]["message"] == "GPU on fire"
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert not a.session.managed.session.tree.calls

    run(test)


# -- the pulse alone ---------------------------------------------------------------------------------


class StepwiseTransport:
    """Where an exchange sends to: takes a piece at a time, when it is let."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.waiting.set()
            await self.open.wait()
            self.taken.append(message["body"])

    def request(self) -> AsgiRequest:
        async def receive() -> Any:
            raise AssertionError("nobody reads")

        return AsgiRequest({"method": "POST", "headers": []}, receive, self.send)


def test_what_waits_to_leave_is_not_overtaken_by_a_beat() -> None:
    async def test() -> None:
        wire = StepwiseTransport()
        exchange = wire.request()
        with Pulse(exchange, lambda: b"beat", 60) as pulse:
            wire.open.clear()
            sending = asyncio.ensure_future(exchange.send_chunk(b"word"))
            await wire.waiting.wait()
            pulse._look()
            pulse._look()
            assert (pulse.beating, wire.taken) == (None, [])
            wire.open.set()
            await sending
            assert wire.taken == [b"word"]

    run(test)


def test_what_is_said_next_waits_for_the_beat_that_is_leaving() -> None:
    async def test() -> None:
        wire = StepwiseTransport()
        exchange = wire.request()
        with Pulse(exchange, lambda: b"beat", 0.002) as pulse:
            wire.open.clear()
            await wire.waiting.wait()
            settled = asyncio.ensure_future(pulse.settle())
            await asyncio.sleep(0)
            assert not settled.done()
            pulse.stop()
            wire.open.set()
            await settled
            await exchange.send_chunk(b"word", last=True)
            assert (wire.taken, pulse.beating) == ([b"beat", b"word"], None)

    run(test)


def test_who_leaves_takes_the_beat_along() -> None:
    async def test() -> None:
        wire = StepwiseTransport()
        with Pulse(wire.request(), lambda: b"beat", 0.002) as pulse:
            wire.open.clear()
            await wire.waiting.wait()
            beat = pulse.beating
            assert beat is not None
        with pytest.raises(asyncio.CancelledError):
            await beat
        assert wire.taken == []

    run(test)
