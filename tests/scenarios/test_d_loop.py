"""Scenarios D, the agent loop: with a toy and a real tokenizer, in process and over HTTP."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any, get_args

import pytest

from branchline import ToyCodec, timelines_of
from branchline.chat.base import Codec
from branchline.core.errors import EngineError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.engines.replicas import Replicas
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.output import build_output
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.task import KeptPart, LoopLimits
from branchline.loop.timeouts import CancelToken
from tests.chat.families import load_codec
from tests.loop.harness import (
    LoopScript,
    ResumableScriptedEngine,
    ScriptedToolCall,
    ScriptedTurn,
    encode_answers,
    loop_harness,
    move_clock,
    run,
)

SETUPS = ["toy", "toy over http", "qwen3", "qwen3 over http"]
setups = pytest.mark.parametrize("setup", SETUPS)
TOOL_CALL = ScriptedToolCall(result="it is done")


@pytest.fixture(autouse=True)
def _skip_without_tokenizer(request: pytest.FixtureRequest) -> None:
    """Skips the test if the tokenizer is missing."""
    codec_for(request.node.callspec.params["setup"])


def codec_for(setup: str) -> Codec:
    return ToyCodec.chatml() if setup.startswith("toy") else load_codec("qwen3")


def harness_for(setup: str, script: LoopScript, **options: Any) -> Any:
    return loop_harness(script, codec_for(setup), over_http=setup.endswith("http"), **options)


def roles(state: LoopState) -> list[str]:
    return [message.role for message in state.messages]


# -- D1 ----------------------------------------------------------------------------------------------


@setups
def test_d1_phases_alternate_between_the_model_tools_and_the_interaction(
    setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LoopPhase] = []

    def record(phase: LoopPhase, method: str) -> None:
        step = getattr(AgentLoop, method)

        async def recorded(loop: AgentLoop) -> LoopPhase:
            seen.append(phase)
            return await step(loop)  # type: ignore[no-any-return]

        monkeypatch.setattr(AgentLoop, method, recorded)

    record(LoopPhase.PENDING, "_start")
    record(LoopPhase.GENERATING, "_generate")
    record(LoopPhase.PROCESSING_TOOLS, "_process_tools")
    record(LoopPhase.INTERACTING, "_interact")

    async def test() -> None:
        script = LoopScript(
            (ScriptedTurn(tool_calls=(TOOL_CALL,)), ScriptedTurn("so"), ScriptedTurn("and so")),
            user_messages=("why",),
        )
        async with harness_for(setup, script) as s:
            state = await s.run_until_finished()
            assert seen == [
                "pending",
                *["generating", "processing_tools"],
                *["generating", "interacting"] * 2,
            ]
            assert (state.phase, state.stop_reason) == (LoopPhase.TERMINATED, StopReason.INTERACTION)
            assert roles(state) == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
            assert (state.assistant_turns, state.user_turns) == (3, 2)
            assert state.turn_scores == [0.0, 1.0]

    run(test)


@setups
def test_d1_assistant_and_user_turns_have_separate_limits(setup: str) -> None:
    async def test() -> None:
        script = LoopScript((*[ScriptedTurn(tool_calls=(TOOL_CALL,))] * 5, ScriptedTurn("end")))
        async with harness_for(setup, script) as s:
            for limits, reason, turns in (
                (LoopLimits(max_assistant_turns=2), StopReason.ASSISTANT_TURNS, (2, 1)),
                (LoopLimits(max_user_turns=2), StopReason.USER_TURNS, (3, 2)),
                (LoopLimits(max_user_turns=0), StopReason.USER_TURNS, (1, 0)),
                (LoopLimits(max_assistant_turns=3, max_user_turns=1), StopReason.USER_TURNS, (2, 1)),
                (LoopLimits(max_assistant_turns=6, max_user_turns=5), StopReason.STOP, (6, 5)),
            ):
                state = await s.run_once(model=await s.open_another(), limits=limits)
                assert (state.stop_reason, (state.assistant_turns, state.user_turns)) == (reason, turns)
                assert len(s.tool.executed) == state.user_turns
                s.tool.executed.clear()

    run(test)


# -- D2 ----------------------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_d2_calls_run_concurrently_up_to_the_limit(setup: str, limit: int) -> None:
    async def test() -> None:
        script = LoopScript(
            (
                ScriptedTurn(tool_calls=tuple(ScriptedToolCall(result=f"result {n}") for n in range(5))),
                ScriptedTurn("end"),
            )
        )
        async with harness_for(setup, script, limits=LoopLimits(max_parallel_calls=limit)) as s:
            state = await s.run_until_finished()
            assert s.tool.max_concurrency == min(limit, 5)
            assert [m.content for m in state.messages if m.role == "tool"] == [
                f"result {n}" for n in range(5)
            ]

    run(test)


@setups
def test_d2_failed_calls_are_errors_for_the_model(setup: str) -> None:
    async def test() -> None:
        calls = (
            ScriptedToolCall(result="out of memory", fails=True),
            ScriptedToolCall(tool="unknown"),
            ScriptedToolCall(invalid_arguments=True),
            ScriptedToolCall(cancels=1),
            ScriptedToolCall(result="fine"),
        )
        script = LoopScript((ScriptedTurn(tool_calls=calls), ScriptedTurn("end")))
        async with harness_for(setup, script, limits=LoopLimits(tool_timeout_s=5)) as s:
            task = asyncio.create_task(s.run_once())
            await s.tool.at_cancel_point.wait()
            move_clock(5)
            state = await task
            contents = [m.content for m in state.messages if m.role == "tool"]
            assert contents == [
                "Error executing tool 'act': out of memory",
                "Unknown function 'unknown'. Available tools: ['act']",
                "Error executing tool 'act': arguments.turn: 'x' is not of type 'integer'",
                "Error executing tool 'act': timed out after 5 s",
                "fine",
            ]
            assert [record.error for record in state.tool_results] == [*contents[:4], None]
            assert state.stop_reason is StopReason.STOP, "the loop continued"
            prompt = s.codec.decode(s.model.replies[-1].prompt_ids)
            assert all(text in prompt for text in contents)

    run(test)


NO_JSON = {
    "{turn: 1": "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    '"{}"': "expected an object, got str",
    '{"turn": 0, "index": 0': "Expecting ',' delimiter: line 1 column 23 (char 22)",
    '{"turn": 0, "index": 0}}': "Extra data: line 1 column 24 (char 23)",
    '{"turn": 0, "index": NaN}': "NaN is not JSON",
}
"""Arguments of a model, and the errors they cause."""


@setups
@pytest.mark.parametrize("arguments", NO_JSON)
def test_d2_arguments_that_are_no_json_are_an_error_for_the_model(setup: str, arguments: str) -> None:
    async def test() -> None:
        async with harness_for(setup, LoopScript((ScriptedTurn("end"),))) as s:
            bad = malformed_call_ids(s.codec, ToolCall("act", arguments))
            s.engine.answers = [bad, *s.engine.answers]
            state = await s.run_until_finished()
            assert roles(state) == ["system", "user", "assistant", "tool", "assistant"]
            (call,) = state.messages[2].tool_calls
            assert (call.name, call.arguments) == ("act", arguments)
            message = f"Invalid JSON in arguments for 'act': {NO_JSON[arguments]}"
            assert state.messages[3].content == message
            assert state.stop_reason is StopReason.STOP, "the loop continued"
            assert s.tool.executed == []
            first, second = s.model.replies
            prompt_ids = second.prompt_ids.tolist()
            kept = [*first.prompt_ids.tolist(), *bad.tolist()]
            assert prompt_ids[: len(kept)] == kept, "the sampled ids are kept"
            assert message in s.codec.decode(second.prompt_ids)
            assert len(timelines_of(s.tree)) == 1

    run(test)


def malformed_call_ids(codec: Codec, call: ToolCall) -> Ids:
    """A call whose arguments are no JSON, in this codec's format."""
    if isinstance(codec, ToyCodec):
        return codec.encode_reply(Message("assistant", tool_calls=(call,)))
    text = f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call><|im_end|>'
    return codec.encode(text)


