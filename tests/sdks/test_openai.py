"""The `openai` SDK, in agent loops such as its documentation shows: Chat Completions and Responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from branchline.core.errors import EngineError
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
    sdk_session,
    streamed,
    templates,
)

FUNCTION = {"name": TOOL, "description": ABOUT_TOOL, "parameters": SCHEMA}


def client_of(s: SdkSession, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=s.url, api_key=s.key, **options)


def chat(s: SdkSession, *, stream: bool) -> list[str]:
    """Keeps the messages the SDK gives and sends them back as they are."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    options: dict[str, Any] = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}
    answers = []
    with client_of(s) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                if stream:
                    with client.chat.completions.stream(messages=messages, **options) as events:
                        message: Any = events.get_final_completion().choices[0].message
                else:
                    message = client.chat.completions.create(messages=messages, **options).choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    found = look(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            answers.append(message.content)
    return answers


def respond(s: SdkSession, *, stream: bool, by_id: bool) -> list[str]:
    """Sends back the output items, or continues by the id of the previous response."""
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    options: dict[str, Any] = {"model": "m", "instructions": SYSTEM, "tools": tools}
    items: list[Any] = []
    answers = []
    with client_of(s) as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            while True:
                if stream:
                    with client.responses.stream(input=items, **options) as events:
                        response: Any = events.get_final_response()
                else:
                    response = client.responses.create(input=items, **options)
                if by_id:
                    items, options["previous_response_id"] = [], response.id
                else:
                    items += response.output
                calls = [item for item in response.output if item.type == "function_call"]
                if not calls:
                    break
                for call in calls:
                    found = look(**json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
            answers.append(response.output_text)
    return answers


@scenarios
@streamed
def test_growing_chat_is_one_timeline(scenario: Scenario, stream: bool) -> None:
    s = run_scenario(scenario, lambda s: chat(s, stream=stream))
    assert s.equivalences <= {"empty_calls", "empty_content"}


@scenarios
@streamed
@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous_response_id"])
def test_consecutive_responses_are_one_timeline(scenario: Scenario, stream: bool, by_id: bool) -> None:
    s = run_scenario(scenario, lambda s: respond(s, stream=stream, by_id=by_id))
    assert not s.equivalences


def test_sdk_retry_after_an_engine_error_makes_no_fork() -> None:
    with (
        sdk_session("toy", [EngineError("out of memory"), "here"]) as s,
        client_of(s, max_retries=1) as client,
    ):
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        assert answer.choices[0].message.content == "here"
    s.check(calls=1)
    assert [call.retry_count for call in s.tree.calls] == [1]
    assert (len(s.timelines), s.causes) == (1, {})


@templates
def test_several_choices_and_a_continuation_of_one(template: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "a word?"}]
    with (
        sdk_session(template, ["Luminous", "Serendipity", "Ephemeral", "Whimsical"]) as s,
        client_of(s) as client,
    ):
        words = client.chat.completions.create(model="m", messages=messages, n=3).choices
        messages += [words[1].message, {"role": "user", "content": "another"}]
        client.chat.completions.create(model="m", messages=messages)
    s.check(calls=2)
    assert s.causes == {"best_of_n": 2}
    reply = [[node.message.content for node in line.sampled_nodes] for line in s.timelines]
    assert sorted(reply) == [["Ephemeral"], ["Luminous"], ["Serendipity", "Whimsical"]]
