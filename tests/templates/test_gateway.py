"""A tool conversation with reasoning through the gateway, with the templates of well-known model families.

The engine samples replies in the template's own format and stops at the first stop id it is given, as a real
engine does. Over Chat Completions, Responses and Messages, streamed or not, the prompts have the same ids.
`make test-templates` fetches the templates.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import pytest

from branchline import Message, ToolCall
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.testing.probed_reply_encoder import ProbedReplyEncoder
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import TOOLS as MESSAGES_TOOLS
from tests.gateway.protocols.messages_client import MessagesClient, blocks_in, events_in, messages_client
from tests.gateway.protocols.protocol_clients import (
    CHAT_TOOLS,
    QUESTIONS,
    SYSTEM,
    over_chat,
    over_responses,
)
from tests.templates.corpus import load_template_codec, template_names, thinking_name

THINKING = (
    "llama_cpp/openai-gpt-oss-120b",
    "llama_cpp/Qwen-Qwen3-0.6B",
    thinking_name("llama_cpp/Qwen-QwQ-32B"),
    "llama_cpp/GLM-4.6",
    "llama_cpp/GLM-4.7-Flash",
    "llama_cpp/MiniMax-M2",
    "llama_cpp/Kimi-K3",
    thinking_name("llama_cpp/deepseek-ai-DeepSeek-V3.1"),
    thinking_name("llama_cpp/deepseek-ai-DeepSeek-V3.2"),
    "llama_cpp/mistralai-Ministral-3-14B-Reasoning-2512",
    thinking_name("llama_cpp/google-gemma-4-31B-it"),
    thinking_name("llama_cpp/google-gemma-4-31B-it-interleaved"),
    "trl/gemma4",
    "llama_cpp/muse-glimmer",
)
"""Templates that show reasoning next to calls."""
WITHOUT_REASONING = (
    "llama_cpp/Qwen3-Coder",
    "llama_cpp/moonshotai-Kimi-K2",
    "llama_cpp/deepseek-ai-DeepSeek-V3.1",
    "llama_cpp/meta-llama-Llama-3.1-8B-Instruct",
    "llama_cpp/meta-llama-Llama-3.2-3B-Instruct",
    "llama_cpp/meta-llama-Llama-3.3-70B-Instruct",
    "axolotl/llama4",
    "llama_cpp/mistralai-Mistral-Nemo-Instruct-2407",
    "llama_cpp/Mistral-Small-3.2-24B-Instruct-2506",
    "llama_cpp/google-gemma-4-31B-it",
    "llama_cpp/meetkai-functionary-medium-v3.2",
    "llama_cpp/GigaChat3-10B-A1.8B",
)
"""Templates that show calls; their models do not think."""
WITHOUT_CALLS = (
    "trl/gemma3",
    "llama_cpp/microsoft-Phi-3.5-mini-instruct",
    "trl/phi3",
    "axolotl/phi_4",
    "llama_cpp/Kimi-K2-Thinking",
)
"""Templates that show or accept no calls; their models answer with text."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not template_names(), reason="needs the templates: make test-templates"),
]


def script(encoder: ProbedReplyEncoder) -> tuple[Message, ...]:
    """Returns two calls, an answer to the first question and one to the second, each with reasoning where the
    template's format has it."""

    def expressible(text: str, *calls: ToolCall) -> Message:
        for reasoning in ("Where is it?", ""):
            for made in (calls, ()):
                message = Message(
                    "assistant", "" if made else text, reasoning_content=reasoning, tool_calls=made
                )
                if encoder.can_express(message):
                    return message
        raise AssertionError(f"the template cannot express {text!r}")

    first, second = (ToolCall("look", f'{{"at": {place}}}', f"callid00{place}") for place in (1, 2))
    calls = expressible("I look.", first), expressible("Once more.", second)
    answers = expressible("A door, grüße 🙂"), expressible("Still a door.")
    return (*calls, *answers) if calls[0].tool_calls else answers


class TemplateEngine(ScriptedEngine):
    """Samples replies in a template's format and stops at the first stop id of the request."""

    def __init__(self, codec: GenericCodec) -> None:
        encoder = ProbedReplyEncoder(codec, Random(7), tools=CHAT_TOOLS, vary_tokenization=False)
        self.script = script(encoder)

        class ReplyCodec:
            decode = staticmethod(codec.decode)
            encode_reply = staticmethod(encoder.encode_reply)

        super().__init__(ReplyCodec(), replies(*self.script))  # type: ignore[arg-type]

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(prompt_ids, params, **options):
            stops = [place for place, token in enumerate(chunk.ids.tolist()) if token in params.stop_ids]
            if not stops:
                yield chunk
                continue
            end = stops[0] + 1
            assert chunk.logprobs is not None
            yield Chunk(chunk.ids[:end], chunk.logprobs[:end], chunk.version, "stop")
            return


async def over_messages(client: MessagesClient, *, stream: bool) -> None:
    turns: list[dict[str, Any]] = []
    for question in QUESTIONS:
        turns.append({"role": "user", "content": question})
        while True:
            body = {"model": "toy", "max_tokens": 500, "messages": turns, "system": SYSTEM, "stream": stream}
            response = await client.post({**body, "tools": [{**MESSAGES_TOOLS[0], "description": "Look."}]})
            assert response.status_code == 200, response.text
            content = blocks_in(events_in(response.text)) if stream else response.json()["content"]
            turns.append({"role": "assistant", "content": content})
            uses = [block for block in content if block["type"] == "tool_use"]
            if not uses:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block["id"],
                    "content": f'saw {{"at": {block["input"]["at"]}}}',
                }
                for block in uses
            ]
            turns.append({"role": "user", "content": results})


async def converse(protocol: str, codec: GenericCodec, *, stream: bool) -> tuple[list[list[int]], list[Any]]:
    """Returns the prompts of a conversation and the replies as they were recorded."""
    engine = TemplateEngine(codec)
    async with messages_client(engine=engine, codec=codec) as client:
        if protocol == "messages":
            await over_messages(client, stream=stream)
        else:
            over = over_chat if protocol == "chat" else over_responses
            await over(client.client, stream=stream)
        tree = client.client.session.managed.session.tree
        sampled = [tree.nodes[call.outputs[0]].message for call in tree.calls]
    return [ids.tolist() for ids in engine.received_prompts], sampled


@pytest.mark.parametrize("name", [*THINKING, *WITHOUT_REASONING, *WITHOUT_CALLS])
def test_a_conversation_has_the_same_prompts_over_every_protocol(name: str) -> None:
    codec = load_template_codec(name)
    expected = TemplateEngine(codec).script
    assert len(expected) == (2 if name in WITHOUT_CALLS else 4)
    assert bool(expected[0].tool_calls and expected[1].tool_calls) == (name not in WITHOUT_CALLS)
    assert name not in THINKING or all(message.reasoning_content for message in expected[:2])
    assert name not in WITHOUT_REASONING or not any(message.reasoning_content for message in expected)

    async def test() -> None:
        recorded = {}
        for protocol in ("chat", "responses", "messages"):
            for stream in (False, True):
                prompts, sampled = await converse(protocol, codec, stream=stream)
                assert [message.key for message in sampled] == [message.key for message in expected]
                assert [message.reasoning_content.strip() for message in sampled] == [
                    message.reasoning_content for message in expected
                ]
                recorded[protocol, stream] = prompts
        first = recorded["chat", False]
        assert len(first) == len(expected)
        for key, prompts in recorded.items():
            assert prompts == first, key

    run(test)