# -- D3 ----------------------------------------------------------------------------------------------

LONG = "one two three four five six seven eight nine ten"


@setups
@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_d3_results_are_truncated_by_part_and_unit(setup: str, unit: Any) -> None:
    async def test() -> None:
        script = LoopScript((ScriptedTurn(tool_calls=(ScriptedToolCall(result=LONG),)), ScriptedTurn("end")))
        async with harness_for(setup, script) as s:
            length = len if unit == "characters" else lambda text: len(s.codec.encode(text))
            size = length(LONG)
            for keep, limit in product(get_args(KeptPart), (6, size - 1, size, size + 1)):
                limits = LoopLimits(
                    tool_response_length=limit, tool_response_unit=unit, tool_response_keep=keep
                )
                state = await s.run_once(model=await s.open_another(), limits=limits)
                (result,) = [m.content for m in state.messages if m.role == "tool"]
                if limit >= size:
                    assert result == LONG
                    continue
                assert result.startswith("(truncated)...") == (keep == "tail")
                assert result.endswith("...(truncated)") == (keep == "head")
                assert ("...(truncated)..." in result) == (keep == "both")
                head, _, tail = result.partition("(truncated)")
                kept = [head.removesuffix("..."), tail.removeprefix("...")]
                assert LONG.startswith(kept[0])
                assert LONG.endswith(kept[1])
                assert sum(map(length, kept)) == limit

    run(test)


