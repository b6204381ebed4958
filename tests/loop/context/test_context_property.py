"""Properties: random tools, deletions, undos, compactions, cancellations and resumes keep C1 to C6, and the
masks of all samples follow the rule of StateLM."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, ToyCodec, export_samples, timelines_of
from branchline.chat.base import Codec
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Origin
from branchline.export.samples import ShareMode
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.context.context_loop import CONTEXT_TOOLS, ContextOptions
from branchline.loop.context.tools import build_context_tools
from branchline.loop.model import SessionModel
from branchline.loop.output import LoopOutput
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.runtime.compaction import CompactionPolicy, DropLeastImportant, DropOldest, Summarize
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.chat.families import load_codec
from tests.loop.context.harness import (
    QUESTION,
    SYSTEM,
    ContextHarness,
    EchoTool,
    answer,
    call,
    context_harness,
    encode_messages,
)
from tests.loop.harness import ResumableScriptedEngine, run, tree_values
from tests.test_contract import timeline_set

LEFT_OUT = ("analyzeText", "loadDocument", "updateNote")
TOOLS = (*[name for name in CONTEXT_TOOLS if name not in LEFT_OUT], "echo")
FINISH = answer(call("finish", answer="x"), text="done")
words = st.text("abc é", max_size=8).map(str.strip)
ids = st.integers(0, 14)
deletions = st.one_of(
    st.lists(ids, min_size=1, max_size=3).map(lambda some: call("deleteContext", message_ids=some)),
    ids.map(lambda one: call("deleteContext", msg_id=one)),
)
undos = st.sampled_from([call("undoDelete"), call("redoDelete")])
others = st.one_of(
    st.integers(0, 300).map(lambda count: call("echo", text="w " * count)),
    st.builds(lambda key, text: call("note", key=key, summary="s", content=text), words, words),
    words.map(lambda key: call("readNote", key=key)),
    st.integers(0, 3).map(lambda chunk: call("readChunk", chunk_id=chunk, enable_scan=True)),
    st.sampled_from(
        [
            call("buildIndex", chunk_size=300, overlap=20),
            call("checkBudget"),
            call("readNote"),
            call("nothing"),
        ]
    ),
    words.map(lambda text: call("searchEngine", keyword=f"item {text}")),
)


def turns(calls: st.SearchStrategy[ToolCall]) -> st.SearchStrategy[Message]:
    return st.builds(
        lambda made, text, reasoning: answer(*made, text=text, reasoning=reasoning),
        st.lists(calls, min_size=1, max_size=3),
        words,
        st.one_of(st.just(""), words),
    )


plain_scripts = st.lists(turns(st.one_of(deletions, others)), max_size=7)
scripts = st.lists(turns(st.one_of(deletions, deletions, undos, others, others)), max_size=8)
long_echoes = st.integers(50, 250).map(lambda count: call("echo", text="w " * count))
filling_scripts = st.lists(
    turns(st.one_of(long_echoes, long_echoes, deletions, undos)), min_size=3, max_size=8
)
"""Their prompts soon become too long."""
cancel_points = st.lists(st.lists(st.integers(0, 8), max_size=2), max_size=6)
policies = st.sampled_from([None, DropOldest(2), DropLeastImportant(keep_last=2), Summarize(keep_last=2)])
toy_codecs = [ToyCodec.chatml(), ToyCodec.chatml(strip_thinking=True)]
histories = st.sampled_from(["template", "verbatim"])


def first_prompt_tokens(codec: Codec) -> int:
    workspace: Any = None
    own = build_context_tools(workspace, [name for name in CONTEXT_TOOLS if name in TOOLS])
    schemas = [tool.schema for tool in (EchoTool(), *own)]
    return codec.count_tokens((Message("system", SYSTEM), Message("user", QUESTION)), schemas)


async def run_script(
    script: list[Message],
    codec: Codec,
    room: int | None,
    policy: CompactionPolicy | None,
    points: list[list[int]],
    setup: str = "",
    **options: Any,
) -> tuple[LoopState, ContextHarness, LoopOutput]:
    limits = None if room is None else LoopLimits(model_length=first_prompt_tokens(codec) + room)
    # Summaries take answers of the script, so it has more than enough.
    answers = [*script, *[FINISH] * (len(script) + 3)]
    async with context_harness(
        answers,
        setup,
        codec=codec,
        limits=limits,
        options=ContextOptions(compaction=policy if room is not None else None),
        tools=TOOLS,
        cancel_points=points,
        **options,
    ) as s:
        before: list[Any] = []
        s.on_cancel = lambda: before.append(tree_values(s.managed))
        state = await s.run()
        nodes, calls = tree_values(s.managed)
        for earlier_nodes, earlier_calls in before:
            assert nodes[: len(earlier_nodes)] == earlier_nodes, "C4: what was recorded is unchanged"
            assert [one[:2] for one in calls[: len(earlier_calls)]] == [one[:2] for one in earlier_calls]
        check_contract(s)
        names = {one.name for message in script for one in message.tool_calls}
        is_single_path = names.isdisjoint(("undoDelete", "redoDelete")) and room is None
        check_masks(s, is_single_path=is_single_path)
        output = await s.output(state)
        check_turns(s, state, output)
        return state, s, output


def check_contract(s: ContextHarness) -> None:
    tree = s.tree
    paths = {tree.path_ids(node).tobytes(): node for node in tree.nodes if node.is_sampled}
    for reply in s.model.replies:
        node = paths[np.concatenate((reply.prompt_ids, reply.ids)).astype(np.int32).tobytes()]
        assert node.sampled_ids is not None, "C1, C3"
        assert node.sampled_ids.tolist() == reply.ids.tolist()
        assert node.output is not None
        assert node.output.logprobs is not None
        assert reply.logprobs is not None
        assert node.output.logprobs.tolist() == reply.logprobs.tolist()
    sampled = sum(len(reply.ids) for reply in s.model.replies)
    modes: tuple[ShareMode, ...] = ("split", "first")
    for shares in modes:
        export = export_samples(tree, ExportPolicy(shares=shares))
        assert export.report.is_balanced, "C2"
        assert not export.report.dropped
        assert export.report.trained_tokens == sampled
        trained = sum(float(sample.shares.sum()) for sample in export.samples)
        assert trained == pytest.approx(sampled)
    for line in timelines_of(tree):
        arrays = (line.ids, line.origins, line.mask, line.logprobs, line.versions, line.token_node_ids)
        assert {len(array) for array in arrays} == {len(line)}, "C6"
        assert ((line.origins == Origin.SAMPLED) == (line.versions >= 0)).all()


def statelm_samples(s: ContextHarness) -> list[tuple[list[int], list[int]]]:
    """Ids and masks by the rule of StateLM: a prompt that does not continue the ids so far leaves a snapshot,
    and everything before the next answer has mask 0."""
    samples: list[tuple[list[int], list[int]]] = []
    current: list[int] = []
    mask: list[int] = []
    for reply in s.model.replies:
        prompt, sampled = reply.prompt_ids.tolist(), reply.ids.tolist()
        if prompt[: len(current)] == current:
            mask = [*mask, *[0] * (len(prompt) - len(current)), *[1] * len(sampled)]
        else:
            samples.append((current, mask))
            mask = [*[0] * len(prompt), *[1] * len(sampled)]
        current = [*prompt, *sampled]
    return [*samples, (current, mask)]


def check_masks(s: ContextHarness, *, is_single_path: bool) -> None:
    """A token has mask 1 where it was sampled after exactly the ids before it, and in one sample only.

    Without undo and compaction no path is continued again, and the samples are exactly those of StateLM.
    """
    answers = [
        (np.concatenate((reply.prompt_ids, reply.ids)).tolist(), len(reply.prompt_ids))
        for reply in s.model.replies
    ]
    trained: set[tuple[int, ...]] = set()
    found: list[tuple[list[int], list[int]]] = []
    for sample in export_samples(s.tree, ExportPolicy(shares="first")).samples:
        tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
        mask = [*[0] * len(sample.prompt_ids), *sample.response_mask.tolist()]
        found.append((tokens, mask))
        wanted = [0] * len(tokens)
        for path, start in answers:
            if tokens[: len(path)] == path and tuple(path) not in trained:
                wanted[start : len(path)] = [1] * (len(path) - start)
                trained.add(tuple(path))
        assert mask == wanted
    if is_single_path:
        assert found == [one for one in statelm_samples(s) if any(one[1])]


def check_turns(s: ContextHarness, state: LoopState, output: LoopOutput) -> None:
    replies = {reply.call_id: reply for reply in s.model.replies}
    assert [turn.call_id for turn in output.turns] == [one.call_id for one in state.answers]
    for turn in output.turns:
        reply, sample = replies[turn.call_id], output.outputs[turn.sample_index]
        assert turn.prompt_ids.tolist() == reply.prompt_ids.tolist()
        assert sample.response_ids[turn.start : turn.end].tolist() == reply.ids.tolist()


def sampled(output: LoopOutput) -> list[Any]:
    return [
        (
            one.prompt_ids.tolist(),
            one.response_ids.tolist(),
            one.response_mask.tolist(),
            one.response_logprobs.tolist(),
            one.response_versions.tolist(),
            one.shares.tolist(),
        )
        for one in output.outputs
    ]


def outcome(state: LoopState) -> Any:
    assert state.context is not None
    context = state.context
    return (
        [(m.role, m.content) for m in state.messages],
        (state.stop_reason, state.reward_score, state.metrics.context_length_exceeded, state.tokens),
        (context.deletions, context.undone, context.compactions, context.scanned_chunks),
        {key: (note.summary, note.content) for key, note in context.notes.items()},
    )


async def compare(
    script: list[Message],
    codec: Codec,
    room: int | None,
    policy: CompactionPolicy | None,
    points: list[list[int]],
    **options: Any,
) -> None:
    state, _, output = await run_script(script, codec, room, policy, points, **options)
    assert state.phase is LoopPhase.TERMINATED
    assert state.stop_reason in (StopReason.FINISH, StopReason.MODEL_LENGTH)
    assert (state.reward_score == -1.0) == (state.stop_reason is StopReason.MODEL_LENGTH)
    plain, harness, plain_output = await run_script(script, codec, room, policy, [], **options)
    assert harness.cancel_count == 0
    assert sampled(output) == sampled(plain_output)
    assert outcome(state) == outcome(plain)
    assert not [fault for fault in state.faults if fault.operation == "repeated"]


@settings(max_examples=25)
@given(
    scripts,
    st.sampled_from(toy_codecs),
    st.none() | st.integers(100, 1500),
    policies,
    cancel_points,
    histories,
)
def test_edits_compactions_and_cancellations_keep_the_contract(
    script: list[Message],
    codec: Codec,
    room: int | None,
    policy: CompactionPolicy | None,
    points: list[list[int]],
    history: str,
) -> None:
    run(lambda: compare(script, codec, room, policy, points, history=history))


@settings(max_examples=15)
@given(
    filling_scripts,
    st.sampled_from(toy_codecs),
    st.integers(1200, 3000),
    st.sampled_from([DropOldest(2), DropLeastImportant(keep_last=3), Summarize(keep_last=2)]),
    cancel_points,
)
def test_compactions_keep_the_contract(
    script: list[Message], codec: Codec, room: int, policy: CompactionPolicy, points: list[list[int]]
) -> None:
    run(lambda: compare(script, codec, room, policy, points))


@settings(max_examples=15)
@given(plain_scripts, st.sampled_from(toy_codecs), cancel_points)
def test_without_undo_and_compaction_samples_are_those_of_statelm(
    script: list[Message], codec: Codec, points: list[list[int]]
) -> None:
    run(lambda: compare(script, codec, None, None, points))


@settings(max_examples=6)
@given(scripts, st.none() | st.integers(60, 500), policies, cancel_points, histories)
def test_a_real_tokenizer_keeps_the_contract(
    script: list[Message],
    room: int | None,
    policy: CompactionPolicy | None,
    points: list[list[int]],
    history: str,
) -> None:
    codec = load_codec("qwen3")
    run(lambda: compare(script, codec, room, policy, points, history=history))


@settings(max_examples=6)
@given(scripts, st.integers(100, 1500), policies, cancel_points)
def test_over_http_the_trajectory_is_the_same(
    script: list[Message], room: int, policy: CompactionPolicy | None, points: list[list[int]]
) -> None:
    async def test() -> None:
        codec = toy_codecs[0]
        state, s, output = await run_script(script, codec, room, policy, points)
        remote, other, remote_output = await run_script(script, codec, room, policy, points, "over http")
        assert tree_values(other.managed) == tree_values(s.managed)
        assert sampled(remote_output) == sampled(output)
        assert outcome(remote) == outcome(state)

    run(test)


INTERRUPTED = [
    answer(call("buildIndex", chunk_size=300), call("note", key="a", summary="s", content="c"), text="so"),
    answer(call("readChunk", chunk_id=1, enable_scan=True), call("searchEngine", keyword="item")),
    answer(call("deleteContext", message_ids=[3]), call("updateNote", key="a", mode="append", content="d")),
    answer(call("echo", text="w " * 200), call("undoDelete")),
    answer(call("echo", text="w " * 200), call("readNote", key="a")),
]


@settings(max_examples=8)
@given(st.lists(st.integers(0, 70), max_size=8))
def test_a_cancellation_may_come_at_any_time(moments: list[int]) -> None:
    async def interrupted(moments: list[int]) -> Any:
        codec = toy_codecs[0]
        tools = (*TOOLS, "updateNote")
        limits = LoopLimits(model_length=first_prompt_tokens(codec) + 1500)
        options = ContextOptions(compaction=Summarize(keep_last=2))
        answers = [*INTERRUPTED, *[FINISH] * 5]
        async with context_harness(answers, codec=codec, limits=limits, options=options, tools=tools) as s:
            state = LoopState.begin(s.task(), "t")
            for moment in [*moments, None]:
                cancel = CancelToken()
                task = asyncio.create_task(run_agent(state, s.context(cancel)))
                for _ in range(moment or 0):
                    await asyncio.sleep(0)
                if moment is not None:
                    cancel.cancel()
                state = LoopState.decode((await task).encode())
            check_contract(s)
            assert not state.faults
            return sampled(await s.output(state)), outcome(state)

    async def test() -> None:
        assert await interrupted(moments) == await interrupted([])

    run(test)


@settings(max_examples=5)
@given(st.lists(scripts, min_size=2, max_size=3))
def test_c5_agents_of_one_session_give_the_same_timelines_in_any_order(many: list[list[Message]]) -> None:
    async def run_all(*, at_once: bool) -> list[tuple[bytes, bytes]]:
        codec = toy_codecs[0]
        managed, _, _ = SessionStore(codec).open(SessionOptions())

        async def one(index: int, script: list[Message]) -> None:
            engine = ResumableScriptedEngine(encode_messages(codec, [*script, FINISH]))
            task = Task((Message("user", f"agent {index}"),), "state", tools=TOOLS, documents={"d": "a b c"})
            model = SessionModel(managed, engine, agent=f"agent-{index}")
            context = AgentContext(model, ToolRegistry([EchoTool()]), report=False)
            assert (await run_agent(LoopState.begin(task, "t"), context)).is_finished

        if at_once:
            await asyncio.gather(*[one(index, script) for index, script in enumerate(many)])
        else:
            for index, script in enumerate(many):
                await one(index, script)
        assert export_samples(managed.session.tree).report.is_balanced
        return timeline_set(managed.session.tree)

    async def test() -> None:
        assert await run_all(at_once=True) == await run_all(at_once=False)

    run(test)
