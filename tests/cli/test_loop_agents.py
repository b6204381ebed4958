"""`branchline run` with agents of the loop: tools of verl's YAML, limits, context editing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from branchline.cli.agents import build_runners, check_tasks
from branchline.cli.main import main, parse_options
from branchline.core.errors import InputError
from branchline.rollout.rollout import Rollout
from branchline.rollout.runners import LoopRunner
from branchline.rollout.sinks import MemorySink
from branchline.rollout.tasks import read_tasks
from branchline.runtime.compaction import Summarize
from tests.loop.test_coming_from_verl import INTERACTIONS, ROW, TOOLS, answer
from tests.rollout.harness import run, scripted_gateway

MULTI_TURN = """
enable: true
max_assistant_turns: 5
max_user_turns: 0
max_parallel_calls: 1
max_tool_response_length: 256
tool_response_truncate_side: middle
tool_config_path: tools.yaml
interaction_config_path: interactions.yaml
use_inference_chat_template: false
tokenization_sanity_check_mode: strict
format: hermes
num_repeat_rollouts: null
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    (tmp_path / "multi_turn.yaml").write_text(MULTI_TURN)
    indented = MULTI_TURN.replace("\n", "\n      ").rstrip()
    (tmp_path / "whole.yaml").write_text(f"actor_rollout_ref:\n  rollout:\n    multi_turn:{indented}\n")
    (tmp_path / "both.yaml").write_text(f"{TOOLS}\nformat: hermes\nmax_assistant_turns: 5\n")
    return tmp_path


def results_of(options: Any, rows: list[dict[str, Any]]) -> MemorySink:
    tasks = read_tasks(rows)
    runners = build_runners(options.agents, tasks)
    check_tasks(runners, tasks)
    sink = MemorySink()

    async def test() -> None:
        async with scripted_gateway(answer) as gateway:
            await Rollout(gateway, runners, sinks=[sink]).run(tasks)

    run(test)
    return sink


@pytest.mark.parametrize("name", ["tool", "tool_agent", "tool_agent_loop"])
@pytest.mark.parametrize("file", ["tools.yaml", "both.yaml", "multi_turn.yaml", "whole.yaml"])
def test_an_agent_of_the_loop_has_the_tools_of_a_file_of_verls(folder: Path, name: str, file: str) -> None:
    extra = {"tools_kwargs": ROW["extra_info"]["tools_kwargs"]}  # type: ignore[index]
    row = {"prompt": "2+2?", "tools": ["check_answer"], "extra_info": extra}
    options = parse_options("run", "t.jsonl", "--agent", name, "--tools", file)
    (result,) = results_of(options, [row]).results
    assert (result.status, result.calls) == ("finished", 2), result.end
    messages = result.line["histories"][0]["messages"]
    assert "reward=1.0" in [message["content"] for message in messages]


def test_tasks_name_their_agents_and_interactions(folder: Path) -> None:
    options = parse_options("run", "t.jsonl", "--tools", "whole.yaml")
    (result,) = results_of(
        options, [{**ROW, "agent_name": "tool_agent_loop", "tools": ["check_answer"]}]
    ).results
    assert (result.status, result.calls) == ("finished", 3), "the interaction asks once more"


def test_a_tool_that_a_task_names_and_the_file_has_not_is_refused_before_anything_runs(folder: Path) -> None:
    tasks = read_tasks([{"prompt": "a"}, {"prompt": "b", "tools": ["hammer"]}])
    options = parse_options("run", "t.jsonl", "--agent", "tool", "--tools", "tools.yaml")
    with pytest.raises(
        InputError, match=r"tasks\[1\]\.tools\[0\]: got 'hammer', expected one of .*check_answer"
    ):
        check_tasks(build_runners(options.agents, tasks), tasks)


def test_limits_and_context_options_reach_the_agent(folder: Path) -> None:
    options = parse_options(
        *["run", "t.jsonl", "--agent", "state", "--tools", "both.yaml", "--model-length", "900"],
        *["--compaction", "summarize", "--compaction-target", "0.5", "--response-room", "100"],
        *["--context-length-penalty", "-2"],
    )
    runner = build_runners(options.agents, [])[""]
    assert isinstance(runner, LoopRunner)
    context = runner.context_options
    assert context is not None
    assert isinstance(context.compaction, Summarize)
    values = (context.compaction_target, context.response_room, context.context_length_penalty)
    assert values == (0.5, 100, -2.0)
    limits = runner._settings()[2]
    assert limits is not None
    assert (limits.model_length, limits.max_assistant_turns) == (900, 5)
    plain = build_runners(parse_options("run", "t.jsonl", "--agent", "state").agents, [])[""]
    assert plain == LoopRunner("state")


def test_a_context_that_becomes_too_long_ends_with_the_penalty_that_was_asked_for(folder: Path) -> None:
    options = parse_options(
        *["run", "t.jsonl", "--agent", "state", "--tools", "tools.yaml", "--model-length", "300"],
        *["--context-length-penalty", "-2"],
    )
    tools = {"tools": ["check_answer"], "tools_kwargs": ROW["extra_info"]["tools_kwargs"]}  # type: ignore[index]
    (result,) = results_of(options, [{"prompt": "2+2?", **tools}]).results
    assert (result.calls, result.reward) == (1, -2.0), result.end


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--command", "true", "--tools", "tools.yaml"],
            "--tools: expected it with an agent of the loop only",
        ),
        (
            ["--command", "true", "--model-length", "9"],
            "--model-length: expected it with an agent of the loop",
        ),
        (
            ["--agent", "tool", "--compaction", "summarize"],
            "expected it with --model-length only",
        ),
        (
            ["--agent", "tool", "--model-length", "9", "--compaction", "summarize"],
            "with the agent state only",
        ),
        (["--agent", "state", "--model-length", "9", "--compaction", "sumarize"], "did you mean summarize"),
        (["--agent", "tool", "--tools", "missing.yaml"], "missing.yaml: got a file that cannot be read"),
        (
            ["--agent", "tool", "--tools", "bad.yaml"],
            "bad.yaml: multi_turn.max_turns: got 3, expected no such",
        ),
        (
            ["--agent", "tool", "--tools", "list.yaml"],
            "list.yaml: got ['a'], expected an object with `tools`",
        ),
    ],
)
def test_options_of_the_loop_that_cannot_be_used_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    (folder / "bad.yaml").write_text("max_turns: 3\n")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "x"}))
    assert main(["run", "t.jsonl", "--engine", "scripted", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") <= 3


def test_a_run_with_other_tools_is_not_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "x"}))
    arguments = ["run", "t.jsonl", "--engine", "scripted", "--agent", "tool", "--tools", "tools.yaml"]
    assert main([*arguments, "--run-folder", "out"]) == 0
    assert main([*arguments, "--run-folder", "out", "--resume"]) == 0
    capsys.readouterr()
    with (folder / "tools.yaml").open("a") as file:
        file.write("# changed\n")
    assert main([*arguments, "--run-folder", "out", "--resume"]) == 2
    assert "agents: this run has" in capsys.readouterr().err
