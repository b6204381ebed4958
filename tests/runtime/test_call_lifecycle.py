"""A call yields deltas, then its result after commit and journal; a failed call leaves no trace."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Journal, Message, ToolCall, ToyCodec
from branchline.core.call import Delivery
from branchline.core.errors import (
    ContextLengthError,
    EngineError,
    EngineOutputError,
    JournalError,
    SessionError,
)
from branchline.engines.base import BUFFERED_FLUSH_S, SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.vllm import VllmEngine
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_record import CallResult
from branchline.runtime.limits import run_in_prepare_thread
from branchline.runtime.managed_session import ManagedSession
from tests.engines.fake_servers import FOREIGN_ID, FakeVllm, Lie
from tests.gateway.harness import run
from tests.runtime.harness import ANSWER, call_request, complete_call, open_session, start_call


def _recorded(managed: ManagedSession) -> list[Any]:
    """All that a session's tree holds of its calls, without their ids."""
    tree = managed.session.tree
    return [
        (
            node.ids.tolist(),
            node.spans,
            node.message.content,
            [(call.name, call.arguments) for call in node.message.tool_calls],
            node.output and node.output.finish_reason,
            None if node.output is None or node.output.logprobs is None else node.output.logprobs.tolist(),
            node.output and node.output.versions,
        )
        for node in tree.nodes[1:]
    ] + [tree.delivery(call) for call in tree.calls]


@settings(max_examples=20, deadline=None)
@given(
    max_tokens=st.integers(1, 40),
    stop_at=st.none() | st.integers(0, 40),
    ids_per_event=st.integers(1, 7),
    flush_s=st.sampled_from([0.0, 0.001, 0.02]),
    stop_index=st.none() | st.integers(0, 30),
    n=st.integers(1, 2),
)
def test_streamed_and_buffered_calls_give_the_same_record(
    max_tokens: int, stop_at: int | None, ids_per_event: int, flush_s: float, stop_index: int | None, n: int
) -> None:
    """Coalescing changes how tokens are cut into deltas, and nothing else."""

    async def test() -> None:
        async with FakeVllm() as server:
            server.ids_per_event, server.stop_at = ids_per_event, stop_at
            server.supports_stream_interval = True
            engine = VllmEngine(server.url)
            params = SamplingParams(max_tokens=max_tokens)
            _, first = await complete_call(open_session(), engine, call_request(params=params))
            content = first.message.content
            stop = (content[stop_index],) if stop_index is not None and stop_index < len(content) else ()
            records, results = [], []
            for stream in (False, True):
                managed = open_session()
                request = call_request(params=params, stop=stop, n=n, stream=stream)
                deltas, result = await complete_call(managed, engine, request, flush_s=flush_s)
                for index, answer in enumerate(result.answers):
                    own = [delta for delta in deltas if delta.index == index]
                    assert np.array_equal(np.concatenate([delta.ids for delta in own]), answer.ids)
                    parts = [part for delta in own for part in delta.deltas]
                    assert "".join(part.content for part in parts) == answer.message.content
                records.append(_recorded(managed))
                results.append([(a.finish_reason, a.stop_sequence, a.ids.tolist()) for a in result.answers])
            assert records[0] == records[1]
            assert results[0] == results[1]
            await engine.close()

    run(test)


def test_an_engine_buffers_only_calls_that_are_not_streamed_and_cannot_end_early() -> None:
    async def test() -> None:
        seen: list[float] = []

        def rule(request: Any) -> str:
            seen.append(request.params.flush_s)
            return "x"

        engine, managed = ScriptedEngine(rule=rule), open_session()
        for fields in ({}, {"stream": True}, {"stop": ("y",)}, {"single_tool_call": True}):
            await complete_call(managed, engine, call_request(**fields), flush_s=0.01)
        assert seen == [BUFFERED_FLUSH_S, 0.01, 0.01, 0.01]

    run(test)


@given(st.integers(1, 11))
def test_a_cancelled_call_keeps_exactly_what_was_yielded(count: int) -> None:
    async def test() -> None:
        engine, managed = ScriptedEngine(rule=replies(ANSWER), chunk_size=3), open_session()
        events, record = start_call(managed, engine)
        ids: list[int] = []
        for _ in range(count):
            delta = await anext(events)
            assert isinstance(delta, AnswerDelta)
            ids += delta.ids.tolist()
        await events.aclose()
        tree = managed.session.tree
        (call,) = tree.calls
        node = tree.nodes[call.outputs[0]]
        assert node.sampled_ids is not None
        assert node.sampled_ids.tolist() == ids
        assert tree.delivery(call) == Delivery.CANCELLED
        assert (record.result, managed.in_flight, managed.running_calls) == (None, 0, {})
        assert engine.aborted_count == (len(ids) <= len(ANSWER))

    run(test)


