from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from branchline.core.errors import ContextLengthError, EngineBusyError, EngineError, EngineInputError
from branchline.engines.client import ServerConfig
from branchline.engines.upstream_chat import ChatDelta, TokenUsage, ToolCallDelta, UpstreamChat
from tests.engines.fake_model import run
from tests.engines.fake_servers import FakeChat

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


@pytest.mark.parametrize("piece", [0, 1, 13])
def test_text_tools_and_usage_are_streamed(piece: int) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.write_size = SCRIPT, piece
            upstream = UpstreamChat(server.url + "/v1", model="large")
            deltas = [one async for one in upstream.chat(HELLO)]
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
            assert not upstream.exact
            await upstream.close()

    run(main())


def test_the_request_is_the_clients_but_for_its_model() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (chat_event("stop", content="hi"),)
            upstream = UpstreamChat(ServerConfig(server.url + "/v1/", api_key="secret"), model="large")
            tools = [{"type": "function", "function": {"name": "ls"}}]
            options = {"temperature": 0.3, "model": "small", "n": 1, "stream": False}
            assert [one async for one in upstream.chat(HELLO, tools=tools, options=options)]
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

    run(main())


@pytest.mark.parametrize("status", [400, 401, 500])
def test_errors_are_the_upstreams_words(status: int) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.refusal = (status, b'{"error": {"message": "not today", "code": "x"}}')
            upstream = UpstreamChat(server.url + "/v1", model="large")
            with pytest.raises(EngineError, match="not today") as raised:
                await anext(upstream.chat(HELLO))
            assert isinstance(raised.value, EngineInputError) == (status == 400)
            await upstream.close()

    run(main())


def test_an_answer_that_does_not_end_is_an_error() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (chat_event(content="hi"),)
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            assert await anext(stream) == ChatDelta("hi")
            with pytest.raises(EngineError, match="ended before"):
                await anext(stream)
            await upstream.close()

    run(main())


def test_an_answer_closed_early_is_aborted() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.hold_after = (chat_event(content="hi"),), 0
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            await anext(stream)
            await stream.aclose()
            await server.aborted.wait()
            await upstream.close()

    run(main())


def test_closing_ends_an_answer_with_an_error() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events, server.hold_after = (chat_event(content="hi"),), 0
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await server.is_held.wait()
            await upstream.close()
            with pytest.raises(EngineError, match="closed by us"):
                await waiting

    run(main())


def test_several_answers_are_asked_for_one_by_one() -> None:
    async def main() -> None:
        upstream = UpstreamChat("http://127.0.0.1:9/v1", model="large")
        with pytest.raises(EngineInputError, match="n: "):
            await anext(upstream.chat(HELLO, options={"n": 2}))
        await upstream.close()

    run(main())


# -- calls are told apart ----------------------------------------------------------------------------


def _joined_calls(*pieces: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The id, name and arguments of each call that comes in these pieces."""
    calls: dict[int, list[str]] = {}

    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (
                *(chat_event(tool_calls=piece) for piece in pieces),
                chat_event("tool_calls"),
            )
            upstream = UpstreamChat(server.url + "/v1", model="large")
            async for delta in upstream.chat(HELLO):
                for tool in delta.tool_calls:
                    known = calls.setdefault(tool.index, ["", "", ""])
                    known[0], known[1] = known[0] or tool.id, known[1] or tool.name
                    known[2] += tool.arguments
            await upstream.close()

    run(main())
    return [(one[0], one[1], one[2]) for _, one in sorted(calls.items())]


def test_calls_that_are_numbered_are_told_apart_by_their_numbers() -> None:
    assert _joined_calls(
        [
            tool_call_delta(0, "a", name="f", arguments='{"x"'),
            tool_call_delta(1, "b", name="f", arguments="{"),
        ],
        [tool_call_delta(1, arguments="}"), tool_call_delta(0, arguments=": 1}")],
    ) == [("a", "f", '{"x": 1}'), ("b", "f", "{}")]


@pytest.mark.parametrize("number", [None, 0])
def test_calls_of_one_number_or_none_are_told_apart_by_their_ids(number: int | None) -> None:
    assert _joined_calls(
        [tool_call_delta(number, "a", name="f")],
        [tool_call_delta(number, "b", name="f", arguments='{"x"')],
        [tool_call_delta(number, "b", arguments=": 1}")],
        [tool_call_delta(number, "c", name="f")],
    ) == [("a", "f", ""), ("b", "f", '{"x": 1}'), ("c", "f", "")]


@pytest.mark.parametrize("number", [None, 0])
def test_without_ids_a_name_begins_a_call_where_the_one_before_is_whole(number: int | None) -> None:
    assert _joined_calls(
        [tool_call_delta(number, name="f", arguments='{"x"')],
        [tool_call_delta(number, name="f", arguments=": 1}")],
        [tool_call_delta(number, name="f", arguments='{"y": 2}')],
        [tool_call_delta(number, name="g")],
        [tool_call_delta(number, name="h", arguments="{}")],
    ) == [("", "f", '{"x": 1}'), ("", "f", '{"y": 2}'), ("", "g", ""), ("", "h", "{}")]


def test_an_id_that_changes_with_every_piece_makes_no_calls() -> None:
    pieces = [
        [tool_call_delta(0, f"id{place}", arguments=text)] for place, text in enumerate(('{"x"', ": 1}"), 1)
    ]
    assert _joined_calls([tool_call_delta(0, "id0", name="f")], *pieces) == [("id0", "f", '{"x": 1}')]


# -- what an upstream refuses ------------------------------------------------------------------------


def test_a_refusal_is_told_apart_from_a_text() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = (
                chat_event(refusal="I "),
                chat_event(refusal="can't."),
                chat_event("stop"),
            )
            upstream = UpstreamChat(server.url + "/v1", model="large")
            deltas = [one async for one in upstream.chat(HELLO)]
            assert deltas[:2] == [ChatDelta(refusal="I "), ChatDelta(refusal="can't.")]
            await upstream.close()

    run(main())


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
def test_a_refusal_is_the_error_that_it_means(
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
            # The same in a stream that has begun.
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

    run(main())
