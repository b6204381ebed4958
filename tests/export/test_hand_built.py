"""Hand-built trajectories: ART's arguments are taken and can be read back, and each choice is as exact as
what is known of it."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from itertools import permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from branchline import (
    ExportPolicy,
    GenericCodec,
    History,
    Message,
    Sample,
    Session,
    Trajectory,
    TrajectoryGroup,
)
from branchline.core.errors import ExportError, InputError, MessageError
from branchline.core.reader import write_message
from branchline.core.sample import DropReason
from branchline.testing.plan_runner import ExecutedCall, PlanRunner
from branchline.testing.plans import PlanGenerator
from tests.chat.families import load_tokenizer
from tests.export.test_histories import CODEC, STRIPPING, thinking_session, user

ALL = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def answered(text: str, **fields: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "index": 0, **fields}


def text_entries(codec: Any, text: str, *, stop: bool = True) -> list[dict[str, Any]]:
    """Returns logprobs as OpenAI writes them: texts and no ids."""
    ids = codec.encode_reply(Message("assistant", text), stop=stop).tolist()
    return [
        {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": -0.25 * (index + 1)}
        for index, data in enumerate(map(codec.token_bytes, ids))
    ]


# -- what ART users write -------------------------------------------------------------------------------


def test_the_arguments_of_art_are_taken_and_can_be_read_back() -> None:
    items = [
        user("u"),
        {"role": "assistant", "content": "w"},
        user("x"),
        answered("hi", token_ids=[104, 260]),
    ]
    other = [user("sub"), answered("ok", token_ids=[111, 260])]
    started = datetime(2026, 11, 19)
    trajectory = Trajectory(
        messages_and_choices=items,
        tools=TOOLS,
        additional_histories=[History(messages_and_choices=other, tools=TOOLS)],
        reward=0.5,
        initial_policy_version=3,
        final_policy_version=4,
        metrics={"turns": 2, "solved": True},
        metadata={"task": "a", "n": None},
        logs=["begun"],
        start_time=started,
        codec=CODEC,
        policy=ExportPolicy(include_inexact="context", include_missing_logprobs=True),
    )
    assert trajectory.messages_and_choices == items
    assert trajectory.tools == TOOLS
    (history,) = trajectory.additional_histories
    assert (history.messages_and_choices, history.tools) == (other, TOOLS)
    assert (trajectory.reward, trajectory.metrics) == (0.5, {"turns": 2, "solved": True})
    assert (trajectory.metadata, list(trajectory.logs)) == ({"task": "a", "n": None}, ["begun"])
    assert (trajectory.start_time, trajectory.final_policy_version) == (started, 4)
    assert [CODEC.decode(sample.response_ids) for sample in trajectory.samples] == ["h<end>", "o<end>"]
    for sample in trajectory.samples:
        assert sample.reward == 0.5
        assert sample.response_versions[sample.response_mask != 0].tolist() == [3, 3]
    assert trajectory.history is not None
    assert trajectory.history.sampled == (3,)


def test_choices_of_openai_are_read_back_as_they_are() -> None:
    choice = Choice.model_validate({**answered("hi"), "token_ids": [1, 2], "prompt_token_ids": [3]})
    message = ChatCompletionMessage(role="assistant", content="well")
    items = [user("u"), message, user("x"), choice]
    trajectory = Trajectory(messages_and_choices=items, policy=ALL)
    assert trajectory.messages_and_choices == items
    (sample,) = trajectory.samples
    assert (sample.prompt_ids.tolist(), sample.response_ids.tolist()) == ([3], [1, 2])


def test_objects_inside_of_json_are_read() -> None:
    message = ChatCompletionMessage(role="assistant", content="hi")
    items = [
        user("u"),
        {"message": message, "finish_reason": "stop", "token_ids": [1], "prompt_token_ids": [2]},
    ]
    (sample,) = Trajectory(messages_and_choices=items, policy=ALL).samples
    assert sample.response_ids.tolist() == [1]


@pytest.mark.parametrize(
    "raw",
    [
        {"messages_and_choices": [user("s"), answered("ok")], "tools": None},
        SimpleNamespace(messages_and_choices=[user("s"), answered("ok")], tools=None),
    ],
)
def test_additional_histories_may_be_json_or_objects_of_art(raw: Any) -> None:
    trajectory = Trajectory(
        messages_and_choices=[user("u")], additional_histories=[raw], codec=CODEC, policy=ALL
    )
    assert [CODEC.decode(sample.response_ids) for sample in trajectory.samples] == ["ok<end>"]
    assert isinstance(trajectory.additional_histories[0], History)


def test_additional_histories_alone_are_trained() -> None:
    history = History(messages_and_choices=[user("s"), answered("ok")])
    trajectory = Trajectory(additional_histories=[history], reward=1.0, codec=CODEC, policy=ALL)
    assert [sample.trained_tokens for sample in trajectory.samples] == [3]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"additional_histories": [3]}, r"additional_histories\[0\]: got 'int', expected a history"),
        ({"additional_histories": [{"messages": []}]}, r"additional_histories\[0\].messages: got \[\]"),
        ({"reward": float("nan")}, "reward: got nan, expected a finite number"),
        ({"reward": "1"}, "reward: got '1'"),
        ({"reward": 10**400}, "reward: got 1000"),
        ({"metrics": {"turns": "2"}}, "metrics.turns: got '2', expected a number"),
        ({"initial_policy_version": -1}, "initial_policy_version: got -1"),
        ({"final_policy_version": "4"}, "final_policy_version: got '4'"),
        ({"tools": {"type": "function"}}, "tools: got .*expected a list of tools"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: got"),
        ({"messages_and_choices": {"role": "user"}}, "messages_and_choices: got .*expected a list"),
        ({"additional_histories": None}, "additional_histories: got None, expected a list of histories"),
        ({"metrics": None}, "metrics: got None, expected an object of numbers"),
        ({"metadata": None}, "metadata: got None, expected an object"),
        ({"logs": "begun"}, "logs: got 'begun', expected a list of texts"),
        ({"start_time": "today"}, "start_time: got 'today', expected a datetime or None"),
        (
            {"messages_and_choices": [user("u"), answered("hi", token_ids=[])]},
            r"token_ids: got \[\], expected the",
        ),
        ({"messages_and_choices": "hi"}, "messages_and_choices: got 'hi', expected a list"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Trajectory(**{"messages_and_choices": [user("u")], **arguments})


@pytest.mark.parametrize(("given", "read"), [(True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (None, None)])
def test_a_reward_is_a_number_true_false_or_none(given: Any, read: float | None) -> None:
    assert Trajectory(messages_and_choices=[user("u")], reward=given).reward == read


def test_a_history_has_its_own_copy_and_says_that_it_does_not_change() -> None:
    items = [user("u"), answered("hi")]
    tools = copy.deepcopy(TOOLS)
    trajectory = Trajectory(messages_and_choices=items, tools=tools, codec=CODEC, policy=ALL)
    items.append(user("more"))
    items[0]["content"] = "changed"
    tools.clear()
    assert trajectory.messages_and_choices == [user("u"), answered("hi")]
    assert trajectory.tools == TOOLS
    kept: Any = trajectory.messages_and_choices
    assert pickle.loads(pickle.dumps(kept)) == copy.deepcopy(kept) == kept
    with pytest.raises(InputError, match="a history does not change"):
        kept.append(user("x"))
    with pytest.raises(InputError, match="a history does not change"):
        kept[0] = user("x")
    with pytest.raises(InputError, match="a history does not change"):
        kept += [user("x")]


def test_every_history_has_template_arguments_of_its_own() -> None:
    def trained(main: dict[str, Any], other: dict[str, Any]) -> list[str]:
        trajectory = Trajectory(
            messages_and_choices=[user("u"), answered("hi")],
            chat_template_kwargs=main,
            additional_histories=[
                History(messages_and_choices=[user("s"), answered("ok")], chat_template_kwargs=other)
            ],
            codec=CODEC,
            policy=ALL,
        )
        return [CODEC.decode(sample.prompt_ids) for sample in trajectory.samples]

    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    first, second = trained(on, off)
    assert first.startswith('tools:[[], {"enable_thinking": true}]')
    assert second.startswith('tools:[[], {"enable_thinking": false}]')
    assert [text.startswith("tools:") for text in trained({}, on)] == [False, True]


def test_a_group_takes_the_arguments_of_art() -> None:
    error = RuntimeError("no luck")
    one = Trajectory(messages_and_choices=[user("u")], reward=1.0)
    group = TrajectoryGroup(
        [one, error],  # type: ignore[list-item]
        exceptions=[ValueError("x")],
        metadata={"task": 1},
        metrics={"n": 2},
        logs=["l"],
    )
    assert list(group) == [one]
    assert [str(raised) for raised in group.exceptions] == ["x", "no luck"]
    assert (group.metadata, group.metrics, group.logs) == ({"task": 1}, {"n": 2}, ["l"])
    assert len(TrajectoryGroup(one for _ in range(3))) == 3  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"trajectories\[0\]: got 'str', expected a Trajectory"):
        TrajectoryGroup(["one"])  # type: ignore[list-item]


# -- each choice by itself ------------------------------------------------------------------------------


def response_of(executed: ExecutedCall, choice: int = 0) -> dict[str, Any]:
    """Returns the response of a recorded call as a gateway writes it, with one of its choices."""
    output, ids = executed.planned.outputs[choice], executed.outputs[choice]
    entries = [
        {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}
        for data, logprob in zip(
            map(CODEC.token_bytes, ids.tolist()), executed.logprobs[choice].tolist(), strict=True
        )
    ]
    raw = {
        "index": choice,
        "message": write_message(output.message),
        "finish_reason": "stop" if output.is_complete else "length",
        "token_ids": ids.tolist(),
        "logprobs": {"content": entries},
    }
    return {"id": executed.call.id, "choices": [raw], "prompt_token_ids": executed.prompt_ids.tolist()}


def forget(response: dict[str, Any], level: str) -> dict[str, Any]:
    """Returns what a program kept of a response."""
    kept = copy.deepcopy(response)
    choice = kept["choices"][0]
    if level == "named":  # vLLM's --return-tokens-as-token-ids, as ART asks for
        for entry, token in zip(choice["logprobs"]["content"], choice.pop("token_ids"), strict=True):
            entry["token"] = f"token_id:{token}"
    elif level == "no prompt":
        del kept["prompt_token_ids"]
    elif level == "texts":
        del kept["prompt_token_ids"], choice["token_ids"]
    elif level == "nothing":
        del kept["prompt_token_ids"], choice["token_ids"], choice["logprobs"]
    return kept


LEVELS = ("all", "named", "no prompt", "texts", "nothing")
Answer = tuple[bytes, bytes, bytes]


def shares_of(samples: tuple[Sample, ...]) -> dict[Answer, float]:
    """Returns the total share of each trained answer, in its context. Asserts what a sample promises."""
    shares: dict[Answer, float] = {}
    for sample in samples:
        ids = np.concatenate((sample.prompt_ids, sample.response_ids)).astype(np.int32)
        trained = np.zeros(len(sample.response_ids), bool)
        for span in sample.answers:
            trained[span.start : span.end] = True
            begin = len(sample.prompt_ids) + span.start
            end = len(sample.prompt_ids) + span.end
            logprobs = sample.response_logprobs[span.start : span.end]
            key = ids[:begin].tobytes(), ids[begin:end].tobytes(), logprobs.tobytes()
            (share,) = set(sample.shares[span.start : span.end].tolist())
            shares[key] = shares.get(key, 0.0) + share
        np.testing.assert_array_equal(trained, sample.response_mask != 0)
        assert not sample.shares[~trained].any()
    return shares


def answer_of(executed: ExecutedCall, choice: int, *, has_logprobs: bool = True) -> Answer:
    logprobs = executed.logprobs[choice]
    values = logprobs if has_logprobs else np.full(len(logprobs), np.nan, np.float32)
    prompt, ids = executed.prompt_ids.astype(np.int32), executed.outputs[choice].astype(np.int32)
    return prompt.tobytes(), ids.tobytes(), values.tobytes()


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans(), st.data())
def test_each_choice_is_trained_once_in_its_context_whatever_is_known_of_the_others(
    seed: int, steps: int, strip: bool, data: st.DataObject
) -> None:
    """The reference is the definition: what the gateway recorded of each call."""
    codec = STRIPPING if strip else CODEC
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(Random(seed), reasoning=strip).generate(steps))
    recorded = [(executed, index) for executed in runner.executed for index in range(len(executed.outputs))]
    levels = [data.draw(st.sampled_from(LEVELS)) for _ in recorded]
    main, *others = [
        History(
            messages_and_choices=[
                *(write_message(message) for message in executed.planned.messages),
                forget(response_of(executed, index), level),
            ],
            tools=list(executed.planned.tools),
            agent=executed.planned.agent,
        )
        for (executed, index), level in zip(recorded, levels, strict=True)
    ]

    def build(policy: ExportPolicy) -> Trajectory:
        assert main.messages_and_choices is not None
        if main.agent:
            return Trajectory(additional_histories=[main, *others], codec=codec, policy=policy)
        return Trajectory(
            messages_and_choices=main.messages_and_choices,
            tools=main.tools,
            additional_histories=others,
            codec=codec,
            policy=policy,
        )

    known = build(ExportPolicy(drop=frozenset()))
    expected = Counter(
        answer_of(executed, index)
        for (executed, index), level in zip(recorded, levels, strict=True)
        if level in ("all", "named") and len(executed.outputs[index])
    )
    assert shares_of(known.samples) == pytest.approx(dict(expected))
    assert all(sample.exact for sample in known.samples)
    assert known.report is not None
    assert known.report.is_balanced
    assert {drop.reason for drop in known.report.dropped} <= {DropReason.INEXACT}

    everything = build(ExportPolicy(drop=frozenset(), include_inexact=True, include_missing_logprobs=True))
    total = Counter[tuple[bytes, bytes]]()
    for (_, ids, logprobs), share in shares_of(everything.samples).items():
        total[ids, logprobs] += round(share)
    assert total == Counter(
        answer_of(executed, index, has_logprobs=level != "nothing")[1:]
        for (executed, index), level in zip(recorded, levels, strict=True)
        if len(executed.outputs[index])
    )
    assert everything.report is not None
    inexact = sum(
        len(executed.outputs[index])
        for (executed, index), level in zip(recorded, levels, strict=True)
        if level not in ("all", "named")
    )
    assert everything.report.inexact_tokens == inexact


def test_an_answer_with_all_ids_is_exact_after_one_without() -> None:
    """Its prompt is known, whatever is known of the answer that it continues."""
    session, (first, second) = thinking_session()
    del first["prompt_token_ids"], first["choices"][0]["token_ids"], first["choices"][0]["logprobs"]
    items = [user("What is 2+2?"), first, user("What is 3+3?"), second]
    (sample,) = Trajectory(messages_and_choices=items, codec=STRIPPING).samples
    assert sample.exact
    assert sample.prompt_ids.tolist() == second["prompt_token_ids"]
    assert len(session.tree.calls) == 2


def test_a_bare_choice_gets_the_prompt_that_the_same_answer_has_in_another_history() -> None:
    _, (first, _) = thinking_session()
    first["prompt_token_ids"][0] += 1  # not what the codec renders
    items = [user("What is 2+2?"), first]
    again = History(messages_and_choices=[user("What is 2+2?"), first["choices"][0]])
    (sample,) = Trajectory(messages_and_choices=items, additional_histories=[again], codec=STRIPPING).samples
    assert sample.exact
    assert set(sample.shares.tolist()) == {1.0}


@pytest.mark.parametrize("level", [*LEVELS, "no logprobs"])
def test_the_same_response_is_one_answer_however_much_each_history_kept_of_it(level: str) -> None:
    _, (first, _) = thinking_session()
    kept = forget(first, level)
    if level == "no logprobs":
        del kept["choices"][0]["logprobs"]
    question = user("What is 2+2?")
    for one, other in ((first, kept), (kept, first)):
        (sample,) = Trajectory(
            messages_and_choices=[question, one],
            additional_histories=[History(messages_and_choices=[question, other])],
            codec=STRIPPING,
            policy=ALL,
        ).samples
        assert (sample.exact, sample.missing_logprobs, set(sample.shares.tolist())) == (True, 0, {1.0})
        assert sample.prompt_ids.tolist() == first["prompt_token_ids"]


FACTS = ("prompt_token_ids", "token_ids", "logprobs", "finish_reason", "id")


def keep(response: dict[str, Any], facts: Collection[str]) -> dict[str, Any]:
    """Returns what a program kept of a response: a bare choice if its id is not kept."""
    raw = {key: value for key, value in response["choices"][0].items() if key in facts or key not in FACTS}
    if "token_ids" in raw and "logprobs" in raw:
        raw["logprobs"] = {"content": [{**entry, "token": ""} for entry in raw["logprobs"]["content"]]}
    raw.setdefault("finish_reason", None)
    prompt = {"prompt_token_ids": response["prompt_token_ids"]} if "prompt_token_ids" in facts else {}
    return {"id": response["id"], "choices": [raw], **prompt} if "id" in facts else {**raw, **prompt}


@given(
    st.lists(st.sets(st.sampled_from(FACTS)), max_size=4),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_the_copies_of_an_answer_tell_together_what_is_known_of_it(
    kept: list[set[str]], seed: int, drifted: bool, cut: bool
) -> None:
    random = Random(seed)
    _, (first, _) = thinking_session()
    (choice,) = first["choices"]
    choice["finish_reason"] = "length" if cut else "stop"
    if drifted:  # other ids than the codec's
        entries = choice["logprobs"]["content"]
        choice["token_ids"], choice["logprobs"] = (
            [*choice["token_ids"][:-1], 5, 260],
            {"content": [*entries, entries[-1]]},
        )
        first["prompt_token_ids"][0] += 1
    # Together they tell all; each fact is in one copy at least.
    copies = [*kept, set(), set()]
    for fact in FACTS:
        if not any(fact in facts for facts in copies):
            random.choice(copies).add(fact)
    question = user("What is 2+2?")
    main, *others = [[question, keep(first, facts)] for facts in copies]
    trajectory = Trajectory(
        messages_and_choices=main,
        additional_histories=[History(messages_and_choices=items) for items in others],
        codec=STRIPPING,
        policy=ALL,
    )
    (sample,) = trajectory.samples
    assert (sample.exact, sample.finish_reason) == (True, choice["finish_reason"])
    assert sample.prompt_ids.tolist() == first["prompt_token_ids"]
    assert sample.response_ids.tolist() == choice["token_ids"]
    assert set(sample.shares.tolist()) == {1.0}
    assert trajectory.report is not None
    assert trajectory.report.sampled_tokens == len(choice["token_ids"])
    assert trajectory.finished is not cut


def test_how_a_text_ended_decides_for_all_its_copies_whether_it_has_a_stop_token() -> None:
    question = user("x")
    told, untold = ({"id": "r", "choices": [answered("hi", finish_reason=how)]} for how in ("length", None))
    for one, other in ((told, untold), (untold, told)):
        trajectory = Trajectory(
            messages_and_choices=[question, one],
            additional_histories=[History(messages_and_choices=[question, other])],
            codec=STRIPPING,
            policy=ALL,
        )
        (sample,) = trajectory.samples
        assert (sample.response_ids.tolist(), sample.finish_reason) == ([*b"hi"], "length")


def test_a_text_that_may_be_two_answers_tells_nothing_of_them() -> None:
    question = user("x")
    ids = [answered("hi", token_ids=[*b"hi", extra, 260]) for extra in (1, 2)]
    text = answered("hi", prompt_token_ids=[1, 2])
    main, *others = [[question, one] for one in (*ids, text)]
    trajectory = Trajectory(
        messages_and_choices=main,
        additional_histories=[History(messages_and_choices=items) for items in others],
        codec=STRIPPING,
        policy=ALL,
    )
    assert [sample.exact for sample in trajectory.samples] == [False, False]


def test_a_copy_with_a_response_id_joins_the_copies_of_its_response_before_others() -> None:
    question = user("x")
    bare = answered("hi", token_ids=[*b"hi", 1, 260])
    named = {"id": "r", "choices": [answered("hi", token_ids=[*b"hi", 2, 260])]}
    text = {"id": "r", "choices": [answered("hi")], "prompt_token_ids": [1, 2]}
    for order in permutations([bare, named, text]):
        main, *others = [[question, one] for one in order]
        trajectory = Trajectory(
            messages_and_choices=main,
            additional_histories=[History(messages_and_choices=items) for items in others],
            codec=STRIPPING,
            policy=ALL,
        )
        assert [sample.response_ids.tolist() for sample in trajectory.samples if sample.exact] == [
            [*b"hi", 2, 260]
        ]
        assert len(trajectory.samples) == 2


def test_equal_answers_of_two_responses_are_two_answers() -> None:
    _, (first, _) = thinking_session()
    question = user("What is 2+2?")

    def shares(*responses: Any) -> float:
        main, *others = [[question, one] for one in responses]
        histories = [History(messages_and_choices=items) for items in others]
        samples = Trajectory(messages_and_choices=main, additional_histories=histories).samples
        return sum(shares_of(samples).values())

    assert shares(first, first) == 1
    assert shares(first, {**first, "id": "another"}) == 2
    other_logprobs = copy.deepcopy(first)
    other_logprobs["choices"][0]["logprobs"]["content"][0]["logprob"] = -9.0
    assert shares({**first, "id": ""}, {**other_logprobs, "id": ""}) == 2
    bare = {**first["choices"][0], "prompt_token_ids": first["prompt_token_ids"]}
    assert shares(first, bare, first) == 1
    assert shares(bare, {**bare, "index": 1}) == 2


@pytest.mark.parametrize("reason", [None, "abort"])
def test_how_an_answer_ended_is_known_if_one_history_tells(reason: str | None) -> None:
    _, (first, _) = thinking_session()
    cut = copy.deepcopy(first)
    cut["choices"][0]["finish_reason"] = reason
    question = user("What is 2+2?")
    for one, other in ((first, cut), (cut, first)):
        trajectory = Trajectory(
            messages_and_choices=[question, one],
            additional_histories=[History(messages_and_choices=[question, other])],
        )
        (sample,) = trajectory.samples
        assert (sample.finish_reason, trajectory.finished) == ("stop", True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", "length"),
        ("token_ids", [1, 2, 3]),
        ("logprobs", -9.0),
        ("message", {"role": "assistant", "content": "other"}),
    ],
)
def test_two_answers_of_one_choice_are_refused_with_both_places(field: str, value: object) -> None:
    _, (first, _) = thinking_session()
    other = copy.deepcopy(first)
    (choice,) = other["choices"]
    if field == "token_ids":
        choice["logprobs"] = None
    if field == "logprobs":
        choice["logprobs"]["content"][0]["logprob"] = value
    else:
        choice[field] = value
    main, again = ([user("What is 2+2?"), one] for one in (first, other))
    histories = [History(messages_and_choices=again)]
    place = rf"additional_histories\[0\].messages_and_choices\[1\].{field}: got .*"
    with pytest.raises(MessageError, match=rf"{place}, as messages_and_choices\[1\], which is choice 0"):
        Trajectory(messages_and_choices=main, additional_histories=histories, policy=ALL)
    other["id"] = "another"
    histories = [History(messages_and_choices=again)]
    Trajectory(messages_and_choices=main, additional_histories=histories, policy=ALL)


def test_the_usage_of_a_response_has_the_numbers_of_its_ids() -> None:
    _, (first, _) = thinking_session()
    ids, prompt = len(first["choices"][0]["token_ids"]), len(first["prompt_token_ids"])
    items = [user("What is 2+2?"), first]
    for name, count in (("completion_tokens", ids), ("prompt_tokens", prompt)):
        first["usage"] = {name: count}
        assert len(Trajectory(messages_and_choices=items).samples) == 1
        for wrong in (count + 1, count - 1):
            first["usage"] = {name: wrong}
            place = rf"messages_and_choices\[1\].usage.{name}: got {wrong}, expected {count}"
            with pytest.raises(MessageError, match=place):
                Trajectory(messages_and_choices=items)


def test_a_choice_that_the_template_refuses_is_exact_if_its_ids_are_known() -> None:
    refusing = GenericCodec(
        load_tokenizer("qwen3"), chat_template="{{ raise_exception('no') }}{{ messages }}"
    )
    known = answered(
        "hi", token_ids=[1, 2], prompt_token_ids=[3], logprobs={"content": [{"token": "", "logprob": -1}] * 2}
    )
    history = History(messages_and_choices=[user("s"), answered("ok", token_ids=[4])])
    with pytest.raises(ExportError, match=r"additional_histories\[0\].messages_and_choices\[1\]: cannot be"):
        Trajectory(messages_and_choices=[user("u"), known], additional_histories=[history], codec=refusing)
    assert len(Trajectory(messages_and_choices=[user("u"), known], codec=refusing).samples) == 1


def test_ids_of_another_tokenizer_are_refused() -> None:
    codec = GenericCodec(load_tokenizer("qwen3"))
    items = [user("u"), answered("hi", token_ids=[10**6])]
    with pytest.raises(
        MessageError, match=r"messages_and_choices\[1\].token_ids: got 1000000, expected ids below"
    ):
        Trajectory(messages_and_choices=items, codec=codec)


def test_missing_ids_name_the_history() -> None:
    history = History(messages_and_choices=[user("s"), answered("ok")])
    with pytest.raises(
        ExportError, match=r"^additional_histories\[1\].messages_and_choices\[1\]: has no token"
    ):
        Trajectory(
            messages_and_choices=[user("u")],
            additional_histories=[History(messages_and_choices=[]), history],
        )


# -- logprobs of texts ----------------------------------------------------------------------------------

TEXTS = ["hi", "Grüße, 世界 👩‍👩‍👧!", "<b>x</b>\n\n  y", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["toy", "qwen3"])
def test_logprobs_of_texts_are_used_where_they_map_one_to_one(text: str, family: str) -> None:
    codec: Any = CODEC if family == "toy" else GenericCodec(load_tokenizer(family))
    entries = text_entries(codec, text)
    items = [user("u"), answered(text, logprobs={"content": entries})]
    (sample,) = Trajectory(messages_and_choices=items, codec=codec, policy=ALL).samples
    assert sample.response_logprobs.tolist() == [entry["logprob"] for entry in entries]
    assert (sample.missing_logprobs, sample.exact) == (0, False)


def test_a_stop_token_that_the_server_left_out_has_no_logprob() -> None:
    items = [user("u"), answered("hi", logprobs={"content": text_entries(CODEC, "hi", stop=False)})]
    (sample,) = Trajectory(messages_and_choices=items, codec=CODEC, policy=ALL).samples
    np.testing.assert_array_equal(sample.response_logprobs, np.array([-0.25, -0.5, np.nan], np.float32))
    assert sample.missing_logprobs == 1


def test_tokens_without_bytes_are_compared_by_their_text() -> None:
    entries = [{**entry, "bytes": None} for entry in text_entries(CODEC, "hi")]
    items = [user("u"), answered("hi", logprobs={"content": entries})]
    (sample,) = Trajectory(messages_and_choices=items, codec=CODEC, policy=ALL).samples
    assert sample.missing_logprobs == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[:-2],
        lambda entries: [*entries, entries[0]],
        lambda entries: [{**entries[0], "bytes": list(b"H")}, *entries[1:]],
        lambda entries: [{"token": "hi", "logprob": -1.0}, entries[2]],
        lambda entries: [{"token": "token_id:104", "logprob": -1.0}, *entries[1:]],
        lambda entries: [{"logprob": -1.0}, *entries[1:]],
    ],
)
def test_logprobs_of_other_tokens_are_left_out_and_said(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    items = [user("u"), answered("hi", logprobs={"content": change(text_entries(CODEC, "hi"))})]
    with caplog.at_level(logging.WARNING):
        (sample,) = Trajectory(messages_and_choices=items, codec=CODEC, policy=ALL).samples
    assert sample.missing_logprobs == 3
    assert np.isnan(sample.response_logprobs).all()
    assert "messages_and_choices[1].logprobs: left out" in caplog.text


# -- edges ----------------------------------------------------------------------------------------------


def test_no_items_are_an_empty_trajectory() -> None:
    for trajectory in (Trajectory(messages_and_choices=[]), Trajectory(messages_and_choices=(), tools=[])):
        assert (trajectory.samples, trajectory.reward, trajectory.finished) == ((), None, True)
        assert trajectory.messages_and_choices == []
        assert trajectory.history is not None
        assert trajectory.history.messages == ()


def test_a_choice_first_is_an_error() -> None:
    with pytest.raises(MessageError, match="expected a message before the first choice"):
        Trajectory(messages_and_choices=[answered("hi")], codec=CODEC)


def test_a_message_with_a_role_is_no_choice_whatever_else_it_has() -> None:
    items = [{**user("u"), "message": {"content": "x"}, "choices": []}, answered("hi")]
    trajectory = Trajectory(messages_and_choices=items, codec=CODEC, policy=ALL)
    assert trajectory.history is not None
    assert trajectory.history.sampled == (1,)


def test_prompt_ids_that_contradict_each_other_are_an_error() -> None:
    _, (first, _) = thinking_session()
    first["choices"][0]["prompt_token_ids"] = [1]
    with pytest.raises(MessageError, match=r"choices\[0\].prompt_token_ids: got \[1\], expected those of"):
        Trajectory(messages_and_choices=[user("u"), first])


def test_tool_calls_without_ids_and_without_content_are_read() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    choice = {
        "message": {"role": "assistant", "content": None, "tool_calls": [call]},
        "finish_reason": "stop",
    }
    items = [user("u"), choice, {"role": "tool", "content": "seen"}, answered("done")]
    trajectory = Trajectory(messages_and_choices=items, tools=TOOLS, codec=CODEC, policy=ALL)
    assert [sample.trained_tokens for sample in trajectory.samples] == [
        len(CODEC.encode_reply(Message("assistant", "done")))
        + len('look {"at": 1}') + 3
    ]  # fmt: skip
    assert trajectory.messages_and_choices == items


def test_media_are_carried_with_ids_too() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    choice = answered("a cat", token_ids=[1, 2], prompt_token_ids=[7, 8])
    items = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}, choice]
    (sample,) = Trajectory(messages_and_choices=items, policy=ALL).samples
    assert [(media.kind, bool(media.payload)) for media in sample.media] == [("image", True)]


def test_the_main_history_is_the_one_that_was_given_as_such() -> None:
    """A limit keeps its sample, also if another history continues it."""
    _, (first, second) = thinking_session()
    main = [user("What is 2+2?"), first]
    first_ids, second_ids = first["choices"][0]["token_ids"], second["choices"][0]["token_ids"]
    longer = History(messages_and_choices=[*main, user("What is 3+3?"), second])
    aside = [answered(text, token_ids=[*text.encode()], prompt_token_ids=[7], logprobs={
        "content": [{"token": "", "logprob": -1}] * len(text)}) for text in ("a", "bb")]  # fmt: skip
    others = [History(messages_and_choices=[user("aside"), one]) for one in aside]
    one = ExportPolicy(max_samples=1)
    for additional in ([*others, longer], [longer, *others], others):
        trajectory = Trajectory(messages_and_choices=main, additional_histories=additional, policy=one)
        assert [sample.response_ids.tolist() for sample in trajectory.samples] == [first_ids]
    trajectory = Trajectory(
        messages_and_choices=[*main, user("What is 3+3?"), second],
        additional_histories=[*others, History(messages_and_choices=main)],
        policy=one,
    )
    assert [sample.response_ids.tolist() for sample in trajectory.samples] == [second_ids]


def test_ids_that_the_logprobs_name_otherwise_are_an_error() -> None:
    entries = [{"token": "token_id:1", "logprob": -1.0}, {"token": "token_id:3", "logprob": -1.0}]
    choice = answered("hi", token_ids=[1, 2], prompt_token_ids=[9], logprobs={"content": entries})
    with pytest.raises(MessageError, match=r"content\[1\].token: got 'token_id:3', expected token_id:2"):
        Trajectory(messages_and_choices=[user("u"), choice])


def test_other_items_for_a_built_trajectory_are_refused() -> None:
    trajectory = Trajectory(messages_and_choices=[user("u"), answered("hi")], codec=CODEC, policy=ALL)
    assert replace(trajectory, session="s").samples == trajectory.samples
    with pytest.raises(InputError, match="build a new Trajectory"):
        replace(trajectory, messages_and_choices=[user("v")])
    assert trajectory.history is not None
    assert replace(trajectory.history, messages_and_choices=[user("v")]).messages[0].content == "v"
    again = History(messages_and_choices=trajectory.messages_and_choices)
    assert again.messages == trajectory.history.messages


def test_samples_and_messages_together_are_refused() -> None:
    (sample,) = Trajectory(messages_and_choices=[user("u"), answered("hi")], codec=CODEC, policy=ALL).samples
    with pytest.raises(InputError, match="got them and samples or a history"):
        Trajectory((sample,), messages_and_choices=[user("u")])


def test_a_hand_built_trajectory_can_be_copied_with_another_reward() -> None:
    trajectory = Trajectory(messages_and_choices=[user("u"), answered("hi")], codec=CODEC, policy=ALL)
    assert trajectory.with_reward(1.0).samples[0].reward == 1.0
    assert copy.deepcopy(trajectory).messages_and_choices == trajectory.messages_and_choices
    assert json.loads(json.dumps(trajectory.messages_and_choices)) == trajectory.messages_and_choices


@pytest.mark.parametrize("reason", [{}, {"finish_reason": None}, {"finish_reason": ""}])
def test_a_choice_without_a_finish_reason_is_counted_and_not_trained(reason: dict[str, Any]) -> None:
    choice = answered("ab", token_ids=[4, 5], prompt_token_ids=[1, 2])
    del choice["finish_reason"]
    built = Trajectory(
        messages_and_choices=[{"role": "user", "content": "q"}, {**choice, **reason}], reward=1.0
    )
    assert (len(built.samples), built.finished) == (0, False)
    assert built.report is not None
    (dropped,) = built.report.dropped
    assert (dropped.reason, dropped.tokens) == (DropReason.CANCELLED, 2)
