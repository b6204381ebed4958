"""An episode in the harmony format: analysis, preambles, calls with a recipient and final messages.

The engine samples headers as gpt-oss writes them, which differ from those of its template, and stops as a
real engine does: at the stop ids it is given.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, scripted_logprobs
from branchline.timelines.causes import classify_forks
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import TOOLS as MESSAGES_TOOLS
from tests.gateway.protocols.messages_client import MessagesClient, blocks_in, messages_client, tool_results
from tests.gateway.protocols.protocol_clients import CHAT_TOOLS, TOOLS, respond

CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": %d}<|call|>'
)
OUTPUTS = (
    "<|channel|>analysis<|message|>Look twice.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>" + CALL % 1,
    "<|channel|>analysis<|message|>Once<|end|><|start|>assistant<|channel|>analysis<|message|> more.<|end|>"
    + CALL % 2,
    "<|channel|>analysis<|message|>A door.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>There is a door.<|return|>",
    "<|channel|>final<|message|>Still a door.<|return|>",
)
"""Three turns of one tool cycle, and an answer to a second question."""
NEVER_SAMPLED = "<|start|>user<|message|>never sampled"


class HarmonyEngine(ScriptedEngine):
    """Samples the outputs in turn, each up to the first stop id."""

    def __init__(self, codec: GenericCodec) -> None:
        super().__init__(codec)  # type: ignore[arg-type]
        self.sampled: list[list[int]] = []

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        self.received_prompts.append(prompt_ids)
        output = self.codec.encode(OUTPUTS[len(self.received_prompts) - 1] + NEVER_SAMPLED).tolist()
        stop = next(index for index, token in enumerate(output) if token in params.stop_ids)
        ids = output[: stop + 1]
        self.sampled.append(ids)
        for start in range(0, len(ids), self.chunk_size):
            part = as_ids(ids[start : start + self.chunk_size])
            is_last = start + self.chunk_size >= len(ids)
            logprobs = scripted_logprobs(prompt_ids, ids, start, len(part))
            yield Chunk(part, logprobs, self.version, "stop" if is_last else None)


async def over_chat(c: MessagesClient, streamed: bool) -> list[tuple[str, list[str]]]:
    messages: list[Any] = [{"role": "user", "content": "What is there?"}]
    answers = []
    for _ in OUTPUTS:
        message = await _chat_message(c, messages, streamed)
        calls = message.get("tool_calls") or []
        answers.append((message["content"] or "", [call["function"]["arguments"] for call in calls]))
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "wood"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "And now?"})
    return answers


async def _chat_message(c: MessagesClient, messages: list[Any], streamed: bool) -> Any:
    if not streamed:
        response = await c.client.ask(*messages, tools=CHAT_TOOLS)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in await c.client.stream(*messages, tools=CHAT_TOOLS)]
    message: dict[str, Any] = {"role": "assistant"}
    for key in ("content", "reasoning_content"):
        message[key] = "".join(delta.get(key) or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return message | {"tool_calls": calls} if calls else message


async def over_responses(c: MessagesClient, streamed: bool) -> list[tuple[str, list[str]]]:
    items: list[Any] = [{"role": "user", "content": "What is there?"}]
    answers = []
    for _ in OUTPUTS:
        output = (await respond(c.client, items, tools=TOOLS, stream=streamed))["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
        answers.append(("".join(texts), [call["arguments"] for call in calls]))
        items += output
        items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "wood"} for call in calls
        ]
        if not calls:
            items.append({"role": "user", "content": "And now?"})
    return answers


async def over_messages(c: MessagesClient, streamed: bool) -> list[tuple[str, list[str]]]:
    turns: list[Any] = ["What is there?"]
    answers = []
    for _ in OUTPUTS:
        if streamed:
            blocks = blocks_in(await c.events(*turns, tools=MESSAGES_TOOLS))
        else:
            blocks = (await c.ask(*turns, tools=MESSAGES_TOOLS))["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        answers.append(("".join(texts), [json.dumps(call["input"]) for call in calls]))
        turns += [blocks, tool_results({"content": blocks}, "wood") if calls else "And now?"]
    return answers


ProtocolClient = Callable[[MessagesClient, bool], Awaitable[list[tuple[str, list[str]]]]]
PROTOCOL_CLIENTS: tuple[ProtocolClient, ...] = (over_chat, over_responses, over_messages)


def verify_episode(codec: GenericCodec, exchange: ProtocolClient, streamed: bool) -> None:
    """Plays the outputs and checks the answers, and that each prompt continues what was sampled."""

    async def test() -> None:
        engine = HarmonyEngine(codec)
        async with messages_client(engine=engine, codec=codec) as c:
            assert await exchange(c, streamed) == [
                ("Let me look.", ['{"at": 1}']),
                ("", ['{"at": 2}']),
                ("There is a door.", []),
                ("Still a door.", []),
            ]
            assert [codec.decode(as_ids(ids)) for ids in engine.sampled] == list(OUTPUTS)
            prompts = [ids.tolist() for ids in engine.received_prompts]
            for turn in (0, 1):
                continued = prompts[turn] + engine.sampled[turn]
                assert prompts[turn + 1][: len(continued)] == continued
            # The template drops all analysis once a final message follows.
            last = codec.decode(as_ids(prompts[3]))
            assert "analysis<|message|>" not in last
            assert "<|channel|>final<|message|>There is a door.<|end|><|start|>user" in last
            assert "<|return|>" not in last
            lines = await c.client.timelines()
            assert sorted(len(line["calls"]) for line in lines) == [1, 3]
            tree = c.client.gateway.app.sessions.get(c.client.session.id).session.tree
            assert [fork.cause for fork in classify_forks(tree).forks] == ["think_strip"]

    run(test)
