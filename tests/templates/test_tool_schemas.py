"""Every template takes every tool that OpenAI takes, if it takes tools at all."""

from __future__ import annotations

import pytest

from branchline import Message, ToolCall
from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from tests.templates.corpus import load_template_codec, template_names
from tests.templates.tool_shapes import COMPLETE, TOOL_SHAPES

NAMES = template_names()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="needs the templates: make test-templates"),
]
REFUSE_TOOLS = {
    "llama_cpp/fireworks-ai-llama-3-firefunction-v2": "reads tools from another variable",
    "llama_cpp/llama-cpp-deepseek-r1": "prints a generator",
}
"""Templates that fail with any tool, with the reason."""
USER = NewMessage(Message("user", "Look."))


def prompt(codec: GenericCodec, *tools: dict[str, object]) -> str:
    extension = codec.extend((), [USER], tools=tools, chat_template_kwargs={}, history="template")
    return codec.decode(extension.ids)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSE_TOOLS])
def test_every_shape_of_a_tool_is_rendered_and_its_calls_are_parsed(name: str) -> None:
    codec = load_template_codec(name)
    shows_tools = "look" in prompt(codec, COMPLETE)
    call = Message("assistant", tool_calls=(ToolCall("look", '{"at": "here"}'),))
    ids = codec.encode_reply(call)
    expected = codec.parse(ids, "stop", (COMPLETE,))
    for shape, tool in TOOL_SHAPES.items():
        assert ("look" in prompt(codec, tool)) == shows_tools, shape
        assert ("look" in prompt(codec, COMPLETE, tool)) == shows_tools, shape
        parsed = codec.parse(ids, "stop", (tool,))
        assert [one.name for one in parsed.tool_calls] == [one.name for one in expected.tool_calls], shape
