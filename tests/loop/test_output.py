from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.core.errors import EngineInputError, InputError
from branchline.core.message import Media
from branchline.core.reader import read_media_part
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.output import build_output
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection, function_schema
from tests.loop.harness import LoopScript, ScriptedToolCall, ScriptedTurn, loop_harness, move_clock, run

SCRIPT = LoopScript(
    (
        ScriptedTurn("look", tool_calls=(ScriptedToolCall(result="found"),)),
        ScriptedTurn("so"),
        ScriptedTurn("end"),
    ),
    user_messages=("and?",),
)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_output_has_every_field(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT, over_http=over_http) as s:
            state = await s.run_once()
            output = await build_output(state, s.model)
            assert s.codec.decode(output.prompt_ids).endswith("user:Begin.<end>\nassistant:")
            assert s.codec.decode(output.response_ids) == (
                'look<call>act {"turn": 0, "index": 0}</call><end>\ntool:found<end>\nassistant:so<end>'
                "\nuser:and?<end>\nassistant:end<end>"
            )
            sampled = "".join(
                s.codec.decode(output.response_ids[index : index + 1])
                for index in output.response_mask.nonzero()[0]
            )
            assert sampled == 'look<call>act {"turn": 0, "index": 0}</call><end>so<end>end<end>'
            assert (output.response_logprobs[output.response_mask == 0] == 0).all()
            assert (output.response_logprobs[output.response_mask == 1] <= 0).all()
            assert output.reward_score == 2.0
            assert output.num_turns == 6
            assert output.metrics.generate_sequences > 0
            assert output.metrics.tool_calls > 0
            assert output.metrics.num_preempted == 0
            assert output.multi_modal_data == {}
            extra = dict(output.extra_fields)
            assert extra.pop("state") is state
            assert extra == {
                "turn_scores": [0.0, 1.0],
                "tool_rewards": [5.0],
                "final_rewards": {"act": 0.5},
                "faults": [],
                "is_cancel": False,
            }

    run(test)


class Grader(BaseTool):
    """A tool with a final reward, or one that fails to compute it."""

    def __init__(self, name: str, reward: Any) -> None:
        self.name, self._reward = name, reward
        self.schema = function_schema(name, "Grades.", {"type": "object"})
        self.grading = asyncio.Event()

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        return ToolResult("done")

    async def calc_reward(self, instance: Any) -> float | None:
        self.grading.set()
        if self._reward == "never":
            await asyncio.Event().wait()
        return 1 / self._reward if self._reward is not None else None


@pytest.mark.parametrize(
    ("reward", "message"), [(0, "division by zero"), ("never", "timed out after 60 s"), ("x", "unsupported")]
)
def test_a_failed_reward_is_a_fault_and_leaves_no_reward_score(reward: Any, message: str) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            broken, state = Grader("broken", reward), LoopState.begin(s.task())
            tools = ToolSelection((broken, Grader("good", 4), Grader("none", None)))

            async def run_loop() -> None:
                async with AgentLoop(s.model, state, tools=tools) as loop:
                    await loop.run()

            task = asyncio.create_task(run_loop())
            await broken.grading.wait()
            move_clock(60 if reward == "never" else 0)
            await task
            output = await build_output(LoopState.decode(state.encode()), s.model)
            assert output.reward_score is None
            assert output.extra_fields["final_rewards"] == {"good": 0.25}
            (fault,) = output.extra_fields["faults"]
            assert fault.startswith(f"broken: calc_reward: {message}")
            assert state.is_finished

    run(test)


def test_cancelled_rewards_are_computed_again() -> None:
    class Second(Grader):
        tries = 0

        async def calc_reward(self, instance: Any) -> float | None:
            self.tries += 1
            if self.tries == 1:
                raise ValueError("not yet")
            return 2.0

    class Late(Grader):
        async def calc_reward(self, instance: Any) -> float | None:
            if not self.grading.is_set():
                self.grading.set()
                await asyncio.Event().wait()
            return None

    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            second, late, cancel = Second("second", None), Late("late", None), CancelToken()
            state = LoopState.begin(s.task())
            async with AgentLoop(s.model, state, tools=ToolSelection((second, late))) as loop:
                task = asyncio.create_task(loop.run(cancel))
                await late.grading.wait()
                while not second.tries:
                    await asyncio.sleep(0)
                cancel.cancel()
                assert (await task).is_cancelled
                assert (await loop.run()).reward_score == 2.0
                assert state.faults == []

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_output_has_only_the_samples_of_its_own_calls(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("one"), ScriptedTurn("two"))), over_http=over_http
        ) as s:
            states = []
            for _ in range(2):
                state = LoopState.begin(s.task())
                state.messages.append(state.messages[-1])
                async with AgentLoop(s.model, state) as loop:
                    states.append(await loop.run())
                s.engine.prompts_by_session[s.managed.id] = [s.model.replies[0].prompt_ids[:1]]
            assert len(await s.model.samples()) == 2
            for state, content in zip(states, ("one", "two"), strict=True):
                output = await build_output(state, s.model)
                assert s.codec.decode(output.response_ids) == f"{content}<end>"
                assert len(output.outputs) == 1

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("is_eval", [False, True])
def test_without_samples_the_arrays_are_empty(over_http: bool, is_eval: bool) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT, over_http=over_http, eval=is_eval) as s:
            state = await s.run_once() if is_eval else LoopState.begin(s.task())
            output = await build_output(state, s.model)
            assert output.outputs == ()
            arrays = (output.prompt_ids, output.response_ids, output.response_mask, output.response_logprobs)
            assert [len(array) for array in arrays] == [0] * 4
            assert output.reward_score == (2.0 if is_eval else None)

    run(test)


