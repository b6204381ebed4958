"""Properties: cancelled and resumed loops keep the contract, and their output is the tree's export."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ToyCodec, export_samples, timelines_of
from branchline.chat.base import Codec
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Origin
from branchline.engines.scripted import ReplyRule, ScriptedEngine, ScriptedRequest
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.model import SessionModel
from branchline.loop.output import LoopOutput, build_output
from branchline.loop.state import LoopPhase, LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection, function_schema
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.chat.families import load_codec
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    run,
    tree_values,
)
from tests.test_contract import timeline_set

words = st.text("abc é", min_size=0, max_size=6).map(str.strip)
scripted_calls = st.builds(
    ScriptedToolCall,
    tool=st.sampled_from(["act", "act", "act", "unknown"]),
    result=words,
    fails=st.booleans(),
    invalid_arguments=st.booleans(),
    cancels=st.integers(0, 1),
)
turns = st.builds(
    ScriptedTurn,
    text=words,
    reasoning=st.one_of(st.just(""), words),
    tool_calls=st.lists(scripted_calls, min_size=1, max_size=3).map(tuple),
    cancel_points=st.lists(st.integers(0, 9), max_size=2).map(tuple),
)
reply_turns = st.builds(
    ScriptedTurn,
    text=words,
    reasoning=words,
    cancel_points=st.lists(st.integers(0, 5), max_size=2).map(tuple),
)


@st.composite
def scripts(draw: st.DrawFn) -> LoopScript:
    middle = draw(st.lists(turns, max_size=3))
    user = draw(st.lists(words, max_size=2))
    answers = [draw(reply_turns) for _ in user]
    order = draw(st.permutations([*middle, *answers]))
    return LoopScript((*order, draw(reply_turns)), tuple(user))


toy_codecs = st.sampled_from([ToyCodec.chatml(), ToyCodec.chatml(strip_thinking=True)])


async def _run_script(
    script: LoopScript, codec: Codec, *, over_http: bool
) -> tuple[LoopState, LoopOutput, LoopHarness, Any]:
    async with loop_harness(script, codec, over_http=over_http) as s:
        before: list[Any] = []
        s.on_cancel = lambda: before.append(tree_values(s.managed))
        state = await s.run_until_finished()
        tree = tree_values(s.managed)
        # C4: what the tree had at a cancellation is unchanged.
        for nodes, calls in before:
            assert tree[0][: len(nodes)] == nodes
            assert [call[:2] for call in tree[1][: len(calls)]] == [call[:2] for call in calls]
        return state, await build_output(state, s.model), s, tree


def _check_contract(s: LoopHarness) -> None:
    tree = s.tree
    # C1, C3: each answer is a path of exactly its prompt and its ids.
    paths = {tree.path_ids(node).tobytes(): node for node in tree.nodes if node.is_sampled}
    for reply in s.model.replies:
        node = paths[np.concatenate((reply.prompt_ids, reply.ids)).astype(np.int32).tobytes()]
        assert node.sampled_ids is not None
        assert node.sampled_ids.tolist() == reply.ids.tolist()
        assert node.output is not None
        assert reply.logprobs is not None
        assert node.output.logprobs is not None
        assert node.output.logprobs.tolist() == reply.logprobs.tolist()
    # C2: every token counts once; resumed calls have nothing left to count.
    export = export_samples(tree)
    assert export.report.is_balanced
    assert not export.report.dropped
    assert export.report.sampled_tokens == sum(len(reply.ids) for reply in s.model.replies)
    trained = sum(float(sample.shares.sum()) for sample in export.samples)
    assert trained == pytest.approx(export.report.sampled_tokens)
    # C6: all arrays have one length.
    for line in timelines_of(tree):
        arrays = (line.ids, line.origins, line.mask, line.logprobs, line.versions, line.token_node_ids)
        assert {len(array) for array in arrays} == {len(line)}
        assert ((line.origins == Origin.SAMPLED) == (line.versions >= 0)).all()


def _check_output(state: LoopState, output: LoopOutput, s: LoopHarness) -> None:
    """The output equals the tree's export."""
    first, last = s.model.replies[0], s.model.replies[-1]
    samples = export_samples(s.tree, session=s.managed.id).samples
    assert [one.response_ids.tolist() for one in output.outputs] == [
        one.response_ids.tolist() for one in samples
    ]
    assert output.prompt_ids.tolist() == first.prompt_ids.tolist() or len(samples) > 1
    tokens = [*output.prompt_ids.tolist(), *output.response_ids.tolist()]
    assert tokens == [*last.prompt_ids.tolist(), *last.ids.tolist()]
    assert state.assistant_turns == len(s.model.replies)
    assert output.response_mask.sum() == sum(
        len(reply.ids) for reply in s.model.replies if reply.call_id in output.outputs[-1].calls
    )
    assert output.num_turns == len(s.model.replies) + state.user_turns + 1


def _sampled(output: LoopOutput) -> list[Any]:
    return [
        (
            one.prompt_ids.tolist(),
            one.response_ids.tolist(),
            one.response_mask.tolist(),
            one.response_logprobs.tolist(),
            one.response_versions.tolist(),
            one.shares.tolist(),
            one.finish_reason,
        )
        for one in output.outputs
    ]


def _conversation(state: LoopState) -> list[Any]:
    return [(message.role, message.content, len(message.tool_calls)) for message in state.messages]


