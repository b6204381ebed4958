"""A small agent with the openai package: asks, runs the tool, asks again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.rollout.records import MAX_TURNS, SYSTEM, look_up

_LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


async def run(task: Mapping[str, Any], session: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["prompt"]}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[_LOOKUP], max_tokens=48
            )
            message: Any = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = look_up(task, _read_key(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _read_key(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["key"])
    except (ValueError, LookupError, TypeError):
        return ""
