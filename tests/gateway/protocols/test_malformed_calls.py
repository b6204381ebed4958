"""A tool call whose arguments are not a JSON object, with a real template, over each protocol.

It is delivered as a call, whole and streamed. Sent back with an error result it matches what was sampled, and
the next prompt continues it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.protocols.messages_blocks import RAW_ARGUMENTS_KEY
from tests.chat.families import load_codec
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import TOOLS as MESSAGES_TOOLS
from tests.gateway.protocols.messages_client import MessagesClient, blocks_in, messages_client, tool_results
from tests.gateway.protocols.protocol_clients import CHAT_TOOLS, TOOLS, respond

QUESTION = "What is there?"
ERROR_RESULT = "Invalid JSON in arguments for 'look'"
MALFORMED = [
    "{at: 1",
    '{"at": 1;}',
    '{"at": 1}}',
    '{"at": "x}',
    '"{}"',
    "[1]",
    "null",
    '{"at": "\n"}',
    '{"at": NaN}',
]


class CharacterEngine(ScriptedEngine):
    """Replies with exactly these texts, encoded by a real tokenizer."""

    def __init__(self, *texts: str) -> None:
        codec = load_codec("qwen3")

        class ReplyCodec:
            decode = staticmethod(codec.decode)

            @staticmethod
            def encode_reply(message: Message) -> Ids:
                return codec.encode(f"{message.content}<|im_end|>")

        super().__init__(ReplyCodec(), replies(*texts))  # type: ignore[arg-type]


async def over_chat(c: MessagesClient, streamed: bool) -> tuple[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    if streamed:
        events = await c.client.stream(*messages, tools=CHAT_TOOLS)
        choices = [event["choices"][0] for event in events]
        (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        message: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        response = await c.client.ask(*messages, tools=CHAT_TOOLS)
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message["tool_calls"]
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": ERROR_RESULT}]
    assert await c.client.ask_text(*messages, tools=CHAT_TOOLS) == "I see."
    return call["function"]["name"], call["function"]["arguments"]


async def over_responses(c: MessagesClient, streamed: bool) -> tuple[str, Any]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    response = await respond(c.client, items, tools=TOOLS, stream=streamed)
    (call,) = response["output"]
    assert call["type"] == "function_call"
    items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": ERROR_RESULT}]
    await respond(c.client, items, tools=TOOLS)
    return call["name"], call["arguments"]


async def over_messages(c: MessagesClient, streamed: bool) -> tuple[str, Any]:
    if streamed:
        content = blocks_in(await c.events(QUESTION, tools=MESSAGES_TOOLS))
    else:
        content = (await c.ask(QUESTION, tools=MESSAGES_TOOLS))["content"]
    (call,) = content
    await c.ask(QUESTION, content, tool_results({"content": content}, ERROR_RESULT), tools=MESSAGES_TOOLS)
    # The protocol has objects only.
    ((key, arguments),) = call["input"].items()
    assert key == RAW_ARGUMENTS_KEY
    return call["name"], arguments


ProtocolClient = Callable[[MessagesClient, bool], Awaitable[tuple[str, Any]]]


@pytest.mark.parametrize("exchange", [over_chat, over_responses, over_messages])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_malformed_call_is_delivered_and_stays_on_one_timeline(
    exchange: ProtocolClient, streamed: bool, history: str
) -> None:
    async def test() -> None:
        codec = load_codec("qwen3")
        for arguments in MALFORMED:
            bad = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
            engine = CharacterEngine(bad, "I see.")
            async with messages_client(engine=engine, codec=codec, history=history) as c:
                assert await exchange(c, streamed) == ("look", arguments)
                first, second = (ids.tolist() for ids in engine.received_prompts)
                sampled = codec.encode(f"{bad}<|im_end|>").tolist()
                assert second[: len(first) + len(sampled)] == first + sampled
                assert ERROR_RESULT in codec.decode(engine.received_prompts[1])
                assert [len(line["calls"]) for line in await c.client.timelines()] == [2]

    run(test)
