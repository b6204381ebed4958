"""`branchline doctor`: one line per finding, a sentence of advice at the end, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from branchline.cli.main import main
from tests.chat.families import CACHE
from tests.chat.harness import save_byte_level

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SYSTEM_LAST_TEMPLATE = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and messages[0].role == 'system' %}"
    "<|start|>system\n{{ messages[0].content }}<|end|>\n{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content or '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
Doctor = Callable[..., tuple[int, str]]


def save_tokenizer(path: Path, template: str) -> Path:
    return save_byte_level(path, chat_template=template, eos_token="<|end|>")


def raw_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def conversation_log(turns: int = 4) -> list[dict[str, Any]]:
    shown, lines = [raw_message("system", "be brief"), raw_message("user", "begin")], []
    for turn in range(turns):
        reply = raw_message("assistant", f"answer {turn}")
        lines.append({"request": {"messages": shown}, "response": {"choices": [{"message": reply}]}})
        shown = [*shown, reply, raw_message("user", f"go on {turn}")]
    return lines


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command with a template and log lines; returns its exit code and its output."""

    def run(template: str, *options: str, lines: Sequence[dict[str, Any] | str] = ()) -> tuple[int, str]:
        arguments = ["doctor", "--tokenizer", str(save_tokenizer(tmp_path / "toy", template)), *options]
        if lines:
            log = tmp_path / "calls.jsonl"
            log.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
            arguments.append(str(log))
        code = main(arguments)
        printed = capsys.readouterr()
        assert (code == 2) == bool(printed.err), printed.err
        return code, printed.out or printed.err

    return run


def real_tokenizer(name: str) -> str:
    if not (CACHE / name / "tokenizer.json").exists():
        pytest.skip(f"no {name} tokenizer in {CACHE}: run scripts/fetch_tokenizers.py")
    return str(CACHE / name)


def test_a_safe_template_exits_with_0_and_ends_with_safe(doctor: Doctor) -> None:
    code, output = doctor(CHAT_TEMPLATE)
    assert code == 0
    assert output.splitlines()[-1].startswith("safe: Nothing to do")
    assert output.splitlines()[-2] == "15 checks: 14 fine, 1 note, 0 unsafe"
    assert "parsers: plain for tool calls, none for reasoning; stop ids: 257 <|end|>" in output


def test_evidence_is_shown_only_below_findings_that_are_not_fine(doctor: Doctor) -> None:
    _, output = doctor(SYSTEM_LAST_TEMPLATE)
    lines = output.splitlines()
    (place,) = (index for index, line in enumerate(lines) if line.startswith("note   system_text "))
    assert lines[place + 1].startswith("         before  <|start|>system\\nzqsystem")
    assert lines[place + 2].startswith("         after   <|start|>user\\nzqask")
    for index, line in enumerate(lines[:-1]):
        if line.startswith("fine"):
            assert not lines[index + 1].startswith(" ")


def test_an_unsafe_template_exits_with_1_and_one_sentence_of_advice(doctor: Doctor) -> None:
    code, output = doctor(CHAT_TEMPLATE.replace("<|end|>", "").replace("<|start|>", "# "))
    assert code == 1
    verdict = output.splitlines()[-1]
    assert verdict.startswith("unsafe: toy's template writes no token after a reply")
    assert verdict.count(". ") == 0


def test_a_template_is_judged_with_its_default_arguments(doctor: Doctor) -> None:
    template = "{{ prefix + '\\n' }}" + CHAT_TEMPLATE
    assert doctor(template)[0] == 1
    code, output = doctor(template, "--default-chat-template-kwargs", '{"prefix": "# Chat"}')
    assert code == 0, output


def test_json_output_is_one_object(doctor: Doctor) -> None:
    code, text = doctor(CHAT_TEMPLATE, "--json")
    output = json.loads(text)
    assert (code, text.count("\n")) == (0, 1)
    assert output["verdict"] == "safe"
    assert output["advice"]
    assert output["parsers"] == {"tool_calls": "plain", "reasoning": "none", "starts_inside_reasoning": False}
    assert output["stop_ids"] == [257]
    assert output["log"] is None
    assert json.loads(doctor(CHAT_TEMPLATE, "--json", "--stop-id", "<|start|>")[1])["stop_ids"] == [256, 257]
    for finding in output["findings"]:
        assert set(finding) == {"name", "ok", "severity", "sentence", "evidence"}
        assert finding["ok"] == (finding["severity"] == "fine")


