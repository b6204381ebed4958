"""Requests of every protocol reach an upstream as Chat Completions; its answers return in every protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.config import GatewayConfig
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import SCRIPT, chat_event
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import events_in, post, request

TEXT = (chat_event(content="fine"), chat_event("stop"))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
MINIMAL_BODY = {"model": "toy", "stream": True, "stream_options": {"include_usage": True}}
CONVERSATION_PROTOCOLS = ("chat/completions", "messages", "responses")


@asynccontextmanager
async def _upstream(*script: dict[str, Any], **options: Any) -> AsyncIterator[tuple[Agent, FakeChat]]:
    """A gateway whose calls go to an upstream that answers with these events."""
    async with FakeChat() as server:
        server.scripted_events = script or TEXT
        upstream = UpstreamChat(server.url + "/v1")
        async with agent(gateway_engine=upstream, codec=ToyCodec.chatml(), **options) as a:
            yield a, server


async def _ask_each_protocol(a: Agent) -> tuple[Any, Any, Any]:
    """The answer in each protocol that has conversations."""
    answers = [await post(a, protocol, "q") for protocol in CONVERSATION_PROTOCOLS]
    assert [answer.status_code for answer in answers] == [200] * 3
    chat, messages, responses = (answer.json() for answer in answers)
    return chat, messages, responses


# -- requests ----------------------------------------------------------------------------------------


def _sent_body(options: dict[str, Any], max_tokens_header: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fields that an upstream gets for a Chat Completions request, without its messages."""
    headers = {"x-branchline-max-tokens": max_tokens_header} if max_tokens_header else {}
    bodies: list[dict[str, Any]] = []

    async def test() -> None:
        async with _upstream(**options) as (a, server):
            assert (await a.ask("p", headers=headers, **body)).status_code == 200
            bodies.extend(server.bodies)

    run(test)
    return {name: value for name, value in bodies[0].items() if name != "messages"}


def test_fields_that_are_not_read_here_are_forwarded() -> None:
    forwarded = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 7,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": -100},
        "stop": "END",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "provider": {"order": ["a", "b"]},
        "tools": [TOOL],
    }
    own = {"n": 1, "return_token_ids": True, "stream": False, "seed": None}
    assert _sent_body({}, "", {**forwarded, **own}) == {**MINIMAL_BODY, **forwarded}


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_an_upstream_gets_no_fields_about_them(choice: str) -> None:
    tools = {"tools": [TOOL]} if choice == "none" else {}
    body = {"tool_choice": choice, "parallel_tool_calls": False, **tools}
    assert _sent_body({}, "", body) == MINIMAL_BODY


@pytest.mark.parametrize(
    ("options", "header", "body", "limit"),
    [
        ({}, "", {}, {}),
        ({}, "", {"max_tokens": 5}, {"max_tokens": 5}),
        ({}, "10", {}, {"max_tokens": 10}),
        ({}, "10", {"max_completion_tokens": 30}, {"max_completion_tokens": 10}),
        ({"sampling": {"max_tokens": 9}}, "", {"max_completion_tokens": 5}, {"max_tokens": 9}),
        ({"sampling": {"max_tokens": 500}}, "10", {"max_tokens": 10}, {"max_tokens": 10}),
        ({"sampling": {"max_tokens": 500}}, "10", {"max_completion_tokens": 10}, {"max_tokens": 10}),
        ({"sampling": {"max_tokens": 5}}, "10", {"max_tokens": 10}, {"max_tokens": 5}),
        (
            {"sampling_defaults": {"max_tokens": 9}},
            "",
            {"max_completion_tokens": 5},
            {"max_completion_tokens": 5},
        ),
        ({"sampling_defaults": {"max_tokens": 9}}, "", {}, {"max_tokens": 9}),
        ({"limits": {"tokens": 7}}, "", {"max_completion_tokens": 9}, {"max_completion_tokens": 7}),
        ({"config": GatewayConfig(default_max_tokens=8)}, "", {}, {"max_tokens": 8}),
    ],
)
def test_an_upstream_gets_one_limit_under_the_name_of_the_client(
    options: dict[str, Any], header: str, body: dict[str, Any], limit: dict[str, int]
) -> None:
    assert _sent_body(options, header, body) == {**MINIMAL_BODY, **limit}


@pytest.mark.parametrize(
    ("protocol", "name"), [("messages", "max_tokens"), ("responses", "max_output_tokens")]
)
def test_the_limit_of_another_protocol_is_sent_as_max_tokens(protocol: str, name: str) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            assert (await post(a, protocol, "q", **{name: 9})).status_code == 200
            assert server.bodies[0]["max_tokens"] == 9

    run(test)


# -- tools -------------------------------------------------------------------------------------------


def _sent_tool_fields(**body: Any) -> dict[str, Any]:
    return {name: value for name, value in _sent_body({}, "", body).items() if name not in MINIMAL_BODY}


