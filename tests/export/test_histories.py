"""Hand-built histories: choices with ids give the samples of the session that they come from."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from branchline import (
    ExportPolicy,
    Generation,
    History,
    Message,
    Request,
    Sample,
    Session,
    ToyCodec,
    Trajectory,
    export_samples,
)
from branchline.core.errors import ExportError, MessageError
from branchline.core.reader import write_message
from branchline.export.hand_built import build_tree
from branchline.testing.plan_runner import ExecutedCall, PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import Cause
from tests.export.compare import assert_equal_samples

CODEC = ToyCodec.chatml()
STRIPPING = ToyCodec.chatml(strip_thinking=True)
ONE_ANSWER_CAUSES = [Cause.EDIT, Cause.CONTEXT_DELETE, Cause.SUB_AGENT, Cause.COMPACTION, Cause.SIDE_CALL]
"""Causes of branches whose answers differ, so that each choice is an answer of its own."""


def response(session: Session, messages: list[Message], answer: Message, **fields: Any) -> dict[str, Any]:
    """Commits a call and returns its response as a gateway writes it."""
    turn = session.prepare(Request(tuple(messages), **fields))
    ids = session.codec.encode_reply(answer)
    logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32)
    call = session.commit(turn, Generation(ids, logprobs, message=answer)).call
    session.record_delivery(call)
    return {
        "id": call.id,
        "choices": [
            {
                "index": 0,
                "message": write_message(answer),
                "finish_reason": "stop",
                "token_ids": ids.tolist(),
                "logprobs": {"content": [{"token": "?", "logprob": value} for value in logprobs.tolist()]},
            }
        ],
        "prompt_token_ids": turn.prompt_ids.tolist(),
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def thinking_session() -> tuple[Session, list[dict[str, Any]]]:
    """Returns a session of two turns whose template drops earlier thinking, and its two responses."""
    session = Session("s", STRIPPING)
    first = Message("assistant", "4", reasoning_content="add two and two")
    second = Message("assistant", "6", reasoning_content="add three and three")
    question, next_question = Message("user", "What is 2+2?"), Message("user", "What is 3+3?")
    return session, [
        response(session, [question], first),
        response(session, [question, first, next_question], second),
    ]


def by_ids(samples: list[Sample] | tuple[Sample, ...]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.prompt_ids.tolist(), sample.response_ids.tolist()))


def assert_same_samples(hand_built: Trajectory, session: Session, policy: ExportPolicy | None = None) -> None:
    expected = export_samples(session.tree, policy).samples
    assert len(hand_built.samples) == len(expected)
    for one, other in zip(by_ids(hand_built.samples), by_ids(expected), strict=True):
        # A choice carries no version; ids of calls and nodes are those of another tree.
        ignored = ("response_versions", "calls", "answers", "session", "agent", "reward")
        assert_equal_samples(one, other, ignore=ignored)
        assert [(span.start, span.end) for span in one.answers] == [
            (span.start, span.end) for span in other.answers
        ]


def test_one_history_per_turn_keeps_the_thinking_of_every_turn() -> None:
    session, (first, second) = thinking_session()
    trajectory = Trajectory.from_messages(
        [user("What is 2+2?"), first],
        additional_histories=[
            History.read(
                [
                    user("What is 2+2?"),
                    {"role": "assistant", "content": "4"},
                    user("What is 3+3?"),
                    second,
                ]
            )
        ],
        reward=1.0,
        metrics={"correct": 1.0},
    )
    assert_same_samples(trajectory, session)
    assert all(sample.exact and sample.reward == 1.0 for sample in trajectory.samples)
    texts = [STRIPPING.decode(sample.response_ids) for sample in by_ids(trajectory.samples)]
    assert sorted(texts) == [
        "<think>add three and three</think>6<end>",
        "<think>add two and two</think>4<end>",
    ]
    assert trajectory.history is not None
    assert (trajectory.history.sampled, trajectory.metrics) == ((1,), {"correct": 1.0})
    assert len(trajectory.additional_histories) == 1


@pytest.mark.parametrize("reason", ["length", "abort", "cancelled"])
def test_a_history_whose_last_answer_was_cut_off_or_cancelled_is_unfinished(reason: str) -> None:
    choice = {
        "finish_reason": reason,
        "token_ids": [3, 4],
        "prompt_token_ids": [1, 2],
        "logprobs": {
            "content": [{"token": "token_id:3", "logprob": -1}, {"token": "token_id:4", "logprob": -1}]
        },
        "message": {"role": "assistant", "content": "ab"},
    }
    assert not Trajectory(messages_and_choices=[user("q"), choice], reward=1.0).finished
    finished = Trajectory(messages_and_choices=[user("q"), {**choice, "finish_reason": "stop"}], reward=1.0)
    assert finished.finished


def test_choices_without_their_prompts_are_rendered_and_inexact() -> None:
    session, (first, second) = thinking_session()
    items: list[object] = [user("What is 2+2?"), first["choices"][0], user("What is 3+3?")]
    dropped = Trajectory.from_messages([*items, second["choices"][0]], codec=STRIPPING)
    assert dropped.samples == ()
    assert dropped.report is not None
    assert {drop.reason for drop in dropped.report.dropped} == {"inexact"}
    policy = ExportPolicy(include_inexact="context")
    trained = Trajectory.from_messages([*items, second["choices"][0]], codec=STRIPPING, policy=policy)
    assert [(sample.exact, sample.inexact_tokens) for sample in trained.samples] == [
        (False, sample.trained_tokens) for sample in trained.samples
    ]
    expected = by_ids(export_samples(session.tree).samples)
    for one, other in zip(by_ids(trained.samples), expected, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)


def test_a_choice_with_all_ids_is_exact_whatever_the_codec_renders() -> None:
    _, (first, second) = thinking_session()
    first["prompt_token_ids"][0] += 1
    del second["prompt_token_ids"]
    policy = ExportPolicy(include_inexact=True)
    items = [user("What is 2+2?"), first, user("What is 3+3?"), second]
    samples = Trajectory.from_messages(items, codec=STRIPPING, policy=policy).samples
    assert [sample.exact for sample in samples] == [True, False]
    assert samples[0].prompt_ids.tolist() == first["prompt_token_ids"]
    (sample,) = Trajectory.from_messages(items, codec=STRIPPING).samples
    assert sample.exact, "what is not known of one choice drops no other"


def test_a_response_with_the_prompt_that_the_codec_renders_is_exact_beside_one_without() -> None:
    _, (first, second) = thinking_session()
    del second["prompt_token_ids"]
    items = [user("What is 2+2?"), first, user("What is 3+3?"), second]
    policy = ExportPolicy(include_inexact=True)
    samples = Trajectory.from_messages(items, codec=STRIPPING, policy=policy).samples
    assert [sample.exact for sample in samples] == [True, False]


def test_choices_without_ids_are_encoded_without_logprobs() -> None:
    items = [user("u"), {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]
    policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
    (sample,) = Trajectory.from_messages(items, codec=CODEC, policy=policy).samples
    assert CODEC.decode(sample.response_ids) == "hi<end>"
    assert (sample.exact, sample.missing_logprobs) == (False, 3)
    assert Trajectory.from_messages(items, codec=CODEC).samples == ()


def test_messages_are_trained_only_if_requested() -> None:
    items = [user("u"), {"role": "assistant", "content": "hi"}]
    policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
    assert Trajectory.from_messages(items, codec=CODEC, policy=policy).samples == ()
    trained = Trajectory.from_messages(items, codec=CODEC, policy=policy, train_messages=True)
    assert [CODEC.decode(sample.response_ids) for sample in trained.samples] == ["hi<end>"]


def test_openai_objects_are_read_with_their_extra_fields() -> None:
    session, (first, second) = thinking_session()
    validated = [ChatCompletion.model_validate(_complete(raw)) for raw in (first, second)]
    trajectory = Trajectory.from_messages(
        [user("What is 2+2?"), validated[0], user("What is 3+3?"), validated[1]]
    )
    assert_same_samples(trajectory, session)
    choices = [one.choices[0] for one in validated]
    kept_messages = Trajectory.from_messages(
        [user("What is 2+2?"), choices[0].message, user("What is 3+3?"), choices[1]],
        codec=STRIPPING,
        policy=ExportPolicy(include_inexact="context"),
    )
    assert [STRIPPING.decode(sample.response_ids) for sample in kept_messages.samples] == [
        "<think>add three and three</think>6<end>"
    ]


def _complete(raw: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields that OpenAI's types require."""
    choice = raw["choices"][0]
    content = [{**entry, "bytes": None, "top_logprobs": []} for entry in choice["logprobs"]["content"]]
    logprobs = {"content": content, "refusal": None}
    return {
        **raw,
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{**choice, "logprobs": logprobs}],
    }


