from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.http import Server
from branchline.engines.openai import ChatDelta, ToolDelta, UpstreamChat, Usage
from tests.engines.fake import FakeChat
from tests.engines.model import run

HELLO = [{"role": "user", "content": "hello"}]


def said(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(index: int | None, id: str | None = None, **function: Any) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": function}


SCRIPT = (
    said(role="assistant", content=""),
    said(reasoning_content="hm"),
    said(content="hé"),
    said(content="llo"),
    said(tool_calls=[call(0, "c1", name="ls", arguments="")]),
    said(tool_calls=[call(0, arguments='{"a"'), call(1, "c2", name="cat", arguments="{}")]),
    said(tool_calls=[call(0, arguments=": 1}")]),
    said("tool_calls"),
    {"id": "x", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
)


@pytest.mark.parametrize("piece", [0, 1, 13])
def test_text_tools_and_usage_are_streamed(piece: int) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.script, server.piece = SCRIPT, piece
            upstream = UpstreamChat(server.url + "/v1", model="large")
            deltas = [one async for one in upstream.chat(HELLO)]
            assert deltas == [
                ChatDelta(reasoning="hm"),
                ChatDelta("hé"),
                ChatDelta("llo"),
                ChatDelta(tools=(ToolDelta(0, "c1", "ls"),)),
                ChatDelta(tools=(ToolDelta(0, arguments='{"a"'), ToolDelta(1, "c2", "cat", "{}"))),
                ChatDelta(tools=(ToolDelta(0, arguments=": 1}"),)),
                ChatDelta(finish="tool_calls"),
                ChatDelta(usage=Usage(7, 3)),
            ]
            assert not upstream.exact
            await upstream.close()

    run(main())


def test_the_request_is_the_clients_but_for_its_model() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.script = (said("stop", content="hi"),)
            upstream = UpstreamChat(Server(server.url + "/v1/", api_key="secret"), model="large")
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
            server.script = (said(content="hi"),)
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
            server.script, server.hold_after = (said(content="hi"),), 0
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
            server.script, server.hold_after = (said(content="hi"),), 0
            upstream = UpstreamChat(server.url + "/v1", model="large")
            stream = upstream.chat(HELLO)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await server.held.wait()
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
