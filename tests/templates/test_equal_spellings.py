"""Replies that templates of the corpus show in another spelling than the sampled one do not fork."""

from __future__ import annotations

import re

import pytest

from branchline import Message, ToolCall
from branchline.core.errors import TemplateError
from tests.chat.harness import SessionDriver, assistant, user
from tests.templates.corpus import load_template_codec, template_names

pytestmark = pytest.mark.slow

TYPES = {"flag": "boolean", "other": "boolean", "nothing": "null", "number": "number", "name": "string"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in TYPES.items()},
            },
        },
    },
)
ARGUMENTS = '{"flag": true, "other": false, "nothing": null, "number": 21.0, "name": "x"}'
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


@pytest.mark.parametrize("name", template_names())
def test_json_literals_do_not_fork_where_the_template_prints_python_literals(name: str) -> None:
    codec = load_template_codec(name)
    traits = codec.profile(tools=True).traits
    reply = assistant("", ToolCall("look", ARGUMENTS, "abcdefgh1"))
    rendered = codec.render_reply(reply)
    if rendered is None or rendered[1] is None or not traits.shows_tool_calls:
        pytest.skip("the template does not show the call after its generation prompt")
    text = re.sub("True|False|None", lambda found: PYTHON_LITERALS[found[0]], rendered[0])
    result = Message("tool", "seen", tool_call_id="abcdefgh1", name="look")
    nodes = []
    for spelling in (rendered[0], text):
        driver = SessionDriver(codec)
        try:
            node = driver.commit_reply([user("p")], [*driver.encode(spelling), rendered[1]], tools=TOOLS)
        except TemplateError:
            pytest.skip("the template refuses the tools")
        if not node.message.tool_calls:
            pytest.skip("no parser reads the call")
        turn = driver.prepare(user("p"), node.message, result, tools=TOOLS)
        nodes.append(turn.parent is node)
    assert nodes[1] >= nodes[0]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["default", "off"])
@pytest.mark.parametrize("name", template_names())
def test_an_empty_reasoning_block_does_not_fork(name: str, kwargs: dict[str, bool]) -> None:
    codec = load_template_codec(name)
    profile = codec.profile(chat_template_kwargs=kwargs)
    traits = profile.traits
    if not traits.empty_reasoning_block or not profile.endings.text_terminator_ids:
        pytest.skip("no empty reasoning block")
    driver = SessionDriver(codec)
    # Some replies have an opener and a closer of their own.
    terminator = min(profile.endings.text_terminator_ids)
    block = traits.empty_reasoning_block
    before = traits.generation_prompt.removesuffix(block)
    text = codec.probe(chat_template_kwargs=kwargs).render([user("p"), assistant("yes"), user("q")])
    reply = text.partition(before)[2].partition(driver.decode([terminator]))[0].strip()
    reply = reply.removeprefix(block.strip()).removeprefix(traits.history_reasoning_block.strip())
    ids = [*driver.encode(reply.lstrip()), terminator]
    conversation = [user("p")]
    for question in ("q", "r"):
        node = driver.commit_reply(conversation, ids, chat_template_kwargs=kwargs)
        conversation += [node.message, user(question)]
        assert driver.prepare(*conversation, chat_template_kwargs=kwargs).parent is node
