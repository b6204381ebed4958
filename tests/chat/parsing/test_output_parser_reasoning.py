"""The reasoning layer: one region at the start, framing newlines, and the rest in the tool format."""

from __future__ import annotations

import pytest

from branchline.chat.parsing.base import ParseProblem
from tests.chat.parsing.samples import call, hermes, parse_text

UNCLOSED = (ParseProblem.UNCLOSED_REASONING,)


@pytest.mark.parametrize(
    ("output", "reasoning", "text"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>hm</think>yes", "hm", "yes"),
        ("<think>\n\nhm\n\nhm \n</think>\n\n\n yes\n", "hm\n\nhm ", " yes\n"),
        ("\n <think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("yes <think>no</think>", "", "yes <think>no</think>"),
        ("</think>yes", "", "yes"),
        (" \n yes", "", " \n yes"),
        ("<thin", "", "<thin"),
        ("\n\n", "", "\n\n"),
        ("<think>a</think>\n\n", "a", ""),
    ],
)
def test_reasoning_comes_before_the_answer(output: str, reasoning: str, text: str) -> None:
    parsed = parse_text("hermes", output, reasoning="think")
    assert (parsed.message.reasoning_content, parsed.message.content) == (reasoning, text)
    assert parsed.problems == ()


@pytest.mark.parametrize(
    ("output", "reasoning", "text"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes"),
        ("\n<think>\nhm</think>yes", "hm", "yes"),
        ("</think>yes", "", "yes"),
    ],
)
def test_the_prompt_may_open_the_reasoning(output: str, reasoning: str, text: str) -> None:
    parsed = parse_text("plain", output, reasoning="think", starts_in_reasoning=True)
    assert (parsed.message.reasoning_content, parsed.message.content, parsed.problems) == (
        reasoning,
        text,
        (),
    )


def test_unclosed_reasoning_extends_to_the_end() -> None:
    parsed = parse_text("plain", "<think>\nhm\n", "length", reasoning="think")
    assert (parsed.message.reasoning_content, parsed.message.content, parsed.problems) == (
        "hm\n",
        "",
        UNCLOSED,
    )
    parsed = parse_text("plain", "", "length", reasoning="think", starts_in_reasoning=True)
    assert (parsed.message.is_empty, parsed.problems) == (True, UNCLOSED)
    parsed = parse_text("harmony", "<|channel|>analysis<|message|>hm", "length")
    assert (parsed.message.reasoning_content, parsed.problems) == ("hm", UNCLOSED)


def test_a_call_inside_reasoning_is_not_a_call() -> None:
    draft, made = hermes("", [call("draft")]), hermes("", [call("f")])
    parsed = parse_text("hermes", f"<think>\nlike {draft}?\n</think>\n\n{made}", reasoning="think")
    assert parsed.message.tool_calls == (call("f"),)
    assert parsed.message.reasoning_content == f"like {draft}?"
    parsed = parse_text("hermes", f"<think>\n{made}", reasoning="think")
    assert (parsed.message.tool_calls, parsed.problems) == ((), UNCLOSED)


def test_mistral_brackets_delimit_reasoning() -> None:
    parsed = parse_text("mistral", "[THINK]hm[/THINK]yes", reasoning="mistral")
    assert (parsed.message.reasoning_content, parsed.message.content) == ("hm", "yes")


def test_without_a_reasoning_format_reasoning_is_text() -> None:
    assert (
        parse_text("hermes", "<think>\nhm\n</think>\n\nyes").message.content == "<think>\nhm\n</think>\n\nyes"
    )
