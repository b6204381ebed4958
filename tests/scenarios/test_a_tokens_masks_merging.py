"""SCENARIOS part A: tokens, masks and merging, with ids written by hand."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from random import Random

import numpy as np
import pytest

from branchline import (
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    Tree,
    classify_forks,
    export_samples,
    merge,
    timelines_of,
)
from branchline.core.errors import MissingLogprobsError
from branchline.core.token_arrays import as_ids
from branchline.timelines.causes import Cause
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput

U = partial(Message, "user")
A = partial(Message, "assistant")
S = partial(Message, "system")


def logged(
    messages: list[Message],
    output: Message | str,
    prompt: list[int] | None = None,
    ids: list[int] | None = None,
    *,
    line: int = 0,
    finish_reason: str = "stop",
    logprobs: list[float] | None = None,
    tools: tuple[dict[str, object], ...] = (),
    agent: str = "",
) -> LoggedCall:
    answer = Message("assistant", output) if isinstance(output, str) else output
    values = None if logprobs is None else np.array(logprobs, np.float32)
    logged_output = LoggedOutput(answer, None if ids is None else as_ids(ids), values, finish_reason)
    request = Request(tuple(messages), tools, agent=agent)
    return LoggedCall(request, (logged_output,), None if prompt is None else as_ids(prompt), line=line)


def commit_reply(
    session: Session, codec: ToyCodec, messages: list[Message], output: str | Message
) -> list[int]:
    """Runs one call of a session and returns its prompt ids."""
    turn = session.prepare(Request(tuple(messages)))
    answer = Message("assistant", output) if isinstance(output, str) else output
    session.commit(turn, Generation(codec.encode_reply(answer), message=answer))
    return turn.prompt_ids.tolist()


def ids_and_masks(tree: Tree) -> list[tuple[list[int], list[int]]]:
    return sorted((line.ids.tolist(), line.mask.tolist()) for line in timelines_of(tree))


CHATML = ToyCodec("hand", header=lambda role: (151644, 77091, 198), terminator=(151645,), separator=(198,))


@pytest.mark.parametrize(
    ("sampled", "finish", "mask"),
    [
        ([4, 3, 2, 151645], "stop", [0, 0, 0, 1, 1, 1, 1, 0]),
        ([3, 2, 1], "length", [0, 0, 0, 1, 1, 1, 0, 0]),
    ],
    ids=["stopped", "cut"],
)
def test_1_the_terminator_is_trained_only_if_it_was_sampled(
    sampled: list[int], finish: str, mask: list[int]
) -> None:
    session = Session("s", CHATML)
    reply = Message("assistant", "reply")
    first = session.prepare(Request((U("p"),)))
    session.commit(first, Generation(as_ids(sampled), finish_reason=finish, message=reply))
    second = session.prepare(Request((U("p"), reply, U("q"))))
    session.commit(second, Generation(as_ids([9, 151645]), message=A("next")))
    (line,) = timelines_of(session.tree)
    start = len(first.prompt_ids) - 3
    body = sampled if 151645 in sampled else [*sampled, 151645]
    assert line.ids[start : start + 8].tolist() == [151644, 77091, 198, *body, 198]
    assert line.mask[start : start + 8].tolist() == mask

    calls = [
        logged([U("p")], reply, first.prompt_ids.tolist(), sampled, finish_reason=finish),
        logged([U("p"), reply, U("q")], "next", second.prompt_ids.tolist(), [9, 151645]),
    ]
    for order in permutations(calls):
        assert ids_and_masks(merge(order).tree) == [(line.ids.tolist(), line.mask.tolist())]


WORDS = ("Luminous", "Serendipity", "Ephemeral")


@pytest.mark.parametrize("compare", ["text", "token"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_2_a_branch_is_reattached_in_every_arrival_order(compare: str, with_ids: bool) -> None:
    if compare == "token" and not with_ids:
        pytest.skip("nothing to compare")
    codec = ToyCodec()
    start = [S("You are helpful."), U("Pick a word.")]
    calls = [(start, word) for word in WORDS]
    calls.append(([*start, A("Serendipity"), U("Now pick another.")], "Whimsical"))
    session = Session("s", codec)
    log: list[LoggedCall] = []
    for messages, reply in calls:
        prompt = commit_reply(session, codec, messages, reply)
        ids = codec.encode_reply(A(reply)).tolist()
        log.append(logged(messages, reply, prompt if with_ids else None, ids if with_ids else None))
    expected = [[*WORDS[:1]], ["Ephemeral"], ["Serendipity", "Whimsical"]]
    for order in permutations(log):
        merged = merge(order, MergePolicy(compare=compare))  # type: ignore[arg-type]
        lines = timelines_of(merged.tree)
        assert sorted([node.message.content for node in line.sampled_nodes] for line in lines) == sorted(
            expected
        )
        assert len(list(merged.timelines())) == 3
        if with_ids:
            assert ids_and_masks(merged.tree) == ids_and_masks(session.tree)
    longest = max(timelines_of(session.tree), key=len)
    assert longest.authors == ["env", "env", "llm", "env", "llm"]


def test_3_an_interior_reply_is_one_node_with_two_children() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    commit_reply(session, codec, [U("u1")], "A1")
    commit_reply(session, codec, [U("u1"), A("A1"), U("u2")], "A2")
    turn = session.prepare(Request((U("u1"), A("A1"), U("u3"))))
    assert turn.parent.message.content == "A1"
    assert turn.encoded_tokens == len(b"user:u3\nassistant:")
    session.commit(turn, Generation(codec.encode_reply(A("A3"))))
    tree = session.tree
    (node,) = [node for node in tree.nodes if node.message.content == "A1"]
    assert [child.message.content for child in node.all_children()] == ["u2", "u3"]
    assert len(timelines_of(tree)) == 2
    samples = export_samples(tree, ExportPolicy(include_missing_logprobs=True)).samples
    assert [sample.shares[:2].tolist() for sample in samples] == [[0.5, 0.5], [0.5, 0.5]]


def test_4_empty_texts_with_different_tool_calls_never_match() -> None:
    codec = ToyCodec()
    one = Message("assistant", "", tool_calls=(ToolCall("look", '{"at": 1}'),))
    other = Message("assistant", "", tool_calls=(ToolCall("look", '{"at": 2}'),))
    session = Session("s", codec)
    commit_reply(session, codec, [U("u")], one)
    turn = session.prepare(Request((U("u"), other, Message("tool", "seen"))))
    assert turn.parent.message.content == "u"
    log = [logged([U("u")], one), logged([U("u"), other, Message("tool", "seen")], "done")]
    assert len(list(merge(log).timelines())) == 2


def test_5_append_only_ids_are_one_sequence() -> None:
    calls = [
        logged([U("a")], "b", [1, 2], [3]),
        logged([U("a"), A("b"), U("c")], "d", [1, 2, 3, 4], [5]),
    ]
    for compare in ("text", "token"):
        for order in permutations(calls):
            tree = merge(order, MergePolicy(compare=compare)).tree  # type: ignore[arg-type]
            assert ids_and_masks(tree) == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]


def test_6_unrelated_prompts_are_two_sequences() -> None:
    calls = [logged([U("a")], "b", [1, 2], [3]), logged([U("x")], "y", [9], [10])]
    for compare in ("text", "token"):
        tree = merge(calls, MergePolicy(compare=compare)).tree  # type: ignore[arg-type]
        assert ids_and_masks(tree) == [([1, 2, 3], [0, 0, 1]), ([9, 10], [0, 1])]


DRIFTED_LOG = [
    logged([U("q")], "hello", [1, 2], [20, 21], line=1, logprobs=[-0.5, -0.25]),
    logged([U("q"), A("hello"), U("go")], "ok", [1, 2, 22, 4], [5], line=2, logprobs=[-1.0]),
]
TOKEN_BYTES = {20: b"hel", 21: b"lo", 22: b"hello", 4: b"go", 1: b"?", 2: b":", 5: b"ok"}


def test_7_drift_by_token_is_two_sequences_each_token_trained_once() -> None:
    tree = merge(DRIFTED_LOG, MergePolicy(compare="token")).tree
    assert ids_and_masks(tree) == [([1, 2, 20, 21], [0, 0, 1, 1]), ([1, 2, 22, 4, 5], [0, 0, 0, 0, 1])]
    export = export_samples(tree)
    assert export.report.trained_tokens == 3
    assert all(sample.exact for sample in export.samples)
    (fork,) = classify_forks(tree).forks
    assert fork.cause == Cause.DRIFT


@pytest.mark.parametrize(
    "policy",
    [
        MergePolicy(repair=True, token_bytes=TOKEN_BYTES.__getitem__),
        MergePolicy(inexact=True),
    ],
    ids=["by bytes", "by estimate"],
)
def test_7_drift_by_text_is_one_sequence_with_the_sampled_ids(policy: MergePolicy) -> None:
    for order in permutations(DRIFTED_LOG):
        merged = merge(order, policy)
        (line,) = timelines_of(merged.tree)
        assert line.ids.tolist() == [1, 2, 20, 21, 4, 5]
        assert line.mask.tolist() == [0, 0, 1, 1, 0, 1]
        assert line.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
        assert line.inexact_tokens == 1
        (sample,) = export_samples(merged.tree, ExportPolicy(include_inexact=True)).samples
        assert not sample.exact
        assert sample.inexact_tokens == 1
        # By default only exact tokens are trained, and the rest is accounted for.
        strict = export_samples(merged.tree)
        assert strict.report.trained_tokens == 2
        assert [(drop.reason, drop.tokens) for drop in strict.report.dropped] == [("inexact", 1)]


def test_7_drift_is_a_fork_without_repair() -> None:
    merged = merge(DRIFTED_LOG)
    assert len(timelines_of(merged.tree)) == 2
    assert not merged.repairs
    (fork,) = classify_forks(merged.tree).forks
    assert (fork.cause, fork.branch.depth) == (Cause.DRIFT, 2)


def test_7_through_a_session_drift_cannot_arise() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    turn = session.prepare(Request((U("q"),)))
    session.commit(turn, Generation(as_ids([300, 301]), message=A("hello")))
    turn = session.prepare(Request((U("q"), A("hello"), U("go"))))
    assert turn.prompt_ids[len(b"user:q\nassistant:") :][:2].tolist() == [300, 301]


def test_8_identical_siblings_are_three_samples() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    for _ in range(3):
        commit_reply(session, codec, [U("u")], "same")
    turn = session.prepare(Request((U("u"), A("same"), U("next"))))
    assert turn.ambiguous_match
    assert turn.parent.id == min(session.tree.calls[0].outputs)
    session.commit(turn, Generation(codec.encode_reply(A("end"))))
    export = export_samples(session.tree, ExportPolicy(include_missing_logprobs=True))
    assert len(export.samples) == 3
    assert export.report.trained_tokens == 3 * 4 + 3
    assert [fork.cause for fork in classify_forks(session.tree).forks] == [Cause.DUPLICATE, Cause.DUPLICATE]


def test_8_a_continuation_attaches_to_the_sibling_whose_ids_it_echoes() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    for name in ("one", "two", "three"):
        answer = Message("assistant", "", tool_calls=(ToolCall("look", "{}", id=f"call_{name}"),))
        commit_reply(session, codec, [U("u")], answer)
    shown = Message("assistant", "", tool_calls=(ToolCall("look", "{}", id="call_two"),))
    turn = session.prepare(Request((U("u"), shown, Message("tool", "seen", tool_call_id="call_two"))))
    assert turn.parent.message.tool_calls[0].id == "call_two"
    assert not turn.ambiguous_match
    by_result = Message("assistant", "", tool_calls=(ToolCall("look", "{}", id="renamed"),))
    turn = session.prepare(Request((U("u"), by_result, Message("tool", "seen", tool_call_id="call_three"))))
    assert turn.parent.message.tool_calls[0].id == "call_three"


def test_8_equal_answers_with_different_dropped_reasoning_are_ambiguous_too() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    for thought in ("first", "second"):
        commit_reply(session, codec, [U("u")], Message("assistant", "same", reasoning_content=thought))
    turn = session.prepare(Request((U("u"), A("same"), U("next"))))
    assert turn.ambiguous_match
    assert turn.parent.message.reasoning_content == "first"
    echoed = Message("assistant", "same", reasoning_content="second")
    turn = session.prepare(Request((U("u"), echoed, U("next"))))
    assert turn.parent.message.reasoning_content == "second"


def test_8_equal_samples_of_a_log_are_merged_only_by_policy() -> None:
    calls = [logged([U("u")], "same", [1], [2, 3], line=line) for line in (1, 2, 3)]
    assert len(timelines_of(merge(calls).tree)) == 3
    deduplicated = merge(calls, MergePolicy(deduplicate=True))
    assert len(timelines_of(deduplicated.tree)) == 1
    assert len(deduplicated.duplicates) == 2
    assert len(list(deduplicated.timelines())) == 1


def test_8_in_a_log_ids_choose_between_equal_texts() -> None:
    calls = [
        logged([U("u")], "same", [1], [2, 3], line=1),
        logged([U("u")], "same", [1], [7], line=2),
        logged([U("u"), A("same"), U("next")], "end", [1, 7, 4], [5], line=3),
    ]
    for order in permutations(calls):
        assert ids_and_masks(merge(order).tree) == [
            ([1, 2, 3], [0, 1, 1]),
            ([1, 7, 4, 5], [0, 1, 0, 1]),
        ]


def test_9_a_long_timeline_captured_first_still_absorbs_its_prefix() -> None:
    calls = [
        logged([U("a"), A("b"), U("c"), A("d"), U("e")], "f", [1, 2, 3, 4, 5], [6]),
        logged([U("a")], "b", [1], [2]),
        logged([U("a"), A("b"), U("c")], "d", [1, 2, 3], [4]),
    ]
    for order in permutations(calls):
        assert ids_and_masks(merge(order).tree) == [([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1])]


def test_10_tool_lists_separate_equal_conversations_unless_ignored() -> None:
    tool: dict[str, object] = {"type": "function", "function": {"name": "look"}}
    calls = [
        logged([U("a")], "b", tools=(tool,)),
        logged([U("a"), A("b"), U("c")], "d"),
    ]
    assert len(timelines_of(merge(calls, MergePolicy(ignore_tools=False)).tree)) == 2
    assert len(timelines_of(merge(calls, MergePolicy(ignore_tools=True)).tree)) == 1


def test_11_missing_logprobs_stay_aligned_and_must_be_allowed() -> None:
    calls = [
        logged([U("a")], "b", [1, 2], [3]),
        logged([U("a"), A("b"), U("c")], "d", [1, 2, 3, 4], [5, 6], logprobs=[-1.0, -2.0]),
    ]
    tree = merge(calls).tree
    (line,) = timelines_of(tree)
    np.testing.assert_array_equal(line.logprobs, np.array([0, 0, np.nan, 0, -1, -2], np.float32))
    with pytest.raises(MissingLogprobsError, match="1 of 3 sampled tokens"):
        export_samples(tree)
    (sample,) = export_samples(tree, ExportPolicy(include_missing_logprobs=True)).samples
    assert sample.missing_logprobs == 1
    assert len(sample.response_logprobs) == len(sample.response_ids)


def test_12_a_repair_loop_trains_the_good_reply_once_where_it_was_sampled() -> None:
    codec = ToyCodec()
    s, u, err, u2 = S("s"), U("u"), U("err"), U("u2")
    calls = [
        ([s, u], "bad"),
        ([s, u, A("bad"), err], "good"),
        ([s, u, A("good"), u2], "x"),
    ]
    session = Session("s", codec)
    log: list[LoggedCall] = []
    for messages, reply in calls:
        prompt = commit_reply(session, codec, messages, reply)
        log.append(logged(messages, reply, prompt, codec.encode_reply(A(reply)).tolist(), line=len(log) + 1))
    for tree in (session.tree, *(merge(order).tree for order in permutations(log))):
        replies = sorted([node.message.content for node in line.sampled_nodes] for line in timelines_of(tree))
        assert replies == [["bad", "good"], ["x"]]
        (fork,) = classify_forks(tree).forks
        assert fork.cause == Cause.REPAIR_LOOP
        report = export_samples(tree, ExportPolicy(include_missing_logprobs=True)).report
        assert report.trained_tokens == report.sampled_tokens == len("bad") + len("good") + len("x")
    assert ids_and_masks(merge(log).tree) == ids_and_masks(session.tree)


def test_13_an_empty_generation_is_recorded_and_continued() -> None:
    codec = ToyCodec.chatml()
    session = Session("s", codec)
    turn = session.prepare(Request((U("u"),)))
    call = session.commit(turn, Generation(as_ids([]), finish_reason="length")).call
    node = session.tree.nodes[call.outputs[0]]
    assert node.message.is_empty
    assert node.output is not None
    assert node.output.finish_reason == "length"
    turn = session.prepare(Request((U("u"), A(""), U("go on"))))
    assert turn.parent is node
    session.commit(turn, Generation(codec.encode_reply(A("yes")), np.zeros(4, np.float32)))
    (line,) = timelines_of(session.tree)
    assert [node.end - node.sampled_start for node in line.sampled_nodes] == [0, 4]
    assert export_samples(session.tree).report.is_balanced
    assert len(timelines_of(merge([logged([U("u")], "", [1], [], finish_reason="length")]).tree)) == 1


def test_14_plans_reach_every_cause() -> None:
    """SCENARIOS A14 is tests/test_contract.py; this checks that its plans contain every cause."""
    from branchline.testing.plans import PlanGenerator

    seen = {call.expected_cause for seed in range(40) for call in PlanGenerator(Random(seed)).generate(8)}
    not_agents = {Cause.UNKNOWN, Cause.DRIFT, Cause.OTHER_MODEL, Cause.THINK_STRIP, Cause.TEMPLATE_REWRITE}
    assert not set(Cause) - seen - not_agents
