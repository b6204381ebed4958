from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.toy import ToyCodec
from branchline.core.call import Request
from branchline.core.context_edits import DELETED_CONTENT, ContextEdit, build_view, is_deletion_stub
from branchline.core.errors import CompactionError, ContextLengthError, InputError
from branchline.core.message import Message, ToolCall
from branchline.engines.base import SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.runtime.call_lifecycle import prepare_call
from branchline.runtime.call_record import CallRequest
from branchline.runtime.compaction import (
    SUMMARY_INSTRUCTION,
    Compaction,
    CompactionOptions,
    CompactionPolicy,
    DropLeastImportant,
    DropOldest,
    SessionCompactions,
    Summarize,
    build_edit,
    compacted_prefix,
    plan_edit,
    score_by_overlap,
)
from branchline.runtime.managed_session import ManagedSession, read_session_options
from branchline.runtime.session_store import SessionStore
from branchline.timelines.causes import Cause, classify_forks
from branchline.tree.journal import Journal
from tests.runtime.harness import complete_call, open_session

LONG = "a long text that a stub would shorten, " * 4


def conversation(turns: int) -> list[Message]:
    """A task, and turns of a call and its result."""
    messages = [Message("system", "s"), Message("user", "find the key")]
    for turn in range(turns):
        calls = (ToolCall("look", f'{{"at": {turn}}}', f"c{turn}"),)
        messages.append(Message("assistant", f"turn {turn} {LONG}", tool_calls=calls))
        messages.append(Message("tool", f"seen {turn} {LONG}", tool_call_id=f"c{turn}", name="look"))
    return messages


def positions(policy: CompactionPolicy, messages: Sequence[Message], excess: int) -> tuple[int, ...] | None:
    plan = policy.plan(messages, [len(message.content) for message in messages], excess)
    if plan is not None:
        plan.check(messages)
    return None if plan is None else plan.positions


# -- policies ----------------------------------------------------------------------------------------


def test_the_oldest_messages_are_dropped_until_the_prompt_is_short_enough() -> None:
    messages = conversation(4)
    assert positions(DropOldest(2), messages, 1) == (2,)
    assert positions(DropOldest(2), messages, len(messages[2].content)) == (2, 3), "stubs have a length too"
    assert positions(DropOldest(2), messages, 10**6) == (2, 3, 4, 5, 6, 7)
    assert positions(DropOldest(8), messages, 10**6) is None


def test_messages_that_a_stub_would_not_shorten_stay() -> None:
    messages = conversation(2)
    messages[2] = Message("assistant", "ok")
    assert positions(DropOldest(1), messages, 10**6) == (3, 4)
    stubs = build_view(messages, [ContextEdit((3, 4))]).messages
    assert positions(DropOldest(1), stubs, 10**6) is None


def test_the_least_important_messages_are_dropped_first() -> None:
    messages = conversation(3)
    messages[3] = msgspec.structs.replace(messages[3], content=f"find the key: it is here {LONG}")
    assert score_by_overlap(messages, 3) > score_by_overlap(messages, 5)
    assert positions(DropLeastImportant(keep_last=1), messages, 250) == (2, 4, 5)
    last_first = DropLeastImportant(lambda messages, position: -position, keep_last=1)
    assert positions(last_first, messages, 1) == (6,)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array, int])
def test_scores_may_be_numbers_of_numpy(kind: Any) -> None:
    messages = conversation(3)
    assert positions(DropLeastImportant(lambda _, position: kind(-position), keep_last=1), messages, 1) == (
        6,
    )


def test_a_summary_covers_whole_turns() -> None:
    messages = conversation(4)
    plan = Summarize(keep_last=3).plan(messages, [1] * len(messages), 5)
    assert plan == Compaction((2, 3, 4, 5), SUMMARY_INSTRUCTION), "the last result stays with its call"
    assert Summarize(keep_last=20).plan(messages, [1] * len(messages), 5) is None


@pytest.mark.parametrize(
    ("compaction", "problem"),
    [
        (Compaction(()), "expected distinct positions in order"),
        (Compaction((3, 2)), "expected distinct positions in order"),
        (Compaction((2, 99)), "expected positions of 6 messages"),
        (Compaction((1, 2)), "1 is a user message, which cannot be replaced"),
        (Compaction((0,), "sum up"), "0 is a system message"),
        (Compaction((2, 4), "sum up"), "separates no call from its results"),
        (Compaction((2,), "sum up"), "separates no call from its results"),
        (Compaction((3, 4, 5), "sum up"), "separates no call from its results"),
    ],
)
def test_a_plan_that_cannot_be_applied_is_refused(compaction: Compaction, problem: str) -> None:
    class Broken:
        def plan(self, messages: object, tokens: object, excess: int) -> Compaction:
            return compaction

    with pytest.raises(CompactionError, match=problem):
        plan_edit(Broken(), build_view(conversation(2), []), None, 1)


