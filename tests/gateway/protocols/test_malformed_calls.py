"""A call whose arguments are no JSON object, on a real template over each protocol.

It arrives as a call, whole and streamed; sent back with the tool's complaint it is what was sampled, and the
next prompt goes on behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from branchline.core.message import Message
from branchline.core.runs import Ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.protocols.messages_blocks import RAW_ARGUMENTS
from tests.chat.families import codec_of
from tests.gateway.protocols.anthropic_agent import TOOLS as MESSAGES_TOOLS
from tests.gateway.protocols.anthropic_agent import Claude, blocks_in, claude, results
from tests.gateway.protocols.speaking import CHAT_TOOLS, TOOLS, respond
from tests.gateway.running import run

ASK = "What is there?"
TOLD = "Invalid JSON in arguments for 'look'"
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


class WritingEngine(ScriptedEngine):
    """Says texts letter by letter, as a real tokenizer spells them."""

    def __init__(self, *said: str) -> None:
        codec = codec_of("qwen3")

        class Voice:
            decode = staticmethod(codec.decode)

            @staticmethod
            def spell(message: Message) -> Ids:
                return codec.encode(f"{message.text}<|im_end|>")

        super().__init__(Voice(), replies(*said))  # type: ignore[arg-type]


async def over_chat(c: Claude, streamed: bool) -> tuple[str, Any]:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    if streamed:
        events = await c.agent.stream(*messages, tools=CHAT_TOOLS)
        choices = [event["choices"][0] for event in events]
        (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        message: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        response = await c.agent.ask(*messages, tools=CHAT_TOOLS)
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message["tool_calls"]
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": TOLD}]
    assert await c.agent.say(*messages, tools=CHAT_TOOLS) == "I see."
    return call["function"]["name"], call["function"]["arguments"]


async def over_responses(c: Claude, streamed: bool) -> tuple[str, Any]:
    given: list[Any] = [{"role": "user", "content": ASK}]
    response = await respond(c.agent, given, tools=TOOLS, stream=streamed)
    (call,) = response["output"]
    assert call["type"] == "function_call"
    given += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": TOLD}]
    await respond(c.agent, given, tools=TOOLS)
    return call["name"], call["arguments"]


async def over_messages(c: Claude, streamed: bool) -> tuple[str, Any]:
    if streamed:
        content = blocks_in(await c.events(ASK, tools=MESSAGES_TOOLS))
    else:
        content = (await c.ask(ASK, tools=MESSAGES_TOOLS))["content"]
    (call,) = content
    await c.ask(ASK, content, results({"content": content}, TOLD), tools=MESSAGES_TOOLS)
    # The protocol knows objects only.
    ((key, arguments),) = call["input"].items()
    assert key == RAW_ARGUMENTS
    return call["name"], arguments


Talk = Callable[[Claude, bool], Awaitable[tuple[str, Any]]]


@pytest.mark.parametrize("talk", [over_chat, over_responses, over_messages])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_malformed_call_arrives_and_goes_on_the_same_timeline(
    talk: Talk, streamed: bool, history: str
) -> None:
    async def test() -> None:
        codec = codec_of("qwen3")
        for arguments in MALFORMED:
            bad = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
            engine = WritingEngine(bad, "I see.")
            async with claude(engine=engine, codec=codec, history=history) as c:
                assert await talk(c, streamed) == ("look", arguments)
                first, second = (ids.tolist() for ids in engine.asked)
                sampled = codec.encode(f"{bad}<|im_end|>").tolist()
                assert second[: len(first) + len(sampled)] == first + sampled
                assert TOLD in codec.decode(engine.asked[1])
                assert [len(line["calls"]) for line in await c.agent.timelines()] == [2]

    run(test)
