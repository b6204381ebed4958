"""`history="verbatim"`: a conversation that only grows is one path, whatever the template shows of it."""

from __future__ import annotations

import pytest

from branchline import Generation, Message, ToolCall
from branchline.core.errors import TemplateError
from branchline.core.token_arrays import as_ids
from tests.chat.families import FAMILIES, load_codec, load_codec_with_template
from tests.chat.harness import TOOLS, SessionDriver, assistant, user
from tests.chat.reply_shapes import REPLY_SHAPES, play_shape

IM_END = 151645


@pytest.mark.parametrize("shape", REPLY_SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_of_any_shape_is_continued(family: str, shape: str) -> None:
    codec = load_codec(family)
    if REPLY_SHAPES[shape].tool_calls and not codec.profile(tools=True).traits.shows_tool_calls:
        pytest.skip("the template refuses or drops tool calls")
    for turn in play_shape(codec, shape, "verbatim"):
        assert turn.continues
        assert all(message.content in turn.added_text for message in turn.new_messages)


CALL = ToolCall("look", '{"at": "1"}', "abcdefgh1")

RESULTS_INSIDE_THE_TURN = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|box_start|>' + m.content + '<|box_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + c.function.name + (c.function.arguments|tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- m.content or '' }}"
    "{%- if not m.tool_calls %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The results of a call follow it without a stop token, as in Gemma 4."""


@pytest.mark.parametrize("arguments", ['{"at": "1"}', '{"at":"1"}'])
@pytest.mark.parametrize("stop", [[], [IM_END]])
def test_a_result_without_a_stop_token_before_it_is_not_lost(arguments: str, stop: list[int]) -> None:
    codec = load_codec_with_template(RESULTS_INSIDE_THE_TURN, tool_parser="plain")
    driver = SessionDriver(codec, history="verbatim")
    reply = assistant("", ToolCall("look", arguments, "abcdefgh1"))
    turn = driver.prepare(user("p"), tools=TOOLS)
    ids = [*driver.encode(f"<tool_call>look{arguments}</tool_call>"), *stop]
    call = driver.session.commit(turn, Generation(as_ids(ids), message=reply)).call
    result = Message("tool", "seen", tool_call_id="abcdefgh1", name="look")
    turn = driver.prepare(user("p"), reply, result, tools=TOOLS)
    assert turn.parent.id == call.outputs[0]
    assert driver.decode(turn.prompt_ids.tolist()[turn.parent.end :]) == "<|box_start|>seen<|box_end|>"


@pytest.mark.parametrize("content", ["t", "<", "\n", "im_start", "<|im_end|>", "</tool_call>", "user"])
def test_content_that_occurs_in_the_text_of_the_template_is_not_taken_for_the_next_message(
    content: str,
) -> None:
    driver = SessionDriver(load_codec("qwen3"), history="verbatim")
    reply = assistant("", CALL)
    text = '<tool_call>\n{"name": "look", "arguments": {"at": "1"}}\n</tool_call><|im_end|>'
    node = driver.commit_reply([user("p")], driver.encode(text), tools=TOOLS)
    turn = driver.prepare(user("p"), reply, user(content), tools=TOOLS)
    assert turn.parent is node
    assert driver.decode(turn.prompt_ids.tolist()[node.end :]) == (
        f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


REFUSES_CALLS = (
    "{%- for m in messages %}{%- if m.tool_calls %}{{- raise_exception('no calls') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def test_a_template_that_refuses_calls_refuses_the_conversation() -> None:
    codec = load_codec_with_template(REFUSES_CALLS, tool_parser="hermes")
    driver = SessionDriver(codec, history="verbatim")
    text = '<tool_call>\n{"name": "look", "arguments": {"at": "1"}}\n</tool_call><|im_end|>'
    node = driver.commit_reply([user("p")], driver.encode(text), tools=TOOLS)
    assert node.message.tool_calls
    with pytest.raises(TemplateError, match="no calls"):
        driver.prepare(user("p"), node.message, Message("tool", "seen"), tools=TOOLS)
