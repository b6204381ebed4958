"""A rollout in a process that kills itself with SIGKILL at a named point, for the test that resumes it.

    python -m tests.rollout.kill_run FOLDER POINT:N

The answers that agents received are noted in FOLDER/acknowledged, one JSON line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from branchline.engines.scripted import ScriptedRequest
from branchline.rollout import sinks
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.run_folder import RunFolder
from branchline.rollout.session_gateway import LocalGateway
from branchline.rollout.stats import RolloutStats
from branchline.rollout.tasks import read_tasks
from tests.rollout.harness import ask, judge_answer, scripted_gateway

TASKS = [{"id": str(index), "prompt": f"question {index}"} for index in range(4)]
N = 2
POINTS = ("answered", "scoring", "finalized", "samples_written", "line_written")


class Failpoint:
    """Kills the process when a point was reached as often as given."""

    def __init__(self, spec: str = "") -> None:
        self._point, _, number = spec.partition(":")
        self._countdown = int(number or 0)

    def reach(self, point: str) -> None:
        if point == self._point:
            self._countdown -= 1
            if self._countdown <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def run_tasks(
    folder: Path, failpoint: Failpoint, *, resume: bool, is_judged: bool = False
) -> RolloutStats:
    async def agent(task: Mapping[str, Any], session: Any) -> None:
        prompt = f"{task['prompt']} of {session.id}"
        first = await ask(session, prompt)
        note(session.id, first)
        second = await ask(session, prompt, first, {"role": "user", "content": "again"})
        note(session.id, second)

    def note(session: str, answer: Mapping[str, Any]) -> None:
        with (folder / "acknowledged").open("a") as file:
            file.write(json.dumps([session, answer["content"]]) + "\n")
        failpoint.reach("answered")

    def reward(task: Mapping[str, Any], trajectory: Any) -> float:
        failpoint.reach("scoring")
        return float(task["id"])

    async def judge(messages: Any) -> str:
        failpoint.reach("scoring")
        return judge_answer(messages, 0.25, 0.75)

    def rule(request: ScriptedRequest) -> str:
        return f"answer to {request.last_line}"

    async with scripted_gateway(rule, folder / "journal") as gateway:
        opened = RunFolder.create(folder, read_tasks(TASKS), N, resume=resume)
        jsonl, stats = opened.open_sinks()
        rollout = Rollout(
            gateway,
            agent,
            reward=None if is_judged else reward,
            judge=RelativeJudge(judge) if is_judged else None,
            sinks=[sinks.ParquetSink(folder / "samples", rows_per_file=3), *jsonl],
            config=RolloutConfig(n=N, concurrency=3),
            resume=resume,
            stats=stats,
            run_id=opened.run_id,
        )
        return await rollout.run(TASKS)


def install(failpoint: Failpoint) -> None:
    """Installs the points that are in the library."""
    append, end = sinks.append_lines, LocalGateway.end

    def append_lines(path: Path, lines: Any) -> None:
        append(path, lines)
        failpoint.reach("samples_written" if path.name == sinks.SAMPLES_FILE else "line_written")

    async def end_session(gateway: LocalGateway, session_id: str, state: Any, reason: str = "") -> Any:
        ended = await end(gateway, session_id, state, reason)
        if state == "finalized":
            failpoint.reach("finalized")
        return ended

    sinks.append_lines = append_lines
    LocalGateway.end = end_session  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    point = Failpoint(sys.argv[2])
    install(point)
    asyncio.run(run_tasks(Path(sys.argv[1]), point, resume=False, is_judged="judged" in sys.argv))