def test_an_upstream_is_offered_the_tools_that_it_may_run_itself() -> None:
    search = {"type": "web_search", "user_location": {"country": "CH"}}
    assert _sent_tool_fields(tools=[TOOL, search]) == {"tools": [TOOL, search]}
    assert _sent_tool_fields(tools=[search], tool_choice="auto") == {
        "tools": [search],
        "tool_choice": "auto",
    }


def test_legacy_functions_are_sent_as_tools_with_one_call_at_a_time() -> None:
    named = {"name": "f", "parameters": {}}
    assert _sent_tool_fields(functions=[named], function_call={"name": "f"}) == {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    }
    assert _sent_tool_fields(functions=[named], function_call="none") == {}


PATCH = {"type": "custom", "custom": {"name": "patch"}}
PATCH_FUNCTION = {"type": "function", "function": {"name": "patch"}}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("tools", "choice", "sent"),
    [
        ([PATCH], PATCH, PATCH_FUNCTION),
        ([{"type": "custom", "name": "patch"}], {"type": "custom", "name": "patch"}, PATCH_FUNCTION),
        ([{"type": "function", "name": "patch"}], {"type": "function", "name": "patch"}, PATCH_FUNCTION),
        (
            [{"type": "apply_patch"}],
            {"type": "apply_patch"},
            {"type": "function", "function": {"name": "apply_patch"}},
        ),
        (
            [{"type": "namespace", "name": "mcp", "tools": [{"type": "custom", "name": "patch"}]}],
            {"type": "custom", "custom": {"name": "patch", "namespace": "mcp"}},
            {"type": "function", "function": {"name": "mcp__patch"}},
        ),
        (
            [PATCH, TOOL, SEARCH],
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [PATCH, PATCH_FUNCTION, SEARCH]},
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [PATCH_FUNCTION, PATCH_FUNCTION, SEARCH]},
            },
        ),
        # A choice of a tool that was not offered in another shape is forwarded.
        ([TOOL, SEARCH], SEARCH, SEARCH),
        ([TOOL], PATCH, PATCH),
        ([TOOL], {"type": ["custom"]}, {"type": ["custom"]}),
        ([TOOL], {"type": "custom", "custom": {"name": 5}}, {"type": "custom", "custom": {"name": 5}}),
        (
            [TOOL],
            {"type": "allowed_tools", "allowed_tools": 5},
            {"type": "allowed_tools", "allowed_tools": 5},
        ),
        ([PATCH], "required", "required"),
    ],
)
def test_a_tool_choice_has_the_shape_in_which_the_tool_is_offered(
    tools: list[Any], choice: Any, sent: Any
) -> None:
    assert _sent_tool_fields(tools=tools, tool_choice=choice)["tool_choice"] == sent


CHOSEN = {"type": "function", "function": {"name": "f"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("protocol", "tool", "choice", "sent"),
    [
        ("messages", ANTHROPIC_TOOL, {"type": "auto"}, None),
        ("messages", ANTHROPIC_TOOL, {"type": "any"}, "required"),
        ("messages", ANTHROPIC_TOOL, {"type": "tool", "name": "f"}, CHOSEN),
        ("responses", RESPONSES_TOOL, "auto", None),
        ("responses", RESPONSES_TOOL, "required", "required"),
        ("responses", RESPONSES_TOOL, {"type": "function", "name": "f"}, CHOSEN),
        (
            "responses",
            RESPONSES_TOOL,
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOSEN]}},
        ),
    ],
)
def test_a_tool_choice_of_another_protocol_is_sent_as_that_of_chat_completions(
    protocol: str, tool: dict[str, Any], choice: Any, sent: Any
) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            hidden = "none" if protocol == "responses" else {"type": "none"}
            for tool_choice in (choice, hidden):
                answer = await post(a, protocol, "p", tools=[tool], tool_choice=tool_choice)
                assert answer.status_code == 200, answer.text
            with_tools, without = server.bodies
            assert with_tools["tools"][0]["function"]["name"] == "f"
            assert with_tools.get("tool_choice") == sent
            assert not {"tools", "tool_choice"} & without.keys()

    run(test)


# -- answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_reaches_the_client(stream: bool) -> None:
    async def test() -> None:
        async with _upstream(*SCRIPT) as (a, server):
            if stream:
                events = await a.stream("p", model="large", stream_options={"include_usage": True})
                deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
                assert "".join(delta.get("content") or "" for delta in deltas) == "héllo"
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
                assert events[-1]["usage"]["prompt_tokens"] == 7
            else:
                message = (await a.ask("p", model="large")).json()["choices"][0]["message"]
                assert (message["content"], message["reasoning_content"]) == ("héllo", "hm")
                calls = message["tool_calls"]
            assert [(call["id"], call["function"]["arguments"]) for call in calls] == [
                ("c1", '{"a": 1}'),
                ("c2", "{}"),
            ]
            assert server.bodies[0]["model"] == "large"

    run(test)