async def _compare(script: LoopScript, codec: Codec, *, also_http: bool) -> None:
    state, output, s, tree = await _run_script(script, codec, over_http=False)
    assert state.phase is LoopPhase.TERMINATED
    _check_contract(s)
    _check_output(state, output, s)
    assert s.tool.created == s.tool.released == s.cancel_count + 1
    assert s.user.started == s.user.finalized
    plain, plain_output, plain_harness, _ = await _run_script(script.uninterrupted, codec, over_http=False)
    assert plain_harness.cancel_count == 0
    assert _sampled(output) == _sampled(plain_output)
    assert _conversation(state) == _conversation(plain)
    assert (state.stop_reason, state.turn_scores, state.tool_rewards, state.score) == (
        plain.stop_reason,
        plain.turn_scores,
        plain.tool_rewards,
        plain.score,
    )
    assert set(s.tool.executed) == set(plain_harness.tool.executed)
    if also_http:
        remote, remote_output, remote_harness, remote_tree = await _run_script(script, codec, over_http=True)
        assert remote_tree == tree
        assert _sampled(remote_output) == _sampled(output)
        assert _conversation(remote) == _conversation(state)
        assert remote_harness.cancel_count == s.cancel_count


@settings(max_examples=60)
@given(scripts(), toy_codecs)
def test_a_cancelled_and_resumed_loop_equals_an_uninterrupted_one(script: LoopScript, codec: Codec) -> None:
    run(lambda: _compare(script, codec, also_http=False))


@settings(max_examples=15)
@given(scripts(), toy_codecs)
def test_in_process_and_over_http_give_the_same_tree(script: LoopScript, codec: Codec) -> None:
    run(lambda: _compare(script, codec, also_http=True))


@settings(max_examples=10)
@given(scripts())
def test_a_real_tokenizer_gives_the_same_tree(script: LoopScript) -> None:
    codec = load_codec("qwen3")
    run(lambda: _compare(script, codec, also_http=True))


CANCEL_SCRIPT = LoopScript(
    (
        ScriptedTurn(
            "let me",
            "hm",
            tool_calls=(ScriptedToolCall(result="x"), ScriptedToolCall(result="y", fails=True)),
        ),
        ScriptedTurn("so"),
        ScriptedTurn("well", tool_calls=(ScriptedToolCall(),)),
        ScriptedTurn("end"),
    ),
    user_messages=("and",),
)
TOKEN_LIMITS = LoopLimits(response_length=5000)


async def _run_interrupted(moments: list[int], *, over_http: bool) -> tuple[list[Any], list[Any], Any]:
    """Runs a loop that is cancelled after each of these numbers of event loop rounds."""
    async with loop_harness(CANCEL_SCRIPT, over_http=over_http, limits=TOKEN_LIMITS) as s:
        state = LoopState.begin(s.task(), "t")
        for moment in [*moments, None]:
            cancel = CancelToken()
            task = asyncio.create_task(s.run_once(state, cancel))
            for _ in range(moment or 0):
                await asyncio.sleep(0)
            if moment is not None:
                cancel.cancel()
            state = LoopState.decode((await task).encode())
        assert s.tool.created == s.tool.released
        export = export_samples(s.tree)
        assert export.report.is_balanced
        assert not export.report.dropped, "no sampled token is lost or sampled twice"
        outcome = (state.stop_reason, state.turn_scores, state.tool_rewards, state.score)
        return _sampled(await build_output(state, s.model)), _conversation(state), outcome


@settings(max_examples=30)
@given(st.lists(st.integers(0, 60), max_size=8))
def test_a_cancellation_may_come_at_any_time(moments: list[int]) -> None:
    async def test() -> None:
        plain = await _run_interrupted([], over_http=False)
        assert await _run_interrupted(moments, over_http=False) == plain

    run(test)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 200), max_size=6))
def test_a_cancellation_may_come_at_any_time_over_http(moments: list[int]) -> None:
    async def test() -> None:
        plain = await _run_interrupted([], over_http=False)
        assert await _run_interrupted(moments, over_http=True) == plain

    run(test)


class YieldingTool(BaseTool):
    """Yields to other tasks for some rounds of the event loop."""

    name = "yield"
    schema = function_schema("yield", "Waits.", {"type": "object"})

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        for _ in range(arguments["rounds"]):
            await asyncio.sleep(0)
        return ToolResult(f"waited {arguments['rounds']}")


def _yielding_rule(plans: dict[str, list[int]]) -> ReplyRule:
    def rule(request: ScriptedRequest) -> Message:
        name = next(name for name in plans if f"system:{name}<end>" in request.prompt_text)
        done = request.prompt_text.count("tool:waited")
        if done == len(plans[name]):
            return Message("assistant", f"{name} is done")
        arguments = json.dumps({"rounds": plans[name][done]})
        return Message("assistant", "and", tool_calls=(ToolCall("yield", arguments),))

    return rule


async def _run_loops(plans: dict[str, list[int]], *, at_once: bool) -> list[tuple[bytes, bytes]]:
    codec = ToyCodec.chatml()
    managed, _, _ = SessionStore(codec).open(SessionOptions())
    engine = ScriptedEngine(codec, _yielding_rule(plans))

    async def one(name: str) -> None:
        task = Task((Message("system", name), Message("user", "Go.")))
        async with AgentLoop(
            SessionModel(managed, engine, agent=name),
            LoopState.begin(task),
            tools=ToolSelection((YieldingTool(),)),
        ) as loop:
            state = await loop.run()
        assert state.messages[-1].content == f"{name} is done"

    if at_once:
        await asyncio.gather(*[one(name) for name in plans])
    else:
        for name in plans:
            await one(name)
    assert export_samples(managed.session.tree).report.is_balanced
    return timeline_set(managed.session.tree)


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=2, max_size=4))
def test_c5_loops_of_one_session_give_the_same_timelines_in_any_order(
    rounds: list[list[int]],
) -> None:
    plans = {f"agent-{index}": plan for index, plan in enumerate(rounds)}

    async def test() -> None:
        assert await _run_loops(plans, at_once=True) == await _run_loops(plans, at_once=False)

    run(test)
