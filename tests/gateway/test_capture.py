"""An upstream without ids is passed on as it is, and what is recorded says that it is not exact."""

from __future__ import annotations

from typing import Any

import pytest

from branchline import ExportPolicy, ToyCodec, export_samples
from branchline.engines.openai import UpstreamChat
from tests.engines.fake import FakeChat
from tests.engines.test_openai import SCRIPT, said
from tests.gateway.running import agent, run

TEXT = (said(content="fine"), said("stop"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_upstream_says_reaches_the_client_and_the_tree(stream: bool) -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.script = SCRIPT
            upstream = UpstreamChat(server.url + "/v1")
            async with agent(fleet=upstream, codec=ToyCodec.chatml()) as a:
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
                tree = a.session.live.session.tree
                assert tree.nodes[-1].message.text == "héllo"

    run(test)


def test_a_captured_conversation_is_one_timeline_that_is_trained_only_when_asked_for() -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.script = TEXT
            async with agent(fleet=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a:
                await a.say("p")
                await a.say("p", "fine", "q", temperature=0.5)
                assert len(await a.timelines()) == 1
                told = await a.get("/samples")
                assert not told["samples"]
                assert {drop["reason"] for drop in told["report"]["dropped"]} == {"inexact"}
                policy = ExportPolicy(inexact=True, missing_logprobs=True)
                (sample,) = export_samples(a.session.live.session.tree, policy).samples
                assert (sample.exact, sample.tokens_behind_other_ids) == (False, 2 * (len("fine") + 1))
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
            agent(fleet=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml()) as a,
        ):
            assert (await a.ask("p", **body)).status_code == 400
            server.refusal = (500, b"down")
            assert (await a.ask("p")).status_code == 502
            assert not a.session.live.session.tree.calls

    run(test)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def _chat_body(options: dict[str, Any], **body: Any) -> dict[str, Any]:
    """What an upstream is asked for when a client asks for this."""
    asked: list[dict[str, Any]] = []

    async def test() -> None:
        async with FakeChat() as server:
            server.script = TEXT
            upstream = UpstreamChat(server.url + "/v1")
            async with agent(fleet=upstream, codec=ToyCodec.chatml(), **options) as a:
                assert (await a.ask("p", **body)).status_code == 200
                asked.extend(server.bodies)

    run(test)
    return {name: value for name, value in asked[0].items() if name not in ("messages", "tools")}


WITHOUT = {"model": "toy", "stream": True, "stream_options": {"include_usage": True}}


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
    assert _chat_body({}, tools=[TOOL], **wishes, **ours) == {**WITHOUT, **wishes}


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_an_upstream_is_told_nothing_about_them(choice: str) -> None:
    tools = {"tools": [TOOL]} if choice == "none" else {}
    assert _chat_body({}, tool_choice=choice, parallel_tool_calls=False, **tools) == WITHOUT


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
    assert _chat_body(options, **body) == {**WITHOUT, **limit}
