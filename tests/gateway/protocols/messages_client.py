"""A client of a gateway that speaks Anthropic's Messages, by hand and through Anthropic's own SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx

from branchline import Message, ToolCall
from tests.gateway.harness import Agent, agent

TOOLS = [
    {
        "name": "look",
        "description": "Looks somewhere.",
        "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}},
    }
]
CALL = Message(
    "assistant", "I look.", reasoning_content="where?", tool_calls=(ToolCall("look", '{"at": 1}'),)
)


@dataclass
class MessagesClient:
    """One session's agent."""

    client: Agent
    sdk: anthropic.AsyncAnthropic

    @property
    def url(self) -> str:
        return f"{self.client.session.base_url}/messages"

    async def post(self, body: Any, path: str = "", headers: Any = None) -> httpx.Response:
        """Posts a body as it is; bytes may be no JSON at all."""
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        key = {"x-api-key": self.client.session.api_key, "anthropic-version": "2023-06-01"}
        return await self.client.http.post(self.url + path, headers={**key, **(headers or {})}, **sent)

    async def ask(self, *turns: Any, **body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed; strings and lists are contents, the user's first."""
        response = await self.post({"model": "toy", "max_tokens": 500, "messages": turns_of(turns), **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, *turns: Any, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        response = await self.post(
            {"model": "toy", "max_tokens": 500, "messages": turns_of(turns), "stream": True, **body}
        )
        assert response.status_code == 200, response.text
        return events_in(response.text)

    async def refusal(self, body: Any, path: str = "", status: int = 400) -> dict[str, Any]:
        """The error of a request that must fail, out of Anthropic's envelope."""
        response = await self.post(body, path)
        assert response.status_code == status, response.text
        envelope = response.json()
        assert (envelope["type"], sorted(envelope)) == ("error", ["error", "request_id", "type"])
        error: dict[str, Any] = envelope["error"]
        return error

    async def calls(self) -> list[list[str]]:
        """The calls of each timeline."""
        return [line["calls"] for line in await self.client.timelines()]

    def prompts(self) -> list[str]:
        return self.client.prompts()


def events_in(stream: str) -> list[dict[str, Any]]:
    """A stream's events, each under its own name."""
    events = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def blocks_in(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that events add up to; each must be opened, filled and closed in its turn."""
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind not in ("start", "delta", "stop"):
            assert not is_open, event
            continue
        assert event["index"] == len(blocks) - (kind != "start")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(dict(event["content_block"]))
            inputs.append("")
        elif kind == "delta":
            ((name, more),) = [item for item in event["delta"].items() if item[0] != "type"]
            if name == "partial_json":
                inputs[-1] += more
            else:
                blocks[-1][name] += more
    return [
        {**block, "input": json.loads(said)} if said else block
        for block, said in zip(blocks, inputs, strict=True)
    ]


def turns_of(turns: Any) -> list[Any]:
    return [
        turn if isinstance(turn, dict) else {"role": "assistant" if index % 2 else "user", "content": turn}
        for index, turn in enumerate(turns)
    ]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def tool_results(answer: Any, *said: Any) -> list[dict[str, Any]]:
    """What the tools an answer calls have found."""
    content = answer["content"] if isinstance(answer, dict) else [b.to_dict() for b in answer.content]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call_id, "content": found}
        for call_id, found in zip(ids, said, strict=True)
    ]


@asynccontextmanager
async def messages_client(*said: Any, **options: Any) -> AsyncIterator[MessagesClient]:
    async with agent(*said, **options) as a:
        key, url = a.session.api_key, a.session.anthropic_base_url
        async with anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0) as sdk:
            yield MessagesClient(a, sdk)
