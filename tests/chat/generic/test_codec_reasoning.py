"""Reasoning that the generation prompt opens is parsed out, whether or not history shows it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.timelines.causes import classify_forks
from tests.chat.families import load_codec_with_template
from tests.chat.harness import SessionDriver, save_byte_level, user

START = "{%- for m in messages %}<|start|>{{ m.role }}\n"
END = "<|end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
OPENED = "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
STRIPPED = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"


def driver(path: Path, template: str, **options: Any) -> SessionDriver:
    folder = save_byte_level(path / "t", chat_template=template, eos_token="<|end|>")
    return SessionDriver(GenericCodec.open(folder), **options)


@pytest.mark.parametrize("content", [STRIPPED, "{{ m.content }}"])
@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_reasoning_that_the_prompt_opens_is_apart_from_the_content(
    tmp_path: Path, content: str, history: str
) -> None:
    session = driver(tmp_path, START + content + END + OPENED, history=history)
    ids = session.encode("hm\n</think>\n\nyes<|end|>")
    node = session.commit_reply([user("a")], ids)
    assert (node.message.reasoning_content, node.message.content) == ("hm", "yes")
    prompt = session.render(user("a"), node.message, user("b"))
    if history == "verbatim":
        assert prompt.endswith(
            "assistant\n<think>\nhm\n</think>\n\nyes<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\n<think>\n"
        )
    else:
        assert "hm" not in prompt
        session.commit_reply([user("a"), node.message, user("b")], session.encode("</think>\n\nno<|end|>"))
        causes = [fork.cause for fork in classify_forks(session.session.tree).forks]
        assert causes == ["think_strip"]


def test_reasoning_that_the_template_strips_from_the_text_is_parsed(tmp_path: Path) -> None:
    session = driver(tmp_path, START + STRIPPED + END + PROMPT)
    node = session.commit_reply([user("a")], session.encode("<think>\nhm\n</think>\n\nyes<|end|>"))
    assert (node.message.reasoning_content, node.message.content) == ("hm", "yes")


def test_reasoning_that_history_shows_as_text_stays_text(tmp_path: Path) -> None:
    # The source mentions the closer, but history shows the text as it is: no fork.
    template = "{% set closer = '</think>' %}" + START + "{{ m.content }}" + END + PROMPT
    session = driver(tmp_path, template)
    node = session.commit_reply([user("a")], session.encode("<think>\nhm\n</think>\n\nyes<|end|>"))
    assert (node.message.reasoning_content, node.message.content) == ("", "<think>\nhm\n</think>\n\nyes")
    assert "<think>\nhm\n</think>\n\nyes" in session.render(user("a"), node.message, user("b"))


def test_a_template_whose_calls_no_parser_reads_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = (
        "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
    )
    with caplog.at_level(logging.WARNING, "branchline.chat"):
        codec = driver(tmp_path, START + "{{ m.content or '' }}" + calls + END + PROMPT).codec
        codec.profile(tools=True)
        codec.profile(tools=True, chat_template_kwargs={"x": 1})
    [record] = caplog.records
    assert "no parser reads" in record.getMessage()
    assert "--tool-parser" in record.getMessage()
    assert len(codec.unread_calls) == 1


CLOSED_BLOCK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_writes_an_empty_block_before_replies_has_a_format_with_reasoning() -> None:
    """Kimi-K2-Thinking shows `<think></think>` before every earlier reply, whatever was sampled there."""
    session = SessionDriver(load_codec_with_template(CLOSED_BLOCK))
    node = session.commit_reply([user("p")], session.encode("<think>hm</think>yes<|im_end|>"))
    assert (node.message.content, node.message.reasoning_content) == ("yes", "hm")
    prompt = session.render(user("p"), node.message, user("q"))
    assert "assistant\n<think></think>yes<|im_end|>" in prompt
    node = session.commit_reply([user("r")], session.encode("<think></think>yes<|im_end|>"))
    assert session.prepare(user("r"), node.message, user("q")).parent is node


def test_text_that_history_shows_after_no_block_keeps_its_tags() -> None:
    session = SessionDriver(load_codec_with_template(CLOSED_BLOCK.replace("<think></think>", "")))
    node = session.commit_reply([user("p")], session.encode("<think>hm</think>yes<|im_end|>"))
    assert node.message.content == "<think>hm</think>yes"


THINKING_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}{{ '<think>' + part.thinking + '</think>' }}{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("output", "content"),
    [
        ("<think>hm</think>yes", "yes"),
        ('<think>hm</think>yes<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "yes"),
        ('<think>hm</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ""),
    ],
)
def test_reasoning_that_a_template_reads_from_a_part_of_the_content_is_kept(
    output: str, content: str
) -> None:
    session = SessionDriver(load_codec_with_template(THINKING_PARTS))
    node = session.commit_reply([user("p")], session.encode(f"{output}<|im_end|>"))
    assert (node.message.content, node.message.reasoning_content) == (content, "hm")
    turn = session.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    edited = session.render(user("other"), node.message, user("q"))
    assert f"assistant\n{output}<|im_end|>" in edited


def test_content_that_a_template_prints_as_it_is_shows_no_part_of_reasoning() -> None:
    template = CLOSED_BLOCK.replace("<think></think>", "")
    traits = load_codec_with_template(template.replace("{{ m.content }}", "{{ m.content | string }}"))
    assert not traits.profile().traits.reasoning_is_part