# -- D4 ----------------------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("which", ["response_length", "model_length"])
@pytest.mark.parametrize("by", ["tools", "interaction"])
def test_d4_a_prompt_that_fits_exactly_is_kept_and_one_token_more_is_not(
    setup: str, which: str, by: str
) -> None:
    async def test() -> None:
        calls, user = ((TOOL_CALL, TOOL_CALL), ()) if by == "tools" else ((), ("why", "how"))
        script = LoopScript(
            (ScriptedTurn("first", tool_calls=calls), ScriptedTurn("second"), ScriptedTurn("end")),
            user_messages=user,
        )
        async with harness_for(setup, script) as s:
            await s.run_until_finished()
            first, second = [len(reply.prompt_ids) for reply in s.model.replies[:2]]
            exact = second - first if which == "response_length" else second
            added = ["tool", "tool"] if by == "tools" else ["user"]
            for spare, ending in (
                (0, ["assistant", *added]),
                (-1, ["assistant"]),
                (1, [*added, "assistant"]),
            ):
                limits = LoopLimits(**{which: exact + spare})  # type: ignore[arg-type]
                model = await s.open_another()
                state = await s.run_once(model=model, limits=limits)
                assert roles(state)[2:][-len(ending) :] == ending
                assert len(state.messages) == 2 + 1 + (len(added) if spare >= 0 else 0) + (spare > 0)
                assert state.stop_reason == which
                assert state.user_turns == (spare >= 0)
                used = exact + (spare > 0)
                assert state.stop_detail == f"{used} tokens of {exact + spare}"
                # Tool rewards count even if the results were not appended.
                assert len(state.tool_rewards) == (2 if by == "tools" else 0)
                output = await build_output(state, model)
                assert len(output.response_ids) <= exact + spare

    run(test)


# -- D5 ----------------------------------------------------------------------------------------------


@setups
def test_d5_instances_are_created_and_released_once(setup: str) -> None:
    async def test() -> None:
        script = LoopScript((*[ScriptedTurn(tool_calls=(TOOL_CALL, TOOL_CALL))] * 3, ScriptedTurn("end")))
        async with harness_for(setup, script) as s:
            state = await s.run_once()
            assert (s.tool.created, s.tool.released, len(s.tool.executed)) == (1, 1, 6)
            assert state.final_rewards == {"act": 0.5}
            assert (await build_output(state, s.model)).reward_score == 0.5
        async with harness_for(setup, script) as s:
            s.engine.failure = EngineError("the engine is gone")
            with pytest.raises(EngineError, match="the engine is gone"):
                await s.run_once()
            assert (s.tool.created, s.tool.released) == (1, 1)

    run(test)


@setups
def test_d5_a_cancelled_trajectory_releases_its_instances_and_a_resumed_one_creates_new_ones(
    setup: str,
) -> None:
    async def test() -> None:
        script = LoopScript(
            (
                ScriptedTurn(tool_calls=(ScriptedToolCall(cancels=1), TOOL_CALL), cancel_points=(2,)),
                ScriptedTurn("end"),
            )
        )
        async with harness_for(setup, script) as s:
            state = await s.run_until_finished()
            assert s.cancel_count == 2
            assert (s.tool.created, s.tool.released) == (3, 3)
            assert state.final_rewards == {"act": 0.5}

    run(test)


# -- D6 ----------------------------------------------------------------------------------------------


@setups
def test_d6_a_resumed_trajectory_has_the_same_tokens(setup: str) -> None:
    async def test() -> None:
        script = LoopScript(
            (
                ScriptedTurn("let me see", tool_calls=(TOOL_CALL,), cancel_points=(3, 4, 0)),
                ScriptedTurn("so it is done", cancel_points=(1, 2)),
            )
        )
        outputs = []
        for one in (script, script.uninterrupted):
            async with harness_for(setup, one) as s:
                state = await s.run_until_finished()
                output = await build_output(state, s.model)
                assert s.cancel_count == sum(len(turn.cancel_points) for turn in one.turns)
                assert output.metrics.num_cancelled == s.cancel_count
                assert len(output.outputs) == 1
                outputs.append(output)
        resumed, plain = outputs
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
            assert getattr(resumed, name).tolist() == getattr(plain, name).tolist()
        assert resumed.num_turns == plain.num_turns == 4

    run(test)


