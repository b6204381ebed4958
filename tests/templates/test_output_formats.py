"""Replies that a template of the corpus shows are parsed back to the same messages.

What the template leaves out (text next to a call, reasoning, a second call) is not expected back. A template
that refuses a reply is skipped.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.parsing.framed import CallFormat
from branchline.chat.parsing.output_parser import REASONING_MARKERS, TOOL_FORMATS, OutputFormat
from branchline.core.message import Message, ToolCall
from tests.templates.corpus import load_template_codec, template_names

NAMES = template_names()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="needs the templates: make test-templates"),
]
DIFFERENT = {
    ("llama_cpp/openai-gpt-oss-120b", "text and call"): "shows text next to a call as analysis",
    ("llama_cpp/openai-gpt-oss-120b", "reasoning and call"): "shows text next to a call as analysis",
    ("trl/gptoss", "text and call"): "shows text next to a call as analysis",
    ("trl/gptoss", "reasoning and call"): "shows text next to a call as analysis",
    ("trl/gptoss_training", "text and call"): "shows text next to a call as analysis",
    ("trl/gptoss_training", "reasoning and call"): "shows text next to a call as analysis",
    ("llama_cpp/NVIDIA-Nemotron-Nano-v2", "text"): "shows text inside the reasoning that its prompt opens",
    ("llama_cpp/NVIDIA-Nemotron-Nano-v2", "text and call"): "shows text and call as two replies",
    (
        "llama_cpp/NVIDIA-Nemotron-Nano-v2",
        "reasoning",
    ): "shows text inside the reasoning that its prompt opens",
    ("llama_cpp/NVIDIA-Nemotron-Nano-v2", "reasoning and call"): "shows text and call as two replies",
    (
        "llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "text and call",
    ): "shows text and call as two replies",
    ("llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "reasoning and call"): "shows them as two replies",
}
"""Replies that a template shows as other replies."""
DROPS_NULL = {"llama_cpp/MiniMax-M3"}
"""Templates that leave out arguments that are null."""
ENDS = (
    "<｜hy_eos:opensource｜>",
    "<SPECIAL_12>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
)
"""What follows a reply and is not an added token of the corpus, or always follows a conversation."""
INSTRUCTION = "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write 'Action:'"
"""What Command R+'s template writes at the end of every conversation."""

USER = Message("user", "zqask")
ARGUMENTS = {"s": 'a "q"\n{x}, [y]', "i": -3, "f": 1.5, "b": True, "z": None, "o": {"k": [1, "v"]}}
PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "f": {"type": "number"},
    "b": {"type": "boolean"},
    "z": {"type": ["string", "null"]},
    "o": {"type": "object"},
}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("look", "other")
)


def _reply(content: str = "", reasoning: str = "", **calls: object) -> Message:
    made = [
        ToolCall(name, json.dumps(arguments), f"abcdefgh{number}")
        for number, (name, arguments) in enumerate(calls.items())
    ]
    return Message("assistant", content, reasoning_content=reasoning, tool_calls=tuple(made))


REPLIES = {
    "text": _reply("Hi.\n\nYou."),
    "call": _reply(look=ARGUMENTS),
    "two calls": _reply(look=ARGUMENTS, other={}),
    "text and call": _reply("Looking.", look={"s": "x"}),
    "reasoning": _reply("Hi.", "Let me\nsee."),
    "reasoning and call": _reply("Looking.", "Let me\nsee.", look=ARGUMENTS),
}


def _framing(output_format: OutputFormat) -> set[str]:
    """Returns the markers of a format, which belong to the reply."""
    tool_format = TOOL_FORMATS[output_format.tool_format]
    splitter = tool_format.splitter if isinstance(tool_format, CallFormat) else None
    markers = {
        *(splitter.markers if splitter else ()),
        *REASONING_MARKERS.get(output_format.reasoning_format, ()),
    }
    return markers | {"[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>", "<|channel|>", "<|call|>"}


def _rendered_reply(codec: GenericCodec, message: Message) -> str:
    """Returns a reply as the template shows it, without the tokens around it; empty if it is refused."""
    profile = codec.profile(tools=True)
    probe = codec.probe(tools=True)
    text = probe.render_or_empty([USER, message], TOOLS, add_generation_prompt=False)
    plain = probe.render_or_empty([USER, REPLIES["text"]], TOOLS, add_generation_prompt=False)
    text = text[text.rfind(USER.content) + len(USER.content) :].partition(INSTRUCTION)[0]
    text = text.removesuffix(plain.rpartition("You.")[2] if "You." in plain else "")
    for suffix in ENDS:
        text = text.rstrip().removesuffix(suffix)
    prompt = profile.traits.generation_prompt
    reasoning = REASONING_MARKERS.get(profile.reader.output_format.reasoning_format, ())
    without_reasoning = min((prompt.partition(marker)[0] for marker in reasoning), key=len, default=prompt)
    for prefix in (prompt, profile.traits.history_reply_prefix, without_reasoning):
        if prefix.strip() and prefix.strip() in text:
            text = text.partition(prefix.strip())[2]
            break
    markers = _framing(profile.reader.output_format)
    added = [
        (start, end)
        for start, end, token in codec.segment_encoder.find_added_tokens(text)
        if codec.segment_encoder.is_control[token]
        and not any(text.startswith(marker, start) or text[:end].endswith(marker) for marker in markers)
    ]
    while added and not text[: added[0][0]].strip():
        _, end = added.pop(0)
        text = " " * end + text[end:]
    while added and not text[added[-1][1] :].strip():
        text = text[: added.pop()[0]]
    return text.strip()


def _shown_part(message: Message, text: str) -> Message:
    """Returns the fields of a message that occur in a text."""
    return Message(
        "assistant",
        message.content if message.content in text else "",
        reasoning_content=message.reasoning_content if message.reasoning_content in text else "",
        tool_calls=tuple(call for call in message.tool_calls if call.name in text),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shown_reply_is_parsed_back(name: str) -> None:
    codec = load_template_codec(name)
    output_format = codec.profile(tools=True).reader.output_format
    assert codec.unread_calls == []
    wrong = []
    for kind, message in REPLIES.items():
        text = _rendered_reply(codec, message)
        if (name, kind) in DIFFERENT:
            continue
        expected = _shown_part(message, text)
        found = []
        for inside in (False, True):
            parser = replace(output_format, starts_in_reasoning=inside).create_parser(TOOLS)
            deltas = [*parser.feed(text), *parser.finish(False)]
            calls = tuple(delta.tool_call for delta in deltas if delta.tool_call is not None)
            content = "".join(delta.content for delta in deltas).strip()
            reasoning = "".join(delta.reasoning_content for delta in deltas).strip()
            found.append((content, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]))
        wanted = [(call.name, json.loads(call.arguments)) for call in expected.tool_calls]
        if name in DROPS_NULL:
            wanted = [(tool, {k: v for k, v in values.items() if v is not None}) for tool, values in wanted]
        if (expected.content, expected.reasoning_content, wanted) not in found:
            wrong.append((kind, text, found))
    assert not wrong
