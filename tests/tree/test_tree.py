"""The tree: prepare reads, commit adds, equal outputs become siblings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from branchline import Generation, Message, Request, Session, ToolCall, ToyCodec, timelines_of
from branchline.core.errors import TreeError
from branchline.core.token_arrays import as_ids
from tests.tree.session_driver import CODEC, SessionDriver, assistant, user


def test_the_next_prompt_extends_the_sampled_ids() -> None:
    driver = SessionDriver()
    driver.sample([user("p")], "A1")
    turn = driver.prepare(user("p"), assistant("A1"), user("x"))
    assert driver.codec.decode(turn.prompt_ids) == "user:p\nassistant:A1user:x\nassistant:"
    assert turn.encoded_tokens == 17


def test_choices_of_one_call_are_siblings() -> None:
    driver = SessionDriver()
    node = driver.sample([user("p")], "one", "two", "three")
    call = driver.tree.call_of(node)
    assert len(call.outputs) == 3
    assert [driver.tree.nodes[output].output.choice_index for output in call.outputs] == [0, 1, 2]  # type: ignore[union-attr]


def test_two_identical_requests_in_flight_become_two_siblings() -> None:
    driver = SessionDriver()
    first, second = driver.prepare(user("p")), driver.prepare(user("p"))
    for turn, text in ((first, "one"), (second, "two")):
        driver.session.commit(turn, Generation(CODEC.encode_reply(assistant(text))))
    (context,) = driver.tree.root.all_children()
    assert [child.message.content for child in context.all_children()] == ["one", "two"]


def test_a_rewritten_reply_starts_a_new_branch_and_keeps_the_old_one() -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], "original")
    new = driver.sample([user("p"), assistant("rewritten"), user("q")], "end")
    rewritten = new.path()[1]
    assert rewritten.output is None
    assert rewritten.source_id == -1
    assert sampled in driver.tree.leaves()


def test_stripped_reasoning_starts_a_new_branch_at_its_message() -> None:
    driver = SessionDriver(ToyCodec.chatml(strip_thinking=True))
    thought = Message("assistant", "answer", reasoning_content="plan")
    sampled = driver.sample([user("p")], thought)
    turn = driver.prepare(user("p"), assistant("answer"), user("q"))
    assert turn.rewrite_reason == "think_strip"
    assert turn.parent.message.content == "p"
    assert turn.source_ids == (sampled.id, -1)
    assert "plan" not in driver.codec.decode(turn.prompt_ids)


def test_verbatim_history_keeps_reasoning_on_one_path() -> None:
    driver = SessionDriver(ToyCodec.chatml(strip_thinking=True), history="verbatim")
    sampled = driver.sample([user("p")], Message("assistant", "answer", reasoning_content="plan"))
    turn = driver.prepare(user("p"), assistant("answer"), user("q"))
    assert turn.parent is sampled
    assert "plan" in driver.codec.decode(turn.prompt_ids)


def test_a_reply_inside_a_tool_cycle_keeps_its_reasoning() -> None:
    driver = SessionDriver(ToyCodec.chatml(strip_thinking=True))
    call = Message("assistant", "", reasoning_content="plan", tool_calls=(ToolCall("look", "{}", "c1"),))
    sampled = driver.sample([user("p")], call)
    turn = driver.prepare(user("p"), call, Message("tool", "seen", tool_call_id="c1"))
    assert turn.parent is sampled


def test_versions_and_logprobs_are_kept_per_token() -> None:
    driver = SessionDriver()
    turn = driver.prepare(user("p"))
    generation = Generation(as_ids([65, 66, 67]), np.array([-1, -2, -3], np.float32), np.array([4, 4, 5]))
    call = driver.session.commit(turn, generation).call
    output = driver.tree.nodes[call.outputs[0]].output
    assert output is not None
    assert output.versions == ((2, 4), (1, 5))
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        (Generation(as_ids([1, 2]), np.zeros(1, np.float32)), "logprobs: got 1 for 2 sampled ids"),
        (Generation(as_ids([1, 2]), versions=np.array([1])), "versions: got 1 for 2 sampled ids"),
    ],
)
def test_a_misaligned_generation_is_rejected_and_changes_nothing(
    generation: Generation, problem: str
) -> None:
    driver = SessionDriver()
    turn = driver.prepare(user("p"))
    with pytest.raises(TreeError, match=problem):
        driver.session.commit(turn, generation)
    assert len(driver.tree.nodes) == 1
    assert not driver.tree.calls


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"versions": ((2, 7),)}, "node 2: got 2 versions for 3 sampled ids"),
        ({"versions": ((2, 7), (2, 8))}, "node 2: got 4 versions for 3 sampled ids"),
        ({"versions": ()}, "node 2: got 0 versions for 3 sampled ids"),
        ({"logprobs": np.zeros(2, np.float32)}, "node 2: got 2 logprobs for 3 sampled ids"),
    ],
)
def test_a_misaligned_record_is_rejected_and_changes_nothing(changes: dict[str, Any], problem: str) -> None:
    driver = SessionDriver()
    turn = driver.prepare(user("p"))
    delta = driver.tree.plan(turn, [Generation(as_ids([1, 2, 3]))])
    *context, sampled = delta.nodes
    assert sampled.output is not None
    misaligned = structs.replace(sampled, output=structs.replace(sampled.output, **changes))
    with pytest.raises(TreeError, match=problem):
        driver.session.apply_record(structs.replace(delta, nodes=(*context, misaligned)))
    assert len(driver.tree.nodes) == 1
    assert not driver.tree.calls


def test_a_plan_made_before_another_commit_is_rejected() -> None:
    driver = SessionDriver()
    tree, turn = driver.tree, driver.prepare(user("p"))
    plans = [tree.plan(turn, [Generation(CODEC.encode_reply(assistant(text)))]) for text in ("one", "two")]
    tree.apply(plans[0])
    with pytest.raises(TreeError, match="another commit came between"):
        tree.apply(plans[1])
    assert len(tree.calls) == 1


def test_agents_with_a_shared_history_get_the_same_timelines_in_every_order() -> None:
    sets = []
    for order in ("ab", "ba"):
        driver = SessionDriver()
        driver.sample([user("u")], "hello", agent="a")
        for agent in order:
            driver.sample([user("u"), assistant("hello"), user("u2")], f"from {agent}", agent=agent)
        sets.append(sorted((line.ids.tobytes(), line.mask.tobytes()) for line in timelines_of(driver.tree)))
    assert sets[0] == sets[1]
    assert len(sets[0]) == 2


def test_reasoning_of_another_agent_never_enters_a_prompt() -> None:
    driver = SessionDriver(ToyCodec.chatml())
    driver.sample(
        [user("is it safe?")], Message("assistant", "Yes.", reasoning_content="secret plan"), agent="main"
    )
    turn = driver.prepare(user("2+2=4?"), assistant("Yes."), user("3+3=6?"), agent="judge")
    assert "secret" not in driver.codec.decode(turn.prompt_ids)


def test_a_tree_copies_arrays_that_an_engine_may_reuse() -> None:
    driver = SessionDriver()
    logprobs = np.zeros(10, np.float32)
    generation = Generation(as_ids([1, 2, 3]), logprobs[:3], message=assistant("x"))
    call = driver.session.commit(driver.prepare(user("u")), generation).call
    logprobs[:] = 9
    output = driver.tree.nodes[call.outputs[0]].output
    assert output is not None
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("version", [-1, 2**31])
def test_a_version_out_of_range_is_rejected(version: int) -> None:
    driver = SessionDriver()
    with pytest.raises(TreeError, match="versions: got"):
        driver.session.commit(driver.prepare(user("u")), Generation(as_ids([1]), versions=version))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=6), st.binary(max_size=3)), max_size=8))
def test_raw_prompts_are_token_exact_paths_of_the_tree(calls: list[tuple[bytes, bytes]]) -> None:
    session = Session("s", ToyCodec())
    for prompt, output in calls:
        turn = session.prepare_ids(Request((Message("user"),), is_raw_prompt=True), as_ids(list(prompt)))
        session.commit(turn, Generation(as_ids(list(output)), message=Message("assistant")))
    tree = session.tree
    for call, (prompt, output) in zip(tree.calls, calls, strict=True):
        (node_id,) = call.outputs
        assert bytes(tree.path_ids(tree.nodes[node_id]).tolist()) == prompt + output
