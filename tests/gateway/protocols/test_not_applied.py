"""What a request asks for and nobody does is refused, or counted where the user sees it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from branchline import Gateway, ScriptedEngine, ToyCodec
from branchline.gateway.config import GatewayConfig
from branchline.runtime.request_fields import (
    CONSTRAINT_FIELDS,
    COUNTED_FIELDS,
    HINT_FIELDS,
    NEUTRAL_VALUES,
    PARTLY_APPLIED_FIELDS,
    READ_FIELDS,
    REFUSED_WHERE_READ,
    field_use,
)
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import BODIES, PROTOCOLS, post

FIELDS: dict[str, set[str]] = {
    "chat/completions": set(chat_params.CompletionCreateParamsBase.__annotations__),
    "completions": set(completions_params.CompletionCreateParamsBase.__annotations__),
    "responses": set(responses_params.ResponseCreateParamsBase.__annotations__),
    "messages": {
        *messages_params.MessageCreateParamsBase.__annotations__,
        *beta_params.MessageCreateParamsBase.__annotations__,
    },
}
"""The fields of requests in the vendors' own types."""
NAMED = {"type": "function", "function": {"name": "look"}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RESPONSES_FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
MESSAGES_TOOL = {"name": "look", "input_schema": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: A"}

COUNTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": "required"}, ["tool_choice"]),
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": NAMED}, ["tool_choice"]),
    (
        "chat/completions",
        {"functions": [FUNCTION["function"]], "function_call": {"name": "look"}},
        ["tool_choice"],
    ),
    (
        "chat/completions",
        {"tools": [{**FUNCTION, "function": {"name": "look", "strict": True}}]},
        ["tools.strict"],
    ),
    (
        "chat/completions",
        {"tools": [{"type": "custom", "custom": {"name": "patch", "format": GRAMMAR}}]},
        ["tools.format"],
    ),
    ("chat/completions", {"reasoning_effort": "low", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
    ("chat/completions", {"logprobs": True, "top_logprobs": 3}, ["top_logprobs"]),
    (
        "chat/completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ["stream_options.continuous_usage_stats"],
    ),
    ("chat/completions", {"enable_thinking": False}, ["enable_thinking"]),
    ("completions", {"logprobs": 2}, ["logprobs"]),
    (
        "responses",
        {"tools": [RESPONSES_FUNCTION, {"type": "web_search"}], "tool_choice": "required"},
        ["tool_choice", "tools.web_search"],
    ),
    ("responses", {"tools": [{**RESPONSES_FUNCTION, "defer_loading": True}]}, ["tools.defer_loading"]),
    ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.effort"]),
    ("responses", {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (
        "responses",
        {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
        ["include.web_search_call.results"],
    ),
    ("responses", {"top_logprobs": 2}, ["top_logprobs"]),
    ("responses", {"truncation": "auto", "max_tool_calls": 2}, ["max_tool_calls", "truncation"]),
    (
        "responses",
        {"input": [{"role": "user", "content": "p"}, {"type": "web_search_call", "id": "ws_1"}]},
        ["input.web_search_call"],
    ),
    ("responses", {"context_management": [{"type": "compaction"}]}, ["context_management"]),
    ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, ["tool_choice"]),
    (
        "messages",
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "look"}},
        ["tool_choice"],
    ),
    (
        "messages",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        ["context_management"],
    ),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking"]),
    ("messages", {"output_config": {"effort": "high"}}, ["output_config.effort"]),
    ("messages", {"container": "c1", "speed": "fast"}, ["container", "speed"]),
    (
        "messages",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        ["tools.web_search_20250305"],
    ),
    ("messages", {"tools": [{**MESSAGES_TOOL, "strict": True}]}, ["tools.strict"]),
]
NOT_COUNTED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False}),
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": "none"}),
    ("chat/completions", {"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k"}),
    ("chat/completions", {"prediction": {"type": "content", "content": "x"}, "seed": 1, "stop": ["x"] * 9}),
    ("chat/completions", {"logprobs": True, "stream_options": {"include_obfuscation": True}}),
    ("responses", {"truncation": "disabled", "background": False, "reasoning": {"summary": "auto"}}),
    ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "none"}),
    ("messages", {"thinking": {"type": "disabled"}, "context_management": {"edits": []}}),
    (
        "messages",
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
    ),
    ("messages", {"tools": [{**MESSAGES_TOOL, "cache_control": {"type": "ephemeral"}}]}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"web_search_options": {}}, "web_search_options"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"stream_options": {"usage": True}}, "stream_options.usage"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("completions", {"best_of": 3}, "best_of"),
    ("responses", {"background": True}, "background"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"previous_response_id": "resp_0"}, "previous_response_id"),
    ("responses", {"n": 2}, "n"),
    ("responses", {"include": [7]}, "include"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "response_format"),
    ("responses", {"input": [{"type": "mesage", "content": "p"}]}, "input[0].type"),
    ("messages", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ("messages", {"n": 2}, "n"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
    ("messages", {"thread": {"type": "continue", "previous_message_id": "m"}}, "thread"),
]


@asynccontextmanager
async def _agent() -> AsyncIterator[Agent]:
    codec = ToyCodec.chatml()
    async with agent(engine=ScriptedEngine(codec, lambda _: "ok"), codec=codec) as a:
        yield a


async def _post(a: Agent, protocol: str, body: dict[str, Any]) -> httpx.Response:
    url = f"{a.session.base_url}/{protocol}"
    return await a.http.post(url, json={**BODIES[protocol]("p"), **body}, headers=a.api_headers)


def _tables_with(protocol: str, name: str) -> list[str]:
    is_read = name in READ_FIELDS[protocol]
    tables = {
        "done": is_read and name not in PARTLY_APPLIED_FIELDS | REFUSED_WHERE_READ[protocol],
        "passed": not is_read and name in CONSTRAINT_FIELDS,
        "hint": not is_read and name in HINT_FIELDS,
        "counted": name in PARTLY_APPLIED_FIELDS if is_read else name in COUNTED_FIELDS,
        "refused": name in (REFUSED_WHERE_READ[protocol] if is_read else NEUTRAL_VALUES),
    }
    return [use for use, has_name in tables.items() if has_name]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_field_of_the_vendors_types_has_exactly_one_use(protocol: str) -> None:
    for name in sorted(FIELDS[protocol] | {"stream"}):
        assert _tables_with(protocol, name) == [field_use(protocol, name)], (protocol, name)


def test_no_field_is_in_two_tables() -> None:
    tables = [CONSTRAINT_FIELDS, HINT_FIELDS, COUNTED_FIELDS, frozenset(NEUTRAL_VALUES)]
    assert sum(map(len, tables)) == len(frozenset[str]().union(*tables))


@pytest.mark.parametrize(("protocol", "body", "names"), COUNTED)
def test_what_is_accepted_and_not_applied_is_counted(
    protocol: str, body: dict[str, Any], names: list[str]
) -> None:
    async def test() -> None:
        async with _agent() as a:
            assert (await post(a, protocol, "p")).status_code == 200
            for _ in range(2):
                response = await _post(a, protocol, body)
                assert response.status_code == 200, response.text
            counts = dict.fromkeys(names, 2)
            assert (await a.get(""))["not_applied"] == counts
            calls = (await a.get("/tree"))["calls"]
            assert [call["not_applied"] for call in calls] == [[], names, names]
            report = a.session.managed.export().report
            assert report.not_applied == counts
            assert (await a.get("/report"))["not_applied"] == counts
            assert report.warnings == (
                "accepted, not applied: " + ", ".join(f"{n} (2 calls)" for n in names),
            )

    run(test)


@pytest.mark.parametrize(("protocol", "body"), NOT_COUNTED)
def test_hints_and_values_that_ask_for_nothing_are_not_counted(protocol: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with _agent() as a:
            response = await _post(a, protocol, body)
            assert response.status_code == 200, response.text
            assert a.session.managed.export().report.not_applied == {}

    run(test)


@pytest.mark.parametrize(("protocol", "body", "name"), REFUSED)
def test_what_is_neither_done_nor_counted_is_refused_by_name(
    protocol: str, body: dict[str, Any], name: str
) -> None:
    async def test() -> None:
        async with _agent() as a:
            response: httpx.Response = await _post(a, protocol, body)
            assert response.status_code in (400, 404), response.text
            assert response.json()["error"]["message"].startswith(name), response.text
            assert not a.session.managed.session.tree.calls

    run(test)


def test_an_ignored_field_of_a_lenient_gateway_is_counted() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        engine = ScriptedEngine(codec, lambda _: "ok")
        async with agent(engine=engine, codec=codec, config=GatewayConfig(ignore_unknown_fields=True)) as a:
            assert (await post(a, "messages", "p", temprature=0.3, logit_bias={"5": 1})).status_code == 200
            assert a.session.managed.export().report.not_applied == {"logit_bias": 1, "temprature": 1}

    run(test)


def test_logs_and_metrics_name_what_was_not_applied(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchline.runtime.not_applied._logged_names", set())

    async def test() -> None:
        async with _agent() as a:
            with caplog.at_level(logging.INFO, logger="branchline"):
                for _ in range(2):
                    await post(a, "responses", "p", reasoning={"effort": "low"}, tools=[{"type": "wizard"}])
            metrics = (await a.http.get(f"{a.gateway.url}/metrics", headers=a.admin_headers)).text
            assert 'branchline_fields_not_applied_total{field="reasoning"} 2.0' in metrics
            assert 'branchline_fields_not_applied_total{field="tools"} 2.0' in metrics
        warnings = [entry.getMessage() for entry in caplog.records if "not applied" in entry.getMessage()]
        assert sorted(text.partition(":")[0] for text in warnings) == ["reasoning.effort", "tools.wizard"]

    run(test)


def test_a_replayed_journal_and_a_snapshot_have_what_was_not_applied(tmp_path: Any) -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        options: dict[str, Any] = {"codec": codec, "journal": tmp_path / "j"}
        async with agent(engine=ScriptedEngine(codec, lambda _: "ok"), **options) as a:
            await post(a, "messages", "p", context_management={"edits": [{"type": "x"}]})
            name = a.session.id
            assert a.session.managed.snapshot().export().report.not_applied == {"context_management": 1}
        async with Gateway(engine=ScriptedEngine(codec, lambda _: "ok"), **options) as gateway:
            managed = gateway.sessions.get(name)
            assert managed.export().report.not_applied == {"context_management": 1}

    run(test)


def test_a_file_is_refused_by_engines_that_take_images() -> None:
    async def test() -> None:
        async with _agent() as a:
            audio = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
            messages = [{"role": "user", "content": [audio]}]
            response = await post(a, "chat/completions", "p", messages=messages)
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "media: got audio, expected text and images"

    run(test)
