"""Pydantic AI over all three protocols, and what its retries and history processors make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from pydantic_ai import Agent, ModelMessage
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from branchline.core.errors import ContextLengthError
from tests.sdks.harness import (
    QUESTIONS,
    SYSTEM,
    Scenario,
    SdkSession,
    look,
    run_scenario,
    scenarios,
    sdk_session,
    streamed,
    templates,
)

protocols = pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])


@asynccontextmanager
async def model_of(s: SdkSession, protocol: str) -> AsyncIterator[Model]:
    if protocol == "messages":
        async with anthropic.AsyncAnthropic(base_url=s.anthropic_url, api_key=s.key) as claude:
            yield AnthropicModel("m", provider=AnthropicProvider(anthropic_client=claude))
        return
    kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=s.url, api_key=s.key) as client:
        yield kind("m", provider=OpenAIProvider(openai_client=client))


async def _drain(_: Any, events: Any) -> None:
    async for _ in events:
        pass


def converse(s: SdkSession, protocol: str, *, stream: bool, **options: Any) -> list[str]:
    async def running() -> list[str]:
        async with model_of(s, protocol) as model:
            agent = Agent(model, instructions=SYSTEM, tools=[look], **options)
            history: list[ModelMessage] = []
            answers = []
            for question in QUESTIONS:
                # A handler is what makes it stream.
                result = await agent.run(
                    question, message_history=history, event_stream_handler=_drain if stream else None
                )
                history = result.all_messages()
                answers.append(result.output)
            return answers

    return asyncio.run(running())


@scenarios
@streamed
@protocols
def test_continued_run_is_one_timeline(scenario: Scenario, stream: bool, protocol: str) -> None:
    s = run_scenario(scenario, lambda s: converse(s, protocol, stream=stream))
    assert s.equivalences <= {"arguments_reserialised", "empty_content"}


@templates
def test_cleared_tool_results_are_deleted_context(template: str) -> None:
    def clear(reply: list[ModelMessage]) -> list[ModelMessage]:
        """Clears the tool results of all messages but the newest."""
        return [_cleared(message) for message in reply[:-1]] + reply[-1:]

    with sdk_session(template) as s:
        converse(s, "chat", stream=False, capabilities=[ProcessHistory(clear)])
    s.check(calls=4)
    # Once when the first results are cleared, once when the third is.
    assert s.causes == {"context_delete": 2}
    assert s.timeline_calls == [[0, 1], [0, 2], [0, 3]]


def _cleared(message: ModelMessage) -> ModelMessage:
    parts: Any = [
        replace(part, content="[cleared]")  # type: ignore[arg-type]
        if part.part_kind == "tool-return"
        else part
        for part in message.parts
    ]
    return replace(message, parts=parts)


@protocols
def test_too_long_prompt_is_recognised(protocol: str) -> None:
    async def test(s: SdkSession) -> None:
        async with model_of(s, protocol) as model:
            with pytest.raises(ModelContextWindowExceededError):
                await Agent(model).run("q")

    with sdk_session("toy", [ContextLengthError.for_prompt(900, 200)]) as s:
        asyncio.run(test(s))
