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


# As Qwen3-Coder writes calls: text as it is, all else as JSON or as Python does.
XML_CALLS = (
    "{% for t in m.tool_calls or [] %}{{ '<function=' + t.function.name + '>' }}"
    "{% for k, v in t.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v if v is string else (v | tojson if v is mapping else v | string) }}"
    "{{ '\\n</parameter>' }}{% endfor %}{{ '</function>' }}{% endfor %}"
)
VALUES = r'{"a":"x \"é\"\n","b":[1, -0.5,true ,null],"c":{"d": "","e":"y"},"f":false}'


def template(
    thinks: str = THINKS,
    calls: str = CALLS,
    generation_prompt: str = "<|start|>assistant\\n",
    content: str = "m.content or ''",
    end: str = "<|end|>\\n",
) -> str:
    return (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' }}"
        + thinks
        + "{{ "
        + content
        + " }}"
        + calls
        + "{{ '"
        + end
        + "' }}{% endfor %}{% if add_generation_prompt %}{{ '"
        + generation_prompt
        + "' }}{% endif %}"
    )


def call(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": arguments}}


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


# As DeepSeek-R1 does.
STRIPS_THINKING = "(m.content or '').split('</think>')[-1]"
FIRST_ARGUMENT = CALLS.replace(
    "t.function.arguments | tojson", "(t.function.arguments | items | list)[0] | string"
)
VALUES_ONLY = CALLS.replace("t.function.arguments | tojson", "t.function.arguments.values() | list | tojson")
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


@pytest.mark.parametrize(
    ("arguments", "calls", "text"),
    [
        (
            VALUES,
            CALLS,
            '<tool_call>\n{"name": "f", "arguments": {"a": "x \\"é\\"\\n", "b": [1, -0.5, true, null], '
            '"c": {"d": "", "e": "y"}, "f": false}}\n</tool_call>',
        ),
        (
            '{"a": "x\\n", "b": 7, "c": true, "d": {"e": null}}',
            XML_CALLS,
            "<function=f><parameter=a>\nx\n\n</parameter><parameter=b>\n7\n</parameter>"
            '<parameter=c>\nTrue\n</parameter><parameter=d>\n{"e": null}\n</parameter></function>',
        ),
        ("", XML_CALLS, "<function=f></function>"),
        ("{}", XML_CALLS, "<function=f></function>"),
    ],
)
def test_arguments_are_whole_in_the_spelling_of_the_template(
    encode: Encode, arguments: str, calls: str, text: str
) -> None:
    rows, _ = encode(answer("", "", call(arguments)), template(calls=calls))
    assert rows == [(PROMPT, f"{text}<|end|>")]


@pytest.mark.parametrize("content", ["<think>zz</think>Hello", "  Hello \n", "x<|end|>y", "."])
def test_text_is_encoded_as_it_is(encode: Encode, content: str) -> None:
    rows, _ = encode(answer(content), template())
    assert rows == [(PROMPT, f"{content}<|end|>")]


def test_white_space_that_the_template_trims_may_be_lost(encode: Encode) -> None:
    rows, _ = encode(answer(" Hello\n "), template(content="(m.content or '') | trim"))
    assert rows == [(PROMPT, "Hello<|end|>")]


def test_a_template_that_cuts_texts_reads_no_lists_of_parts(encode: Encode) -> None:
    rows, _ = encode(answer("Hello"), template(content="(m.content or '')[:5]"))
    assert rows == [(PROMPT, "Hello<|end|>")]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_what_the_template_writes_between_turns_is_no_part_of_an_answer(encode: Encode, reason: str) -> None:
    rows, _ = encode(answer("Done. "), template(end="\\n"), reason)
    assert rows == [("<|start|>user\nq\n<|start|>assistant\n", "Done. ")]
    rows, _ = encode(answer("", "", CALL), template(end="\\n"))
    assert [text for _, text in rows] == [CALL_TEXT]


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
        (answer("<think>zz</think>Hello"), template(content=STRIPS_THINKING), "stop"),
        (answer("Hello"), template(content="(m.content or '') | upper"), "stop"),
        (answer("Hello you"), template(content="(m.content or '')[:5]"), "stop"),
        (answer("a  b"), template(content="(m.content or '') | replace('  ', ' ')"), "stop"),
        (answer("", "", CALL), template(calls=CALLS.replace("t.function.arguments | tojson", "''")), "stop"),
        (answer("", "", CALL), template(calls=CALLS.replace("t.function.name", "'g'")), "stop"),
        (answer("", "", call('{"a": 1, "b": 2}')), template(calls=FIRST_ARGUMENT), "stop"),
        (answer("", "", call('{"a": 1}')), template(calls=VALUES_ONLY), "stop"),
        (answer("", "", call('{"a": 1, "a": 2}')), template(), "stop"),
        (answer("", "", call('{"a": ')), template(), "stop"),
        (answer("", "", call("[1]")), template(), "stop"),
        ({**raw_message("assistant", ""), "refusal": "I do not."}, template(), "stop"),
        ({**raw_message("assistant", "Hello"), "refusal": "I do not."}, None, "stop"),
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


@pytest.mark.parametrize("is_first", [False, True])
def test_an_answer_whose_ids_another_line_has_is_not_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_first: bool
) -> None:
    folder = save_byte_level(tmp_path / "model", chat_template=template(), eos_token="<|end|>")
    with_ids = log_line([raw_message("user", "q")], "Done.", [1, 2, 3], [4, 5])
    without = log_line([raw_message("user", "q")], "Done.")
    for line in (with_ids, without):
        line["response"]["id"] = "c"
    log, target = tmp_path / "calls.jsonl", tmp_path / "samples.jsonl"
    lines = [without, with_ids] if is_first else [with_ids, without]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--tokenizer", str(folder), "--inexact", "--json"]
    assert main(["merge", str(log), "--samples", str(target), *options]) == 0
    (sample,) = read_jsonl(target)
    assert (sample.exact, sample.response_ids.tolist()) == (True, [4, 5])
    assert len(json.loads(capsys.readouterr().out)["logged_twice"]) == 1