def test_a_call_cancelled_before_its_first_token_leaves_nothing() -> None:
    async def test() -> None:
        engine, managed = ScriptedEngine(gate=asyncio.Event()), open_session()
        events, _ = start_call(managed, engine)
        task = asyncio.ensure_future(anext(events))
        while not engine.received_prompts:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not managed.session.tree.calls
        assert managed.in_flight == 0

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_generation_leaves_nothing(n: int) -> None:
    async def test() -> None:
        engine, managed = ScriptedEngine(rule=replies("x", ValueError("broken"), "y")), open_session()
        await complete_call(managed, engine)
        before = _recorded(managed)
        with pytest.raises(EngineError, match="broken"):
            await complete_call(managed, engine, call_request("q", n=n))
        assert _recorded(managed) == before
        assert managed.in_flight == managed.reserved_tokens == 0

    run(test)


def test_the_result_is_yielded_only_after_the_journal_has_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        with Journal(tmp_path / "journal") as journal:
            managed = open_session(journal=journal)
            durable: Future[int] = Future()
            commit = managed.session.commit

            def commit_slowly(*args: Any, **options: Any) -> Any:
                committed = commit(*args, **options)
                return type(committed)(committed.call, durable)

            monkeypatch.setattr(managed.session, "commit", commit_slowly)
            events, _ = start_call(managed, ScriptedEngine(rule=replies("x")))
            assert isinstance(await anext(events), AnswerDelta)
            result = asyncio.ensure_future(anext(events))
            while not managed.session.tree.calls:
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not result.done()
            durable.set_result(1)
            assert isinstance(await result, CallResult)
            await events.aclose()

    run(test)


def test_a_call_that_the_journal_refused_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        with Journal(tmp_path / "journal") as journal:
            managed = open_session(journal=journal)
            commit = managed.session.commit

            def commit_failing(*args: Any, **options: Any) -> Any:
                committed, durable = commit(*args, **options), Future[int]()
                asyncio.get_running_loop().call_soon(durable.set_exception, JournalError("disk full"))
                return type(committed)(committed.call, durable)

            monkeypatch.setattr(managed.session, "commit", commit_failing)
            with pytest.raises(JournalError, match="disk full"):
                await complete_call(managed, ScriptedEngine(rule=replies("x")))
            tree = managed.session.tree
            assert tree.delivery(tree.calls[0]) == Delivery.LOST
            assert not managed.export().samples

    run(test)


def test_delivery_says_whether_the_caller_took_the_result() -> None:
    async def test() -> None:
        managed, engine = open_session(), ScriptedEngine(rule=replies("x"))
        await complete_call(managed, engine)
        events, _ = start_call(managed, engine, call_request("q"))
        async for event in events:
            if isinstance(event, CallResult):
                break
        await events.aclose()
        tree = managed.session.tree
        assert [tree.delivery(call) for call in tree.calls] == [Delivery.DELIVERED, Delivery.LOST]

    run(test)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_session_closed_while_it_samples_gets_no_further_call(cancel: bool) -> None:
    async def test() -> None:
        managed = open_session()
        events, _ = start_call(managed, ScriptedEngine(rule=replies(ANSWER)))
        await anext(events)
        await managed.set_state("finalized")
        if cancel:
            await events.aclose()
        else:
            with pytest.raises(SessionError, match="takes no more calls"):
                async for _ in events:
                    pass
        assert not managed.session.tree.calls

    run(test)


def test_several_answers_are_sampled_at_the_same_time_with_seeds_of_their_own() -> None:
    async def test() -> None:
        seeds: list[int | None] = []

        def rule(request: Any) -> str:
            seeds.append(request.params.seed)
            return f"answer {request.params.seed}"

        engine, managed = ScriptedEngine(rule=rule, chunk_size=2), open_session()
        params = SamplingParams(max_tokens=100, seed=7)
        deltas, result = await complete_call(managed, engine, call_request(params=params, n=3))
        assert sorted(seed for seed in seeds if seed is not None) == [7, 8, 9]
        assert [answer.message.content for answer in result.answers] == ["answer 7", "answer 8", "answer 9"]
        # Interleaved: no answer waits for another to end.
        assert {delta.index for delta in deltas[:3]} == {0, 1, 2}
        assert result.sampled_tokens == 3 * (len("answer 7") + 1)

    run(test)


