"""The `openai-agents` SDK: its runner over both protocols, and what its handoffs and sub-agents make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import agents
import openai
import pytest

from branchline import Message, ToolCall
from branchline.timelines.causes import classify_forks
from tests.sdks.harness import (
    QUESTIONS,
    SYSTEM,
    Scenario,
    SdkSession,
    call,
    look,
    run_scenario,
    scenarios,
    sdk_session,
    streamed,
    templates,
)

LOOKS = Message("assistant", tool_calls=(call(1),))
LOOK = agents.function_tool(look)
MODELS: dict[str, Any] = {
    "chat": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}
protocols = pytest.mark.parametrize("protocol", MODELS)


def run_with_model(s: SdkSession, protocol: str, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Runs an agent of the SDK with a model of the session."""

    async def running() -> Any:
        async with openai.AsyncOpenAI(base_url=s.url, api_key=s.key) as client:
            return await work(MODELS[protocol](model="m", openai_client=client))

    return asyncio.run(running())


def converse(s: SdkSession, protocol: str, *, stream: bool) -> list[str]:
    async def work(model: agents.Model) -> list[str]:
        looker = agents.Agent("looker", instructions=SYSTEM, tools=[LOOK], model=model)
        items: list[Any] = []
        answers = []
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            if stream:
                result: Any = agents.Runner.run_streamed(looker, items)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(looker, items)
            items = result.to_input_list()
            answers.append(result.final_output)
        return answers

    found: list[str] = run_with_model(s, protocol, work)
    return found


@scenarios
@streamed
@protocols
def test_continued_run_is_one_timeline(scenario: Scenario, stream: bool, protocol: str) -> None:
    s = run_scenario(scenario, lambda s: converse(s, protocol, stream=stream))
    assert s.equivalences <= ({"dropped_reasoning", "empty_content"} if protocol == "chat" else set())


@scenarios
def test_run_continued_by_response_id_is_one_timeline(scenario: Scenario) -> None:
    def converse_by_id(s: SdkSession) -> list[str]:
        async def work(model: agents.Model) -> list[str]:
            looker = agents.Agent("looker", instructions=SYSTEM, tools=[LOOK], model=model)
            last: str | None = None
            answers = []
            for question in QUESTIONS:
                result = await agents.Runner.run(
                    looker, question, previous_response_id=last, auto_previous_response_id=True
                )
                last = result.last_response_id
                answers.append(result.final_output)
            return answers

        found: list[str] = run_with_model(s, "responses", work)
        return found

    assert not run_scenario(scenario, converse_by_id).equivalences


@templates
@protocols
def test_handoff_has_the_whole_history_under_another_system_prompt(template: str, protocol: str) -> None:
    reply: list[Message | str] = [
        Message("assistant", tool_calls=(ToolCall("transfer_to_looker", "{}"),)),
        LOOKS,
        "A door.",
    ]

    async def work(model: agents.Model) -> Any:
        looker = agents.Agent("looker", instructions=SYSTEM, tools=[LOOK], model=model)
        desk = agents.Agent("desk", instructions="You hand over.", handoffs=[looker], model=model)
        return await agents.Runner.run(desk, QUESTIONS[0])

    with sdk_session(template, reply) as s:
        result = run_with_model(s, protocol, work)
        assert (result.final_output, result.last_agent.name) == ("A door.", "looker")
    s.check(calls=3)
    assert s.causes == {"edit": 1}
    assert s.timeline_calls == [[0], [1, 2]]


@templates
@protocols
def test_agent_as_a_tool_is_a_sub_agent_with_an_edge_to_the_call(template: str, protocol: str) -> None:
    spawn = Message("assistant", tool_calls=(ToolCall("ask_looker", '{"input": "Is the door there?"}'),))
    reply: list[Message | str] = [spawn, LOOKS, "It is.", "A door."]

    async def work(model: agents.Model) -> Any:
        looker = agents.Agent("looker", instructions=SYSTEM, tools=[LOOK], model=model)
        tool = looker.as_tool(tool_name="ask_looker", tool_description="Asks the looker.")
        chief = agents.Agent("chief", instructions="You ask others.", tools=[tool], model=model)
        return await agents.Runner.run(chief, QUESTIONS[0])

    with sdk_session(template, reply) as s:
        assert run_with_model(s, protocol, work).final_output == "A door."
    s.check(calls=4)
    assert s.causes == {"sub_agent": 1}
    assert s.timeline_calls == [[1, 2], [0, 3]]
    (edge,) = classify_forks(s.tree).edges
    assert edge.source.message.tool_calls[0].name == "ask_looker"
