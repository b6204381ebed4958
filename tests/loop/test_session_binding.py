"""A trajectory and its session: results reach the samples, and a state resumes only where its calls are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline import HttpModel, Message, SessionModel
from branchline.core.errors import EngineError, InputError, SessionError
from branchline.gateway.server import Gateway
from branchline.loop.agents import AgentContext, agent, run_agent
from branchline.loop.output import build_output
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import Task
from branchline.loop.timeouts import CancelToken
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    run,
)

SCRIPT = LoopScript(
    (
        ScriptedTurn("let me", tool_calls=(ScriptedToolCall(result="seen"), ScriptedToolCall())),
        ScriptedTurn("so"),
        ScriptedTurn("end"),
    ),
    user_messages=("and?",),
)
CANCELLED = LoopScript(
    (
        ScriptedTurn("let me", tool_calls=(ScriptedToolCall(result="seen"),)),
        ScriptedTurn("a long answer", cancel_points=(4,)),
    )
)


async def run_until_cancelled(s: LoopHarness) -> LoopState:
    cancel = CancelToken()
    task = asyncio.create_task(s.run_once(cancel=cancel))
    await s.engine.at_cancel_point.wait()
    cancel.cancel()
    state = await task
    assert state.is_cancelled
    return LoopState.decode(state.encode())


# -- results reach the session -----------------------------------------------------------------------


@pytest.mark.parametrize("over_http", [False, True])
def test_samples_carry_the_reward_and_the_session_is_completed(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT, over_http=over_http) as s:
            state = await s.run_once()
            assert (state.reward_score, state.is_reported) == (2.0, True)
            assert [sample.reward for sample in await s.model.samples()] == [2.0]
            assert (s.managed.state, s.managed.reason) == ("completed", "interaction")
            first, second, third = state.call_ids
            assert s.managed.rewards == [
                {"id": "t/call-0", "score": 4.0, "tool": "act", "call": first, "extras": {"turn": 1}},
                {"id": "t/call-1", "score": 4.0, "tool": "act", "call": first, "extras": {"turn": 1}},
                {"id": "t/turn-2", "score": 0.0, "call": second, "extras": {"turn": 2}},
                {"id": "t/turn-3", "score": 1.0, "call": third, "extras": {"turn": 3}},
                {"id": "t/tool-act", "score": 0.5, "tool": "act"},
                {"id": "t", "score": 2.0, "extras": {"stop_reason": "interaction", "faults": []}},
            ]

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_the_final_reward_of_a_tool_that_was_not_called_is_kept_as_an_extra(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),)), over_http=over_http) as s:
            state = await s.run_once()
            assert (state.final_rewards, state.is_reported) == ({"act": 0.5}, True)
            (whole,) = s.managed.rewards
            assert whole["extras"]["other_rewards"] == {"tool-act": 0.5}
            (sample,) = await s.model.samples()
            assert (sample.reward, sample.rewards) == (state.reward_score, ())

    run(test)


def test_a_trajectory_without_a_reward_completes_its_session() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            async with AgentContextLoop(s) as state:
                assert state.reward_score is None
            assert (s.managed.rewards, s.managed.state, s.managed.reason) == ([], "completed", "stop")

    run(test)


class AgentContextLoop:
    """One run of the agent `single_turn`."""

    def __init__(self, s: LoopHarness, **options: Any) -> None:
        self._s, self._options = s, options

    async def __aenter__(self) -> LoopState:
        task = Task((Message("user", "Begin."),))
        return await run_agent(LoopState.begin(task, "t"), AgentContext(self._s.model, **self._options))

    async def __aexit__(self, *_: object) -> None: ...


def test_a_context_that_does_not_report_leaves_the_session_open() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            async with AgentContextLoop(s, report=False) as state:
                assert (state.is_finished, state.is_reported) == (True, False)
            assert s.managed.state == "open"

    run(test)


@agent("test-scored")
async def scored_agent(state: LoopState, context: AgentContext) -> LoopState:
    await context.ask(state)
    state.score = 5.0
    return state


def test_a_custom_agent_reports_its_score() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),)), over_http=True) as s:
            task = Task((Message("user", "Begin."),), agent_name="test-scored")
            await run_agent(LoopState.begin(task, "t"), AgentContext(s.model))
            assert [sample.reward for sample in await s.model.samples()] == [5.0]
            assert s.managed.state == "completed"

    run(test)


def test_a_report_that_failed_is_repeated_and_counts_once() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            complete, failures = s.model.session.complete, [EngineError("no connection")]

            async def fail_once(reason: str = "") -> None:
                if failures:
                    raise failures.pop()
                await complete(reason)

            s.model.session.complete = fail_once  # type: ignore[method-assign]
            state = LoopState.begin(s.task(), "t")
            with pytest.raises(EngineError, match="no connection"):
                await s.run_once(state)
            state = LoopState.decode(state.encode())
            assert (state.is_loop_finished, state.is_reported) == (True, False)
            state = await s.run_once(state)
            assert (state.is_reported, s.managed.state, len(s.managed.rewards)) == (True, "completed", 6)
            await s.run_once(state)
            assert len(s.managed.rewards) == 6

    run(test)


def test_a_model_without_a_control_key_reports_nothing() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),)), over_http=True) as s:
            session = s.model.session
            assert isinstance(session, HttpModel)
            async with HttpModel(session.base_url, session.api_key, codec=s.codec) as model:
                task = Task((Message("user", "Begin."),))
                state = await run_agent(LoopState.begin(task, "t"), AgentContext(model))
                assert (state.is_finished, state.is_reported, s.managed.state) == (True, False, "open")
                with pytest.raises(InputError, match="control_key: got none, expected the session's"):
                    await model.reward(1.0)

    run(test)


def test_a_model_opened_at_a_gateway_rewards_completes_and_finalizes() -> None:
    async def test() -> None:
        async with (
            loop_harness(LoopScript((ScriptedTurn("end"),))) as s,
            Gateway(engine=s.engine, codec=s.codec) as gateway,
            await HttpModel.open(gateway.url, gateway.admin_key, group="g", codec=s.codec) as model,
        ):
            await model.ask([Message("user", "Begin.")])
            managed = gateway.sessions.get(model.session_id)
            assert model.base_url == f"{gateway.url}/sessions/{managed.id}/v1"
            assert gateway.sessions.by_api_key(model.api_key) is managed
            assert model.control_key
            await model.reward({"score": 0.5, "why": "late"})
            await model.reward([{"score": 1.0, "turn": 1}, {"score": 3}])
            assert [sample.reward for sample in await model.samples()] == [3.0]
            await model.complete("done")
            assert (managed.state, managed.reason) == ("completed", "done")
            await model.finalize()
            assert managed.state == "finalized"
            await model.reward({"score": 4.0, "id": "last"})
            assert [sample.reward for sample in await model.samples()] == [4.0]
            with pytest.raises(SessionError, match="is finalized and takes no more calls"):
                await model.ask([Message("user", "Again.")])

    run(test)


# -- resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over_http", [False, True])
def test_a_state_names_its_session_and_resumes_in_it(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(CANCELLED, over_http=over_http) as s:
            state = await run_until_cancelled(s)
            assert state.session_id == s.managed.id
            assert bool(state.session_url) == over_http
            model: Any = s.model
            if over_http:
                session = s.model.session
                assert isinstance(session, HttpModel)
                assert state.session_url == session.base_url
                assert session.api_key not in str(state)
                model = HttpModel(state.session_url, session.api_key, session.control_key, codec=s.codec)
            state = await s.run_once(state, model=model)
            assert state.stop_reason is StopReason.STOP
            trained = sum([sample.trained_tokens for sample in (await build_output(state, model)).outputs])
            assert trained == sum(len(ids) for ids in s.engine.answers)
            if over_http:
                await model.__aexit__()

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_state_is_refused_in_a_session_without_its_calls(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(CANCELLED, over_http=over_http) as s:
            state = await run_until_cancelled(s)
            before, other = state.encode(), await s.open_another()
            with pytest.raises(InputError) as refused:
                await s.run_once(state, model=other)
            assert str(refused.value).startswith(
                f"state.call_ids: got {state.call_ids[0]!r}, which session {other.session_id} does not have, "
                f"expected the session of the trajectory, {s.managed.id}"
            )
            assert state.encode() == before
            # The same for a custom agent.
            custom = LoopState.begin(Task((Message("user", "?"),), agent_name="test-scored"), "c")
            custom.call_ids.append(state.call_ids[0])
            with pytest.raises(InputError, match=r"^state\.call_ids: got "):
                await run_agent(custom, AgentContext(other))

    run(test)


def test_a_session_of_the_default_path_is_checked_too() -> None:
    """A base URL without a session id: the key alone names the session."""

    async def test() -> None:
        async with loop_harness(CANCELLED, over_http=True) as s:
            state = await run_until_cancelled(s)
            session, other = s.model.session, (await s.open_another()).session
            assert isinstance(session, HttpModel)
            assert isinstance(other, HttpModel)
            root = session.base_url.partition("/sessions/")[0] + "/v1"
            async with HttpModel(root, other.api_key, codec=s.codec) as model:
                assert model.session_id == ""
                with pytest.raises(InputError, match=f"which session {other.session_id} does not have"):
                    await s.run_once(state, model=model)  # type: ignore[arg-type]
            async with HttpModel(root, session.api_key, codec=s.codec) as model:
                state = await s.run_once(state, model=model)  # type: ignore[arg-type]
                assert state.stop_reason is StopReason.STOP

    run(test)


def test_the_session_of_a_session_model_is_the_managed_session() -> None:
    async def test() -> None:
        async with loop_harness(CANCELLED) as s:
            model = SessionModel(s.managed, s.engine)
            assert (model.session_id, model.base_url, model.session) == (s.managed.id, "", model)
            await model.abort("no reason")
            assert (s.managed.state, s.managed.reason) == ("aborted", "no reason")

    run(test)