@given(st.integers(0, 6), st.integers(1, 6), st.integers(1, 3000), st.sampled_from(["drop", "score", "sum"]))
def test_plans_are_valid_and_keep_the_task_and_the_latest_messages(
    turns: int, keep_last: int, excess: int, kind: str
) -> None:
    policies: dict[str, CompactionPolicy] = {
        "drop": DropOldest(keep_last),
        "score": DropLeastImportant(keep_last=keep_last),
        "sum": Summarize(keep_last=keep_last),
    }
    policy = policies[kind]
    messages = conversation(turns)
    view = build_view(messages, [])
    plan = plan_edit(policy, view, None, excess)
    assert plan == plan_edit(policy, view, None, excess), "the same arguments give the same plan"
    if plan is not None:
        assert min(plan.positions) >= 2
        assert max(plan.positions) < len(messages) - keep_last
        edited = build_view(messages, [build_edit(view, [], plan, "short")]).messages
        assert sum(len(m.content) for m in edited) < sum(len(m.content) for m in messages)


def test_without_a_summary_the_messages_become_stubs() -> None:
    messages = [*conversation(2), Message("user", "and?"), *conversation(1)[2:]]
    view = build_view(messages, [])
    plan = Summarize(keep_last=2).plan(messages, [1] * len(messages), 5)
    assert plan is not None
    assert 6 in plan.positions, "a user message can be summarised"
    edit = build_edit(view, [], plan, "  ")
    assert edit == ContextEdit((2, 3, 4, 5)), "but it has no stub"


# -- sessions ----------------------------------------------------------------------------------------


def test_edits_apply_to_conversations_that_begin_with_the_same_messages() -> None:
    messages = conversation(4)
    compactions = SessionCompactions([compacted_prefix(messages, "", ContextEdit((2, 3)))])
    _, edits = compactions.view([*messages, Message("user", "and?")], "")
    assert edits == [ContextEdit((2, 3))]
    for other, agent in (
        (messages, "critic"),
        ([*messages[:1], Message("user", "another task"), *messages[2:]], ""),
        (messages[:3], ""),
    ):
        view, edits = compactions.view(other, agent)
        assert (view.messages, edits) == (tuple(other), [])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"policy": "drop_oldest"}, "trigger_tokens"),
        ({"trigger_tokens": 0}, "trigger_tokens"),
        ({"trigger_tokens": 10, "policy": "shrink"}, "policy"),
        (
            {"trigger_tokens": 10, "target_tokens": 11},
            "target_tokens: got 11, expected at most trigger_tokens",
        ),
        ({"trigger_tokens": 10, "size": 1}, "size"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_session_options({"compaction": options})


def test_options_build_their_policy() -> None:
    assert CompactionOptions(100).target == 60
    assert CompactionOptions(100, 30).target == 30
    assert CompactionOptions(100).build_policy() == DropOldest()
    scored = CompactionOptions(100, policy="drop_least_important", keep_last=2).build_policy()
    assert scored == DropLeastImportant(keep_last=2)
    summarized = CompactionOptions(100, policy="summarize", summary_instruction="Sum up.").build_policy()
    assert summarized == Summarize("Sum up.")


def reply(request: ScriptedRequest) -> Message:
    if SUMMARY_INSTRUCTION in request.prompt_text.rpartition("user:")[2]:
        return Message("assistant", f"The drawers were empty. ({request.call_index})")
    number = request.call_index
    calls = (ToolCall("look", f'{{"at": {number}}}', f"c{number}"),)
    return Message("assistant", f"I look at place {number}. " + LONG, tool_calls=calls)


async def run_agent(managed: ManagedSession, engine: ScriptedEngine, turns: int) -> list[Message]:
    """An agent that sends its whole history with every call and compacts nothing."""
    history = [Message("system", "s"), Message("user", "find the key")]
    for turn in range(turns):
        request = CallRequest(Request(tuple(history)), SamplingParams(max_tokens=1000))
        _, result = await complete_call(managed, engine, request)
        history.append(result.message)
        history.append(
            Message("tool", f"nothing at {turn} {LONG}", tool_call_id=result.message.tool_calls[0].id)
        )
    return history


@pytest.mark.parametrize(
    # Stubs have a length too, so dropping lasts for fewer turns.
    ("policy", "turns"),
    [("drop_oldest", 10), ("drop_least_important", 10), ("summarize", 16)],
)
def test_a_session_compacts_conversations_that_become_too_long(policy: str, turns: int) -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        options = {"trigger_tokens": 2200, "target_tokens": 1200, "policy": policy, "keep_last": 2}
        managed = open_session(compaction=options)
        await run_agent(managed, engine, turns)
        is_summary = [SUMMARY_INSTRUCTION in engine.codec.decode(one) for one in engine.received_prompts]
        lengths = [len(prompt) for prompt in engine.received_prompts]
        assert max(one for one, asked in zip(lengths, is_summary, strict=True) if not asked) <= 2200
        tree = managed.session.tree
        edits = [prefix.edit for prefix in managed.compactions.prefixes]
        assert len(edits) >= 2
        report = managed.export().report
        assert report.is_balanced
        assert not report.dropped
        assert len(tree.calls) == turns + (len(edits) if policy == "summarize" else 0)
        # Between two compactions every prompt continues the one before it.
        forks = classify_forks(tree).forks
        expected = Cause.COMPACTION if policy == "summarize" else Cause.CONTEXT_DELETE
        assert [fork.cause for fork in forks if fork.cause != expected] == []
        starts = sum(
            prompt.tolist()[: len(before)] != before.tolist()
            for before, prompt in zip(engine.received_prompts, engine.received_prompts[1:], strict=False)
        )
        assert starts <= len(edits) * (2 if policy == "summarize" else 1)
        text = engine.codec.decode(engine.received_prompts[-1])
        if policy == "summarize":
            assert text.count("The drawers were empty.") == 1
        else:
            assert DELETED_CONTENT in text

    asyncio.run(test())


def test_an_agents_own_view_of_its_tokens_is_that_of_the_compacted_conversation() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        managed = open_session(compaction={"trigger_tokens": 2200, "keep_last": 2})
        history = await run_agent(managed, engine, 8)
        counted = await prepare_call(managed, CallRequest(Request(tuple(history)), SamplingParams()))
        view, edits = managed.compactions.view(history, "")
        assert edits
        assert len(counted.prompt_ids) == managed.session.codec.count_tokens(view.messages)
        assert len(counted.prompt_ids) < managed.session.codec.count_tokens(history) - 500

    asyncio.run(test())


def test_concurrent_calls_compact_a_conversation_once() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        managed = open_session(compaction={"trigger_tokens": 2200, "policy": "summarize", "keep_last": 2})
        request = CallRequest(Request(tuple(conversation(8))), SamplingParams(max_tokens=1000))
        await asyncio.gather(*[complete_call(managed, engine, request) for _ in range(3)])
        assert len(managed.compactions.prefixes) == 1
        assert len(managed.session.tree.calls) == 4

    asyncio.run(test())


def test_a_conversation_that_cannot_be_shortened_is_sent_as_it_is() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        for policy in ("drop_oldest", "summarize"):
            managed = open_session(compaction={"trigger_tokens": 5, "policy": policy})
            await complete_call(managed, engine)
            assert not managed.compactions.prefixes

    asyncio.run(test())


def test_a_model_that_writes_no_summary_loses_the_messages_only_once() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda request: "")
        managed = open_session(compaction={"trigger_tokens": 100, "policy": "summarize", "keep_last": 1})
        messages = [*conversation(2), Message("user", "and?"), Message("user", "well?")]
        request = CallRequest(Request(tuple(messages)), SamplingParams(max_tokens=1000))
        await complete_call(managed, engine, request)
        (prefix,) = managed.compactions.prefixes
        assert prefix.edit == ContextEdit((2, 3, 4, 5))

    asyncio.run(test())


