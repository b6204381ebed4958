"""SCENARIOS B10: the same conversation over Chat Completions and over Messages is the same record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import Ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.testing.reply_encoder import TemplateReplyEncoder
from tests.chat.families import load_codec
from tests.gateway.harness import Agent, run
from tests.gateway.protocols.messages_client import MessagesClient, messages_client, text

REPLIES = (
    Message(
        "assistant",
        "I look twice.",
        reasoning_content="where to?",
        tool_calls=(ToolCall("look", '{"at": 1, "far": false}'), ToolCall("look", '{"at": 2, "far": true}')),
    ),
    Message(
        "assistant",
        "",
        reasoning_content="once more",
        tool_calls=(ToolCall("look", '{"at": 3, "far": null}'),),
    ),
    Message("assistant", "A door, grüße 🙂", reasoning_content="a door"),
    Message("assistant", "Bye.", reasoning_content="they leave"),
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}, "far": {"type": "boolean"}}}
ABOUT = {"name": "look", "description": "Looks somewhere."}


class ConversationClient(Protocol):
    """A conversation as one protocol's client keeps it."""

    def add_user(self, *texts: str) -> None: ...
    def add_system(self, content: str) -> None: ...
    async def ask(self, *, streamed: bool) -> list[str]:
        """The ids of the tools the answer calls; the answer is part of the conversation from then on."""
        ...

    def add_tool_results(self, results: dict[str, str], then: str = "") -> None: ...


class ChatClient:
    """Chat Completions, by hand."""

    def __init__(self, client: MessagesClient) -> None:
        self._agent: Agent = client.client
        self._messages: list[Any] = [{"role": "system", "content": [text("You "), text("help.")]}]
        self._tools = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]

    def add_user(self, *texts: str) -> None:
        content = texts[0] if len(texts) == 1 else [text(part) for part in texts]
        self._messages.append({"role": "user", "content": content})

    def add_system(self, content: str) -> None:
        self._messages.append({"role": "system", "content": content})

    async def ask(self, *, streamed: bool) -> list[str]:
        if streamed:
            events = await self._agent.stream(*self._messages, tools=self._tools)
            deltas = [event["choices"][0]["delta"] for event in events]
            message = {
                "role": "assistant",
                "content": "".join(delta.get("content") or "" for delta in deltas),
                "reasoning_content": "".join(delta.get("reasoning_content") or "" for delta in deltas),
                "tool_calls": [call for delta in deltas for call in delta.get("tool_calls", ())],
            }
        else:
            response = await self._agent.ask(*self._messages, tools=self._tools)
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
        self._messages.append(message)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def add_tool_results(self, results: dict[str, str], then: str = "") -> None:
        for call_id, content in results.items():
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        if then:
            self.add_user(then)


class AnthropicClient:
    """Messages, through Anthropic's SDK."""

    def __init__(self, client: MessagesClient) -> None:
        self._client = client
        self._messages: list[Any] = []
        self._tools = [{**ABOUT, "input_schema": SCHEMA}]

    def add_user(self, *texts: str) -> None:
        self._messages.append({"role": "user", "content": [text(part) for part in texts]})

    def add_system(self, content: str) -> None:
        self._messages.append({"role": "system", "content": content})

    async def ask(self, *, streamed: bool) -> list[str]:
        ask: Any = {
            "model": "toy",
            "max_tokens": 500,
            "system": [text("You "), text("help.")],
            "messages": self._messages,
            "tools": self._tools,
        }
        messages = self._client.sdk.messages
        if streamed:
            async with messages.stream(**ask) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await messages.create(**ask)
        self._messages.append({"role": "assistant", "content": answer.content})
        return [block.id for block in answer.content if block.type == "tool_use"]

    def add_tool_results(self, results: dict[str, str], then: str = "") -> None:
        content: list[Any] = [
            {"type": "tool_result", "tool_use_id": call_id, "content": content}
            for call_id, content in results.items()
        ]
        self._messages.append({"role": "user", "content": [*content, *([text(then)] if then else [])]})


async def _converse(client: ConversationClient, *, streamed: bool) -> None:
    client.add_user("<system-reminder>", "What do you see?")
    client.add_system("There is one tool.")
    one, two = await client.ask(streamed=streamed)
    client.add_tool_results({two: "a wall", one: "a window"}, then="Look closer.")
    (three,) = await client.ask(streamed=streamed)
    client.add_tool_results({three: "a door"})
    assert await client.ask(streamed=streamed) == []
    client.add_user("Thanks.")
    await client.ask(streamed=streamed)


@dataclass
class EncoderCodec:
    """A codec for the scripted engine whose outputs a real model could have sampled."""

    codec: GenericCodec
    encoder: TemplateReplyEncoder

    def decode(self, ids: Ids) -> str:
        return self.codec.decode(ids)

    def encode_reply(self, message: Message) -> Ids:
        return self.encoder.encode_reply(message)


def _engine(name: str) -> tuple[Any, ScriptedEngine]:
    if name != "qwen3":
        toy = ToyCodec.chatml(strip_thinking=name == "strips")
        return toy, ScriptedEngine(toy, replies(*REPLIES))
    codec = load_codec(name)
    spoken: Any = EncoderCodec(codec, TemplateReplyEncoder(codec, Random(7)))
    return codec, ScriptedEngine(spoken, replies(*REPLIES))


@pytest.mark.parametrize("name", ["toy", "strips", "qwen3"])
def test_prompts_masks_and_trees_are_the_same_over_messages_and_chat(name: str) -> None:
    async def test() -> None:
        records = []
        for make in (ChatClient, AnthropicClient):
            for streamed in (False, True):
                codec, engine = _engine(name)
                async with messages_client(engine=engine, codec=codec) as c:
                    await _converse(make(c), streamed=streamed)
                    nodes = (await c.client.get("/tree"))["nodes"]
                    lines = await c.client.timelines()
                    for line in lines:
                        # Both have random ids of calls.
                        del line["calls"], line["messages"]
                        for answer in line["answers"]:
                            del answer["call"]
                    records.append(
                        {
                            "prompts": [ids.tolist() for ids in engine.received_prompts],
                            "tree": [{key: node[key] for key in node if key != "call"} for node in nodes],
                            "timelines": lines,
                        }
                    )
        assert len(records[0]["prompts"]) == len(REPLIES)
        assert json.dumps(records[0]).count('"sampled"') == len(REPLIES)
        for record in records[1:]:
            assert record == records[0]

    run(test)
