"""Spellings of a reply that the template shows in another way, and that are still the same reply."""

from __future__ import annotations

import re
from typing import Any

import pytest

from branchline import Message
from tests.chat.families import load_codec, load_codec_with_template
from tests.chat.harness import SessionDriver, user


def off_template(prompt_block: str, history_block: str = "") -> str:
    """Returns a template whose generation prompt ends with a block that history shows differently."""
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        f"{{%- if m.role == 'assistant' %}}{{{{- {history_block!r} }}}}{{%- endif %}}"
        "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        f"{{{{- {prompt_block!r} }}}}{{%- endif %}}"
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("prompt_block", "history_block"),
    [
        ("<think>\n\n</think>\n\n", ""),
        ("<think></think>", ""),
        ("<think>\n</think>\n", ""),
        ("<think></think>", "</think>"),
        ("<|channel>thought\n<channel|>", ""),
        ("<think:opensource></think:opensource>", ""),
        ("<|START_THINKING|><|END_THINKING|>", ""),
        ("[THINK][/THINK]", ""),
    ],
)
def test_an_empty_reasoning_block_is_kept_in_any_spelling(
    prompt_block: str, history_block: str, keep: bool
) -> None:
    codec = load_codec_with_template(off_template(prompt_block, history_block), keep_empty_think=keep)
    driver = SessionDriver(codec)
    node = driver.commit_reply([user("p")], driver.encode("yes<|im_end|>"))
    for _ in range(2):
        assert (driver.prepare(user("p"), node.message, user("q")).parent is node) is keep
        codec.prompt_cache.clear()


DROPPED_LATER = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
"""Shows the empty block of a reply until the next question, as Qwen3.5 without thinking."""


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("forgets", [False, True], ids=["remembered", "forgotten"])
def test_an_empty_reasoning_block_that_history_shows_at_first_is_kept_when_it_is_dropped(
    keep: bool, forgets: bool
) -> None:
    codec = load_codec_with_template(DROPPED_LATER, keep_empty_think=keep)
    driver = SessionDriver(codec)
    messages, reply = [user("p")], driver.encode("yes<|im_end|>")
    for number in range(3):
        node = driver.commit_reply(messages, reply)
        messages += [node.message, Message("tool", f"r{number}")]
        assert driver.prepare(*messages).parent is node
    node = driver.commit_reply(messages, reply)
    if forgets:
        codec.prompt_cache.clear()
    assert (driver.prepare(*messages, node.message, user("q")).parent is node) is keep


@pytest.mark.parametrize(
    "prompt_block",
    ["<think>\n", "Here are my reasoning steps:\n", "<|channel|>final<|message|>", "<think>hm</think>"],
)
def test_a_block_that_is_not_empty_reasoning_is_not_kept(prompt_block: str) -> None:
    driver = SessionDriver(load_codec_with_template(off_template(prompt_block)))
    node = driver.commit_reply([user("p")], driver.encode("yes<|im_end|>"))
    assert driver.prepare(user("p"), node.message, user("q")).parent is not node


@pytest.mark.parametrize(
    "text", ["re\u0301sume\u0301", "\u0301x", "<think>\ne\u0301\n</think>\n\n\u1112\u1161"]
)
def test_decomposed_characters_do_not_fork_under_a_tokenizer_that_composes_them(text: str) -> None:
    driver = SessionDriver(load_codec("qwen3"))
    # Ids of single bytes: the tokenizer would compose the text.
    by_bytes = {driver.codec.tokenizer.token_bytes(token): token for token in range(256)}
    sampled = []
    for segment in re.split("(</?think>)", text):
        is_control = segment.startswith("<")
        sampled += driver.encode(segment) if is_control else [by_bytes[bytes([b])] for b in segment.encode()]
    node = driver.commit_reply([user("p")], [*sampled, *driver.encode("<|im_end|>")])
    tool = Message("tool", "r")
    assert driver.prepare(user("p"), node.message, tool).parent is node


XML_CALLS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{%- for k, v in c.function.arguments.items() %}{{- '<parameter=' + k + '>\\n' }}"
    "{{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Prints arguments as Python does, as the templates of Qwen3-Coder, Qwen3.5 and Step 3.5."""


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "boolean"}, "true"),
        ({"type": "boolean"}, "False"),
        ({"type": ["string", "null"]}, "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null"),
        ({"type": "number"}, "1e-7"),
        ({"type": "number"}, "21.0"),
        ({"type": "array"}, '[true,null,"True"]'),
        ({}, "1e-7"),
        ({}, '{"deep": [true, 21.0]}'),
    ],
)
def test_values_that_a_template_prints_as_python_does_not_fork(schema: dict[str, Any], value: str) -> None:
    driver = SessionDriver(load_codec_with_template(XML_CALLS))
    parameters = {"type": "object", "properties": {"at": schema}}
    tools = ({"type": "function", "function": {"name": "look", "parameters": parameters}},)
    text = f"<tool_call>\n<function=look>\n<parameter=at>\n{value}\n</parameter>\n</function>\n</tool_call>"
    node = driver.commit_reply([user("p")], driver.encode(f"{text}<|im_end|>"), tools=tools)
    assert node.message.tool_calls
    assert driver.prepare(user("p"), node.message, Message("tool", "r"), tools=tools).parent is node


def test_a_string_that_looks_like_a_boolean_is_not_one() -> None:
    driver = SessionDriver(load_codec_with_template(XML_CALLS.replace("v | string", "v | string | title")))
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools = ({"type": "function", "function": {"name": "look", "parameters": parameters}},)
    text = "<tool_call>\n<function=look>\n<parameter=at>\ntrue\n</parameter>\n</function>\n</tool_call>"
    node = driver.commit_reply([user("p")], driver.encode(f"{text}<|im_end|>"), tools=tools)
    assert driver.prepare(user("p"), node.message, Message("tool", "r"), tools=tools).parent is not node