def test_a_template_that_drops_the_thoughts_of_a_logged_text_is_the_cause_of_a_fork(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last_only = "m.content if loop.last else (m.content or '').split('</think>')[-1]"
    folder = save_byte_level(
        tmp_path / "model", chat_template=template(content=last_only), eos_token="<|end|>"
    )
    question, reply = raw_message("user", "q"), raw_message("assistant", "<think>hm</think>Done.")
    lines = [log_line([question], reply), log_line([question, reply, question], "Yes.")]
    log = tmp_path / "calls.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["merge", str(log), "--tokenizer", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"] == {"think_strip": 1}


@pytest.mark.parametrize("with_stop", [False, True])
@pytest.mark.parametrize("tokens", [list("Done."), ["Do", "ne."]])
def test_the_logprobs_of_a_text_are_used_if_its_tokens_are_the_encoded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], with_stop: bool
) -> None:
    folder = save_byte_level(tmp_path / "model", chat_template=template(), eos_token="<|end|>")
    line = log_line([raw_message("user", "q")], "Done.")
    shown = [*tokens, "<|end|>"] if with_stop else tokens
    entries = [{"token": token, "logprob": -0.5 * index} for index, token in enumerate(shown)]
    line["response"]["choices"][0]["logprobs"] = {"content": entries}
    log, target = tmp_path / "calls.jsonl", tmp_path / "samples.jsonl"
    log.write_text(json.dumps(line))
    options = ["--tokenizer", str(folder), "--inexact", "--missing-logprob", "-9"]
    assert main(["merge", str(log), "--samples", str(target), *options]) == 0
    (sample,) = read_jsonl(target)
    out = capsys.readouterr().out
    if len(tokens) == 2:
        assert set(sample.response_logprobs.tolist()) == {-9.0}
        assert "logprobs left out: 1 answer logged without ids, whose logprobs name other tokens" in out
        return
    assert sample.response_logprobs.tolist() == [0, -0.5, -1, -1.5, -2, -2.5 if with_stop else -9]
    assert sample.missing_logprobs == (0 if with_stop else 1)
    assert "logprobs left out" not in out
