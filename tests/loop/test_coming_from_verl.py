"""docs/coming-from-verl.md: every row of its tables is run by the check of the same name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from branchline import Gateway, HttpModel, Message, ScriptedEngine, SessionModel, ToolCall, ToyCodec
from branchline.core.errors import InputError
from branchline.loop.agents import AgentContext, find_agent, run_agent, single_turn_agent, tool_agent
from branchline.loop.output import LoopOutput, build_output
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.token_budget import truncate_result
from branchline.loop.tools.base import ToolResult, media_from_bytes
from branchline.loop.verl import VerlConfig, load_verl_interactions, load_verl_tools, read_verl_config
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.loop.harness import run
from tests.loop.verl_classes import AnswerTool, ToolResponse

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-verl.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
TOOLS = """
tools:
  - class_name: tests.loop.verl_classes.AnswerTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check_answer
        description: Checks an answer.
        parameters:
          type: object
          properties: {answer: {type: string}}
          required: [answer]
  - class_name: tests.loop.verl_classes.OwnTool
    config: {type: native, greeting: hello}
"""
INTERACTIONS = """
interaction:
  - name: tutor
    class_name: tests.loop.verl_classes.ExaminerInteraction
    config: {}
  - class_name: tests.loop.verl_classes.ExaminerInteraction
    config: {}
