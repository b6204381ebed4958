"""The `anthropic` SDK: the loop its documentation shows, and the one it brings along."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.sdks.harness import (
    ABOUT_TOOL,
    QUESTIONS,
    SCHEMA,
    SYSTEM,
    TOOL,
    Scenario,
    SdkSession,
    look,
    run_scenario,
    scenarios,
    streamed,
)

TOLERATED = {"arguments_reserialised"}
"""Arguments are an object on this wire, so what spaces they had is gone."""


def client_of(s: SdkSession) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=s.anthropic_url, api_key=s.key)


def conversation(s: SdkSession, *, stream: bool, cached: bool) -> list[str]:
    """Keeps the blocks the SDK gives; `cached` marks the newest turn for a cache, as agents do."""
    tools = [{"name": TOOL, "description": ABOUT_TOOL, "input_schema": SCHEMA}]
    options: dict[str, Any] = {"model": "m", "max_tokens": 500, "system": SYSTEM, "tools": tools}
    messages: list[Any] = []
    answers = []
    with client_of(s) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
            while True:
                newest = dict(messages[-1]["content"][-1])
                if cached:
                    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
                if stream:
                    with client.messages.stream(messages=messages, **options) as events:
                        message: Any = events.get_final_message()
                else:
                    message = client.messages.create(messages=messages, **options)
                messages[-1]["content"][-1] = newest
                messages.append({"role": "assistant", "content": message.content})
                uses = [block for block in message.content if block.type == "tool_use"]
                if not uses:
                    break
                found = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": look(**use.input)}
                    for use in uses
                ]
                messages.append({"role": "user", "content": found})
            answers.append("".join(block.text for block in message.content if block.type == "text"))
    return answers


def run_tools(s: SdkSession, *, stream: bool) -> list[str]:
    """The SDK's own loop, once for each question."""
    messages: list[Any] = []
    answers = []
    with client_of(s) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            runner: Any = client.beta.messages.tool_runner(
                model="m",
                max_tokens=500,
                system=SYSTEM,
                tools=[anthropic.beta_tool(look)],
                messages=[*messages],
                stream=stream,
            )
            for turn in runner:
                message = turn.get_final_message() if stream else turn
                results = runner.generate_tool_call_response()
                messages.append({"role": "assistant", "content": message.content})
                messages += [results] if results else []
            answers.append("".join(block.text for block in message.content if block.type == "text"))
    return answers


@scenarios
@streamed
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cache_control"])
def test_growing_conversation_is_one_timeline(scenario: Scenario, stream: bool, cached: bool) -> None:
    s = run_scenario(scenario, lambda s: conversation(s, stream=stream, cached=cached))
    assert s.equivalences <= TOLERATED


@scenarios
@streamed
def test_the_tool_runner_only_appends(scenario: Scenario, stream: bool) -> None:
    s = run_scenario(scenario, lambda s: run_tools(s, stream=stream))
    assert s.equivalences <= TOLERATED
