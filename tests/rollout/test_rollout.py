"""Rollouts: limits, retries, early stops, staleness, and sessions that fail in every way."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline.core.errors import InputError, SinkError
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import JsonlSink, MemorySink, ParquetSink, Sink, read_lines
from tests.rollout.harness import ask, ask_once, judge_answer, run, scripted_gateway

TASKS = [{"id": str(index), "prompt": f"question {index}"} for index in range(4)]


def test_every_session_of_every_task_is_run_and_rewarded() -> None:
    async def test() -> None:
        def reward(task: Mapping[str, Any], trajectory: Any) -> dict[str, Any]:
            return {"score": float(task["id"]), "length": len(trajectory.answer)}

        async def answer(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, task["prompt"])

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            stats = await Rollout(
                gateway, answer, reward=reward, sinks=[sink], config=RolloutConfig(n=3), run_id="r"
            ).run(TASKS)
            assert len(gateway.sessions) == 0, "ended sessions are released"
        assert {result.session for result in sink.results} == {
            f"r-{task}-{slot}" for task in range(4) for slot in range(3)
        }
        assert stats.sessions == stats.finished == 12
        assert stats.sampled_tokens == stats.delivered_tokens > 0
        for result in sink.results:
            assert result.reward == float(result.job.task.uid)
            assert result.rewards == [{"score": result.reward, "extras": {"length": 2}}]
            assert [sample.reward for sample in result.samples] == [result.reward]
            assert result.sample_keys == [f"r-{result.job.task.uid}_{result.job.slot}_0"]

    run(test)


def test_concurrency_is_capped_globally_and_for_each_runner() -> None:
    async def test() -> None:
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()

        async def work(task: Mapping[str, Any], session: Any) -> float:
            name = str(task["agent_name"])
            for key in (name, "all"):
                running[key] += 1
                most[key] = max(most[key], running[key])
            await ask_once(task, session)
            await asyncio.sleep(0.01)
            for key in (name, "all"):
                running[key] -= 1
            return 1.0

        tasks = [{"prompt": "x", "agent_name": name} for name in ["slow"] * 6 + ["fast"] * 6]
        config = RolloutConfig(n=2, concurrency=5, runner_concurrency={"slow": 2})
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, {"slow": work, "fast": work}, config=config).run(tasks)
        assert stats.finished == 24
        assert most["slow"] == 2
        assert most["all"] == 5
        assert most["fast"] >= 3, "a capped runner does not hold the others back"

    run(test)


def test_a_cause_with_retries_is_run_again_in_a_new_session() -> None:
    async def test() -> None:
        async def flaky(task: Mapping[str, Any], session: Any) -> float:
            if "-r" not in session.id:
                raise ConnectionError("reset")
            if task["id"] == "1" and session.id.endswith("r1"):
                raise ValueError("not retried")
            return await ask_once(task, session)

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            config = RolloutConfig(retries={"connection": 2})
            rollout = Rollout(gateway, flaky, sinks=[sink], config=config, run_id="r")
            stats = await rollout.run(TASKS[:2])
        found = {result.session: (result.status, str(result.end.cause or "")) for result in sink.results}
        assert found == {
            "r-0-0": ("failed", "connection"),
            "r-0-0-r1": ("finished", ""),
            "r-1-0": ("failed", "connection"),
            "r-1-0-r1": ("failed", "runner_error"),
        }
        assert stats.prompts == {"0": "finished", "1": "failure"}

    run(test)


def test_unknown_causes_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="retries: got sadness=1, expected a cause"):
        RolloutConfig(retries={"sadness": 1})
    with pytest.raises(InputError, match=r"retries\.timeout: got -1, expected a whole number of 0 or more"):
        RolloutConfig(retries={"timeout": -1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, "2", True, None, 1.5)],
        *[("timeout_s", value) for value in (0, -1, float("nan"), float("inf"), "10", True)],
        ("reward_timeout_s", float("nan")),
        ("stop_after", 0),
        ("oversample", None),
        ("retries", {"timeout": "1"}),
        ("retries", ["timeout"]),
        ("runner_concurrency", {"a": "2"}),
        ("session", {"id": "x"}),
        ("session", {"group": "x"}),
        ("export_policy", {"shares": "all"}),
    ],
)
def test_values_that_are_no_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}[.\w]*: got .*, expected"):
        RolloutConfig(**{name: value})


def test_oversampled_sessions_are_aborted_when_enough_have_finished() -> None:
    async def test() -> None:
        release = asyncio.Event()

        async def work(task: Mapping[str, Any], session: Any) -> float:
            await ask(session, task["prompt"])
            if session.id.rpartition("-")[2] in ("0", "3"):
                await release.wait()  # never
            return 1.0

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            config = RolloutConfig(n=2, oversample=2)
            stats = await Rollout(gateway, work, sinks=[sink], config=config).run(TASKS[:2])
        assert (stats.finished, stats.aborted, stats.failed) == (4, 4, 0)
        assert stats.abort_reasons == {"early_stop": 4}
        assert stats.prompts == {"0": "finished", "1": "finished"}
        for result in sink.results:
            assert bool(result.samples) == (result.status == "finished")

    run(test)


@pytest.mark.parametrize("where", ["agent", "reward", "judge"])
def test_an_error_with_half_an_emoji_fails_its_session_only(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        broken = ValueError("cannot parse \ud83d")

        async def work(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, "q")
            if where == "agent" and task["id"] == "0":
                raise broken

        def score(task: Mapping[str, Any], trajectory: Any) -> float:
            if where != "agent" and task["id"] == "0":
                raise broken
            return 1.0

        def judge(task: Mapping[str, Any], trajectories: Any) -> list[float]:
            return [score(task, trajectory) for trajectory in trajectories]

        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            scoring: dict[str, Any] = {"judge": judge} if where == "judge" else {"reward": score}
            stats = await Rollout(gateway, work, sinks=[JsonlSink(tmp_path)], **scoring).run(TASKS)
        assert (stats.finished, stats.failed) == (3, 1)
        (failed,) = [
            line for line in read_lines(tmp_path / "trajectories.jsonl") if line["status"] == "failed"
        ]
        assert "cannot parse \ufffd (" in failed["error"]
        caplog.text.encode()  # a log file may be UTF-8

    run(test)


def test_a_rollout_stops_when_enough_tasks_are_finished() -> None:
    async def test() -> None:
        never = asyncio.Event()

        async def work(task: Mapping[str, Any], session: Any) -> float:
            if task["id"] in ("1", "3"):
                await never.wait()
            return await ask_once(task, session)

        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, work, config=RolloutConfig(stop_after=2)).run(TASKS)
        assert (stats.finished, stats.aborted) == (2, 2)

    run(test)


def test_sessions_of_too_old_policies_are_aborted() -> None:
    async def test() -> None:
        async def work(task: Mapping[str, Any], session: Any) -> float:
            await ask(session, task["prompt"])
            await gateway.app.router.pause()
            await gateway.app.router.resume(gateway.app.router.version + int(task["id"]))
            await ask(session, task["prompt"], "ok", "more")
            return 1.0

        async with scripted_gateway() as gateway:
            config = RolloutConfig(max_staleness=2, concurrency=1)
            stats = await Rollout(gateway, work, config=config).run(TASKS)
        assert (stats.finished, stats.aborted) == (3, 1)
        assert stats.abort_reasons == {"stale": 1}

    run(test)


def test_a_session_that_somebody_aborts_is_aborted() -> None:
    async def test() -> None:
        async def work(task: Mapping[str, Any], session: Any) -> float:
            await ask(session, task["prompt"])
            await session.abort("enough")
            return 1.0

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, work, sinks=[sink]).run(TASKS[:1])
        assert (stats.aborted, stats.abort_reasons) == (1, {"session_aborted": 1})
        assert sink.results[0].end.error == "enough"

    run(test)


def test_cancelling_a_rollout_ends_and_writes_every_session(tmp_path: Path) -> None:
    async def test() -> None:
        started, asked = asyncio.Event(), 0

        async def work(task: Mapping[str, Any], session: Any) -> float:
            nonlocal asked
            await ask(session, task["prompt"])
            asked += 1
            if asked == len(TASKS):
                started.set()
            if task["id"] != "0":
                await asyncio.Event().wait()
            return 1.0

        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, work, sinks=[JsonlSink(tmp_path)], run_id="r")
            task = asyncio.create_task(rollout.run(TASKS))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        lines = list(read_lines(tmp_path / "trajectories.jsonl"))
        statuses = {line["session"]: (line["status"], line["cause"]) for line in lines}
        assert len(lines) == len(statuses) == 4
        assert statuses.pop("r-0-0") in (("finished", ""), ("aborted", "interrupted"))
        assert set(statuses.values()) == {("aborted", "interrupted")}
        assert all(line["histories"] for line in lines), "what was sampled is kept"
        assert json.loads((tmp_path / "stats.json").read_text())["sessions"] == 4

    run(test)


class FailingSink(MemorySink):
    """Fails on the third session."""

    async def write(self, result: Any) -> None:
        if len(self.results) == 2:
            raise SinkError("disk full")
        await super().write(result)


def test_a_failing_sink_ends_the_rollout_with_its_error() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            with pytest.raises(SinkError, match="disk full"):
                await Rollout(
                    gateway, ask_once, sinks=[FailingSink()], config=RolloutConfig(concurrency=1)
                ).run(TASKS)

    run(test)


def test_a_full_sink_holds_the_rollout_back() -> None:
    async def test() -> None:
        started: list[str] = []

        async def work(task: Mapping[str, Any], session: Any) -> float:
            started.append(session.id)
            return await ask_once(task, session)

        sink = MemorySink(max_pending=1)
        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, work, sinks=[sink], config=RolloutConfig(n=10, concurrency=2))
            running = asyncio.create_task(rollout.run(TASKS[:1]))
            while len(started) < 3:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert len(started) == 3, "one result is stored, two sessions wait to be written"
            taken = [await sink.get() for _ in range(10)]
            stats = await running
        assert stats.finished == len({result.session for result in taken}) == 10

    run(test)


# -- chaos -------------------------------------------------------------------------------------------


async def chaotic_agent(task: Mapping[str, Any], session: Any) -> Any:
    """Does what its task says, which is mostly something wrong."""
    kind = task["kind"]
    if kind not in TIMED_OUT:
        await ask(session, task["prompt"])
    if kind == "raise":
        raise RuntimeError("chaos")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "hang":
        await asyncio.Event().wait()
    if kind == "ignore_cancel":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0
    if kind == "disconnect":
        async with httpx.AsyncClient() as http:
            body = {"model": "any", "messages": [{"role": "user", "content": "slow"}], "stream": True}
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with http.stream(
                "POST", f"{session.base_url}/chat/completions", json=body, headers=headers
            ):
                raise ConnectionResetError("client left")
    if kind == "bad_posted_reward":
        async with httpx.AsyncClient() as http:
            for content in (
                '{"score": "much"}',
                "no json",
                '{"score": NaN}',
                '{"score": 1, "call": "no such call"}',
            ):
                response = await http.post(
                    f"{session.anthropic_base_url}/reward",
                    content=content,
                    headers={"authorization": f"Bearer {session.control_key}"},
                )
                assert response.status_code == 400
        return None
    if kind == "bad_returned_reward":
        return {"score": "much"}
    if kind == "nan":
        return float("nan")
    if kind == "abort":
        await session.abort("by the agent")
    if kind == "finalize":
        await session.reward(0.25)
        await session.finalize()
        return None
    return 1.0


TIMED_OUT = ("hang", "ignore_cancel")
EXPECTED = {
    "ok": ("finished", ""),
    "raise": ("failed", "runner_error"),
    "exit": ("failed", "runner_error"),
    "disconnect": ("failed", "connection"),
    "bad_posted_reward": ("failed", "no_reward"),
    "bad_returned_reward": ("failed", "reward_error"),
    "nan": ("failed", "reward_error"),
    "abort": ("aborted", "session_aborted"),
    "finalize": ("finished", ""),
}


def test_whatever_agents_do_each_session_ends_once_and_alone(tmp_path: Path) -> None:
    async def test() -> None:
        tasks = [
            {"id": f"{kind.replace('_', '-')}.{number}", "prompt": "x", "kind": kind}
            for number in range(2)
            for kind in EXPECTED
        ]
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            config = RolloutConfig(n=2, concurrency=50, require_reward=True)
            sinks: list[Sink] = [JsonlSink(tmp_path), ParquetSink(tmp_path / "samples", rows_per_file=3)]
            stats = await Rollout(gateway, chaotic_agent, sinks=sinks, config=config).run(tasks)
        lines = list(read_lines(tmp_path / "trajectories.jsonl"))
        assert len(lines) == len({line["session"] for line in lines}) == 4 * len(EXPECTED)
        for line in lines:
            assert (line["status"], line["cause"]) == EXPECTED[line["task"]["kind"]], line
        assert stats.sessions == stats.finished + stats.failed + stats.aborted
        assert sum(stats.failure_reasons.values()) == stats.failed
        from branchline import read_parquet

        rows = [one for file in (tmp_path / "samples").glob("*.parquet") for one in read_parquet(file)]
        finished = {line["session"] for line in lines if line["status"] == "finished"}
        assert sorted(row.session for row in rows) == sorted(finished)
        assert stats.delivered_tokens == sum(row.trained_tokens for row in rows)

    run(test)


def test_agents_that_hang_fail_after_their_time_also_if_they_ignore_a_cancellation() -> None:
    async def test() -> None:
        tasks = [{"prompt": "x", "kind": kind} for kind in TIMED_OUT]
        async with scripted_gateway() as gateway:
            config = RolloutConfig(n=2, timeout_s=0.05)
            stats = await Rollout(gateway, chaotic_agent, config=config).run(tasks)
        assert (stats.sessions, stats.failed) == (4, 4)
        assert stats.failure_reasons == {"timeout: timed out after 0.05 s": 4}

    run(test)


def test_a_judge_that_returns_nonsense_fails_its_sessions_and_no_others() -> None:
    async def test() -> None:
        async def complete(messages: Any) -> str:
            text = messages[1]["content"]
            if "question 0" in text:
                raise TimeoutError("busy")
            if "question 1" in text:
                return "I would say they are all quite good."
            if "question 2" in text:
                return judge_answer(messages, 0.75, 8)
            return judge_answer(messages, 0.5)

        async def answer(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, f"{task['prompt']} {session.id}" if task["id"] == "2" else task["prompt"])

        async with scripted_gateway() as gateway:
            judge = RelativeJudge(complete, attempts=2)
            stats = await Rollout(gateway, answer, judge=judge, config=RolloutConfig(n=2)).run(TASKS)
        # Both sessions of task 3 are equal, so one score is for both.
        assert stats.prompts == {"0": "failure", "1": "failure", "2": "finished", "3": "finished"}
        assert (stats.finished, stats.failed) == (3, 5)
        expected = "expected one JSON object with a score from 0 to 1 for each trajectory (asked 2 times)"
        said = "I would say they are all quite good."
        assert stats.failure_reasons == {
            "judge_error: TimeoutError: busy (asked 2 times)": 2,
            f"judge_error: got {said!r}, {expected}": 2,
            "judge_error: score: got 8, expected a number from 0 to 1 (asked 2 times)": 1,
        }
        assert sorted(stats.rewards) == [0.5, 0.5, 0.75]

    run(test)