"""
ROW = {
    "data_source": "sums",
    "agent_name": "tool_agent",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {
        "index": 7,
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "check_answer": {
                "create_kwargs": {"ground_truth": "4"},
                "execute_kwargs": {"unit": "m"},
                "calc_reward_kwargs": {"bonus": 2},
                "release_kwargs": {"why": "end"},
            }
        },
        "interaction_kwargs": {"name": "examiner", "ground_truth": "4"},
    },
}
Check = Callable[[Path], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(row: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[row] = function
        return function

    return register


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_page(row: str, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    run(lambda: CHECKS[row](tmp_path))  # type: ignore[arg-type, return-value]


def test_every_check_is_a_row_of_the_page() -> None:
    assert sorted(CHECKS) == sorted(ROWS)


# -- what the checks share ---------------------------------------------------------------------------


def read_config(folder: Path, **options: Any) -> VerlConfig:
    return read_verl_config(
        {
            "enable": True,
            "tool_config_path": str(folder / "tools.yaml"),
            "interaction_config_path": folder / "interactions.yaml",
            **options,
        }
    )


def answer(request: Any) -> Message:
    """Calls the tool once, then answers wrongly, then rightly."""
    text = request.prompt_text
    if "reward=" not in text:
        call = ToolCall("check_answer", json.dumps({"answer": "4"}))
        return Message("assistant", tool_calls=(call,))
    return Message("assistant", "4" if "Try again" in text else "5")


def open_model(engine: Any = None) -> SessionModel:
    codec = ToyCodec.chatml()
    managed, _, _ = SessionStore(codec).open(SessionOptions())
    return SessionModel(managed, engine or ScriptedEngine(codec, answer))


async def run_row(folder: Path, **options: Any) -> tuple[LoopState, LoopOutput, VerlConfig, SessionModel]:
    config, model = read_config(folder, **options), open_model()
    task = Task.read({**ROW, "tools": ["check_answer"]})
    context = AgentContext(model, config.tools, config.interactions, config.limits)
    state = await run_agent(LoopState.begin(task, "t"), context)
    return state, await build_output(state, model), config, model


def verl_tool(config: VerlConfig) -> AnswerTool:
    inner: AnswerTool = config.tools.get("check_answer")._tool  # type: ignore[attr-defined]
    return inner


# -- rows of a dataset -------------------------------------------------------------------------------


@check("agent_name: tool_agent")
async def _(_: Path) -> None:
    assert find_agent("tool_agent") is find_agent("tool") is tool_agent


@check("agent_name: tool_agent_loop")
async def _(_: Path) -> None:
    assert find_agent("tool_agent_loop") is find_agent("tool")


@check("agent_name: single_turn_agent")
async def _(_: Path) -> None:
    assert find_agent("single_turn_agent") is find_agent("") is single_turn_agent


@check("tools_kwargs.create_kwargs")
async def _(folder: Path) -> None:
    task = Task.read(ROW)
    assert task.tool_arguments == {"check_answer": {"ground_truth": "4"}}
    assert Task.read({"prompt": "?", "tools_kwargs": ROW["extra_info"]["tools_kwargs"]}).tool_arguments  # type: ignore[index]
    assert task.extra["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert task.extra["extra_info"] == ROW["extra_info"]
    state, *_ = await run_row(folder)
    assert state.tool_results[0].content == "reward=1.0"
    with pytest.raises(InputError, match=r"tools_kwargs\.check_answer: got 'create_kwarg', expected one of"):
        Task.read({"prompt": "?", "tools_kwargs": {"check_answer": {"create_kwarg": {}}}})
    with pytest.raises(InputError, match="tools_kwargs: got it together with tool_arguments"):
        Task.read({**ROW, "tool_arguments": {"check_answer": {}}})


@check("tools_kwargs.execute_kwargs")
async def _(folder: Path) -> None:
    assert Task.read(ROW).tool_method_arguments == {
        "check_answer": {"execute": {"unit": "m"}, "calc_reward": {"bonus": 2}, "release": {"why": "end"}}
    }
    state, _, config, _ = await run_row(folder)
    assert verl_tool(config).log == [{"unit": "m"}, {"bonus": 2}, {"why": "end"}]
    assert state.final_rewards == {"check_answer": 3.0}
    with pytest.raises(InputError, match=r"tool_method_arguments\['own'\]\.execute: .*'unit'"):
        config.tools.select(["own"], {}, {"own": {"execute": {"unit": "m"}}})


@check("interaction_kwargs")
async def _(_: Path) -> None:
    task = Task.read(ROW)
    assert (task.interaction, task.interaction_arguments) == ("examiner", {"ground_truth": "4"})
    with pytest.raises(InputError, match=r"interaction_kwargs\.name: got None, expected the interaction's"):
        Task.read({"prompt": "?", "interaction_kwargs": {"ground_truth": "4"}})


# -- multi-turn options ------------------------------------------------------------------------------


@check("max_user_turns")
async def _(folder: Path) -> None:
    assert read_verl_config({"max_user_turns": 0}).limits.max_user_turns is None
    state, *_ = await run_row(folder, max_user_turns=1)
    assert (state.stop_reason, state.user_turns) == (StopReason.USER_TURNS, 1)


@check("max_assistant_turns")
async def _(folder: Path) -> None:
    assert read_verl_config({"max_assistant_turns": None}).limits.max_assistant_turns is None
    state, *_ = await run_row(folder, max_assistant_turns=2)
    assert (state.stop_reason, state.assistant_turns) == (StopReason.ASSISTANT_TURNS, 2)
    task = Task.read({"prompt": "?", "limits": {"max_user_turns": 3, "tool_timeout_s": 60.0}})
    shared = LoopLimits(max_assistant_turns=2, tool_timeout_s=5)
    merged = AgentContext(open_model(), limits=shared).limits_for(task)
    assert merged == LoopLimits(max_assistant_turns=2, max_user_turns=3, tool_timeout_s=60.0)


@check("max_parallel_calls")
async def _(_: Path) -> None:
    assert read_verl_config({"max_parallel_calls": 3}).limits.max_parallel_calls == 3


@check("max_tool_response_length")
async def _(_: Path) -> None:
    limits = read_verl_config({"max_tool_response_length": 4}).limits
    shown = await truncate_result(ToolResult("abcdefgh"), limits, None)
    assert shown.content == "ab...(truncated)...gh"


@check("tool_response_truncate_side")
async def _(_: Path) -> None:
    for side, expected in (("left", "abc...(truncated)"), ("right", "(truncated)...fgh")):
        options = {"max_tool_response_length": 3, "tool_response_truncate_side": side}
        limits = read_verl_config(options).limits
        assert (await truncate_result(ToolResult("abcdefgh"), limits, None)).content == expected
    with pytest.raises(InputError, match="truncate_side: got 'top', expected one of left, right, middle"):
        read_verl_config({"tool_response_truncate_side": "top"})
    with pytest.raises(InputError, match="unknown field `tool_response_side`"):
        Task.read({"prompt": "?", "limits": {"tool_response_side": "left"}})


@check("tool_config_path")
async def _(folder: Path) -> None:
    tools = load_verl_tools(folder / "tools.yaml")
    assert tools.names == ("check_answer", "own")
    function = tools.get("check_answer").schema["function"]
    assert function["parameters"]["required"] == ["answer"]
    for change, message in (
        ({"clas": "x"}, r"tools\[0\]: got 'clas', expected any of class_name, config, tool_schema"),
        ({"class_name": "no.such.Tool"}, r"tools\[0\]\.class_name: got 'no\.such\.Tool', expected an import"),
        ({"class_name": "json.loads", "config": {"type": "mcp"}}, r"config\.type: got 'mcp', .* McpTools"),
    ):
        with pytest.raises(InputError, match=message):
            load_verl_tools({"tools": [change]})


@check("interaction_config_path")
async def _(folder: Path) -> None:
    interactions = load_verl_interactions(folder / "interactions.yaml")
    assert interactions.names == ("tutor", "examiner")
    with pytest.raises(InputError, match=r"interaction\[0\]: got 'nam', expected any of name, class"):
        load_verl_interactions({"interaction": [{"nam": "x"}]})


@check("format")
async def _(_: Path) -> None:
    assert read_verl_config({"format": "hermes"}).limits == read_verl_config({}).limits
    with pytest.raises(InputError, match=r"multi_turn\.format: got 3, expected null or str"):
        read_verl_config({"format": 3})
    all_keys = {
        "_target_": "verl.workers.config.MultiTurnConfig",
        "enable": True,
        "max_assistant_turns": None,
        "tool_config_path": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "interaction_config_path": None,
        "use_inference_chat_template": False,
        "tokenization_sanity_check_mode": "strict",
        "format": "hermes",
        "num_repeat_rollouts": None,
    }
    assert read_verl_config(all_keys).limits.tool_response_length == 256
    with pytest.raises(InputError, match=r"multi_turn\.num_repeat_rollouts: got 4, expected null"):
        read_verl_config({**all_keys, "num_repeat_rollouts": 4})
    with pytest.raises(InputError, match=r"multi_turn\.max_turns: got 3, expected no such option"):
        read_verl_config({"max_turns": 3})


@check("response_length")
async def _(_: Path) -> None:
    model = open_model()
    task = Task.read({"prompt": "2+2?", "limits": {"response_length": 5}})
    state = await run_agent(LoopState.begin(task), AgentContext(model))
    assert len((await build_output(state, model)).response_ids) == 5


# -- classes -----------------------------------------------------------------------------------------


@check("BaseTool.create")
async def _(folder: Path) -> None:
    config = read_config(folder)
    tool = config.tools.get("check_answer")
    instance = await tool.create("t", ground_truth="4")
    assert verl_tool(config).instances == {instance: {"ground_truth": "4", "reward": 0.0}}


@check("BaseTool.execute")
async def _(folder: Path) -> None:
    state, *_ = await run_row(folder)
    (result,) = state.tool_results
    assert (result.content, result.reward, result.extras) == ("reward=1.0", -0.05, {"tries": 1})


@check("BaseTool.calc_reward")
async def _(folder: Path) -> None:
    state, *_ = await run_row(folder)
    assert state.final_rewards == {"check_answer": 3.0}


@check("BaseTool.release")
async def _(folder: Path) -> None:
    _, _, config, _ = await run_row(folder)
    assert verl_tool(config).instances == {}


@check("ToolResponse")
async def _(folder: Path) -> None:
    config = read_config(folder)
    pixel = b"\x89PNG\r\n\x1a\n"

    async def execute(*_: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse("seen", [pixel, None]), 1.0, {}

    verl_tool(config).execute = execute  # type: ignore[method-assign, assignment]
    result = await config.tools.get("check_answer").execute("t", {})
    assert (result.content, result.media) == ("seen", (media_from_bytes(pixel),))


@check("start_interaction")
async def _(folder: Path) -> None:
    examiner = read_config(folder).interactions.get("examiner")
    state, first_message = await examiner.start("t", ground_truth="4")
    assert (state, first_message) == (("t", {"name": "examiner", "ground_truth": "4"}), None)


@check("generate_response")
async def _(folder: Path) -> None:
    state, *_ = await run_row(folder)
    assert [record.content for record in state.turn_records] == ["Try again.", "Right."]


@check("calculate_score")
async def _(folder: Path) -> None:
    state, *_ = await run_row(folder)
    assert state.score == 0.75


@check("finalize_interaction")
async def _(folder: Path) -> None:
    _, _, config, _ = await run_row(folder)
    inner: Any = config.interactions.get("examiner")
    assert inner._interaction.instances == {}


# -- output ------------------------------------------------------------------------------------------


@check("prompt_ids")
async def _(folder: Path) -> None:
    _, output, _, model = await run_row(folder)
    assert output.is_complete
    (sample,) = output.outputs
    assert output.prompt_ids.tolist() == sample.prompt_ids.tolist()
    lengths = {len(output.response_ids), len(output.response_mask), len(output.response_logprobs)}
    assert lengths == {len(sample.response_ids)}
    assert output.response_mask.sum() == model.managed.sampled_tokens


@check("reward_score")
async def _(folder: Path) -> None:
    _, output, _, model = await run_row(folder)
    assert output.reward_score == 0.75
    assert [sample.reward for sample in await model.samples()] == [0.75]


@check("num_turns")
async def _(folder: Path) -> None:
    state, output, _, _ = await run_row(folder)
    assert output.num_turns == state.assistant_turns + state.user_turns + 1 == 6


@check("metrics.num_preempted")
async def _(folder: Path) -> None:
    class PreemptingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, params: Any, **options: Any) -> Any:
            async for chunk in super().generate(prompt_ids, params, **options):
                yield msgspec.structs.replace(chunk, num_preempted=2)

    codec = ToyCodec.chatml()
    engine = PreemptingEngine(codec, lambda _: "an answer")
    async with (
        Gateway(engine=engine, codec=codec) as gateway,
        await HttpModel.open(gateway.url, gateway.admin_key) as remote,
    ):
        for model in (open_model(engine), remote):
            state = await run_agent(LoopState.begin(Task.read({"prompt": "?"})), AgentContext(model))
            metrics = (await build_output(state, model)).metrics
            assert (metrics.num_preempted, metrics.num_cancelled) == (2, 0)


@check("extra_fields.turn_scores")
async def _(folder: Path) -> None:
    _, output, _, _ = await run_row(folder)
    assert output.extra_fields["turn_scores"] == [0.0, 1.0]


@check("extra_fields.tool_rewards")
async def _(folder: Path) -> None:
    _, output, _, _ = await run_row(folder)
    assert output.extra_fields["tool_rewards"] == [-0.05]


@check("extra_fields.is_cancel")
async def _(_: Path) -> None:
    sampled = asyncio.Event()

    class NotifyingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, params: Any, **options: Any) -> Any:
            async for chunk in super().generate(prompt_ids, params, **options):
                yield chunk
                sampled.set()
                await asyncio.sleep(0)

    codec = ToyCodec.chatml()
    model, cancel = open_model(NotifyingEngine(codec, lambda _: "a long answer", chunk_size=1)), CancelToken()
    context = AgentContext(model, ToolRegistry(), InteractionRegistry(), cancel=cancel)
    task = asyncio.create_task(run_agent(LoopState.begin(Task.read({"prompt": "?"})), context))
    await sampled.wait()
    cancel.cancel()
    state = await task
    output = await build_output(state, model)
    assert (output.extra_fields["is_cancel"], output.extra_fields["state"]) == (True, state)
    assert (output.metrics.num_preempted, output.metrics.num_cancelled) == (0, 1)
    assert 0 < output.partial_tokens == len(output.response_ids) == output.response_mask.sum()
