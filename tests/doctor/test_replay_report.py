"""Replaying a log under both history policies, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.doctor.findings import USE_VERBATIM, Finding, fine, note, unsafe
from branchline.doctor.replay_report import RefusedCall, ReplayReport, assess_safety, replay_log
from branchline.doctor.template_audit import TemplateAudit, audit_template
from branchline.timelines.log import LoggedCall, read_call
from tests.chat.families import load_codec
from tests.chat.harness import HELLO_MERGES, save_byte_level

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('No tools here!') }}{% endif %}"
    "<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content and messages[-1].role != 'user' %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> GenericCodec:
    """A tokenizer with `hello` as one token or five, and a template that strips reasoning."""
    path = tmp_path_factory.mktemp("toy")
    return GenericCodec.open(
        save_byte_level(path, merges=HELLO_MERGES, chat_template=TEMPLATE, eos_token="<|end|>")
    )


def raw_message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def conversation(
    replies: Sequence[dict[str, Any]], session: str = "s", *, ids: Sequence[list[int] | None] = ()
) -> list[LoggedCall]:
    """Returns the log of a conversation: every call contains all earlier messages."""
    shown = [raw_message("user", "begin")]
    calls: list[LoggedCall] = []
    for index, reply in enumerate(replies):
        choice: dict[str, Any] = {"message": reply, "finish_reason": "stop"}
        if index < len(ids) and ids[index] is not None:
            choice["token_ids"] = ids[index]
        line = {"session": session, "request": {"messages": shown}, "response": {"choices": [choice]}}
        calls.append(read_call(line, len(calls) + 1))
        shown = [*shown, reply, raw_message("user", f"go on {index}")]
    return calls


PLAIN_REPLIES = [raw_message("assistant", f"answer {index}") for index in range(4)]
REASONING_REPLIES = [
    raw_message("assistant", f"answer {index}", reasoning_content="hm") for index in range(4)
]


# Replaying


def test_a_conversation_without_reasoning_is_one_timeline_under_both_policies(codec: GenericCodec) -> None:
    for history in ("template", "verbatim"):
        report = replay_log(conversation(PLAIN_REPLIES), codec, history)
        assert (report.calls, report.continuing_calls, report.forked_calls, report.timelines) == (4, 3, 0, 1)
        assert not report.causes
        assert report.tokens_computed_again == 0
        assert report.fork_rate == 0


def test_reasoning_forks_at_every_user_message_under_template_and_never_under_verbatim(
    codec: GenericCodec,
) -> None:
    template = replay_log(conversation(REASONING_REPLIES), codec, "template")
    verbatim = replay_log(conversation(REASONING_REPLIES), codec, "verbatim")
    assert (template.continuing_calls, template.forked_calls, template.timelines) == (3, 3, 4)
    assert template.causes == {"think_strip": 3}
    assert template.tokens_computed_again > 0
    assert template.exceeds_max_fork_rate
    assert (verbatim.forked_calls, verbatim.timelines, verbatim.tokens_computed_again) == (0, 1, 0)
    assert verbatim.encoded_tokens < template.encoded_tokens
    # Under verbatim the reasoning stays in the context.
    assert verbatim.prompt_tokens > template.prompt_tokens


def test_sessions_are_replayed_separately(codec: GenericCodec) -> None:
    calls = [*conversation(PLAIN_REPLIES, "one"), *conversation(PLAIN_REPLIES, "two")]
    report = replay_log(calls, codec, "template")
    assert (report.calls, report.continuing_calls, report.timelines) == (8, 6, 2)


def test_the_order_of_the_log_does_not_matter(codec: GenericCodec) -> None:
    calls = conversation(REASONING_REPLIES)
    for seed in range(5):
        mixed = Random(seed).sample(calls, len(calls))
        report = replay_log(mixed, codec, "template")
        assert (report.continuing_calls, report.forked_calls, report.timelines) == (3, 3, 4)


def test_logged_ids_are_kept(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    sampled = [*(codec.tokenizer.encode(char)[0] for char in "hello"), end]
    replies = [raw_message("assistant", "hello"), raw_message("assistant", "bye")]
    calls = conversation(replies, ids=[[int(token) for token in sampled]])
    ours = replay_log(calls, codec, "template")
    whole = replay_log(conversation(replies), codec, "template")
    assert ours.prompt_tokens == whole.prompt_tokens + 4
    assert ours.forked_calls == 0


def test_a_prompt_that_was_encoded_again_is_drift_with_the_same_text(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    sampled = [*(int(codec.tokenizer.encode(char)[0]) for char in "hello"), end]
    first, second = conversation(
        [raw_message("assistant", "hello"), raw_message("assistant", "bye")], ids=[sampled]
    )
    prompt = codec.encode_prompt(second.request.messages)
    logged = [first, LoggedCall(second.request, second.outputs, prompt, "s", line=2)]
    report = replay_log(logged, codec, "template")
    (drift,) = report.drifts
    assert report.compared_prompts == 1
    assert (drift.line, drift.same_text) == (2, True)
    assert "|hello|" in drift.logged
    assert "|h|e|l|l|o|" in drift.ours
    assert drift.first_divergent_token == len(
        codec.tokenizer.encode("<|start|>user\nbegin<|end|>\n<|start|>assistant\n")
    )


def test_a_prompt_with_another_text_is_drift(codec: GenericCodec) -> None:
    (call,) = conversation(PLAIN_REPLIES[:1])
    other = LoggedCall(call.request, call.outputs, as_ids(codec.tokenizer.encode("USER: begin")), line=7)
    (drift,) = replay_log([other], codec, "template").drifts
    assert (drift.line, drift.same_text, drift.logged[:4]) == (7, False, "USER")


def test_a_refused_call_is_reported_and_the_other_calls_are_replayed(codec: GenericCodec) -> None:
    bad = {
        "request": {"messages": [raw_message("user", "u"), raw_message("tool", "t", tool_call_id="x")]},
        "response": {"choices": [{"message": raw_message("assistant", "never")}]},
    }
    report = replay_log([read_call(bad, 9), *conversation(PLAIN_REPLIES)], codec, "template")
    (refusal,) = report.refusals
    assert (refusal.line, refusal.message) == (9, "No tools here!")
    assert report.calls == 4


# The verdict


def audit_with(*findings: Finding) -> TemplateAudit:
    return TemplateAudit("toy", findings or (fine("tools", "Yes."),))


STRIPS_THINKING = note("thinking", "It does.", {}, "leaves earlier thinking out")
DROPS_TEXT = unsafe("text_beside_call", "leaves out the text beside a tool call", {}, USE_VERBATIM)
BREAKS_CALL_END = unsafe("call_end", "loses the end of a single tool call", {}, USE_VERBATIM)
UNREADABLE_CALLS = unsafe("parses_calls", "writes calls that no parser reads", {}, "use the renderers codec")


def test_stripping_reasoning_is_safe_and_gets_advice() -> None:
    verdict = assess_safety(audit_with(STRIPS_THINKING), "template")
    assert verdict.safe
    assert verdict.advice == (
        "This template leaves earlier thinking out, so each new user message forks: keep history=template "
        "for fidelity (tree-packed training makes it cheap) or serve with history=verbatim to keep one "
        "timeline."
    )


def test_dropped_text_is_unsafe_under_template_and_safe_under_verbatim() -> None:
    verdict = assess_safety(audit_with(DROPS_TEXT), "template")
    assert not verdict.safe
    assert verdict.advice.startswith(
        "toy's template leaves out the text beside a tool call: serve with history="
    )
    assert assess_safety(audit_with(DROPS_TEXT), "verbatim").safe


def test_the_renderers_codec_is_advised_for_a_template_that_breaks_its_calls() -> None:
    advice = assess_safety(audit_with(BREAKS_CALL_END), "template").advice
    assert (
        "loses the end of a single tool call: use the renderers codec or serve with history=verbatim"
        in advice
    )


def test_findings_that_verbatim_does_not_solve_stay_unsafe() -> None:
    for history in ("template", "verbatim"):
        verdict = assess_safety(audit_with(DROPS_TEXT, UNREADABLE_CALLS), history)
        assert not verdict.safe
        assert "writes calls that no parser reads: use the renderers codec" in verdict.advice


def test_a_log_that_forks_more_than_a_quarter_is_unsafe_under_that_policy() -> None:
    template = ReplayReport("template", calls=10, continuing_calls=8, forked_calls=3)
    verbatim = ReplayReport("verbatim", calls=10, continuing_calls=8, forked_calls=0)
    verdict = assess_safety(audit_with(STRIPS_THINKING), "template", [template, verbatim])
    assert not verdict.safe
    assert "forks 3 of 8 continuing calls" in verdict.advice
    assert "history=verbatim (0 forks)" in verdict.advice
    assert assess_safety(audit_with(STRIPS_THINKING), "verbatim", [template, verbatim]).safe
    template.forked_calls = 2
    assert assess_safety(audit_with(STRIPS_THINKING), "template", [template, verbatim]).safe


def test_refused_calls_are_unsafe_and_quoted(codec: GenericCodec) -> None:
    report = ReplayReport("template", calls=3)
    report.refusals = [RefusedCall(4, "No!")]
    verdict = assess_safety(audit_with(), "template", [report])
    assert not verdict.safe
    assert "refuses 1 of 4 calls (line 4: No!)" in verdict.advice


def test_advice_is_one_sentence(codec: GenericCodec) -> None:
    audits = [
        audit_with(),
        audit_with(STRIPS_THINKING),
        audit_with(DROPS_TEXT, BREAKS_CALL_END, STRIPS_THINKING),
        audit_template(codec),
    ]
    for audit in audits:
        advice = assess_safety(audit, "template").advice
        assert advice.endswith(".")
        assert ". " not in advice


# Real


@pytest.mark.parametrize(("name", "forks"), [("qwen3", 3), ("mistral_nemo", 3)])
def test_real_templates_fork_under_template_and_not_under_verbatim(name: str, forks: int) -> None:
    real = load_codec(name)
    replies = REASONING_REPLIES if name == "qwen3" else PLAIN_REPLIES
    calls = conversation(replies)
    system = Message("system", "Be brief.")
    calls = [
        LoggedCall(type(call.request)((system, *call.request.messages)), call.outputs, line=call.line)
        for call in calls
    ]
    template, verbatim = replay_log(calls, real, "template"), replay_log(calls, real, "verbatim")
    assert (template.forked_calls, template.timelines) == (forks, forks + 1)
    assert (verbatim.forked_calls, verbatim.timelines) == (0, 1)