def test_usage_is_the_upstreams_in_every_protocol() -> None:
    async def test() -> None:
        usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 222}}
        async with _upstream(*TEXT, usage) as (a, _):
            chat, messages, responses = await _ask_each_protocol(a)
            assert chat["usage"] == {"prompt_tokens": 11, "completion_tokens": 222, "total_tokens": 233}
            assert messages["usage"]["output_tokens"] == 222
            assert responses["usage"]["output_tokens"] == 222

    run(test)


def test_a_refusal_is_one_in_every_protocol() -> None:
    async def test() -> None:
        script = chat_event(refusal="I "), chat_event(refusal="can't."), chat_event("stop")
        async with _upstream(*script) as (a, _):
            chat, messages, responses = await _ask_each_protocol(a)
            message = chat["choices"][0]["message"]
            assert (message["content"], message["refusal"]) == (None, "I can't.")
            assert messages["stop_reason"] == "refusal"
            assert messages["content"] == [{"type": "text", "text": "I can't."}]
            (item,) = responses["output"]
            assert item["content"] == [{"type": "refusal", "refusal": "I can't."}]
            assert a.session.managed.session.tree.nodes[-1].message.refusal == "I can't."
            # Sent back, it is recognised.
            await a.ask("q", message, "go on")
            items = [{"role": "user", "content": "q"}, item, {"role": "user", "content": "go on"}]
            await a.http.send(request(a, "responses", "", input=items))
            assert [len(timeline["calls"]) for timeline in await a.timelines()] == [1, 1, 2, 2]

    run(test)


def test_a_refusal_is_streamed_as_one() -> None:
    async def test() -> None:
        async with _upstream(chat_event(refusal="I can't."), chat_event("stop")) as (a, _):
            chat = await a.stream("q")
            assert [event["choices"][0]["delta"].get("refusal") for event in chat] == ["I can't.", None]
            streams = [await post(a, protocol, "q", stream=True) for protocol in ("messages", "responses")]
            messages, responses = (events_in(response.text) for response in streams)
            assert messages[-2]["delta"]["stop_reason"] == "refusal"
            texts = [event["delta"]["text"] for event in messages if event["type"] == "content_block_delta"]
            assert texts == ["I can't."]
            kinds = [event["type"] for event in responses]
            assert [kind for kind in kinds if "refusal" in kind] == [
                "response.refusal.delta",
                "response.refusal.done",
            ]
            assert responses[kinds.index("response.refusal.done")]["refusal"] == "I can't."
            (item,) = responses[-1]["response"]["output"]
            assert item["content"] == [{"type": "refusal", "refusal": "I can't."}]

    run(test)


@pytest.mark.parametrize("text", ["", "Well. "])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reference_to_a_refusal_stands_for_it(text: str, stream: bool) -> None:
    async def test() -> None:
        content = [chat_event(content=text)] if text else []
        async with _upstream(*content, chat_event(refusal="I can't."), chat_event("stop")) as (a, _):
            answer = await post(a, "responses", "q", stream=stream)
            output = (events_in(answer.text)[-1]["response"] if stream else answer.json())["output"]
            assert len(output) == (2 if text else 1)
            references = [{"type": "item_reference", "id": item["id"]} for item in output]
            items = [{"role": "user", "content": "q"}, *references, {"role": "user", "content": "go on"}]
            assert (await a.http.send(request(a, "responses", "", input=items))).status_code == 200
            (timeline,) = await a.timelines()
            assert len(timeline["calls"]) == 2
            path = a.session.managed.session.tree.nodes[-1].path()
            assert [(node.message.content, node.message.refusal) for node in path][1] == (text, "I can't.")

    run(test)


def test_a_filtered_answer_is_incomplete_in_every_protocol() -> None:
    async def test() -> None:
        async with _upstream(chat_event(content="par"), chat_event("content_filter")) as (a, _):
            chat, messages, responses = await _ask_each_protocol(a)
            assert chat["choices"][0]["finish_reason"] == "content_filter"
            assert messages["stop_reason"] == "refusal"
            assert responses["status"] == "incomplete"
            assert responses["incomplete_details"] == {"reason": "content_filter"}

    run(test)


@pytest.mark.parametrize("protocol", CONVERSATION_PROTOCOLS)
def test_a_busy_upstream_is_429_with_its_retry_after(protocol: str) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            server.refusal, server.retry_after = (429, b'{"error": {"message": "slowly"}}'), "7"
            response = await post(a, protocol, "q")
            assert (response.status_code, response.headers["retry-after"]) == (429, "7")
            assert "slowly" in response.json()["error"]["message"]

    run(test)


def test_a_prompt_that_is_too_long_for_an_upstream_has_our_error_code() -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            error = {"message": "too much", "code": "context_length_exceeded"}
            server.refusal = (400, json.dumps({"error": error}).encode())
            response = await post(a, "chat/completions", "q")
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"

    run(test)