# -- media, thinking ---------------------------------------------------------------------------------

DOT = read_media_part({"image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}, "image_url")
FILM = read_media_part({"video_url": {"url": "data:video/mp4;base64,AAAAIGZ0eXA="}}, "video_url")


@dataclass
class Camera(BaseTool):
    """Returns what it saw."""

    media: tuple[Media, ...]
    name = "act"
    schema = function_schema("act", "Looks.", {"type": "object"})

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        return ToolResult("a very long caption", media=self.media)


@pytest.mark.parametrize("over_http", [False, True])
def test_images_of_tools_reach_the_model_and_the_output(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript(
                (ScriptedTurn("look", tool_calls=(ScriptedToolCall(result="found"),)), ScriptedTurn("end"))
            ),
            over_http=over_http,
        ) as s:
            state = LoopState.begin(s.task())
            limits = LoopLimits(tool_response_length=6, tool_response_unit="characters")
            async with AgentLoop(
                s.model, state, tools=ToolSelection((Camera((DOT,)),)), limits=limits
            ) as loop:
                state = LoopState.decode((await loop.run()).encode("json"))
            assert state.messages[3].parts == ("a v...(truncated)...ion", DOT)
            prompt = s.codec.decode(s.model.replies[1].prompt_ids)
            assert "a v...(truncated)...ion<image>" in prompt
            output = await build_output(state, s.model)
            assert output.multi_modal_data == {"image": (DOT,)}

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_video_of_a_tool_is_refused_because_no_engine_takes_it(over_http: bool) -> None:
    async def test() -> None:
        script = LoopScript((ScriptedTurn("look", tool_calls=(ScriptedToolCall(result="found"),)),))
        async with loop_harness(script, over_http=over_http) as s:
            state = LoopState.begin(s.task())
            async with AgentLoop(s.model, state, tools=ToolSelection((Camera((DOT, FILM)),))) as loop:
                with pytest.raises(
                    (InputError, EngineInputError), match="media: got video, expected text and images"
                ):
                    await loop.run()

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_stripped_thinking_splits_a_trajectory_into_samples(over_http: bool) -> None:
    async def test() -> None:
        script = LoopScript(
            (ScriptedTurn("first", "hm"), ScriptedTurn("second", "well")), user_messages=("continue",)
        )
        codec = ToyCodec.chatml(strip_thinking=True)
        async with loop_harness(script, codec, over_http=over_http) as s:
            state = await s.run_once()
            output = await build_output(state, s.model)
            assert len(output.outputs) == 2
            texts = [codec.decode(sample.response_ids) for sample in output.outputs]
            assert texts == ["<think>hm</think>first<end>", "<think>well</think>second<end>"]
            assert codec.decode(output.response_ids) == texts[1]
            assert codec.decode(output.prompt_ids).count("first") == 1
            assert "hm" not in codec.decode(output.prompt_ids)

    run(test)


# -- split histories ---------------------------------------------------------------------------------


THINKING = LoopScript(
    (
        ScriptedTurn("look", "hm", tool_calls=(ScriptedToolCall(result="found"),)),
        ScriptedTurn("so", "well"),
        ScriptedTurn("end", "done"),
    ),
    user_messages=("and?",),
)


@pytest.mark.parametrize("over_http", [False, True])
def test_flat_fields_of_a_split_history_are_not_complete(over_http: bool) -> None:
    async def test() -> None:
        codec = ToyCodec.chatml(strip_thinking=True)
        async with loop_harness(THINKING, codec, over_http=over_http) as s:
            output = await build_output(await s.run_once(), s.model)
            assert (output.is_complete, len(output.outputs) > 1) == (False, True)
            assert output.response_mask.sum() < s.managed.sampled_tokens
            trained = sum(float(sample.shares.sum()) for sample in output.outputs)
            assert trained == pytest.approx(s.managed.sampled_tokens)
        async with loop_harness(THINKING, codec, over_http=over_http, history="verbatim") as s:
            output = await build_output(await s.run_once(), s.model)
            assert (output.is_complete, len(output.outputs)) == (True, 1)
            assert output.response_mask.sum() == s.managed.sampled_tokens

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_the_tokens_of_a_cancelled_answer_are_in_the_output_and_counted(over_http: bool) -> None:
    async def test() -> None:
        script = LoopScript(
            (
                ScriptedTurn("look", tool_calls=(ScriptedToolCall(result="found"),)),
                ScriptedTurn("a long answer", cancel_points=(3, 2)),
            )
        )
        async with loop_harness(script, over_http=over_http) as s:
            state, sizes = LoopState.begin(s.task(), "t"), list[int]()
            for _ in range(2):
                s.engine.at_cancel_point.clear()
                cancel = CancelToken()
                task = asyncio.create_task(s.run_once(state, cancel))
                await s.engine.at_cancel_point.wait()
                cancel.cancel()
                state = LoopState.decode((await task).encode())
                output = await build_output(state, s.model)
                (sample,) = output.outputs
                assert (output.is_complete, sample.finish_reason) == (True, "cancelled")
                sizes.append(output.partial_tokens)
                partial = output.response_ids[len(output.response_ids) - output.partial_tokens :]
                assert "a long answer".startswith(s.codec.decode(partial))
                assert (output.response_mask[-output.partial_tokens :] == 1).all()
                assert (sample.shares[output.response_mask == 1] == 1).all()
            assert sizes == [3, 5]
            # Without a request for it, a cancelled answer is not a sample.
            assert [one.finish_reason for one in await s.model.samples()] == ["stop"]
            output = await build_output(await s.run_once(state), s.model)
            assert (output.partial_tokens, output.metrics.num_cancelled) == (0, 2)

    run(test)