@setups
def test_d6_tokens_keep_the_version_that_sampled_them(setup: str) -> None:
    async def test() -> None:
        script = LoopScript((ScriptedTurn("a rather long answer", cancel_points=(2, 2)),))
        async with harness_for(setup, script) as s:
            s.on_cancel = lambda: setattr(s.engine, "version", s.engine.version + 1)
            state = await s.run_until_finished()
            (sample,) = (await build_output(state, s.model)).outputs
            count = len(s.model.replies[0].ids)
            assert sample.response_versions.tolist() == [0, 0, 1, 1] + [2] * (count - 4)
            assert sample.response_mask.tolist() == [1] * count

    run(test)


@setups
def test_d6_all_loops_are_cancelled_and_resumed_for_a_weight_update(setup: str) -> None:
    async def test() -> None:
        codec = codec_for(setup)
        script = LoopScript(
            (ScriptedTurn("thinking about it", tool_calls=(TOOL_CALL,)), ScriptedTurn("done with it"))
        )
        engine = ResumableScriptedEngine(encode_answers(codec, script), gate=asyncio.Event())
        async with harness_for(setup, script, engine=engine) as s:
            models = [s.model, *[await s.open_another() for _ in range(4)]]
            cancel = CancelToken()
            loops = [
                asyncio.create_task(s.run_once(model=model, state=LoopState.begin(s.task()), cancel=cancel))
                for model in models
            ]
            await engine.wait_until_waiting(len(models))
            cancel.cancel()
            states = await asyncio.gather(*loops)
            assert all(state.is_cancelled and state.phase is LoopPhase.GENERATING for state in states)
            engine.version = 1
            assert engine.gate is not None
            engine.gate.set()
            again = await asyncio.gather(
                *[
                    s.run_once(model=model, state=LoopState.decode(state.encode()))
                    for model, state in zip(models, states, strict=True)
                ]
            )
            for model, state in zip(models, again, strict=True):
                assert (state.stop_reason, state.is_cancelled) == (StopReason.STOP, False)
                output = await build_output(state, model)
                versions = output.outputs[-1].response_versions
                assert versions[output.response_mask == 1].tolist() == [0] + [1] * (
                    output.response_mask.sum() - 1
                )

    run(test)


# -- D7 ----------------------------------------------------------------------------------------------


@setups
def test_d7_a_loop_stays_on_its_replica_and_moves_when_that_is_removed(setup: str) -> None:
    async def test() -> None:
        codec = codec_for(setup)
        script = LoopScript(
            (ScriptedTurn("thinking about it", tool_calls=(TOOL_CALL,)), ScriptedTurn("done with it"))
        )
        prompts: dict[str, Any] = {}
        first, second = (
            ResumableScriptedEngine(
                encode_answers(codec, script), name=name, prompts_by_session=prompts, gate=asyncio.Event()
            )
            for name in ("first", "second")
        )
        replicas = Replicas([first, second])
        async with harness_for(setup, script, engine=replicas) as s:
            models = [s.model, *[await s.open_another() for _ in range(3)]]
            loops = [
                asyncio.create_task(s.run_once(model=model, state=LoopState.begin(s.task())))
                for model in models
            ]
            await first.wait_until_waiting(2)
            await second.wait_until_waiting(2)
            assert replicas.in_flight == {"first": 2, "second": 2}, (
                "new sessions go to the least loaded replica"
            )
            moved = {session for session, _ in first.requests}
            await replicas.remove("first")
            await second.wait_until_waiting(4)
            assert second.gate is not None
            second.gate.set()
            states = await asyncio.gather(*loops)
            assert [state.stop_reason for state in states] == [StopReason.STOP] * 4
            requests = [session for session, _ in second.requests]
            # Each session sent two requests there: those that moved one for the rest of their turn.
            assert {session: requests.count(session) for session in requests} == {
                model.session_id: 2 for model in models
            }
            assert len(moved) == 2
            plain = None
            for state, model in zip(states, models, strict=True):
                output = await build_output(state, model)
                plain = plain or output.response_ids.tolist()
                assert output.response_ids.tolist() == plain, "no token is lost or repeated"

    run(test)
