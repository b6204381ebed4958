"""What user code gets is its own: an agent, a reward or a judge that changes it changes nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.loop import agents
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.judge_scores import Judgement
from branchline.rollout.rewards import VerifierCommand
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.runners import make_runner
from branchline.rollout.sinks import JsonlSink, MemorySink, read_lines
from branchline.rollout.tasks import RolloutTask
from branchline.train.episodes import EpisodeRunner
from tests.rollout.harness import ask, run, scripted_gateway

ROW = {"id": "a", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "nested": {"tags": ["x"]}}


def spoil(row: Any) -> None:
    """Changes a row in every way."""
    row["messages"].append({"role": "assistant", "content": "poison"})
    row["nested"]["tags"].clear()
    row["new"] = 1
    del row["id"]


async def async_agent(task: Any, session: Any) -> None:
    assert task == ROW
    spoil(task)
    await ask(session, "hi")


def plain_agent(task: Any, session: Any) -> Any:
    assert task == ROW
    spoil(task)
    return ask_later(session)


async def ask_later(session: Any) -> None:
    await ask(session, "hi")


class RunnerOfMine:
    """A runner that changes the row of its task."""

    async def run(self, task: RolloutTask, session: Any) -> None:
        await async_agent(task.row, session)


@pytest.mark.parametrize("agent", [async_agent, plain_agent, RunnerOfMine()])
def test_an_agent_that_changes_its_row_changes_no_other_sessions(agent: Any, tmp_path: Path) -> None:
    async def test() -> None:
        seen: list[Any] = []

        def reward(task: Any, trajectory: Any) -> float:
            seen.append(deepcopy(task))
            spoil(task)
            return 1.0

        rows, sink = [deepcopy(ROW)], MemorySink()
        async with scripted_gateway() as gateway:
            rollout = Rollout(
                gateway,
                agent,
                reward=reward,
                sinks=[sink, JsonlSink(tmp_path)],
                config=RolloutConfig(n=3, retries={"runner_error": 0}),
            )
            stats = await rollout.run(rows)
        assert stats.finished == 3, stats.failure_reasons
        assert seen == [ROW] * 3, "each reward sees the row as it was given"
        assert rows == [ROW], "the caller's row is unchanged"
        assert [line["task"] for line in read_lines(tmp_path / "trajectories.jsonl")] == [ROW] * 3
        for result in sink.results:
            assert result.job.task.row == ROW
            spoil(result.job.task.row)
            assert sum(other.job.task.row == ROW for other in sink.results) == 2 - sink.results.index(result)

    run(test)


def test_the_sessions_of_a_task_that_is_given_share_no_row() -> None:
    async def test() -> None:
        task = RolloutTask("a", deepcopy(ROW))
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, async_agent, config=RolloutConfig(n=3)).run([task])
        assert stats.finished == 3, stats.failure_reasons
        assert task.row == ROW

    run(test)


def test_a_repeated_session_gets_the_row_as_it_was() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> None:
            await async_agent(task, session)
            if "-r" not in session.id:
                raise ConnectionError

        async with scripted_gateway() as gateway:
            config = RolloutConfig(retries={"connection": 1})
            stats = await Rollout(gateway, agent, config=config).run([deepcopy(ROW)])
        assert (stats.finished, stats.failed) == (1, 1), stats.failure_reasons

    run(test)


def test_an_agent_of_the_loop_that_changes_its_task_changes_no_other_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def spoiler(state: Any, context: Any) -> Any:
            seen.append(deepcopy(state.task.extra))
            state.task.extra["nested"]["tags"].clear()
            return await agents.single_turn_agent(state, context)

        monkeypatch.setitem(agents._custom_agents, "spoiler", spoiler)
        row = {"id": "a", "prompt": "hi", "nested": {"tags": ["x"]}}
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, "spoiler", config=RolloutConfig(n=3)).run([row])
        assert stats.finished == 3, stats.failure_reasons
        assert [extra["nested"] for extra in seen] == [{"tags": ["x"]}] * 3

    run(test)


def test_a_judge_that_changes_the_row_changes_no_line(tmp_path: Path) -> None:
    class Judge(RelativeJudge):
        async def score_group(self, task: Any, trajectories: Any) -> list[Judgement]:
            assert task == ROW
            spoil(task)
            judgements = [Judgement(0.5)] * len(trajectories)
            trajectories.clear()
            return judgements

    async def never(messages: Any) -> str:
        raise AssertionError

    async def test() -> None:
        async with scripted_gateway() as gateway:
            rollout = Rollout(
                gateway,
                async_agent,
                judge=Judge(never),
                sinks=[JsonlSink(tmp_path)],
                config=RolloutConfig(n=2),
            )
            stats = await rollout.run([deepcopy(ROW)])
        assert (stats.finished, stats.rewards) == (2, [0.5, 0.5])
        assert [line["task"] for line in read_lines(tmp_path / "trajectories.jsonl")] == [ROW] * 2

    run(test)


def test_a_reward_function_that_changes_the_trajectory_changes_no_sample() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> None:
            await ask(session, "hi")

        def reward(task: Any, trajectory: Any) -> float:
            for sample in trajectory.samples:
                for name in ("response_ids", "response_mask", "response_logprobs", "shares"):
                    array = getattr(sample, name)
                    array.flags.writeable = True
                    array[:] = 0
            trajectory.metrics["mine"] = 1.0
            return 1.0

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            await Rollout(gateway, agent, reward=reward, sinks=[sink]).run([deepcopy(ROW)])
        (result,) = sink.results
        (sample,) = result.samples
        assert sample.trained_tokens == result.line["metrics"]["sampled_tokens"] > 0
        assert sample.shares.any()
        assert sample.response_ids.any()
        assert "mine" not in result.line["metrics"]

    run(test)


def test_the_options_of_a_session_are_its_own() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> None:
            managed = gateway.sessions.get(session.id)
            assert managed.options.sampling == {"stop": ["x"]}
            managed.options.sampling["stop"].append("y")
            await ask(session, "hi")

        async with scripted_gateway() as gateway:
            config = RolloutConfig(n=3, session={"sampling": {"stop": ["x"]}})
            stats = await Rollout(gateway, agent, config=config).run([deepcopy(ROW)])
        assert stats.finished == 3, stats.failure_reasons

    run(test)


def test_the_episodes_of_a_trainer_share_no_task() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> float:
            await async_agent(task, session)
            return 1.0

        task = deepcopy(ROW)
        async with scripted_gateway() as gateway:
            group = await EpisodeRunner(gateway, make_runner(agent)).run_group(task, "step0-group0", 3)
        assert not group.errors, group.errors
        assert task == ROW

    run(test)


def test_a_row_that_cannot_be_copied_is_refused_before_anything_runs() -> None:
    async def test() -> None:
        async def agent(task: Mapping[str, Any], session: Any) -> None:
            raise AssertionError

        sink = MemorySink()
        tasks = [RolloutTask("a", {}), RolloutTask("b", {"lock": threading.Lock()})]
        async with scripted_gateway() as gateway:
            with pytest.raises(InputError, match=r"task b: got a row that cannot be copied .*TypeError"):
                await Rollout(gateway, agent, sinks=[sink]).run(tasks)
        assert not sink.results

    run(test)


def test_a_task_is_sent_to_commands_as_it_was(tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            command = VerifierCommand(f"cat > {tmp_path}/$BRANCHLINE_SESSION; echo 1")
            rollout = Rollout(gateway, async_agent, reward=command, config=RolloutConfig(n=2))
            stats = await rollout.run([deepcopy(ROW)])
        assert stats.finished == 2
        files = await asyncio.to_thread(lambda: [path.read_text() for path in tmp_path.iterdir()])
        assert [json.loads(text)["task"] for text in files] == [ROW] * 2

    run(test)
