"""Samples: shares sum to one, limits keep the last sample, and every token is accounted for."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Generation, Message, Request, Session, ToolCall, ToyCodec, export_samples
from branchline.core.call import Delivery
from branchline.core.errors import ExportError
from branchline.core.message import Media
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import Cause

CODEC = ToyCodec()


def commit_reply(
    session: Session,
    messages: list[Message],
    output: str,
    delivery: Delivery = Delivery.DELIVERED,
    *,
    tool: str = "",
) -> Message:
    """Commits a reply with a text, which may call a tool."""
    turn = session.prepare(Request(tuple(messages)))
    ids = CODEC.encode_reply(Message("assistant", output))
    answer = Message("assistant", output, tool_calls=(ToolCall(tool, "{}", "c"),) if tool else ())
    call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), message=answer)).call
    session.record_delivery(call, delivery)
    return answer


def forked_session() -> Session:
    """Returns a session with reply A1 and three continuations: AA, BBB and CCCC."""
    session = Session("s", CODEC)
    question = Message("user", "u")
    reply = commit_reply(session, [question], "A1")
    for text, answer in (("x", "AA"), ("y", "BBB"), ("z", "CCCC")):
        commit_reply(session, [question, reply, Message("user", text)], answer)
    return session


def test_a_shared_token_is_split_over_the_leaves_through_it() -> None:
    samples = export_samples(forked_session().tree).samples
    assert [sample.shares[:2].tolist() for sample in samples] == [pytest.approx([1 / 3, 1 / 3])] * 3
    assert [sample.shares[-2:].tolist() for sample in samples] == [[1, 1]] * 3
    assert [CODEC.decode(sample.prompt_ids) for sample in samples] == ["user:u\nassistant:"] * 3


def test_first_trains_a_shared_token_in_one_sample_only() -> None:
    samples = export_samples(forked_session().tree, ExportPolicy(shares="first")).samples
    assert [sample.trained_tokens for sample in samples] == [4, 3, 4]
    assert CODEC.decode(samples[1].prompt_ids) == "user:u\nassistant:A1user:y\nassistant:"
    assert all((sample.shares[sample.response_mask == 1] == 1).all() for sample in samples)


def test_all_trains_a_shared_token_fully_in_every_sample() -> None:
    samples = export_samples(forked_session().tree, ExportPolicy(shares="all")).samples
    assert [sample.trained_tokens for sample in samples] == [4, 5, 6]
    assert all((sample.shares[sample.response_mask == 1] == 1).all() for sample in samples)


def test_a_cancelled_leaf_is_dropped_and_its_ancestors_are_trained() -> None:
    session = Session("s", CODEC)
    question = Message("user", "u")
    reply = commit_reply(session, [question], "A1")
    commit_reply(session, [question, reply, Message("user", "x")], "half", Delivery.CANCELLED)
    export = export_samples(session.tree)
    (sample,) = export.samples
    assert CODEC.decode(sample.response_ids) == "A1"
    assert [(drop.reason, drop.tokens) for drop in export.report.dropped] == [("cancelled", 4)]
    kept = export_samples(session.tree, ExportPolicy(drop=frozenset()))
    assert kept.report.trained_tokens == 6


@pytest.mark.parametrize("finish_reason", ["cancelled", "abort"])
def test_a_choice_that_was_cut_off_is_dropped_though_another_one_of_its_call_is_continued(
    finish_reason: str,
) -> None:
    session = Session("s", CODEC)
    question = Message("user", "u")
    texts = {"half": finish_reason, "whole": "stop", "more": "stop"}
    generations = [
        Generation(CODEC.encode_reply(Message("assistant", text)), finish_reason=reason)
        for text, reason in texts.items()
    ]
    call = session.commit(session.prepare(Request((question,))), *generations).call
    session.record_delivery(call, Delivery.CANCELLED)
    policy = ExportPolicy(include_missing_logprobs=True)
    assert not export_samples(session.tree, policy).samples
    commit_reply(session, [question, Message("assistant", "whole"), Message("user", "x")], "end")
    export = export_samples(session.tree, policy)
    ends = sorted(CODEC.decode(sample.response_ids) for sample in export.samples)
    assert [text.removesuffix("end") for text in ends] == ["more", "wholeuser:x\nassistant:"]
    assert [(drop.reason, drop.tokens) for drop in export.report.dropped] == [("cancelled", 4)]


def test_a_cause_can_be_dropped_with_everything_below_it() -> None:
    session = forked_session()
    export = export_samples(session.tree, ExportPolicy(drop=frozenset({Cause.EDIT})))
    assert len(export.samples) == 1
    assert sorted((drop.reason, drop.tokens) for drop in export.report.dropped) == [("edit", 3), ("edit", 4)]
    assert export.samples[0].shares[:2].tolist() == [1, 1]


@pytest.mark.parametrize("keep", ["last", "random"])
def test_max_samples_keeps_the_last_sample_and_shares_sum_to_one(keep: str) -> None:
    for seed in range(5):
        export = export_samples(forked_session().tree, ExportPolicy(max_samples=2, keep=keep, seed=seed))  # type: ignore[arg-type]
        assert len(export.samples) == 2
        assert CODEC.decode(export.samples[-1].response_ids).endswith("CCCC")
        assert [sample.shares[:2].tolist() for sample in export.samples] == [[0.5, 0.5]] * 2
        assert export.report.is_balanced
        assert {drop.reason for drop in export.report.dropped} == {"capped"}


def test_max_tokens_truncates_and_accounts_for_the_rest() -> None:
    prompt = len("user:u\nassistant:")
    export = export_samples(forked_session().tree, ExportPolicy(max_tokens=prompt + 1))
    assert [len(sample) for sample in export.samples] == [prompt + 1] * 3
    assert all(sample.finish_reason == "length" and sample.truncated_tokens for sample in export.samples)
    assert export.report.trained_tokens == 1
    assert sum(drop.tokens for drop in export.report.dropped if drop.reason == "over_length") == 1 + 2 + 3 + 4


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 6),
    st.sampled_from(["split", "first"]),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 600),
    st.sampled_from(["last", "random"]),
)
def test_under_every_limit_each_token_is_trained_with_weight_one_or_dropped_for_one_reason(
    seed: int, steps: int, shares: str, max_samples: int | None, max_tokens: int | None, keep: str
) -> None:
    codec = ToyCodec.chatml()
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(Random(seed)).generate(steps))
    policy = ExportPolicy(shares=shares, max_samples=max_samples, max_tokens=max_tokens, keep=keep)  # type: ignore[arg-type]
    export = export_samples(runner.session.tree, policy)
    report = export.report
    assert report.is_balanced
    assert sum(float(sample.shares.sum()) for sample in export.samples) == pytest.approx(
        report.trained_tokens, abs=1e-2
    )
    assert len(export.samples) == report.samples <= (max_samples or 10**9)


def test_samples_can_be_read_before_the_session_ends() -> None:
    session = Session("s", CODEC)
    assert export_samples(session.tree).samples == []
    commit_reply(session, [Message("user", "u")], "A1")
    assert len(export_samples(session.tree, session="s", reward=0.5).samples) == 1


def test_dropping_duplicates_trains_equal_answers_once() -> None:
    session = Session("s", CODEC)
    question = Message("user", "u")
    for _ in range(3):
        reply = commit_reply(session, [question], "same")
    commit_reply(session, [question, reply, Message("user", "x")], "end")
    assert export_samples(session.tree).report.trained_tokens == 15
    export = export_samples(session.tree, ExportPolicy(drop=frozenset({Cause.DUPLICATE})))
    assert export.report.trained_tokens == 7
    assert CODEC.decode(export.samples[0].response_ids).endswith("end")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-1, True, 1.0, "1", float("nan")]),
        ("max_samples", [0, -1, True, 1.5, "1", float("nan")]),
        ("missing_logprob", [True, "0", float("nan"), float("inf"), float("-inf")]),
    ],
)
def test_an_invalid_number_is_rejected(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ExportError, match=f"{name}: got {value!r}, expected a .*, or None"):
            ExportPolicy(**{name: value})


def test_a_text_is_no_switch() -> None:
    with pytest.raises(ExportError, match="include_missing_logprobs: got 'no', expected True or False"):
        ExportPolicy(include_missing_logprobs="no")  # type: ignore[arg-type]


def test_a_sample_is_not_cut_inside_a_message_with_an_image() -> None:
    session = Session("s", CODEC)
    first, second = Media("image", "a" * 9, b"1"), Media("image", "b" * 9, b"2")
    messages = [Message("user", "u", parts=("u", first))]
    messages.append(commit_reply(session, messages, "A1"))
    messages.append(Message("user", "v", parts=("v", second)))
    commit_reply(session, messages, "A2")
    (whole,) = export_samples(session.tree).samples
    assert whole.media == (first, second)
    image_start, image_end = session.tree.nodes[3].start, session.tree.nodes[3].end
    for limit in range(image_start, len(whole)):
        export = export_samples(session.tree, ExportPolicy(max_tokens=limit))
        (sample,) = export.samples
        has_second = limit >= image_end
        assert sample.media == ((first, second) if has_second else (first,))
        assert len(sample) == (limit if has_second else image_start)
        assert sample.truncated_tokens == len(whole) - len(sample)
        assert export.report.is_balanced


def test_a_replacement_for_missing_logprobs_is_a_logprob() -> None:
    with pytest.raises(
        ExportError, match=r"missing_logprob: got 5.0, expected a finite number of at most 0, or None"
    ):
        ExportPolicy(missing_logprob=5.0)