def test_a_prompt_must_fit_and_may_leave_no_token_to_sample() -> None:
    async def test() -> None:
        managed, engine = open_session(), ScriptedEngine(rule=replies("x"))
        _, result = await complete_call(managed, engine)
        length = len(result.prompt_ids)
        with pytest.raises(ContextLengthError, match=str(length)):
            await complete_call(managed, engine, max_prompt_tokens=length - 1)
        engine.max_context = length
        _, result = await complete_call(managed, engine)
        assert (result.finish_reason, len(result.ids), result.message.content) == ("length", 0, "")
        engine.max_context = length - 1
        with pytest.raises(ContextLengthError):
            await complete_call(managed, engine)

    run(test)


@pytest.fixture(name="sizes")
def sizes_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each request that was prepared in a thread."""
    sizes: list[int] = []

    async def counted(managed: Any, work: Any, request_size: int) -> Any:
        sizes.append(request_size)
        return await run_in_prepare_thread(managed, work, request_size)

    monkeypatch.setattr("branchline.runtime.call_lifecycle.run_in_prepare_thread", counted)
    return sizes


def test_a_long_request_is_prepared_in_a_thread(sizes: list[int]) -> None:
    async def test() -> None:
        managed, engine = open_session(), ScriptedEngine(rule=replies("x"))
        await complete_call(managed, engine, call_request("p" * 29_999))
        assert not sizes
        await complete_call(managed, engine, call_request("p" * 30_000))
        assert sizes == [30_000]
        await complete_call(managed, engine, replace(call_request("p"), body_bytes=40_000))
        assert sizes == [30_000, 40_000]

    run(test)


def test_the_calls_of_a_session_share_what_is_prepared_in_the_event_loop(sizes: list[int]) -> None:
    async def test() -> None:
        managed, engine = open_session(), ScriptedEngine(rule=replies("x"))
        managed.call_tasks.update(asyncio.create_task(asyncio.sleep(60)) for _ in range(3))
        await complete_call(managed, engine, call_request("p" * 9_999))
        assert not sizes
        await complete_call(managed, engine, call_request("p" * 10_000))
        assert sizes == [10_000]

    run(test)


def test_a_result_counts_what_was_encoded_and_what_was_recognised() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        call = Message("assistant", "hm", tool_calls=(ToolCall("look", '{"a": 1}'),))
        managed, engine = open_session(codec), ScriptedEngine(codec, replies(call, "done"))
        _, first = await complete_call(managed, engine)
        assert (first.finish_reason, first.reused_tokens) == ("tool_calls", 0)
        echoed_call = ToolCall("look", '{"a":1}', first.message.tool_calls[0].id)
        echo = Message("assistant", "hm", tool_calls=(echoed_call,))
        tool_result = Message("tool", "a door", tool_call_id=echo.tool_calls[0].id)
        _, second = await complete_call(managed, engine, call_request("p", echo, tool_result))
        assert [str(equivalence) for equivalence in second.equivalences] == ["arguments_reserialised"]
        assert second.reused_tokens == second.prompt_tokens - second.encoded_tokens > 0
        assert second.version_range == (0, 0)

    run(test)


@pytest.mark.parametrize("lie", ["id", "logprob", "after_finish", "too_many", "index"])
@pytest.mark.parametrize("stream", [False, True])
def test_output_that_cannot_be_right_fails_the_call_and_enters_no_tree(lie: Lie, stream: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.lie, server.lie_at = lie, 2
            engine = VllmEngine(server.url)
            managed = open_session(ToyCodec("toy", vocab_size=FOREIGN_ID))
            request = call_request(params=SamplingParams(max_tokens=5), stream=stream)
            with pytest.raises(EngineOutputError):
                await complete_call(managed, engine, request)
            assert _recorded(managed) == []
            server.lie = None
            _, result = await complete_call(managed, engine, request)
            assert len(result.answers[0].ids) == 5
            await engine.close()

    run(test)
