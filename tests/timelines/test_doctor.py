"""A log replayed under both policies says how often each forks, what it costs, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from branchline.chat.audit.audit import Audit, audit_codec
from branchline.chat.audit.findings import VERBATIM, Finding, fine, note, unsafe
from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message
from branchline.core.runs import as_ids
from branchline.timelines.doctor import Refusal, Replay, judge_safety, replay
from branchline.timelines.log import LoggedCall, read_call
from tests.chat.families import codec_of

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


def says(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def conversation(
    replies: Sequence[dict[str, Any]], session: str = "s", *, ids: Sequence[list[int] | None] = ()
) -> list[LoggedCall]:
    """A talk as a log has it: every call shows all that was said before."""
    shown = [says("user", "begin")]
    calls: list[LoggedCall] = []
    for place, reply in enumerate(replies):
        choice: dict[str, Any] = {"message": reply, "finish_reason": "stop"}
        if place < len(ids) and ids[place] is not None:
            choice["token_ids"] = ids[place]
        line = {"session": session, "request": {"messages": shown}, "response": {"choices": [choice]}}
        calls.append(read_call(line, len(calls) + 1))
        shown = [*shown, reply, says("user", f"go on {place}")]
    return calls


PLAIN = [says("assistant", f"answer {place}") for place in range(4)]
THOUGHTFUL = [says("assistant", f"answer {place}", reasoning_content="hm") for place in range(4)]


# Replaying


def test_a_talk_without_thinking_is_one_timeline_under_both_policies(codec: GenericCodec) -> None:
    for history in ("template", "verbatim"):
        told = replay(conversation(PLAIN), codec, history)
        assert (told.calls, told.continuing, told.forked, told.timelines) == (4, 3, 0, 1)
        assert not told.causes
        assert told.tokens_computed_again == 0
        assert told.fork_rate == 0


def test_thinking_forks_at_every_user_message_under_template_and_never_under_verbatim(
    codec: GenericCodec,
) -> None:
    template = replay(conversation(THOUGHTFUL), codec, "template")
    verbatim = replay(conversation(THOUGHTFUL), codec, "verbatim")
    assert (template.continuing, template.forked, template.timelines) == (3, 3, 4)
    assert template.causes == {"think_strip": 3}
    assert template.tokens_computed_again > 0
    assert template.forks_too_often
    assert (verbatim.forked, verbatim.timelines, verbatim.tokens_computed_again) == (0, 1, 0)
    assert verbatim.encoded_tokens < template.encoded_tokens
    # What was thought stays in the context there.
    assert verbatim.prompt_tokens > template.prompt_tokens


def test_sessions_stay_apart(codec: GenericCodec) -> None:
    calls = [*conversation(PLAIN, "one"), *conversation(PLAIN, "two")]
    told = replay(calls, codec, "template")
    assert (told.calls, told.continuing, told.timelines) == (8, 6, 2)


def test_the_order_of_the_log_does_not_matter(codec: GenericCodec) -> None:
    calls = conversation(THOUGHTFUL)
    for seed in range(5):
        mixed = Random(seed).sample(calls, len(calls))
        told = replay(mixed, codec, "template")
        assert (told.continuing, told.forked, told.timelines) == (3, 3, 4)


def test_logged_ids_are_kept_whatever_their_spelling(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    spelled = [*(codec.tokenizer.encode(letter)[0] for letter in "hello"), end]
    replies = [says("assistant", "hello"), says("assistant", "bye")]
    calls = conversation(replies, ids=[[int(token) for token in spelled]])
    ours = replay(calls, codec, "template")
    whole = replay(conversation(replies), codec, "template")
    assert ours.prompt_tokens == whole.prompt_tokens + 4
    assert ours.forked == 0


def test_a_prompt_that_was_encoded_again_is_drift_in_ids_alone(codec: GenericCodec) -> None:
    end = codec.tokenizer.added_tokens["<|end|>"]
    spelled = [*(int(codec.tokenizer.encode(letter)[0]) for letter in "hello"), end]
    first, second = conversation([says("assistant", "hello"), says("assistant", "bye")], ids=[spelled])
    prompt = codec.tokenizer.encode_prompt(second.request.messages)
    logged = [first, LoggedCall(second.request, second.outputs, prompt, "s", line=2)]
    told = replay(logged, codec, "template")
    (drift,) = told.drifts
    assert told.compared == 1
    assert (drift.line, drift.same_text) == (2, True)
    assert "|hello|" in drift.logged
    assert "|h|e|l|l|o|" in drift.ours
    assert drift.first_divergent_token == len(
        codec.tokenizer.encode("<|start|>user\nbegin<|end|>\n<|start|>assistant\n")
    )


def test_another_text_is_drift_too(codec: GenericCodec) -> None:
    (call,) = conversation(PLAIN[:1])
    other = LoggedCall(call.request, call.outputs, as_ids(codec.tokenizer.encode("USER: begin")), line=7)
    (drift,) = replay([other], codec, "template").drifts
    assert (drift.line, drift.same_text, drift.logged[:4]) == (7, False, "USER")


def test_a_refused_call_is_named_in_the_templates_words_and_the_rest_goes_on(codec: GenericCodec) -> None:
    bad = {
        "request": {"messages": [says("user", "u"), says("tool", "t", tool_call_id="x")]},
        "response": {"choices": [{"message": says("assistant", "never")}]},
    }
    told = replay([read_call(bad, 9), *conversation(PLAIN)], codec, "template")
    (refusal,) = told.refusals
    assert (refusal.line, refusal.words) == (9, "No tools here!")
    assert told.calls == 4


# The verdict


def audit_of(*findings: Finding) -> Audit:
    return Audit("toy", findings or (fine("tools", "Yes."),))


STRIPS = note("thinking", "It does.", {}, "leaves earlier thinking out")
DROPS = unsafe("text_beside_call", "leaves out the text beside a tool call", {}, VERBATIM)
BREAKS = unsafe("call_end", "loses the end of a single tool call", {}, VERBATIM)
MUTE = unsafe("parses_calls", "writes calls nobody reads", {}, "use the renderers codec")


def test_stripping_thinking_alone_is_safe_and_gets_advice() -> None:
    verdict = judge_safety(audit_of(STRIPS), "template")
    assert verdict.safe
    assert verdict.advice == (
        "This template leaves earlier thinking out, so each new user message forks: keep history=template "
        "for fidelity (tree-packed training makes it cheap) or serve with history=verbatim to keep one "
        "timeline."
    )


def test_what_is_lost_is_unsafe_under_template_and_kept_under_verbatim() -> None:
    verdict = judge_safety(audit_of(DROPS), "template")
    assert not verdict.safe
    assert verdict.advice.startswith(
        "toy's template leaves out the text beside a tool call: serve with history="
    )
    assert judge_safety(audit_of(DROPS), "verbatim").safe


def test_a_template_that_breaks_its_calls_is_pointed_to_the_renderers_codec() -> None:
    advice = judge_safety(audit_of(BREAKS), "template").advice
    assert (
        "loses the end of a single tool call: use the renderers codec or serve with history=verbatim"
        in advice
    )


def test_what_verbatim_does_not_cure_stays_unsafe() -> None:
    for history in ("template", "verbatim"):
        verdict = judge_safety(audit_of(DROPS, MUTE), history)
        assert not verdict.safe
        assert "writes calls nobody reads: use the renderers codec" in verdict.advice


def test_a_log_that_forks_more_than_a_quarter_is_unsafe_under_that_policy() -> None:
    template = Replay("template", calls=10, continuing=8, forked=3)
    verbatim = Replay("verbatim", calls=10, continuing=8, forked=0)
    verdict = judge_safety(audit_of(STRIPS), "template", [template, verbatim])
    assert not verdict.safe
    assert "forks 3 of 8 continuing calls" in verdict.advice
    assert "history=verbatim (0 forks)" in verdict.advice
    assert judge_safety(audit_of(STRIPS), "verbatim", [template, verbatim]).safe
    template.forked = 2
    assert judge_safety(audit_of(STRIPS), "template", [template, verbatim]).safe


def test_refused_calls_are_unsafe_and_quoted(codec: GenericCodec) -> None:
    told = Replay("template", calls=3)
    told.refusals = [Refusal(4, "No!")]
    verdict = judge_safety(audit_of(), "template", [told])
    assert not verdict.safe
    assert "refuses 1 of 4 calls (line 4: No!)" in verdict.advice


def test_advice_is_one_sentence(codec: GenericCodec) -> None:
    audits = [audit_of(), audit_of(STRIPS), audit_of(DROPS, BREAKS, STRIPS), audit_codec(codec)]
    for audit in audits:
        advice = judge_safety(audit, "template").advice
        assert advice.endswith(".")
        assert ". " not in advice


# Real


@pytest.mark.parametrize(("name", "forks"), [("qwen3", 3), ("mistral_nemo", 3)])
def test_real_templates_fork_under_template_and_not_under_verbatim(name: str, forks: int) -> None:
    real = codec_of(name)
    replies = THOUGHTFUL if name == "qwen3" else PLAIN
    calls = conversation(replies)
    system = Message("system", "Be brief.")
    calls = [
        LoggedCall(type(call.request)((system, *call.request.messages)), call.outputs, line=call.line)
        for call in calls
    ]
    template, verbatim = replay(calls, real, "template"), replay(calls, real, "verbatim")
    assert (template.forked, template.timelines) == (forks, forks + 1)
    assert (verbatim.forked, verbatim.timelines) == (0, 1)
