"""Answers and prompts that were logged without ids are encoded as the chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchline.chat.tokenizer import TokenizerDir
from branchline.cli.main import main
from branchline.export.jsonl import read_jsonl
from tests.chat.harness import save_byte_level
from tests.cli.harness import log_line, raw_message

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THINKS = (
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
)
CALLS = (
    "{% for t in m.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + t.function.name + \'", "arguments": \' }}'
    "{{ t.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
Encode = Callable[..., tuple[list[tuple[str, str]], Any]]


def template(
    thinks: str = THINKS, calls: str = CALLS, generation_prompt: str = "<|start|>assistant\\n"
) -> str:
    return (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' }}"
        + thinks
        + "{{ m.content or '' }}"
        + calls
        + "{{ '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '"
        + generation_prompt
        + "' }}{% endif %}"
    )


def answer(content: str = "", reasoning: str = "", *calls: object) -> dict[str, Any]:
    return {**raw_message("assistant", content), "reasoning_content": reasoning, "tool_calls": list(calls)}


@pytest.fixture
def encode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Encode:
    """Merges one call without ids; returns the texts of its samples and the report."""

    def run(
        reply: dict[str, Any], chat_template: str | None, finish_reason: str = "stop"
    ) -> tuple[list[tuple[str, str]], Any]:
        config: dict[str, Any] = (
            {} if chat_template is None else {"chat_template": chat_template, "eos_token": "<|end|>"}
        )
        folder = save_byte_level(tmp_path / "model", **config)
        log, target = tmp_path / "calls.jsonl", tmp_path / "samples.jsonl"
        log.write_text(json.dumps(log_line([raw_message("user", "q")], reply, finish_reason=finish_reason)))
        options = ["--tokenizer", str(folder), "--inexact", "--allow-missing-logprobs", "--json"]
        assert main(["merge", str(log), "--samples", str(target), *options]) == 0
        decode = TokenizerDir.open(str(folder)).decode
        texts = [(decode(row.prompt_ids), decode(row.response_ids)) for row in read_jsonl(target)]
        return texts, json.loads(capsys.readouterr().out)

    return run


PROMPT = "<|start|>user\nq<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (answer("Done."), "Done."),
        (answer("Done.", "Easy."), "<think>\nEasy.\n</think>\n\nDone."),
        (answer("", "Only thoughts."), "<think>\nOnly thoughts.\n</think>\n\n"),
        (answer("", "I look.", CALL), f"<think>\nI look.\n</think>\n\n{CALL_TEXT}"),
        (answer("So: ", "", CALL, CALL), f"So: {CALL_TEXT}{CALL_TEXT}"),
    ],
)
def test_an_answer_is_encoded_with_its_reasoning_its_calls_and_its_stop_token(
    encode: Encode, reply: dict[str, Any], text: str
) -> None:
    rows, report = encode(reply, template())
    assert rows == [(PROMPT, f"{text}<|end|>")]
    assert report["inexact_tokens"] == report["delivered_tokens"] > 0


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_an_answer_that_was_cut_off_has_no_stop_token(encode: Encode, reason: str) -> None:
    rows, report = encode(answer("Done.", "Easy."), template(), reason)
    assert [text for _, text in rows] == (["<think>\nEasy.\n</think>\n\nDone."] if reason == "length" else [])
    assert reason == "length" or report["dropped"][0]["reason"] == "cancelled"


@pytest.mark.parametrize(
    ("reply", "chat_template", "reason"),
    [
        (answer("Done.", "Easy."), template(thinks=""), "stop"),
        (answer("", "Only thoughts."), template(thinks=""), "stop"),
        (answer("So.", "", CALL), template(calls=""), "stop"),
        (answer("", "", CALL), template(calls=""), "stop"),
        (
            answer("", "", CALL, CALL),
            template(calls=CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")),
            "stop",
        ),
        # The generation prompt is another one than that of answers in the history.
        (answer("Done."), template(generation_prompt="<|start|>assistant\\n<think>\\n"), "stop"),
        # The template closes what the model had not closed.
        (answer("", "Easy, I"), template(), "length"),
        (answer("", "", CALL), template(), "length"),
        (answer("Done.", "Easy."), None, "stop"),
        (answer("", "Only thoughts."), None, "stop"),
    ],
)
def test_an_answer_that_is_not_shown_whole_is_not_trained_and_counted(
    encode: Encode, reply: dict[str, Any], chat_template: str | None, reason: str
) -> None:
    rows, report = encode(reply, chat_template, reason)
    assert rows == []
    assert report["dropped"] == [{"reason": "not_encoded", "call": "line-1", "tokens": 0}]


def test_without_a_template_a_prompt_is_one_line_per_message(encode: Encode) -> None:
    rows, _ = encode(answer("so", "", CALL), None)
    assert rows == [("user: q\nassistant: ", 'so\n{"name":"f","arguments":{"a":1}}')]


def test_the_table_says_why_an_answer_is_not_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_byte_level(tmp_path / "model", chat_template=template(thinks=""), eos_token="<|end|>")
    log = tmp_path / "calls.jsonl"
    log.write_text(json.dumps(log_line([raw_message("user", "q")], answer("Done.", "Easy."))))
    assert main(["merge", str(log), "--tokenizer", str(folder), "--inexact"]) == 0
    assert "dropped, not_encoded: 1 output, 0 tokens (logged without ids, and" in capsys.readouterr().out
