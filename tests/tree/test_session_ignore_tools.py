"""`ignore_tools`: a call with other tools continues the path, is recorded as inexact, and its prompt is the
one it asked for."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import (
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToyCodec,
    export_samples,
    timelines_of,
)
from branchline.core.call import Delivery
from branchline.core.token_arrays import Ids
from branchline.timelines.causes import Cause, classify_forks
from branchline.tree.journal import Journal

CODEC = ToyCodec.chatml()
U, V, W = (Message("user", text) for text in "uvw")
SEARCH = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
READ = (
    {
        "type": "function",
        "function": {"name": "read", "description": "d", "parameters": {"type": "object", "properties": {}}},
    },
)


def ask(
    session: Session,
    messages: list[Message],
    text: str,
    tools: tuple[dict[str, Any], ...] = (),
    agent: str = "",
) -> tuple[Message, Ids]:
    """Commits an answer; returns it and the prompt that the engine got."""
    turn = session.prepare(Request(tuple(messages), tools, agent=agent))
    answer = Message("assistant", text)
    ids = session.codec.encode_reply(answer)
    call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), message=answer)).call
    session.record_delivery(call, Delivery.DELIVERED)
    return answer, turn.prompt_ids


def converse(session: Session) -> list[Ids]:
    """Asks three questions: without tools, with `search`, without tools again."""
    one, first = ask(session, [U], "one")
    two, second = ask(session, [U, one, V], "two", SEARCH)
    _, third = ask(session, [U, one, V, two, W], "three")
    return [first, second, third]


def test_a_call_with_other_tools_continues_the_path_as_inexact() -> None:
    session = Session("s", CODEC, ignore_tools=True)
    converse(session)
    (timeline,) = timelines_of(session.tree)
    assert [message.content for message in timeline.messages] == ["u", "one", "v", "two", "w", "three"]
    outputs = [node.output for node in timeline.sampled_nodes]
    assert [output.inexact for output in outputs if output] == [False, True, False]
    assert not any(output.estimated for output in outputs if output)
    two = len(CODEC.encode_reply(Message("assistant", "two")))
    assert timeline.inexact_tokens == two
    export = export_samples(session.tree, ExportPolicy(include_inexact="context"))
    (sample,) = export.samples
    assert export.report.trained_tokens == export.report.sampled_tokens
    assert (sample.exact, sample.inexact_tokens) == (False, two)


def test_the_model_gets_the_prompt_that_the_call_asked_for() -> None:
    ignoring, plain = Session("s", CODEC, ignore_tools=True), Session("s", CODEC)
    for prompt, expected in zip(converse(ignoring), converse(plain), strict=True):
        assert prompt.tolist() == expected.tolist()
    assert len(timelines_of(plain.tree)) == 2


def test_the_third_call_sees_exactly_the_path_and_is_exact() -> None:
    session = Session("s", CODEC, ignore_tools=True)
    prompts = converse(session)
    leaf = session.tree.leaves()[0]
    assert session.tree.path_ids(leaf)[: leaf.sampled_start].tolist() == prompts[2].tolist()


def test_a_conversation_with_the_same_tools_is_preferred() -> None:
    session = Session("s", CODEC, ignore_tools=True)
    ask(session, [U], "one")
    ask(session, [U], "one", SEARCH)
    one = Message("assistant", "one")
    ask(session, [U, one, V], "two", SEARCH)
    assert all(timeline.exact for timeline in timelines_of(session.tree))
    assert len(timelines_of(session.tree)) == 2


def test_an_edited_history_forks_as_always() -> None:
    session = Session("s", CODEC, ignore_tools=True)
    ask(session, [U], "one")
    ask(session, [U, Message("assistant", "edited"), V], "two", SEARCH)
    assert len(timelines_of(session.tree)) == 2
    assert all(timeline.exact for timeline in timelines_of(session.tree))


def test_history_that_the_template_now_shows_differently_forks() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec, ignore_tools=True)
    turn = session.prepare(Request((U,)))
    thought = Message("assistant", "one", reasoning_content="hm")
    session.commit(turn, Generation(codec.encode_reply(thought), message=thought))
    ask(session, [U, thought, V], "two", SEARCH)
    assert len(timelines_of(session.tree)) == 2
    assert all(timeline.exact for timeline in timelines_of(session.tree))


def test_another_agent_does_not_continue_the_path() -> None:
    session = Session("s", CODEC, ignore_tools=True)
    one, _ = ask(session, [U], "one")
    ask(session, [U, one, V], "two", SEARCH, agent="other")
    assert len(timelines_of(session.tree)) == 2


def test_a_session_with_other_tools_is_restored_from_its_journal(tmp_path: Any) -> None:
    with Journal(tmp_path / "j") as journal:
        session = Session("s", CODEC, ignore_tools=True, journal=journal)
        converse(session)
        again = Session.reopen("s", CODEC, journal, ignore_tools=True)
        one, two = timelines_of(session.tree)[0], timelines_of(again.tree)[0]
        assert one.ids.tolist() == two.ids.tolist()
        assert one.inexact_tokens == two.inexact_tokens > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_prompts_are_those_of_a_plain_session_and_every_difference_is_marked(seed: int, count: int) -> None:
    random = Random(seed)
    ignoring, plain = Session("s", CODEC, ignore_tools=True), Session("s", CODEC)
    histories: list[list[Message]] = [[U]]
    for number in range(count):
        history = random.choice(histories)
        tools = random.choice([(), SEARCH, READ])
        text = f"answer {number}"
        answer, prompt = ask(ignoring, history, text, tools)
        _, expected = ask(plain, history, text, tools)
        assert prompt.tolist() == expected.tolist()
        node = ignoring.tree.nodes[ignoring.tree.calls[-1].outputs[0]]
        recorded = ignoring.tree.path_ids(node)[: node.sampled_start]
        assert node.output is not None
        assert node.output.inexact == (recorded.tolist() != prompt.tolist())
        histories.append([*history, answer, random.choice([V, W])])


def test_equal_answers_are_dropped_as_duplicates_only_if_their_ids_are_equal() -> None:
    session = Session("s", CODEC)
    for reasoning in ("", "", "hm"):
        turn = session.prepare(Request((U,)))
        answer = Message("assistant", "same", reasoning_content=reasoning)
        ids = CODEC.encode_reply(answer)
        call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), message=answer)).call
        session.record_delivery(call, Delivery.DELIVERED)
    assert [fork.cause for fork in classify_forks(session.tree).forks] == [Cause.DUPLICATE] * 2
    export = export_samples(session.tree, ExportPolicy(drop=frozenset({Cause.DUPLICATE})))
    assert len(export.samples) == 2
    assert export.report.is_balanced