@pytest.mark.parametrize("policy", ["drop_oldest", "summarize"])
def test_after_a_restart_the_compacted_conversation_continues(policy: str, tmp_path: Path) -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        options = {"id": "s", "compaction": {"trigger_tokens": 2200, "policy": policy, "keep_last": 2}}
        with Journal(tmp_path / "journal") as journal:
            store = SessionStore(engine.codec, journal=journal)
            managed, _, _ = store.open(read_session_options(options))
            history = await run_agent(managed, engine, 8)
            request = CallRequest(Request(tuple(history)), SamplingParams(max_tokens=1000))
            before = (await prepare_call(managed, request)).prompt_ids.tolist()
        with Journal(tmp_path / "journal") as journal:
            again = next(iter(SessionStore(engine.codec, journal=journal)))
            assert again.compactions.prefixes == managed.compactions.prefixes
            assert (await prepare_call(again, request)).prompt_ids.tolist() == before
            view, _ = again.compactions.view(history, "")
            assert any(is_deletion_stub(m) for m in view.messages) == (policy == "drop_oldest")

    asyncio.run(test())


def test_the_limit_of_a_prompt_applies_after_the_compaction() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), reply)
        request = CallRequest(Request(tuple(conversation(8))), SamplingParams(max_tokens=1000))
        options = {"trigger_tokens": 1500, "policy": "summarize", "keep_last": 2}
        _, result = await complete_call(
            open_session(compaction=options), engine, request, max_prompt_tokens=1500
        )
        assert len(result.prompt_ids) <= 1500
        managed = open_session(compaction={"trigger_tokens": 1500, "keep_last": 18})
        with pytest.raises(ContextLengthError):
            await complete_call(managed, engine, request, max_prompt_tokens=1500)

    asyncio.run(test())


def test_raw_prompts_are_not_compacted() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda request: "ok")
        managed = open_session(compaction={"trigger_tokens": 10})
        request = CallRequest(Request((), is_raw_prompt=True), SamplingParams(), raw_prompt="x" * 50)
        _, result = await complete_call(managed, engine, request)
        assert len(result.prompt_ids) == 50
        with pytest.raises(ContextLengthError):
            await complete_call(managed, engine, request, max_prompt_tokens=20)

    asyncio.run(test())
