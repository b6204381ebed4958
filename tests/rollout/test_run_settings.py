"""What agents and rewards are called in the settings of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from branchline.rollout.rewards import VerifierCommand
from branchline.rollout.run_settings import describe_reward, describe_runner
from branchline.rollout.runners import (
    CommandRunner,
    DispatchRunner,
    FunctionRunner,
    LoopRunner,
    RemoteRunner,
    make_runner,
)


async def agent(task: Any, session: Any) -> None: ...


class Agent:
    async def __call__(self, task: Any, session: Any) -> None: ...

    async def run(self, task: Any, session: Any) -> None: ...


def reward(task: Any, trajectory: Any) -> float:
    return 1.0


def test_an_agent_is_named_by_what_it_runs() -> None:
    assert describe_runner(make_runner(agent)) == f"{__name__}:agent"
    assert describe_runner(FunctionRunner(f"{__name__}:agent")) == f"{__name__}:agent"
    assert describe_runner(FunctionRunner(Agent())) == f"{__name__}:Agent"
    assert describe_runner(FunctionRunner(Agent().run)) == f"{__name__}:Agent.run"
    assert describe_runner(FunctionRunner(partial(agent))) == "functools:partial"
    assert describe_runner(Agent()) == f"{__name__}:Agent"
    assert describe_runner(CommandRunner("x", Path("logs"))) == {"command": "x"}
    assert describe_runner(RemoteRunner("http://h/run", api_key="secret")) == {"url": "http://h/run"}
    assert describe_runner(LoopRunner("tool")) == {"loop": "tool"}
    assert describe_runner(DispatchRunner({"b": LoopRunner(), "": make_runner(agent)})) == {
        "": f"{__name__}:agent",
        "b": {"loop": ""},
    }


def test_a_reward_is_named_by_what_computes_it() -> None:
    assert describe_reward(None) is None
    assert describe_reward(reward) == f"{__name__}:reward"
    assert describe_reward(VerifierCommand("x")) == {"command": "x", "exit_code": False}