def test_ids_in_the_tokens_of_logprobs_are_read() -> None:
    _, (first, _) = thinking_session()
    choice = first["choices"][0]
    for entry, token in zip(choice["logprobs"]["content"], choice.pop("token_ids"), strict=True):
        entry["token"] = f"token_id:{token}"
    trajectory = Trajectory.from_messages([user("What is 2+2?"), first])
    (sample,) = trajectory.samples
    assert STRIPPING.decode(sample.response_ids) == "<think>add two and two</think>4<end>"
    assert sample.exact


def test_a_choice_in_several_histories_is_one_answer() -> None:
    session = Session("s", CODEC)
    first = response(session, [Message("user", "u")], Message("assistant", "A"))
    reply = Message("assistant", "A")
    ends = [
        response(session, [Message("user", "u"), reply, Message("user", text)], Message("assistant", text))
        for text in ("x", "y")
    ]

    def build(codec: ToyCodec | None = None) -> Trajectory:
        return Trajectory.from_messages(
            [user("u"), first, user("x"), ends[0]],
            additional_histories=[History.read([user("u"), first, user("y"), ends[1]])],
            codec=codec,
            policy=ExportPolicy(include_inexact="context"),
        )

    assert_same_samples(build(), session)
    del ends[1]["prompt_token_ids"]  # The codec renders it.
    samples = build(CODEC).samples
    assert [sample.shares[0] for sample in samples] == [0.5, 0.5]
    assert [sample.trained_tokens for sample in samples] == [4, 4]
    assert [sample.exact for sample in samples] == [True, False]


