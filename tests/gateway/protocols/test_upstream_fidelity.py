"""What passes between a client and an upstream is kept: fields, logprobs, usage, errors, headers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from branchline import ExportPolicy, ToyCodec, export_samples
from branchline.engines.upstream_chat import UpstreamChat
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import chat_event
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import events_in, post

CONVERSATION_PROTOCOLS = ("chat/completions", "messages", "responses")
TEXT = (chat_event(content="fine"), chat_event("stop"))
SIGNATURE = {"google": {"thought_signature": "c2ln"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@asynccontextmanager
async def _upstream(*script: Any, **options: Any) -> AsyncIterator[tuple[Agent, FakeChat]]:
    """A gateway whose calls go to an upstream that answers with these events."""
    async with FakeChat() as server:
        server.scripted_events = script or TEXT
        upstream = UpstreamChat(server.url + "/v1")
        async with agent(gateway_engine=upstream, codec=ToyCodec.chatml(), **options) as a:
            yield a, server


def _tool_event(**extra: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return chat_event(tool_calls=[{"index": 0, "id": "c1", "function": function, **extra}])


# -- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", CONVERSATION_PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "gone", "code": 502}, "choices": [{"delta": {}, "finish_reason": "error"}]},
        {"choices": [{"delta": {"content": ""}, "finish_reason": None, "error": {"message": "gone"}}]},
        {"choices": [{"delta": {"content": ""}, "finish_reason": "error"}], "message": "gone"},
        {"error": "gone", "choices": []},
    ],
)
def test_an_error_event_with_choices_is_an_error(protocol: str, stream: bool, event: dict[str, Any]) -> None:
    async def test() -> None:
        async with _upstream(chat_event(content="half"), event) as (a, _):
            response = await post(a, protocol, "q", stream=stream)
            if stream:
                assert "gone" in response.text
                assert '"finish_reason":"stop"' not in response.text
            else:
                assert response.status_code == 502, response.text
                assert "gone" in response.json()["error"]["message"]
            assert not a.session.managed.session.tree.calls

    run(test)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 429, 500, 503, 529])
def test_the_upstreams_error_is_relayed(status: int) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            error = {"message": "not now", "type": "some_type", "param": "temperature", "code": "some_code"}
            server.refusal = (status, json.dumps({"error": error}).encode())
            server.response_headers = {
                "retry-after": "3",
                "retry-after-ms": "3000",
                "x-should-retry": "false",
                "x-request-id": "req_7",
                "x-ratelimit-remaining-tokens": "12",
                "set-cookie": "secret=1",
            }
            for stream in (False, True):
                response = await a.ask("q", stream=stream)
                assert response.status_code == status
                assert response.json() == {"error": error}
                assert response.headers["retry-after"] == "3"
                assert response.headers["retry-after-ms"] == "3000"
                assert response.headers["x-should-retry"] == "false"
                assert response.headers["x-upstream-request-id"] == "req_7"
                assert response.headers["x-ratelimit-remaining-tokens"] == "12"
                assert response.headers["x-request-id"].startswith("chatcmpl-")
                assert "set-cookie" not in response.headers
            for protocol in ("messages", "responses"):
                response = await post(a, protocol, "q")
                assert response.status_code == status
                assert response.headers["retry-after"] == "3"
                assert "not now" in response.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    "content", [b"", b"<html>\xff</html>", b"[1]", b'{"error": "\\ud83d"}', b'{"error": "\xff"}']
)
def test_an_error_without_the_usual_body_keeps_its_status(content: bytes) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            server.refusal = (418, content)
            response = await a.ask("q")
            assert response.status_code == 418
            assert response.json()["error"]["message"]

    run(test)


def test_headers_of_a_successful_response_are_relayed() -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            server.response_headers = {"x-request-id": "req_7", "x-ratelimit-remaining-requests": "5"}
            for stream in (False, True):
                response = await a.ask("q", stream=stream)
                assert response.headers["x-upstream-request-id"] == "req_7"
                assert response.headers["x-ratelimit-remaining-requests"] == "5"

    run(test)


# -- messages ----------------------------------------------------------------------------------------


def test_messages_of_the_same_protocol_are_sent_as_the_client_wrote_them() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "ops"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hear", "cache_control": {"type": "ephemeral"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {
                    "type": "file",
                    "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="},
                },
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}],
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": "{}"},
                    "extra_content": SIGNATURE,
                }
            ],
            "audio": {"id": "audio_1"},
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok", "cache_control": {"type": "ephemeral"}},
    ]

    async def test() -> None:
        async with _upstream() as (a, server):
            response = await a.ask(*messages, tools=[TOOL])
            assert response.status_code == 200, response.text
            assert server.bodies[0]["messages"] == messages

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_of_an_answer_reach_the_client(stream: bool) -> None:
    script = (
        chat_event(reasoning_details=[{"type": "reasoning.text", "text": "h", "index": 0}]),
        chat_event(reasoning_details=[{"type": "reasoning.text", "text": "m", "index": 0, "signature": "s"}]),
        chat_event(content="fine", annotations=[{"type": "url_citation"}]),
        _tool_event(extra_content=SIGNATURE),
        chat_event("tool_calls"),
    )

    async def test() -> None:
        async with _upstream(*script) as (a, _):
            if stream:
                events = await a.stream("q", tools=[TOOL])
                deltas = [event["choices"][0]["delta"] for event in events]
                details = [part for delta in deltas for part in delta.get("reasoning_details", ())]
                assert details == [
                    part for event in script[:2] for part in _delta(event)["reasoning_details"]
                ]
                (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
                assert [delta["annotations"] for delta in deltas if "annotations" in delta]
            else:
                message = (await a.ask("q", tools=[TOOL])).json()["choices"][0]["message"]
                assert message["reasoning_details"] == [
                    {"type": "reasoning.text", "text": "hm", "index": 0, "signature": "s"}
                ]
                assert message["annotations"] == [{"type": "url_citation"}]
                (call,) = message["tool_calls"]
            assert call["extra_content"] == SIGNATURE

    run(test)


def _delta(event: dict[str, Any]) -> dict[str, Any]:
    delta: dict[str, Any] = event["choices"][0]["delta"]
    return delta


@pytest.mark.parametrize("restore", [True, False])
def test_what_an_upstream_needs_back_is_restored_for_clients_that_drop_it(restore: bool) -> None:
    details = [{"type": "reasoning.encrypted", "data": "x"}]
    script = (
        chat_event(reasoning_details=details),
        _tool_event(extra_content=SIGNATURE),
        chat_event("tool_calls"),
    )

    async def test() -> None:
        async with _upstream(*script, restore_reasoning=restore) as (a, server):
            await a.ask("q", tools=[TOOL])
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
            await a.ask(
                "q", {"role": "assistant", "content": None, "tool_calls": [call]}, result, tools=[TOOL]
            )
            blocks = [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]},
            ]
            tools = [{"name": "f", "input_schema": {"type": "object"}}]
            url, body = (
                f"{a.session.base_url}/messages",
                {"messages": blocks, "max_tokens": 9, "tools": tools},
            )
            response = await a.http.post(url, json=body, headers=a.api_headers)
            assert response.status_code == 200, response.text
            for sent in server.bodies[1:]:
                message = next(entry for entry in sent["messages"] if entry["role"] == "assistant")
                if restore:
                    assert message["reasoning_details"] == details
                    assert message["tool_calls"][0]["extra_content"] == SIGNATURE
                else:
                    assert "reasoning_details" not in message
                    assert "extra_content" not in message["tool_calls"][0]

    run(test)


def test_audio_of_another_protocol_is_sent_in_the_form_of_chat_completions() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}

    async def test() -> None:
        async with _upstream() as (a, server):
            items = [{"role": "user", "content": [{"type": "input_text", "text": "hear"}, audio]}]
            url = f"{a.session.base_url}/responses"
            response = await a.http.post(url, json={"input": items}, headers=a.api_headers)
            assert response.status_code == 200, response.text
            assert server.bodies[0]["messages"][0]["content"][1] == audio

    run(test)


# -- fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "body", "sent"),
    [
        (
            "responses",
            {
                "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"verbosity": "low"},
                "metadata": {"run": "7"},
                "service_tier": "flex",
                "safety_identifier": "s",
                "max_output_tokens": 9,
                "logit_bias": {"5": 1},
            },
            {
                "reasoning_effort": "low",
                "verbosity": "low",
                "metadata": {"run": "7"},
                "service_tier": "flex",
                "safety_identifier": "s",
                "max_tokens": 9,
                "logit_bias": {"5": 1},
            },
        ),
        (
            "messages",
            {
                "output_config": {"effort": "high"},
                "metadata": {"user_id": "u", "run": "7"},
                "max_tokens": 9,
                "service_tier": "auto",
            },
            {"reasoning_effort": "high", "user": "u", "metadata": {"run": "7"}, "max_tokens": 9},
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (
            "responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
        ),
    ],
)
def test_fields_of_other_protocols_have_the_names_of_chat_completions(
    protocol: str, body: dict[str, Any], sent: dict[str, Any]
) -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            question: dict[str, Any] = {"input": "q"}
            if protocol == "messages":
                question = {"messages": [{"role": "user", "content": "q"}]}
            url = f"{a.session.base_url}/{protocol}"
            response = await a.http.post(url, json={**question, **body}, headers=a.api_headers)
            assert response.status_code == 200, response.text
            own = {"model", "messages", "stream", "stream_options"}
            assert {name: value for name, value in server.bodies[0].items() if name not in own} == sent

    run(test)


def test_what_an_upstream_was_asked_for_is_recorded() -> None:
    async def test() -> None:
        async with _upstream() as (a, _):
            await a.ask("q", logit_bias={"5": 1}, reasoning_effort="low", temperature=0.5, store=False, x=1)
            await post(a, "messages", "q", thinking={"type": "adaptive"}, logit_bias={"5": 1})
            chat, messages = [call.sampling for call in a.session.managed.session.tree.calls]
            assert chat == {
                "temperature": 0.5,
                "requested": {"logit_bias": {"5": 1}, "reasoning_effort": "low", "x": 1},
                "constraints": ["logit_bias"],
            }
            assert messages == {
                "requested": {"thinking": {"type": "adaptive"}, "logit_bias": {"5": 1}},
                "not_applied": ["thinking"],
                "constraints": ["logit_bias"],
            }
            refused = await post(a, "messages", "q", x=1)
            assert refused.status_code == 400

    run(test)


def test_a_limit_that_an_upstream_refuses_by_name_is_sent_under_the_other_name() -> None:
    async def test() -> None:
        async with _upstream() as (a, server):
            error = {"message": "use max_completion_tokens", "param": "max_tokens", "code": "unsupported"}
            server.refusal_for = lambda body: (
                (400, json.dumps({"error": error}).encode()) if "max_tokens" in body else None
            )
            for _ in range(2):
                assert (await post(a, "responses", "q", max_output_tokens=9)).status_code == 200
            names = [sorted(body.keys() & {"max_tokens", "max_completion_tokens"}) for body in server.bodies]
            assert names == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]
            # A client of the same protocol chose the name itself.
            assert (await a.ask("q", max_tokens=9)).status_code == 400

    run(test)


# -- logprobs and usage ------------------------------------------------------------------------------


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


def _logprob_event(text: str, *entries: dict[str, Any]) -> dict[str, Any]:
    event = chat_event(content=text)
    event["choices"][0]["logprobs"] = {"content": list(entries), "refusal": None}
    return event


def test_logprobs_are_relayed_and_recorded() -> None:
    # The toy codec has a token for each character, as this upstream does; it has no token for its end.
    first, second = _entry("h", -0.25), _entry("i", -0.5)
    script = (_logprob_event("h", first), _logprob_event("i", second), chat_event("stop"))

    async def test() -> None:
        async with _upstream(*script) as (a, _):
            choice = (await a.ask("q", logprobs=True)).json()["choices"][0]
            assert choice["logprobs"] == {"content": [first, second], "refusal": None}
            streamed = [event["choices"][0].get("logprobs") for event in await a.stream("q", logprobs=True)]
            assert [part for part in streamed if part] == [
                {"content": [entry], "refusal": None} for entry in (first, second)
            ]
            item = (await post(a, "responses", "q", include=["message.output_text.logprobs"])).json()
            assert item["output"][0]["content"][0]["logprobs"] == [first, second]
            policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
            samples = export_samples(a.session.managed.session.tree, policy).samples
            assert len(samples) == 3
            for sample in samples:
                assert sample.response_logprobs[:2].tolist() == [-0.25, -0.5]
                assert np.isnan(sample.response_logprobs[2:]).all()
                assert not sample.exact

    run(test)


USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
    "cost": 0.01,
}


def test_usage_is_as_the_upstream_counted_it() -> None:
    async def test() -> None:
        async with _upstream(*TEXT, {"choices": [], "usage": USAGE}) as (a, _):
            assert (await a.ask("q")).json()["usage"] == USAGE
            events = await a.stream("q", stream_options={"include_usage": True})
            assert events[-1]["usage"] == USAGE
            usage = (await post(a, "messages", "q")).json()["usage"]
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 4)
            assert usage["output_tokens"] == 5
            usage = (await post(a, "responses", "q")).json()["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == 4
            assert usage["output_tokens_details"]["reasoning_tokens"] == 2

    run(test)


# -- unusual events ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", CONVERSATION_PROTOCOLS)
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([chat_event(content=[{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}])], "fine"),
        (
            [
                chat_event(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]),
                *TEXT[:1],
            ],
            "fine",
        ),
        (
            [
                b'{"choices": [{"delta": {"content": "a \\ud83d"}}]}',
                b'{"choices": [{"delta": {"content": "\\ude42 b"}}]}',
            ],
            "a \U0001f642 b",
        ),
        ([b'{"choices": [{"delta": {"content": "a \\ud83d"}}]}'], "a \ufffd"),
        ([b'{"choices": [{"delta": {"content": "caf\xe9"}}]}'], "caf\ufffd"),
        ([{"choices": [{"delta": {"content": "fine", "tool_calls": None}, "logprobs": None}]}], "fine"),
        (
            [
                *TEXT[:1],
                {
                    "choices": [],
                    "usage": {"prompt_tokens": None, "completion_tokens": None, "total_tokens": None},
                },
            ],
            "fine",
        ),
        ([*TEXT[:1], {"choices": None, "usage": {"prompt_tokens": 3.0, "completion_tokens": "x"}}], "fine"),
    ],
)
def test_unusual_events_are_read(protocol: str, script: list[Any], expected: str) -> None:
    async def test() -> None:
        async with _upstream(*script, chat_event("stop")) as (a, _):
            for stream in (False, True):
                response = await post(a, protocol, "q", stream=stream)
                assert response.status_code == 200, response.text
                message = a.session.managed.session.tree.nodes[-1].message
                assert message.content == expected
                if stream:
                    assert "error" not in [event.get("type") for event in events_in(response.text)]

    run(test)


@pytest.mark.parametrize(
    "event",
    [
        b"nonsense",
        b"[1]",
        b"5",
        b'{"choices": 5}',
        b'{"choices": [5]}',
        b'{"choices": [{"delta": 5}]}',
        b"{}",
    ],
)
def test_an_event_that_cannot_be_read_is_an_error_of_the_upstream(event: bytes) -> None:
    async def test() -> None:
        async with _upstream(event, *TEXT) as (a, _):
            response = await a.ask("q")
            assert response.status_code == 502, response.text

    run(test)


def test_numbers_beyond_64_bits_are_answered() -> None:
    big = b"1" * 30

    async def test() -> None:
        event = b'{"choices": [{"delta": {"content": "a \\ud83d", "x": %b}}]}' % big
        async with _upstream(event, chat_event("stop")) as (a, _):
            assert (await a.ask("q")).status_code == 200
            url = f"{a.session.base_url}/chat/completions"
            message = b'{"role": "user", "content": "a \\ud83d"}'
            for field in (b"temperature", b"x"):
                body = b'{"messages": [%b], "%b": %b}' % (message, field, big)
                response = await a.http.post(url, content=body, headers=a.api_headers)
                assert response.status_code in (200, 400), response.text

    run(test)
