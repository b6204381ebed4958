"""A silent stream sends keepalives; keepalives and events never overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import anthropic
import openai
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.parsing.base import MessageDelta
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.asgi import AsgiRequest, StreamWriter
from branchline.gateway.config import GatewayConfig
from branchline.gateway.model_api import PROTOCOLS
from branchline.gateway.protocols.base import ErrorInfo
from branchline.runtime.answer import AnswerDelta
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import events_in, request

TOOL_CALL = Message("assistant", "I write.", tool_calls=(ToolCall("write", '{"text": "long"}'),))
FAST_PINGS = GatewayConfig(keepalive_s=0.01)
IS_PING: dict[str, Callable[[Any], bool]] = {
    "chat/completions": lambda event: event["choices"][0]["delta"] == {},
    "completions": lambda event: event["choices"][0]["text"] == "",
    "responses": lambda event: event["type"] == "response.in_progress",
    "messages": lambda event: event["type"] == "ping",
}
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


class HeldEngine(ScriptedEngine):
    """Yields the first half of its answer, or nothing, and waits for `resume`."""

    def __init__(self, half: bool, reply: Any = TOOL_CALL) -> None:
        super().__init__(ToyCodec.chatml(), replies(reply), chunk_size=len("I write.") + 4)
        self.resume_event = asyncio.Event()
        self.half = half

    async def generate(self, *args: Any, **options: Any) -> Any:
        if not self.half:
            await self.resume_event.wait()
        async for chunk in super().generate(*args, **options):
            yield chunk
            await self.resume_event.wait()


async def _read_stream(a: Agent, engine: HeldEngine, protocol: str, pings: int = 3) -> str:
    """The stream of an engine that is resumed after this many keepalives."""
    received = ""
    response = await a.http.send(request(a, protocol, "q", stream=True), stream=True)
    assert response.status_code == 200
    async for text in response.aiter_text():
        received += text
        if sum(map(IS_PING[protocol], events_in(received))) >= pings:
            engine.resume_event.set()
    await response.aclose()
    return received


@protocols
@pytest.mark.parametrize("half", [False, True])
def test_silent_stream_sends_keepalives(protocol: str, half: bool) -> None:
    async def test() -> None:
        engine = HeldEngine(half)
        async with agent(engine=engine, config=FAST_PINGS) as a:
            events = events_in(await _read_stream(a, engine, protocol))
            assert sum(map(IS_PING[protocol], events)) >= 3
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
            assert (await a.timelines())[0]["mask"].count(1) == len(ToyCodec.chatml().encode_reply(TOOL_CALL))
            assert len(tree.calls) == 1

    run(test)


def _on_ping(monkeypatch: pytest.MonkeyPatch, protocol: str, callback: Callable[[int], None]) -> None:
    """Calls back with the number of each keepalive of a protocol."""
    encoder: Any = PROTOCOLS[protocol].stream_encoder
    encode_ping, numbers = encoder.encode_ping, count(1)

    def counted(self: Any) -> Any:
        callback(next(numbers))
        return encode_ping(self)

    monkeypatch.setattr(encoder, "encode_ping", counted)


@protocols
def test_busy_stream_sends_no_keepalives(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        pings: list[int] = []
        _on_ping(monkeypatch, protocol, pings.append)
        async with agent("I write.", codec=ToyCodec.chatml()) as a:
            assert events_in((await a.http.send(request(a, protocol, "q", stream=True))).text)
            assert not pings

    run(test)


@pytest.mark.parametrize("protocol", ["chat/completions", "responses", "messages"])
def test_sdks_accept_keepalives(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = HeldEngine(half=True)
        _on_ping(monkeypatch, protocol, lambda number: engine.resume_event.set() if number == 3 else None)
        async with agent(engine=engine, config=FAST_PINGS) as a:
            assert await _sdk_answer(a, protocol) == ("I write.", "write")

    run(test)


async def _sdk_answer(a: Agent, protocol: str) -> tuple[Any, str]:
    """The text and the tool name of an answer, as the protocol's SDK reads it."""
    messages: list[Any] = [{"role": "user", "content": "q"}]
    if protocol == "messages":
        url, key = a.session.anthropic_base_url, a.session.api_key
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key=key) as claude,
            claude.messages.stream(model="m", max_tokens=500, messages=messages) as stream,
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
        async with sdk.chat.completions.stream(model="m", messages=messages) as chunks:
            message = (await chunks.get_final_completion()).choices[0].message
        assert message.tool_calls is not None
        return message.content, message.tool_calls[0].function.name


def test_error_after_a_keepalive_is_an_event_of_the_stream() -> None:
    async def test() -> None:
        engine = HeldEngine(half=False, reply=EngineError("GPU on fire"))
        async with agent(engine=engine, config=FAST_PINGS) as a:
            events = events_in(await _read_stream(a, engine, "responses", pings=2))
            assert events[-1]["type"] == "response.failed"
            assert events[-1]["response"]["error"]["message"] == "GPU on fire"
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert not a.session.managed.session.tree.calls

    run(test)


# -- the writer alone --------------------------------------------------------------------------------

EVENT = AnswerDelta(0, [MessageDelta(content="word")])


class Encoder:
    """Encodes a delta as its text."""

    def encode_delta(self, delta: AnswerDelta) -> bytes:
        return delta.deltas[0].content.encode()

    def encode_ping(self) -> bytes:
        return b"ping"

    def encode_end(self, result: Any) -> bytes:
        return b"end"

    def encode_error(self, info: Any) -> bytes:
        return b"error"


class BlockingServer:
    """A server whose `send` blocks while `open` is cleared."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()
        self.blocked = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if not self.open.is_set():
                self.blocked.set()
            await self.open.wait()
            self.sent.append(message["body"])

    @contextmanager
    def writer(self, keepalive_s: float) -> Iterator[StreamWriter]:
        async def receive() -> Any:
            raise AssertionError("the body was read")

        request = AsgiRequest({"method": "POST", "headers": []}, receive, self.send)
        writer = StreamWriter(request, Encoder(), keepalive_s)
        yield writer
        writer.keepalive_task.cancel()


def test_no_keepalive_starts_while_an_event_is_being_sent() -> None:
    async def test() -> None:
        server = BlockingServer()
        with server.writer(0.002) as writer:
            server.open.clear()
            sending = asyncio.ensure_future(writer.write(EVENT))
            await server.blocked.wait()
            await asyncio.sleep(0.02)  # several checks
            server.open.set()
            await sending
            assert server.sent[0] == b"word"

    run(test)


def test_event_waits_for_a_keepalive_in_progress() -> None:
    async def test() -> None:
        server = BlockingServer()
        server.open.clear()
        with server.writer(0.002) as writer:
            await server.blocked.wait()
            sending = asyncio.ensure_future(writer.write_error(ErrorInfo(500, "")))
            await asyncio.sleep(0)
            assert not sending.done()
            server.open.set()
            await sending
            assert server.sent == [b"ping", b"error"]

    run(test)


def test_cancelling_the_task_ends_a_keepalive_in_progress() -> None:
    async def test() -> None:
        server = BlockingServer()
        server.open.clear()
        with server.writer(0.002) as writer:
            await server.blocked.wait()
        with pytest.raises(asyncio.CancelledError):
            await writer.keepalive_task
        assert server.sent == []

    run(test)


def test_empty_deltas_are_not_sent() -> None:
    async def test() -> None:
        server = BlockingServer()
        with server.writer(60) as writer:
            await writer.write(AnswerDelta(0, [MessageDelta(content="")]))
            assert server.sent == []

    run(test)
