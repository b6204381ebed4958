"""A client of Anthropic's Messages, by plain HTTP and through Anthropic's own SDK."""

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
        """Posts a body; bytes are sent as they are."""
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        key = {"x-api-key": self.client.session.api_key, "anthropic-version": "2023-06-01"}
        return await self.client.http.post(self.url + path, headers={**key, **(headers or {})}, **sent)

    async def ask(self, *turns: Any, **body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed; turns are contents, the user's first."""
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
        """The error in the envelope of a request that must fail."""
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
    """The events of a stream; checks that each has its type as name."""
    events = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def blocks_in(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks in events; checks that each is opened, filled and closed in order."""
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
        {**block, "input": json.loads(input)} if input else block
        for block, input in zip(blocks, inputs, strict=True)
    ]


def turns_of(turns: Any) -> list[Any]:
    return [
        turn if isinstance(turn, dict) else {"role": "assistant" if index % 2 else "user", "content": turn}
        for index, turn in enumerate(turns)
    ]


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def tool_results(answer: Any, *results: Any) -> list[dict[str, Any]]:
    """Tool result blocks for the tool uses of an answer."""
    content = answer["content"] if isinstance(answer, dict) else [b.to_dict() for b in answer.content]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call_id, "content": result}
        for call_id, result in zip(ids, results, strict=True)
    ]


@asynccontextmanager
async def messages_client(*replies: Any, **options: Any) -> AsyncIterator[MessagesClient]:
    async with agent(*replies, **options) as a:
        key, url = a.session.api_key, a.session.anthropic_base_url
        async with anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0) as sdk:
            yield MessagesClient(a, sdk)
