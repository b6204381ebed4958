"""Trajectories built by hand from a gateway's responses give what the gateway recorded of the same calls."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI

from branchline import ExportPolicy, History, Trajectory
from branchline.engines.scripted import ScriptedRequest
from tests.export.test_hand_built import shares_of
from tests.rollout.harness import run, scripted_gateway

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
KEEP_ALL = ExportPolicy(drop=frozenset())


def reply(request: ScriptedRequest) -> str:
    """Answers that differ, with a thought and several bytes for a character."""
    return f"<think>hm</think>{request.last_line} → ünï {request.call_index}"


@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_give_the_samples_of_their_session(seed: int) -> None:
    async def test() -> None:
        random = Random(seed)
        async with scripted_gateway(reply) as gateway:
            session = await gateway.session()
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            histories: list[tuple[list[Any], Any]] = []
            conversations: list[list[Any]] = [[{"role": "user", "content": "begin"}]]
            for number in range(random.randint(1, 6)):
                items = random.choice(conversations)
                tools = random.choice([None, TOOLS])
                messages: list[Any] = [
                    item if isinstance(item, dict) else item.choices[0].message.model_dump(exclude_none=True)
                    for item in items
                ]
                response = await client.chat.completions.create(
                    model="any",
                    messages=messages,
                    logprobs=True,
                    extra_body={"return_token_ids": True, **({"tools": tools} if tools else {})},
                )
                histories.append(([*messages, response], tools))
                conversations.append([*items, response, {"role": "user", "content": f"more {number}"}])
                if random.random() < 0.3:
                    conversations.append([{"role": "system", "content": f"helper {number}"}, items[-1]])
            await client.close()
            recorded = Trajectory.from_session(session.managed.session, policy=KEEP_ALL)
        (items, tools), *others = histories
        by_hand = Trajectory(
            messages_and_choices=items,
            tools=tools,
            additional_histories=[
                History(messages_and_choices=other, tools=other_tools) for other, other_tools in others
            ],
            policy=KEEP_ALL,
        )
        assert shares_of(by_hand.samples) == shares_of(recorded.samples)
        assert len(by_hand.samples) == len(recorded.samples)
        assert by_hand.messages_and_choices == items

    run(test)
