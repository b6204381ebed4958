from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from branchline.core.errors import ContextLengthError, EngineBusyError, EngineError, EngineInputError
from branchline.engines.client import ServerConfig
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.upstream_events import ChatDelta, TokenUsage, ToolCallDelta
from tests.engines.fake_servers import FakeChat
from tests.engines.manual_clock import run_with_frozen_clock

HELLO = [{"role": "user", "content": "hello"}]


def chat_event(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def tool_call_delta(index: int | None, id: str | None = None, **function: Any) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": function}


SCRIPT = (
    chat_event(role="assistant", content=""),
    chat_event(reasoning_content="hm"),
    chat_event(content="hé"),
    chat_event(content="llo"),
    chat_event(tool_calls=[tool_call_delta(0, "c1", name="ls", arguments="")]),
    chat_event(
        tool_calls=[
            tool_call_delta(0, arguments='{"a"'),
            tool_call_delta(1, "c2", name="cat", arguments="{}"),
        ]
    ),
    chat_event(tool_calls=[tool_call_delta(0, arguments=": 1}")]),
    chat_event("tool_calls"),
    {"id": "x", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
)


@pytest.mark.parametrize("write_size", [0, 1, 13])
def test_text_tool_calls_and_usage_are_streamed(write_size: int) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.write_size = SCRIPT, write_size
            upstream = UpstreamChat(server.url + "/v1", model="large")
            deltas = [delta async for delta in upstream.chat(HELLO)]
            assert deltas == [
                ChatDelta(reasoning_content="hm"),
                ChatDelta("hé"),
                ChatDelta("llo"),
                ChatDelta(tool_calls=(ToolCallDelta(0, "c1", "ls"),)),
                ChatDelta(
                    tool_calls=(ToolCallDelta(0, arguments='{"a"'), ToolCallDelta(1, "c2", "cat", "{}"))
                ),
                ChatDelta(tool_calls=(ToolCallDelta(0, arguments=": 1}"),)),
                ChatDelta(finish_reason="tool_calls"),
                ChatDelta(usage=TokenUsage(7, 3)),
            ]
            await upstream.close()

    run_with_frozen_clock(main())


def test_request_is_passed_on_with_the_configured_model() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (chat_event("stop", content="hi"),)
            upstream = UpstreamChat(ServerConfig(server.url + "/v1/", api_key="secret"), model="large")
            tools = [{"type": "function", "function": {"name": "ls"}}]
            options = {"temperature": 0.3, "model": "small", "n": 1, "stream": False}
            assert [delta async for delta in upstream.chat(HELLO, tools=tools, options=options)]
            assert server.bodies == [
                {
                    "model": "large",
                    "messages": HELLO,
                    "tools": tools,
                    "temperature": 0.3,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ]
            assert "secret" not in repr(vars(upstream))
            await upstream.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("status", [400, 401, 500])
def test_error_has_the_upstreams_message(status: int) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.refusal = (status, b'{"error": {"message": "not today", "code": "x"}}')
            upstream = UpstreamChat(server.url + "/v1", model="large")
            with pytest.raises(EngineError, match="not today") as raised:
                await anext(upstream.chat(HELLO))
            assert isinstance(raised.value, EngineInputError) == (status == 400)
            await upstream.close()

    run_with_frozen_clock(main())


def test_stream_without_a_finish_reason_is_an_error() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (chat_event(content="hi"),)
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            assert await anext(stream) == ChatDelta("hi")
            with pytest.raises(EngineError, match="ended before"):
                await anext(stream)
            await upstream.close()

    run_with_frozen_clock(main())


def test_closed_stream_is_aborted_at_the_upstream() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.hold_after = (chat_event(content="hi"),), 0
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            await anext(stream)
            await stream.aclose()
            await server.aborted.wait()
            await upstream.close()

    run_with_frozen_clock(main())


def test_close_ends_a_running_stream_with_an_error() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.hold_after = (chat_event(content="hi"),), 0
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await server.is_held.wait()
            await upstream.close()
            with pytest.raises(EngineError, match="closed by the client"):
                await waiting

    run_with_frozen_clock(main())


def test_n_above_one_is_refused() -> None:
    async def main() -> None:
        upstream = UpstreamChat("http://127.0.0.1:9/v1", model="large")
        with pytest.raises(EngineInputError, match="n: got 2, expected 1"):
            await anext(upstream.chat(HELLO, options={"n": 2}))
        await upstream.close()

    run_with_frozen_clock(main())


# -- indexes of tool calls ---------------------------------------------------------------------------


def _joined_calls(*events: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The id, name and arguments of each tool call in these events."""
    calls: dict[int, list[str]] = {}

    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (
                *(chat_event(tool_calls=parts) for parts in events),
                chat_event("tool_calls"),
            )
            upstream = UpstreamChat(server.url + "/v1", model="large")
            async for delta in upstream.chat(HELLO):
                for part in delta.tool_calls:
                    call = calls.setdefault(part.index, ["", "", ""])
                    call[0], call[1] = call[0] or part.id, call[1] or part.name
                    call[2] += part.arguments
            await upstream.close()

    run_with_frozen_clock(main())
    return [(call[0], call[1], call[2]) for _, call in sorted(calls.items())]


def test_tool_calls_are_distinguished_by_index() -> None:
    assert _joined_calls(
        [
            tool_call_delta(0, "a", name="f", arguments='{"x"'),
            tool_call_delta(1, "b", name="f", arguments="{"),
        ],
        [tool_call_delta(1, arguments="}"), tool_call_delta(0, arguments=": 1}")],
    ) == [("a", "f", '{"x": 1}'), ("b", "f", "{}")]


@pytest.mark.parametrize("index", [None, 0])
def test_tool_calls_with_the_same_index_are_distinguished_by_id(index: int | None) -> None:
    assert _joined_calls(
        [tool_call_delta(index, "a", name="f")],
        [tool_call_delta(index, "b", name="f", arguments='{"x"')],
        [tool_call_delta(index, "b", arguments=": 1}")],
        [tool_call_delta(index, "c", name="f")],
    ) == [("a", "f", ""), ("b", "f", '{"x": 1}'), ("c", "f", "")]


@pytest.mark.parametrize("index", [None, 0])
def test_name_begins_a_tool_call_when_the_arguments_before_it_are_complete(index: int | None) -> None:
    assert _joined_calls(
        [tool_call_delta(index, name="f", arguments='{"x"')],
        [tool_call_delta(index, name="f", arguments=": 1}")],
        [tool_call_delta(index, name="f", arguments='{"y": 2}')],
        [tool_call_delta(index, name="g")],
        [tool_call_delta(index, name="h", arguments="{}")],
    ) == [("", "f", '{"x": 1}'), ("", "f", '{"y": 2}'), ("", "g", ""), ("", "h", "{}")]


def test_id_that_changes_with_every_part_begins_no_tool_call() -> None:
    events = [[tool_call_delta(0, f"id{i}", arguments=text)] for i, text in enumerate(('{"x"', ": 1}"), 1)]
    assert _joined_calls([tool_call_delta(0, "id0", name="f")], *events) == [("id0", "f", '{"x": 1}')]


# -- refusals and errors -----------------------------------------------------------------------------


def test_refusal_is_not_content() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (
                chat_event(refusal="I "),
                chat_event(refusal="can't."),
                chat_event("stop"),
            )
            upstream = UpstreamChat(server.url + "/v1", model="large")
            deltas = [delta async for delta in upstream.chat(HELLO)]
            assert deltas[:2] == [ChatDelta(refusal="I "), ChatDelta(refusal="can't.")]
            await upstream.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("status", "problem", "expected"),
    [
        (400, {"message": "too much", "code": "context_length_exceeded"}, ContextLengthError),
        (
            400,
            {"message": "This model's maximum context length is 8 tokens.", "code": 400},
            ContextLengthError,
        ),
        (400, {"message": "too much", "code": "invalid"}, EngineInputError),
        (429, {"message": "slowly"}, EngineBusyError),
        (500, {"message": "This model's maximum context length broke us"}, EngineError),
    ],
)
def test_status_and_message_decide_the_error_type(
    status: int, problem: dict[str, Any], expected: type[Exception]
) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.refusal = (status, json.dumps({"error": problem}).encode())
            upstream = UpstreamChat(server.url + "/v1", model="large")
            with pytest.raises(EngineError) as refused:
                await anext(upstream.chat(HELLO))
            assert type(refused.value) is expected
            assert problem["message"] in str(refused.value)
            # The same error as an event of a stream.
            server.refusal, server.scripted_events = (
                None,
                (chat_event(content="hi"), {"error": {**problem, "code": status}}),
            )
            if "code" in problem and isinstance(problem["code"], str):
                server.scripted_events = (chat_event(content="hi"), {"error": problem})
            stream = upstream.chat(HELLO)
            assert await anext(stream) == ChatDelta("hi")
            with pytest.raises(EngineError) as broken:
                await anext(stream)
            assert type(broken.value) is (EngineError if problem.get("code") == "invalid" else expected)
            await upstream.close()

    run_with_frozen_clock(main())
