"""An upstream without ids is passed on as it is, and what is recorded says that it is not exact."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from branchline import ExportPolicy, ToyCodec, export_samples
from branchline.engines.upstream_chat import UpstreamChat
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import SCRIPT, chat_event
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_bodies import events_in, post, request

TEXT = (chat_event(content="fine"), chat_event("stop"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_upstream_says_reaches_the_client_and_the_tree(stream: bool) -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = SCRIPT
            upstream = UpstreamChat(server.url + "/v1")
            async with agent(gateway_engine=upstream, codec=ToyCodec.chatml()) as a:
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
                tree = a.session.managed.session.tree
                assert tree.nodes[-1].message.content == "héllo"

    run(test)


def test_a_captured_conversation_is_one_timeline_that_is_trained_only_when_asked_for() -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = TEXT
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                await a.ask_text("p")
                await a.ask_text("p", "fine", "q", temperature=0.5)
                assert len(await a.timelines()) == 1
                told = await a.get("/samples")
                assert not told["samples"]
                assert {drop["reason"] for drop in told["report"]["dropped"]} == {"inexact"}
                policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
                (sample,) = export_samples(a.session.managed.session.tree, policy).samples
                assert (sample.exact, sample.inexact_tokens) == (False, 2 * (len("fine") + 1))
                # Only what was asked for is asked for: the upstream has defaults of its own.
                assert "temperature" not in server.bodies[0]
                assert "max_tokens" not in server.bodies[0]
                assert server.bodies[1]["temperature"] == 0.5

    run(test)


@pytest.mark.parametrize("body", [{"n": 2}])
def test_what_an_upstream_cannot_do_is_refused(body: dict[str, Any]) -> None:
    async def test() -> None:
        async with (
            FakeChat() as server,
            agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a,
        ):
            assert (await a.ask("p", **body)).status_code == 400
            server.refusal = (500, b"down")
            assert (await a.ask("p")).status_code == 502
            assert not a.session.managed.session.tree.calls

    run(test)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def _chat_body(options: dict[str, Any], **body: Any) -> dict[str, Any]:
    """What an upstream is asked for when a client asks for this."""
    asked: list[dict[str, Any]] = []

    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = TEXT
            upstream = UpstreamChat(server.url + "/v1")
            async with agent(gateway_engine=upstream, codec=ToyCodec.chatml(), **options) as a:
                assert (await a.ask("p", **body)).status_code == 200
                asked.extend(server.bodies)

    run(test)
    return {name: value for name, value in asked[0].items() if name not in ("messages", "tools")}


MINIMAL_BODY = {"model": "toy", "stream": True, "stream_options": {"include_usage": True}}


def test_fields_that_nobody_here_reads_reach_the_upstream_as_they_came() -> None:
    wishes = {
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
    }
    ours = {"n": 1, "return_token_ids": True, "stream": False, "seed": None}
    assert _chat_body({}, tools=[TOOL], **wishes, **ours) == {**MINIMAL_BODY, **wishes}


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_an_upstream_is_told_nothing_about_them(choice: str) -> None:
    tools = {"tools": [TOOL]} if choice == "none" else {}
    assert _chat_body({}, tool_choice=choice, parallel_tool_calls=False, **tools) == MINIMAL_BODY


@pytest.mark.parametrize(
    ("options", "body", "limit"),
    [
        ({}, {"max_tokens": 5}, {"max_tokens": 5}),
        ({"sampling": {"max_tokens": 9}}, {"max_completion_tokens": 5}, {"max_tokens": 9}),
        (
            {"sampling_defaults": {"max_tokens": 9}},
            {"max_completion_tokens": 5},
            {"max_completion_tokens": 5},
        ),
        ({"sampling_defaults": {"max_tokens": 9}}, {}, {"max_tokens": 9}),
    ],
)
def test_an_upstream_is_told_one_limit_under_the_name_it_was_given(
    options: dict[str, Any], body: dict[str, Any], limit: dict[str, int]
) -> None:
    assert _chat_body(options, **body) == {**MINIMAL_BODY, **limit}


# -- what upstreams say beside texts -----------------------------------------------------------------


async def _ask_each_protocol(a: Agent) -> tuple[Any, Any, Any]:
    """The answer in each protocol that has conversations."""
    answers = [await post(a, protocol, "q") for protocol in ("chat/completions", "messages", "responses")]
    assert [answer.status_code for answer in answers] == [200] * 3
    chat, messages, responses = (answer.json() for answer in answers)
    return chat, messages, responses


def _said(test: Callable[[Agent], Awaitable[None]], *script: dict[str, Any]) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.scripted_events = script
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                await test(a)

    run(main)


def _call(id: str | None, arguments: str) -> dict[str, Any]:
    return chat_event(tool_calls=[{"id": id, "function": {"name": "look", "arguments": arguments}}])


@pytest.mark.parametrize("stream", [False, True])
def test_calls_without_ids_get_some_by_which_their_results_are_known(stream: bool) -> None:
    async def test(a: Agent) -> None:
        if stream:
            events = await a.stream("q")
            deltas = [event["choices"][0]["delta"] for event in events]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            finish = events[-1]["choices"][0]["finish_reason"]
        else:
            choice = (await a.ask("q")).json()["choices"][0]
            calls, finish = choice["message"]["tool_calls"], choice["finish_reason"]
        assert [call["function"]["arguments"] for call in calls] == ['{"a":1}', '{"b":2}']
        assert all(call["id"].startswith("call_") for call in calls)
        assert calls[0]["id"] != calls[1]["id"]
        # An answer with calls waits for their results, though the upstream says that it is over.
        assert finish == "tool_calls"
        recorded = a.session.managed.session.tree.nodes[-1].message.tool_calls
        assert [call.id for call in recorded] == [call["id"] for call in calls]

    _said(test, _call("", '{"a":1}'), _call(None, '{"b":2}'), chat_event("stop"))


@pytest.mark.parametrize(
    ("word", "finish"),
    [(word, "tool_calls") for word in ("stop", "tool_calls", "tool_use", "function_call", "eos", "end_turn")]
    + [(word, word) for word in ("length", "content_filter")],
)
def test_an_answer_with_calls_waits_for_them_whatever_the_upstream_calls_its_end(
    word: str, finish: str
) -> None:
    async def test(a: Agent) -> None:
        assert (await a.ask("q")).json()["choices"][0]["finish_reason"] == finish
        events = await a.stream("q")
        assert events[-1]["choices"][0]["finish_reason"] == finish

    _said(test, _call("c1", "{}"), chat_event(word))


def test_both_counts_are_the_upstreams_or_both_ours() -> None:
    async def counted(a: Agent) -> None:
        chat, messages, responses = await _ask_each_protocol(a)
        assert chat["usage"] == {"prompt_tokens": 11, "completion_tokens": 222, "total_tokens": 233}
        assert messages["usage"]["output_tokens"] == 222
        assert responses["usage"]["output_tokens"] == 222

    async def uncounted(a: Agent) -> None:
        chat, _, _ = await _ask_each_protocol(a)
        assert chat["usage"]["completion_tokens"] == len(ToyCodec.chatml().encode("fine")) + 1

    usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 222}}
    _said(counted, *TEXT, usage)
    _said(uncounted, *TEXT)


def test_a_refusal_stays_one_in_every_protocol() -> None:
    async def test(a: Agent) -> None:
        chat, messages, responses = await _ask_each_protocol(a)
        message = chat["choices"][0]["message"]
        assert (message["content"], message["refusal"]) == (None, "I can't.")
        assert (messages["stop_reason"], messages["content"]) == (
            "refusal",
            [{"type": "text", "text": "I can't."}],
        )
        (item,) = responses["output"]
        assert item["content"] == [{"type": "refusal", "refusal": "I can't."}]
        assert a.session.managed.session.tree.nodes[-1].message.refusal == "I can't."
        # What comes back is known again.
        await a.ask("q", message, "go on")
        items = [{"role": "user", "content": "q"}, item, {"role": "user", "content": "go on"}]
        await a.http.send(request(a, "responses", "", input=items))
        assert [len(line["calls"]) for line in await a.timelines()] == [1, 1, 2, 2]

    _said(test, chat_event(refusal="I "), chat_event(refusal="can't."), chat_event("stop"))


@pytest.mark.parametrize("text", ["", "Well. "])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reference_to_a_refusal_stands_for_it(text: str, stream: bool) -> None:
    async def test(a: Agent) -> None:
        answer = await post(a, "responses", "q", stream=stream)
        output = (events_in(answer.text)[-1]["response"] if stream else answer.json())["output"]
        assert len(output) == (2 if text else 1)
        references = [{"type": "item_reference", "id": item["id"]} for item in output]
        items = [{"role": "user", "content": "q"}, *references, {"role": "user", "content": "go on"}]
        assert (await a.http.send(request(a, "responses", "", input=items))).status_code == 200
        (line,) = await a.timelines()
        assert len(line["calls"]) == 2
        path = a.session.managed.session.tree.nodes[-1].path()
        assert [(node.message.content, node.message.refusal) for node in path][1] == (text, "I can't.")

    _said(
        test,
        *([chat_event(content=text)] if text else []),
        chat_event(refusal="I can't."),
        chat_event("stop"),
    )


def test_a_refusal_is_streamed_as_one() -> None:
    async def test(a: Agent) -> None:
        chat = await a.stream("q")
        assert [event["choices"][0]["delta"].get("refusal") for event in chat] == ["I can't.", None]
        sent = [await post(a, protocol, "q", stream=True) for protocol in ("messages", "responses")]
        messages, responses = (events_in(response.text) for response in sent)
        assert messages[-2]["delta"]["stop_reason"] == "refusal"
        assert [event["delta"]["text"] for event in messages if event["type"] == "content_block_delta"] == [
            "I can't."
        ]
        kinds = [event["type"] for event in responses]
        assert [kind for kind in kinds if "refusal" in kind] == [
            "response.refusal.delta",
            "response.refusal.done",
        ]
        assert responses[kinds.index("response.refusal.done")]["refusal"] == "I can't."
        (item,) = responses[-1]["response"]["output"]
        assert item["content"] == [{"type": "refusal", "refusal": "I can't."}]

    _said(test, chat_event(refusal="I can't."), chat_event("stop"))


def test_an_answer_that_a_filter_cut_says_so_in_every_protocol() -> None:
    async def test(a: Agent) -> None:
        chat, messages, responses = await _ask_each_protocol(a)
        assert chat["choices"][0]["finish_reason"] == "content_filter"
        assert messages["stop_reason"] == "refusal"
        assert (responses["status"], responses["incomplete_details"]) == (
            "incomplete",
            {"reason": "content_filter"},
        )

    _said(test, chat_event(content="par"), chat_event("content_filter"))


@pytest.mark.parametrize("protocol", ["chat/completions", "messages", "responses"])
def test_an_upstream_that_has_too_much_to_do_says_when_to_come_again(protocol: str) -> None:
    async def main() -> None:
        async with FakeChat() as server:
            server.refusal, server.retry_after = (429, b'{"error": {"message": "slowly"}}'), "7"
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                response = await post(a, protocol, "q")
                assert (response.status_code, response.headers["retry-after"]) == (429, "7")
                assert "slowly" in response.json()["error"]["message"]

    run(main)


def test_an_upstreams_word_for_a_prompt_that_is_too_long_is_ours() -> None:
    async def main() -> None:
        async with FakeChat() as server:
            problem = {"message": "too much", "code": "context_length_exceeded"}
            server.refusal = (400, json.dumps({"error": problem}).encode())
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                response = await post(a, "chat/completions", "q")
                assert (response.status_code, response.json()["error"]["code"]) == (
                    400,
                    "context_length_exceeded",
                )

    run(main)


# -- tools that only an upstream can run -------------------------------------------------------------


def _upstream_tool_fields(**body: Any) -> dict[str, Any]:
    """What an upstream hears about tools."""
    asked: list[dict[str, Any]] = []

    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = TEXT
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                assert (await a.ask("p", **body)).status_code == 200
                asked.extend(server.bodies)

    run(test)
    return {name: value for name, value in asked[0].items() if name not in {*MINIMAL_BODY, "messages"}}


def test_an_upstream_is_offered_what_it_may_be_able_to_run_itself() -> None:
    search = {"type": "web_search", "user_location": {"country": "CH"}}
    assert _upstream_tool_fields(tools=[TOOL, search]) == {"tools": [TOOL, search]}
    assert _upstream_tool_fields(tools=[search], tool_choice="auto") == {
        "tools": [search],
        "tool_choice": "auto",
    }


def test_functions_of_old_reach_an_upstream_as_tools_one_call_at_a_time() -> None:
    named = {"name": "f", "parameters": {}}
    assert _upstream_tool_fields(functions=[named], function_call={"name": "f"}) == {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    }
    assert _upstream_tool_fields(functions=[named], function_call="none") == {}


PATCH = {"type": "custom", "custom": {"name": "patch"}}
PATCH_OFFERED = {"type": "function", "function": {"name": "patch"}}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("tools", "choice", "told"),
    [
        ([PATCH], PATCH, PATCH_OFFERED),
        ([{"type": "custom", "name": "patch"}], {"type": "custom", "name": "patch"}, PATCH_OFFERED),
        ([{"type": "function", "name": "patch"}], {"type": "function", "name": "patch"}, PATCH_OFFERED),
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
                "allowed_tools": {"mode": "auto", "tools": [PATCH, PATCH_OFFERED, SEARCH]},
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [PATCH_OFFERED, PATCH_OFFERED, SEARCH]},
            },
        ),
        # What was not offered in another shape is the upstream's to judge.
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
def test_an_upstream_is_told_to_choose_a_tool_in_the_shape_that_it_was_given_it_in(
    tools: list[Any], choice: Any, told: Any
) -> None:
    asked = _upstream_tool_fields(tools=tools, tool_choice=choice)
    assert asked["tool_choice"] == told


NAMED = {"type": "function", "function": {"name": "f"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
FLAT = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("protocol", "tool", "choice", "told"),
    [
        ("messages", ANTHROPIC_TOOL, {"type": "auto"}, None),
        ("messages", ANTHROPIC_TOOL, {"type": "any"}, "required"),
        ("messages", ANTHROPIC_TOOL, {"type": "tool", "name": "f"}, NAMED),
        ("responses", FLAT, "auto", None),
        ("responses", FLAT, "required", "required"),
        ("responses", FLAT, {"type": "function", "name": "f"}, NAMED),
        (
            "responses",
            FLAT,
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        ),
    ],
)
def test_a_choice_of_another_protocol_reaches_an_upstream_as_chat_completions_say_it(
    protocol: str, tool: dict[str, Any], choice: Any, told: Any
) -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = TEXT
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                hidden = "none" if protocol == "responses" else {"type": "none"}
                for wanted in (choice, hidden):
                    answer = await post(a, protocol, "p", tools=[tool], tool_choice=wanted)
                    assert answer.status_code == 200, answer.text
            asked, without = server.bodies
            assert asked["tools"][0]["function"]["name"] == "f"
            assert asked.get("tool_choice") == told
            assert "tools" not in without
            assert "tool_choice" not in without

    run(test)