def test_a_log_is_replayed_under_both_policies(doctor: Doctor) -> None:
    code, text = doctor(SYSTEM_LAST_TEMPLATE, "--json", lines=conversation_log())
    output = json.loads(text)
    assert (code, output["verdict"]) == (1, "unsafe")
    template, verbatim = output["log"]["template"], output["log"]["verbatim"]
    assert (template["calls"], template["continuing_calls"], template["forked_calls"]) == (4, 3, 3)
    assert (template["timelines"], template["fork_rate"]) == (4, 1.0)
    assert sum(template["causes"].values()) == template["forks"] == 3
    assert template["tokens_computed_again"] > 0
    assert (verbatim["forked_calls"], verbatim["timelines"], verbatim["tokens_computed_again"]) == (0, 1, 0)
    assert verbatim["encoded_tokens"] < template["encoded_tokens"]
    assert template["drift"] == {"compared": 0, "differing": 0, "same_text": 0, "lines": [], "first": None}


def test_the_verdict_depends_on_the_chosen_history(doctor: Doctor) -> None:
    code, output = doctor(SYSTEM_LAST_TEMPLATE, "--history", "template", lines=conversation_log())
    assert code == 1
    assert "history=template forks 3 of 3 continuing calls" in output
    assert "100%; unsafe above 25%" in output
    code, output = doctor(SYSTEM_LAST_TEMPLATE, "--history", "verbatim", lines=conversation_log())
    assert code == 0
    assert output.splitlines()[-1].startswith("safe: ")


def test_drift_and_refusals_are_shown_with_their_lines(doctor: Doctor) -> None:
    drifted = conversation_log(1)[0]
    drifted["response"]["prompt_token_ids"] = [1, 2, 3]
    strict = CHAT_TEMPLATE.replace(
        "<|start|>{{",
        "{% if m.content == 'go on 0' %}{{ raise_exception('Stop!') }}{% endif %}<|start|>{{",
        1,
    )
    code, output = doctor(strict, lines=[drifted, *conversation_log(2)[1:]])
    assert code == 1
    assert (
        "template: 1 logged prompt with other ids than ours, 0 of them with the same text; "
        "line 1 from token 0" in output
    )
    assert "logged  " in output
    assert "template: the template refuses 1 call\n         line 2: Stop!" in output
    assert "refuses 1 of 2 calls (line 2: Stop!)" in output.splitlines()[-1]


def test_bad_lines_are_an_error_or_skipped(doctor: Doctor) -> None:
    code, output = doctor(CHAT_TEMPLATE, lines=[*conversation_log(), "{"])
    assert code == 2
    assert "calls.jsonl:5: expected one JSON object a line" in output
    code, output = doctor(CHAT_TEMPLATE, "--skip-bad", lines=[*conversation_log(), "{"])
    assert code == 0
    assert "skipped 1 bad line" in output
    _, output = doctor(CHAT_TEMPLATE, "--skip-bad", lines=[*conversation_log(), *["{"] * 12])
    assert "2 more; --json lists them all" in output
    code, output = doctor(CHAT_TEMPLATE, "--skip-bad", lines=["{"])
    assert code == 2
    assert "no calls in it" in output


def test_bad_input_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tokenizer", str(tmp_path / "nowhere")]) == 2
    assert "not a directory" in capsys.readouterr().err
    path = save_tokenizer(tmp_path / "toy", CHAT_TEMPLATE)
    assert main(["doctor", "--tokenizer", str(path), str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl: cannot be read" in capsys.readouterr().err
    (path / "tokenizer_config.json").write_text("{}")
    assert main(["doctor", "--tokenizer", str(path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "branchline doctor --tokenizer",
        "verbatim  the path stays",
        "unsafe (1)",
        "CALLS.jsonl",
        "--json",
    ):
        assert expected in output


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("qwen3", 0, "safe: This template leaves earlier thinking out, so each new user message forks"),
        ("mistral_nemo", 1, "moves the system text to the last user message"),
        ("deepseek_v3", 1, "loses the end of a single tool call"),
    ],
)
def test_real_verdicts(capsys: pytest.CaptureFixture[str], name: str, code: int, words: str) -> None:
    assert main(["doctor", "--tokenizer", real_tokenizer(name)]) == code
    assert words in capsys.readouterr().out.splitlines()[-1]
