"""The same agent with the OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import agents
from openai import AsyncOpenAI

from examples.rollout.records import MAX_TURNS, SYSTEM, look_up

agents.set_tracing_disabled(True)


async def run(task: Mapping[str, Any], session: Any) -> None:
    async def lookup(key: str) -> str:
        return look_up(task, key)

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        clerk = agents.Agent(
            "clerk",
            instructions=SYSTEM,
            tools=[agents.function_tool(lookup)],
            model=agents.OpenAIChatCompletionsModel(model="policy", openai_client=client),
            model_settings=agents.ModelSettings(max_tokens=48),
        )
        # What the model did is scored as it is.
        with suppress(agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            await agents.Runner.run(clerk, task["prompt"], max_turns=MAX_TURNS)
