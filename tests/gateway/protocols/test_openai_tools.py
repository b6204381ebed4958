"""Tools of Chat Completions that are no functions: custom ones, the `functions` of old, vendors' own."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.message import freeform_input
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.protocols.vendor_tools import warn_unsupported_tool
from tests.chat.families import load_codec
from tests.gateway.harness import Agent, agent, run
from tests.templates.tool_shapes import TOOL_SHAPES

PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: LINE"}},
    },
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
streamed = pytest.mark.parametrize("stream", [False, True])


async def answer(a: Agent, *messages: Any, stream: bool = False, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of an answer."""
    if not stream:
        choice = (await a.ask(*messages, **body)).json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {}
    finish = ""
    for event in await a.stream(*messages, **body):
        choice = event["choices"][0]
        for name, value in choice["delta"].items():
            message[name] = message.get(name, []) + value if name == "tool_calls" else value
        finish = choice["finish_reason"] or finish
    for call in message.get("tool_calls", ()):
        call.pop("index")
    return message, finish


# -- custom tools ------------------------------------------------------------------------------------


@streamed
@pytest.mark.parametrize(
    "arguments", ['{"input": "*** Begin\\n+ä"}', '{"patch": "x"}', '{"input": "{\\"a\\": 1}"}', "no JSON"]
)
def test_custom_tool_is_a_function_for_the_model_and_custom_for_the_client(
    arguments: str, stream: bool
) -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall("patch", arguments), ToolCall("look", "{}")))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            tools = [PATCH, LOOK]
            message, finish = await answer(a, "p", tools=tools, stream=stream)
            custom, function = message["tool_calls"]
            assert finish == "tool_calls"
            assert (custom["type"], custom["custom"]) == (
                "custom",
                {"name": "patch", "input": freeform_input(arguments)},
            )
            assert (function["type"], function["function"]["name"]) == ("function", "look")
            shown = a.prompts()[0]
            assert '"name": "patch"' in shown
            assert "lark grammar" in shown
            assert '"custom"' not in shown
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in (custom, function)
            ]
            await a.ask_text("p", message, *results, tools=tools)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2

    run(test)


def test_custom_call_is_recognised_without_tools() -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall("patch", '{"input": "x"}'),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            message, _ = await answer(a, "p", tools=[PATCH])
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
            await a.ask_text("p", message, result)
            tree = a.session.managed.session.tree
            assert tree.calls[1].reused_nodes == (tree.calls[0].outputs[0],)

    run(test)


def test_openai_sdk_reads_a_custom_call() -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall("patch", '{"input": "x"}'),))
        async with (
            agent(reply, codec=ToyCodec.chatml()) as a,
            openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key) as sdk,
        ):
            completion = await sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "q"}],
                tools=[PATCH],  # type: ignore[list-item]
            )
            calls = completion.choices[0].message.tool_calls
            assert calls is not None
            assert calls[0].type == "custom"
            assert (calls[0].custom.name, calls[0].custom.input) == ("patch", "x")

    run(test)


def test_function_without_a_type_is_shown_with_it() -> None:
    async def test() -> None:
        async with agent("ok", codec=ToyCodec.chatml()) as a:
            await a.ask_text("q", tools=[{"function": {"name": "look"}}])
            assert '{"function": {"name": "look"}, "type": "function"}' in a.prompts()[0]

    run(test)


@pytest.mark.parametrize("shape", TOOL_SHAPES)
def test_tools_that_openai_accepts_are_accepted(shape: str) -> None:
    async def test() -> None:
        tool = TOOL_SHAPES[shape]
        async with agent("ok", "ok", codec=ToyCodec.chatml()) as a:
            assert (await a.ask("q", tools=[tool])).status_code == 200
            body = {"model": "toy", "input": "q", "tools": [{"type": "function", **tool["function"]}]}
            url = f"{a.session.base_url}/responses"
            assert (await a.http.post(url, json=body, headers=a.api_headers)).status_code == 200

    run(test)


@pytest.mark.parametrize("family", ["qwen3", "llama3_2", "mistral_nemo", "deepseek_v3"])
def test_15_tools_of_any_type_are_accepted_by_every_template(family: str) -> None:
    async def test() -> None:
        codec: Any = load_codec(family)

        class ReplyCodec:
            encode_reply = staticmethod(codec.encode_reply)
            decode = staticmethod(codec.decode)

        engine = ScriptedEngine(ReplyCodec(), replies("ok"))  # type: ignore[arg-type]
        async with agent(engine=engine, codec=codec) as a:
            for tool in (
                {"type": "web_search"},
                PATCH,
                {"type": "function", "function": {"name": "look"}},
                {"type": None, "name": "look", "parameters": {"type": "object"}},
                {"name": "look", "input_schema": {"type": "object"}},
            ):
                response = await a.ask("q", tools=[tool])
                assert response.status_code == 200, (tool, response.text)

    run(test)


def test_function_is_shown_as_written() -> None:
    async def test() -> None:
        odd = {"function": {"parameters": {}, "name": "look", "x-hint": 1}, "type": "function", "extra": True}
        async with agent("ok", codec=ToyCodec.chatml()) as a:
            await a.ask_text("q", tools=[odd])
            assert '"extra": true' in a.prompts()[0]
            assert '"x-hint": 1' in a.prompts()[0]

    run(test)


def test_unsupported_tool_type_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        warn_unsupported_tool.cache_clear()
        async with agent("ok") as a:
            with caplog.at_level(logging.WARNING, "branchline.gateway"):
                for _ in range(2):
                    await a.ask_text("q", tools=[{"type": "web_search"}])
            assert [
                record.getMessage() for record in caplog.records if "web_search" in record.getMessage()
            ] == [
                "tools of type web_search are not offered: "
                "they run on their vendor's servers, or are not known"
            ]
            assert a.prompts() == ["user:q\nassistant:"] * 2

    run(test)


# -- functions, of old -------------------------------------------------------------------------------


@streamed
def test_legacy_functions_are_tools_and_calls_use_function_call(stream: bool) -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall("look", '{"at": 1}'), ToolCall("look", "{}")))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            functions = [{"name": "look", "parameters": {"type": "object"}}]
            message, finish = await answer(a, "p", functions=functions, function_call="auto", stream=stream)
            assert finish == "function_call"
            assert message["function_call"] == {"name": "look", "arguments": '{"at": 1}'}
            assert "tool_calls" not in message
            assert '"name": "look"' in a.prompts()[0]
            result = {"role": "function", "name": "look", "content": "ok"}
            await a.ask_text("p", message, result, functions=functions)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2

    run(test)


def test_legacy_functions_are_hidden_by_function_call_none() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            await a.ask_text("q", functions=[{"name": "look"}], function_call="none")
            assert a.prompts() == ["user:q\nassistant:"]
            for body, field in (
                ({"functions": [{}]}, "functions[0].function.name"),
                ({"functions": 7}, "functions"),
                ({"functions": [{"name": "look"}], "function_call": 7}, "function_call"),
            ):
                refused = (await a.ask("q", **body)).json()["error"]
                assert refused["param"] == field

    run(test)


# -- stream_options ----------------------------------------------------------------------------------


def test_null_stream_options_are_accepted_and_invalid_ones_named() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            for options in (None, {}, {"include_usage": None}, {"include_obfuscation": False}):
                events = await a.stream("q", stream_options=options)
                assert all("usage" not in event for event in events)
            refused = await a.ask("q", stream=True, stream_options={"include_usage": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                "stream_options.include_usage",
            )

    run(test)