def history_of(executed: ExecutedCall) -> History:
    """Returns the history that an agent's own record of one call would be."""
    planned = executed.planned
    (output,), (ids,), (logprobs,) = planned.outputs, executed.outputs, executed.logprobs
    raw = {
        "message": write_message(output.message),
        "finish_reason": "stop" if output.is_complete else "length",
        "token_ids": ids.tolist(),
        "logprobs": {"content": [{"token": "", "logprob": value} for value in logprobs.tolist()]},
        "prompt_token_ids": executed.prompt_ids.tolist(),
    }
    messages = [write_message(message) for message in planned.messages]
    return History.read([*messages, raw], list(planned.tools), agent=planned.agent)


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans(), st.booleans())
def test_the_calls_of_a_session_as_histories_give_its_samples(
    seed: int, steps: int, strip: bool, verbatim: bool
) -> None:
    codec = STRIPPING if strip else CODEC
    runner = PlanRunner(Session("s", codec, history="verbatim" if verbatim else "template"), codec)
    runner.run(PlanGenerator(Random(seed), reasoning=strip).generate(steps, only=ONE_ANSWER_CAUSES))
    main, *others = [history_of(executed) for executed in runner.executed]
    trajectory = Trajectory.from_tree(build_tree([main, *others]).tree, policy=ExportPolicy(drop=frozenset()))
    assert_same_samples(trajectory, runner.session, ExportPolicy(drop=frozenset()))


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([{"role": "wizard", "content": "x"}], r"messages_and_choices\[0\].role: got 'wizard'"),
        ([user("u"), 3], r"messages_and_choices\[1\]: got 'int', expected a message, a choice or a response"),
        ([{"message": {"content": "x"}}], r"messages_and_choices\[0\].*a message before the first choice"),
        ([user("u"), {"choices": []}], r"messages_and_choices\[1\].choices: got 0, expected one choice"),
        (
            [user("u"), {"message": {"content": "x"}, "prompt_token_ids": [-1]}],
            r"messages_and_choices\[1\].prompt_token_ids\[0\]: got -1",
        ),
        (
            [user("u"), {"message": {"content": "x"}, "token_ids": [1], "logprobs": {"content": []}}],
            r"messages_and_choices\[1\].logprobs: got '0 entries', expected one for each of 1",
        ),
    ],
)
def test_an_item_that_cannot_be_read_is_named(items: list[object], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        History.read(items)


def test_missing_ids_without_a_codec_are_an_error() -> None:
    choice = {"message": {"content": "x"}, "token_ids": [1, 2]}
    with pytest.raises(ExportError, match=r"messages_and_choices\[1\]: has no prompt_token_ids"):
        Trajectory.from_messages([user("u"), choice])
    with pytest.raises(ExportError, match=r"messages_and_choices\[1\]: has no token_ids"):
        Trajectory.from_messages([user("u"), {"message": {"content": "x"}}])


def test_a_history_without_choices_trains_nothing() -> None:
    trajectory = Trajectory.from_messages([user("u")], reward=0.0)
    assert (trajectory.samples, trajectory.finished) == ((), True)


def test_media_are_carried_along() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    choice = {"message": {"content": "a cat"}, "finish_reason": "stop"}
    policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
    items = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}, choice]
    (sample,) = Trajectory.from_messages(items, codec=CODEC, policy=policy).samples
    assert [(media.kind, media.mime, bool(media.payload)) for media in sample.media] == [
        ("image", "image/png", True)
    ]
