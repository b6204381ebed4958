"""The template audit, with one artificial template per trait and with real templates."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.doctor.findings import USE_VERBATIM, Severity
from branchline.doctor.replay_report import assess_safety
from branchline.doctor.template_audit import TemplateAudit, audit_template
from tests.chat.families import load_codec
from tests.chat.harness import save_byte_level

CLEAN = (
    "{%- if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTENT = "{{ m.content or '' }}"
LOOP = "{%- for m in messages %}"


def audit_source(path: Path, template: str) -> TemplateAudit:
    return audit_template(
        GenericCodec.open(save_byte_level(path, chat_template=template, eos_token="<|end|>"))
    )


@lru_cache
def audit_of_family(name: str) -> TemplateAudit:
    return audit_template(load_codec(name))


def unsafe(audit: TemplateAudit) -> set[str]:
    return {finding.name for finding in audit.findings_of(Severity.UNSAFE)}


def rewriting_steps(audit: TemplateAudit) -> set[str]:
    """Returns the steps at which a template rewrites earlier text."""
    steps = [finding for finding in audit.findings if finding.name.startswith("append_only.")]
    assert steps
    return {step.name.removeprefix("append_only.") for step in steps if "before" in step.evidence}


# Artificial templates, one per trait


def test_calls_in_a_form_that_no_parser_reads_are_reported(tmp_path: Path) -> None:
    start = CLEAN.index("<tool_call>")
    template = CLEAN[:start] + "call {{ c.function.name }}: {{ c.function.arguments | tojson }}{% endfor %}"
    template += CLEAN[CLEAN.index("<|end|>\n{% endfor %}{% if") :]
    finding = audit_source(tmp_path / "unread", template)["parses_calls"]
    assert (finding.severity, finding.remedy) == (Severity.UNSAFE, "name a parser with serve --tool-parser")
    assert finding.evidence["written"].startswith("call zqlook")


def test_a_clean_template_has_only_a_note_about_its_json(tmp_path: Path) -> None:
    audit = audit_source(tmp_path / "clean", CLEAN)
    assert [finding.name for finding in audit.findings if not finding.ok] == ["arguments"]
    assert audit.name == "clean"
    assert audit.parsers["tool_calls"] == "hermes"
    assert list(audit.stop_ids.values()) == ["<|end|>"]


FOLDED = (
    "{%- if m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}<|start|>user\n{% endif %}<r>{{ m.content }}</r>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% continue %}{% endif %}"
)
THINKS = (
    "{% if m.reasoning_content and messages[-1].role != 'user' %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
)
ALWAYS_THINKS = THINKS.replace(" and messages[-1].role != 'user'", "")
MOVED = (
    "{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if m.role == 'user' and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] "
    "and messages[0].role == 'system' %}<|start|>system\n{{ messages[0].content }}<|end|>\n{% endif %}"
)
REPEATED = "{% if m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
TOOLS_LAST = "{% if tools and loop.last %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
NO_TOOLS_FIRST = CLEAN[CLEAN.index(LOOP) :]
WITHOUT_TOOLS = (
    f"{LOOP}<|start|>{{{{ m.role }}}}\n{CONTENT}<|end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THINKS_WITH_TOOLS = THINKS.replace("messages[-1].role != 'user'", "(tools or messages[-1].role != 'user')")


def refusing_template(test: str, words: str) -> str:
    return CLEAN.replace(LOOP, LOOP + f"{{% if {test} %}}{{{{ raise_exception('{words}') }}}}{{% endif %}}")


@pytest.mark.parametrize(
    ("template", "name", "severity", "words"),
    [
        (CLEAN.replace(CONTENT, THINKS + CONTENT), "thinking", "note", "earlier thinking out once a user"),
        (CLEAN.replace(CONTENT, ALWAYS_THINKS + CONTENT), "thinking", "fine", "also later"),
        (
            CLEAN.replace(CONTENT, "{{ (m.content or '').split('</think>')[-1] }}"),
            "thinking",
            "note",
            "always",
        ),
        (CLEAN.replace(LOOP, LOOP + FOLDED), "tool_results", "note", "folds"),
        (CLEAN.replace(LOOP, LOOP + MOVED), "system_text", "note", "moves the system text to the last user"),
        (
            CLEAN.replace(LOOP, LOOP + MOVED),
            "append_only.user_after_assistant",
            "note",
            "with a system message",
        ),
        (CLEAN.replace(CONTENT, REPEATED + CONTENT), "system_text", "note", "repeats the system text"),
        (NO_TOOLS_FIRST.replace(LOOP, LOOP + TOOLS_LAST), "tool_list", "note", "moves the tools"),
        (
            CLEAN.replace("{{ c.function.arguments | tojson", "{{ '' + c.function.arguments"),
            "arguments",
            "fine",
            "as they were generated",
        ),
        ("{{ strftime_now('%Y') }}" + CLEAN, "dates", "note", "prints the date"),
        (CLEAN.replace(CONTENT, "{{ (m.content or '') | trim }}"), "trimming", "note", "user and assistant"),
        (
            CLEAN.replace("{% if add_generation_prompt %}", "{% if true %}"),
            "generation_prompt",
            "note",
            "whether",
        ),
        (
            refusing_template("m.tool_calls and m.tool_calls | length > 1", "One!"),
            "parallel_calls",
            "note",
            "refuses several",
        ),
        (
            CLEAN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            "parallel_calls",
            "unsafe",
            "all but one",
        ),
        (CLEAN.replace(CONTENT, "{{ '' + m.content }}"), "null_content", "note", "refuses null"),
        (
            refusing_template("m.tool_call_id and m.tool_call_id | length != 9", "9!"),
            "call_ids",
            "note",
            "nine characters",
        ),
        (
            refusing_template("m.role == 'system' and not loop.first", "No!"),
            "append_only.system_in_the_middle",
            "note",
            "refuses this: system in the middle; it is shown as a user message",
        ),
        (
            CLEAN.replace(LOOP, LOOP + "{%- if m.role != 'system' or loop.first %}").replace(
                "<|end|>\n{% endfor %}", "<|end|>\n{% endif %}{% endfor %}"
            ),
            "append_only.system_in_the_middle",
            "note",
            "leaves this out: system in the middle; it is shown as a user message",
        ),
        (
            refusing_template("m.role == 'tool'", "No tools!"),
            "tools",
            "unsafe",
            "shows tools and then refuses",
        ),
        (NO_TOOLS_FIRST, "tools", "note", "not the tools"),
        (
            WITHOUT_TOOLS,
            "tools",
            "note",
            "support tools: the model sees results, but neither tools nor calls",
        ),
        (
            WITHOUT_TOOLS.replace(LOOP, LOOP + "{% if m.role == 'tool' %}{% continue %}{% endif %}"),
            "tools",
            "note",
            "does not support tools: it leaves out the results without an error",
        ),
        (
            WITHOUT_TOOLS.replace(
                LOOP, LOOP + "{% if m.role == 'tool' %}{{ raise_exception('No!') }}{% endif %}"
            ),
            "tools",
            "note",
            "does not support tools: it refuses calls and their results",
        ),
        (
            CLEAN.replace(CONTENT, THINKS_WITH_TOOLS + CONTENT),
            "thinking",
            "note",
            "once a user message follows, but not with tools",
        ),
        (
            CLEAN.replace(CONTENT, "{{ '' if m.tool_calls else m.content }}"),
            "text_beside_call",
            "unsafe",
            "the text next to",
        ),
        (
            CLEAN.replace("m.tool_calls or []", "([] if m.content else m.tool_calls or [])"),
            "text_beside_call",
            "unsafe",
            "a tool call that has",
        ),
        (
            CLEAN.replace(
                "<|end|>\n{% endfor %}", "{% if not m.tool_calls %}<|end|>{% endif %}\n{% endfor %}"
            ),
            "call_end",
            "unsafe",
            "loses the end",
        ),
        (
            CLEAN.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>"),
            "parses_calls",
            "unsafe",
            "no parser",
        ),
        (
            CLEAN.replace("<|end|>", "").replace("<|start|>", "# "),
            "stop_ids",
            "unsafe",
            "writes no token after a reply",
        ),
        ("{{ 1e22 }}" + CLEAN, "minijinja", "note", "jinja2 is used"),
    ],
)
def test_a_trait_is_found(tmp_path: Path, template: str, name: str, severity: str, words: str) -> None:
    finding = audit_source(tmp_path, template)[name]
    assert (finding.severity, words in finding.sentence) == (severity, True), finding
    assert finding.ok == (severity == "fine")
    assert finding.ok or finding.evidence
    assert finding.sentence.endswith(".")


def test_findings_that_verbatim_solves_name_it_as_remedy(tmp_path: Path) -> None:
    for template in (CLEAN.replace(CONTENT, THINKS + CONTENT), CLEAN.replace(LOOP, LOOP + MOVED)):
        acted_on = [finding for finding in audit_source(tmp_path, template).findings if finding.behaviour]
        assert acted_on
        assert all(finding.remedy == USE_VERBATIM for finding in acted_on)


def test_evidence_shows_both_texts_at_their_first_difference(tmp_path: Path) -> None:
    evidence = audit_source(tmp_path, CLEAN.replace(CONTENT, THINKS + CONTENT))["thinking"].evidence
    assert "<think>\nzqthought" in evidence["before"]
    assert "zqthought" not in evidence["after"]
    assert "zqsaid" in evidence["after"]


def test_a_template_without_tools_is_safe_and_the_verdict_says_what_is_lost_with_them(tmp_path: Path) -> None:
    drops = WITHOUT_TOOLS.replace(LOOP, LOOP + "{% if m.role == 'tool' %}{% continue %}{% endif %}")
    for template, end in (
        (drops, "; with tools it leaves out the results without an error."),
        (
            drops.replace(CONTENT, THINKS + CONTENT),
            "; with tools it leaves out the results without an error.",
        ),
        (CLEAN, "prompts only grow."),
    ):
        verdict = assess_safety(audit_source(tmp_path, template), "template")
        assert verdict.safe
        assert verdict.advice.endswith(end), verdict.advice


def test_an_audit_logs_no_warning_about_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not audit_source(tmp_path, WITHOUT_TOOLS)["tools"].ok
    assert not caplog.records


def test_a_refusal_quotes_the_template(tmp_path: Path) -> None:
    audit = audit_source(tmp_path, refusing_template("m.role == 'tool'", "No tools here!"))
    assert audit["tools"].evidence == {"refusal": "No tools here!"}


def test_a_template_that_refuses_everything_is_one_finding(tmp_path: Path) -> None:
    (finding,) = audit_source(tmp_path, "{{ raise_exception('Never!') }}").findings
    assert (finding.name, finding.severity) == ("conversation", "unsafe")
    assert finding.evidence == {"refusal": "Never!"}


# Real templates


@pytest.mark.parametrize("name", ["qwen2_5", "gemma3", "llama3"])
def test_templates_that_always_extend(name: str) -> None:
    audit = audit_of_family(name)
    assert rewriting_steps(audit) == set()
    assert unsafe(audit) == set()
    assert audit["thinking"].ok
    assert audit["system_text"].ok


def test_llama3_2_extends_but_drops_text_next_to_a_call_and_prints_the_date() -> None:
    audit = audit_of_family("llama3_2")
    assert rewriting_steps(audit) == set()
    assert unsafe(audit) == {"text_beside_call"}
    assert "Today Date: 03 Feb 2001" in audit["dates"].evidence["one clock"]
    assert "single tool-calls" in audit["parallel_calls"].evidence["refusal"]
    assert not audit["trimming"].ok


def test_qwen3_strips_thinking_and_is_otherwise_append_only() -> None:
    audit = audit_of_family("qwen3")
    assert "once a user message follows" in audit["thinking"].sentence
    assert rewriting_steps(audit) == set()
    assert unsafe(audit) == set()
    assert audit.parsers == {"tool_calls": "hermes", "reasoning": "think", "starts_inside_reasoning": False}
    assert audit.stop_ids == {151645: "<|im_end|>"}
    for name in ("parses_calls", "parses_reasoning", "segments", "round_trip", "minijinja"):
        assert audit[name].ok, audit[name]
    assert "folds" in audit["tool_results"].sentence


def test_mistral_nemo_moves_the_system_text_and_the_tools() -> None:
    audit = audit_of_family("mistral_nemo")
    assert "moves the system text to the last user message" in audit["system_text"].sentence
    assert "moves the tools to the last user message" in audit["tool_list"].sentence
    assert "user_after_assistant" in rewriting_steps(audit)
    assert not audit["call_ids"].ok
    assert unsafe(audit) == {"text_beside_call"}


def test_deepseek_v3_breaks_single_calls() -> None:
    audit = audit_of_family("deepseek_v3")
    assert unsafe(audit) == {"call_end", "text_beside_call"}
    assert {"call_after_tool", "user_after_tool"} <= rewriting_steps(audit)
    assert audit["arguments"].ok


def test_llama3_always_writes_its_generation_prompt_and_names_another_eos() -> None:
    audit = audit_of_family("llama3")
    assert "whether requested or not" in audit["generation_prompt"].sentence
    assert "<|eot_id|>" in audit["stop_ids"].sentence
    assert not audit["tools"].ok
