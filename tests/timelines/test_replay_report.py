"""A log replayed under both policies says how often each forks, what it costs, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from branchline.chat.audit.findings import USE_VERBATIM, Finding, fine, note, unsafe
from branchline.chat.audit.template_audit import TemplateAudit, audit_codec
from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.timelines.log import LoggedCall, read_call
from branchline.timelines.replay_report import RefusedCall, ReplayReport, assess_safety, replay_log
from tests.chat.families import load_codec

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
    """Letters and their bytes, `hello` in one token or five; the template strips thinking."""
    path = tmp_path_factory.mktemp("toy")
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("l", "o"), ("l", "lo"), ("e", "llo"), ("h", "ello")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>"), AddedToken("<|end|>")])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return GenericCodec.open(path)


def raw_message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def conversation(
    replies: Sequence[dict[str, Any]], session: str = "s", *, ids: Sequence[list[int] | None] = ()
) -> list[LoggedCall]:
    """A talk as a log has it: every call shows all that was said before."""
    shown = [raw_message("user", "begin")]
    calls: list[LoggedCall] = []
    for place, reply in enumerate(replies):
        choice: dict[str, Any] = {"message": reply, "finish_reason": "stop"}
        if place < len(ids) and ids[place] is not None:
            choice["token_ids"] = ids[place]
        line = {"session": session, "request": {"messages": shown}, "response": {"choices": [choice]}}
        calls.append(read_call(line, len(calls) + 1))
        shown = [*shown, reply, raw_message("user", f"go on {place}")]
    return calls


PLAIN_REPLIES = [raw_message("assistant", f"answer {place}") for place in range(4)]
REASONING_REPLIES = [
    raw_message("assistant", f"answer {place}", reasoning_content="hm") for place in range(4)
]


# Replaying


def test_a_talk_without_thinking_is_one_timeline_under_both_policies(codec: GenericCodec) -> None:
    for history in ("template", "verbatim"):
        told = replay_log(conversation(PLAIN_REPLIES), codec, history)
        assert (told.calls, told.continuing_calls, told.forked_calls, told.timelines) == (4, 3, 0, 1)
        assert not told.causes
        assert told.tokens_computed_again == 0
        assert told.fork_rate == 0


def test_thinking_forks_at_every_user_message_under_template_and_never_under_verbatim(
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
    # What was thought stays in the context there.
    assert verbatim.prompt_tokens > template.prompt_tokens


def test_sessions_stay_apart(codec: GenericCodec) -> None:
    calls = [*conversation(PLAIN_REPLIES, "one"), *conversation(PLAIN_REPLIES, "two")]
    told = replay_log(calls, codec, "template")
    assert (told.calls, told.continuing_calls, told.timelines) == (8, 6, 2)


def test_the_order_of_the_log_does_not_matter(codec: GenericCodec) -> None:
    calls = conversation(REASONING_REPLIES)
    for seed in range(5):
        mixed = Random(seed).sample(calls, len(calls))
        told = replay_log(mixed, codec, "template")
        assert (told.continuing_calls, told.forked_calls, told.timelines) == (3, 3, 4)


def test_logged_ids_are_kept_whatever_their_spelling(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    spelled = [*(codec.tokenizer.encode(letter)[0] for letter in "hello"), end]
    replies = [raw_message("assistant", "hello"), raw_message("assistant", "bye")]
    calls = conversation(replies, ids=[[int(token) for token in spelled]])
    ours = replay_log(calls, codec, "template")
    whole = replay_log(conversation(replies), codec, "template")
    assert ours.prompt_tokens == whole.prompt_tokens + 4
    assert ours.forked_calls == 0


def test_a_prompt_that_was_encoded_again_is_drift_in_ids_alone(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    spelled = [*(int(codec.tokenizer.encode(letter)[0]) for letter in "hello"), end]
    first, second = conversation(
        [raw_message("assistant", "hello"), raw_message("assistant", "bye")], ids=[spelled]
    )
    prompt = codec.tokenizer.encode_prompt(second.request.messages)
    logged = [first, LoggedCall(second.request, second.outputs, prompt, "s", line=2)]
    told = replay_log(logged, codec, "template")
    (drift,) = told.drifts
    assert told.compared_prompts == 1
    assert (drift.line, drift.same_text) == (2, True)
    assert "|hello|" in drift.logged
    assert "|h|e|l|l|o|" in drift.ours
    assert drift.first_divergent_token == len(
        codec.tokenizer.encode("<|start|>user\nbegin<|end|>\n<|start|>assistant\n")
    )


def test_another_text_is_drift_too(codec: GenericCodec) -> None:
    (call,) = conversation(PLAIN_REPLIES[:1])
    other = LoggedCall(call.request, call.outputs, as_ids(codec.tokenizer.encode("USER: begin")), line=7)
    (drift,) = replay_log([other], codec, "template").drifts
    assert (drift.line, drift.same_text, drift.logged[:4]) == (7, False, "USER")


def test_a_refused_call_is_named_in_the_templates_words_and_the_rest_goes_on(codec: GenericCodec) -> None:
    bad = {
        "request": {"messages": [raw_message("user", "u"), raw_message("tool", "t", tool_call_id="x")]},
        "response": {"choices": [{"message": raw_message("assistant", "never")}]},
    }
    told = replay_log([read_call(bad, 9), *conversation(PLAIN_REPLIES)], codec, "template")
    (refusal,) = told.refusals
    assert (refusal.line, refusal.words) == (9, "No tools here!")
    assert told.calls == 4


# The verdict


def audit_with(*findings: Finding) -> TemplateAudit:
    return TemplateAudit("toy", findings or (fine("tools", "Yes."),))


STRIPS_THINKING = note("thinking", "It does.", {}, "leaves earlier thinking out")
DROPS_TEXT = unsafe("text_beside_call", "leaves out the text beside a tool call", {}, USE_VERBATIM)
BREAKS_CALL_END = unsafe("call_end", "loses the end of a single tool call", {}, USE_VERBATIM)
UNREADABLE_CALLS = unsafe("parses_calls", "writes calls nobody reads", {}, "use the renderers codec")


def test_stripping_thinking_alone_is_safe_and_gets_advice() -> None:
    verdict = assess_safety(audit_with(STRIPS_THINKING), "template")
    assert verdict.safe
    assert verdict.advice == (
        "This template leaves earlier thinking out, so each new user message forks: keep history=template "
        "for fidelity (tree-packed training makes it cheap) or serve with history=verbatim to keep one "
        "timeline."
    )


def test_what_is_lost_is_unsafe_under_template_and_kept_under_verbatim() -> None:
    verdict = assess_safety(audit_with(DROPS_TEXT), "template")
    assert not verdict.safe
    assert verdict.advice.startswith(
        "toy's template leaves out the text beside a tool call: serve with history="
    )
    assert assess_safety(audit_with(DROPS_TEXT), "verbatim").safe


def test_a_template_that_breaks_its_calls_is_pointed_to_the_renderers_codec() -> None:
    advice = assess_safety(audit_with(BREAKS_CALL_END), "template").advice
    assert (
        "loses the end of a single tool call: use the renderers codec or serve with history=verbatim"
        in advice
    )


def test_what_verbatim_does_not_cure_stays_unsafe() -> None:
    for history in ("template", "verbatim"):
        verdict = assess_safety(audit_with(DROPS_TEXT, UNREADABLE_CALLS), history)
        assert not verdict.safe
        assert "writes calls nobody reads: use the renderers codec" in verdict.advice


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
    told = ReplayReport("template", calls=3)
    told.refusals = [RefusedCall(4, "No!")]
    verdict = assess_safety(audit_with(), "template", [told])
    assert not verdict.safe
    assert "refuses 1 of 4 calls (line 4: No!)" in verdict.advice


def test_advice_is_one_sentence(codec: GenericCodec) -> None:
    audits = [
        audit_with(),
        audit_with(STRIPS_THINKING),
        audit_with(DROPS_TEXT, BREAKS_CALL_END, STRIPS_THINKING),
        audit_codec(codec),
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
