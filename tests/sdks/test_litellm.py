"""LiteLLM in front of the gateway: as an OpenAI provider and as Anthropic's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from litellm.exceptions import ContextWindowExceededError

from branchline.core.errors import ContextLengthError
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
)


@pytest.fixture(autouse=True)
def current_event_loop() -> Iterator[None]:
    """LiteLLM gets the current event loop also in blocking calls, and leaves open a loop that it creates."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def converse(s: SdkSession, provider: str, *, stream: bool) -> list[str]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    function = {"name": TOOL, "description": ABOUT_TOOL, "parameters": SCHEMA}
    options: dict[str, Any] = {
        "model": f"{provider}/m",
        "api_base": s.url if provider == "openai" else s.anthropic_url,
        "api_key": s.key,
        "max_tokens": 500,
        "tools": [{"type": "function", "function": function}],
    }
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            response: Any = litellm.completion(messages=messages, stream=stream, **options)
            if stream:
                response = litellm.stream_chunk_builder(list(response))
            message = response.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                found = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        answers.append(message.content)
    return answers


@scenarios
@streamed
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_growing_conversation_is_one_timeline(scenario: Scenario, stream: bool, provider: str) -> None:
    s = run_scenario(scenario, lambda s: converse(s, provider, stream=stream))
    assert s.equivalences <= {"arguments_reserialised", "empty_content"}


PROVIDERS = pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])


def ask(s: SdkSession, provider: str, **options: Any) -> Any:
    url = s.anthropic_url if provider == "anthropic" else s.url
    messages = [{"role": "user", "content": "q"}]
    return litellm.completion(
        model=f"{provider}/m", api_base=url, api_key=s.key, messages=messages, num_retries=0, **options
    )


@PROVIDERS
@streamed
def test_too_long_prompt_is_recognised(provider: str, stream: bool) -> None:
    with (
        sdk_session("toy", [ContextLengthError.for_prompt(900, 200)]) as s,
        pytest.raises(ContextWindowExceededError),
    ):
        list(ask(s, provider, stream=stream))


@PROVIDERS
def test_text_with_unicode_line_separators_is_streamed_completely(provider: str) -> None:
    reply = "one\u2028two\u2029three\x85four"
    with sdk_session("toy", [reply]) as s:
        chunks = list(ask(s, provider, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply
