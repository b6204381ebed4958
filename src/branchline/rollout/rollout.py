"""A rollout: n sessions for each task, run by agents, scored, and written to sinks as each ends.

The life of a session: it is opened at the gateway; its runner runs the agent; it is marked as completed; its
reward is computed and posted; it is finalized, read as a trajectory and written to every sink. With a
journal, each of these steps survives the process, and `resume` continues at the step that was reached.

A session that fails, hangs or is aborted ends alone: no other session notices. Every session that was opened
ends in exactly one status and is written once, also when the rollout is cancelled.

    async with Gateway(engine=engine, codec=codec) as gateway:
        rollout = Rollout(gateway, run, reward=reward, sinks=[JsonlSink(folder)], config=RolloutConfig(n=8))
        stats = await rollout.run(read_tasks("tasks.jsonl"))
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from branchline.core.errors import InputError, SessionError, SessionRefusedError
from branchline.export.trajectory import Trajectory
from branchline.gateway.server import Gateway
from branchline.rollout.config import RolloutConfig as RolloutConfig
from branchline.rollout.failures import keep_traceback
from branchline.rollout.judge import Judge, check_judge, judge_group
from branchline.rollout.rewards import RewardFunction, RewardScorer, VerifierCommand
from branchline.rollout.runners import RunnerSpec, make_runner, select_runner
from branchline.rollout.session_gateway import LocalGateway, SessionGateway
from branchline.rollout.session_result import EndCause, SessionEnd, SessionJob
from branchline.rollout.session_runner import SessionRunner
from branchline.rollout.sinks import Sink
from branchline.rollout.stats import RolloutStats
from branchline.rollout.task_sessions import Slot, TaskSessions
from branchline.rollout.tasks import RolloutTask, new_run_id, read_tasks
from branchline.runtime.managed_session import SessionState

log = logging.getLogger("branchline.rollout")

_SINK_GRACE_S = 10.0
"""How long a cancelled rollout waits for sinks."""
_JUDGE_EXTRAS = {"source": "judge"}
"""What a judge's reward has besides its score."""
_RUN_ID = re.compile(r"[A-Za-z0-9]{0,16}")
"""No hyphen: it separates the parts of a session's id."""


class Rollout:
    """Runs tasks."""

    def __init__(
        self,
        gateway: Gateway | SessionGateway,
        runners: RunnerSpec | Mapping[str, RunnerSpec],
        *,
        reward: RewardFunction | VerifierCommand | None = None,
        judge: Judge | None = None,
        sinks: Sequence[Sink] = (),
        config: RolloutConfig | None = None,
        resume: bool = False,
        stats: RolloutStats | None = None,
        run_id: str | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """`gateway` is that of this process, or a `GatewayPool`. `runners` is one agent for all tasks without
        an `agent_name`, or agents by name. `run_id` is a part of the ids of all sessions; None: each `run`
        chooses a new one. With `resume`, sessions of that `run_id` that a journal or `stats` know are not run
        again; `stats` are then those of the sessions of that run that the sinks have. One that only a sink
        knows is refused. `log_folder` gets the traceback of each session that failed, in `SESSION.log`."""
        if reward is not None and judge is not None:
            raise InputError("judge: got a judge and a reward function, expected one of them")
        if judge is not None:
            check_judge(judge)
        if run_id is not None and not _RUN_ID.fullmatch(run_id):
            raise InputError(f"run_id: got {run_id!r}, expected at most 16 letters and digits")
        if resume and run_id is None:
            raise InputError("run_id: got none, expected that of the rollout to resume")
        if stats is not None and not stats.runs <= ({run_id} if resume else set()):
            got = ", ".join(map(repr, sorted(stats.runs)))
            expected = f"those of run {run_id!r}" if resume else "none, or resume=True"
            raise InputError(f"stats: got sessions of the runs {got}, expected {expected}")
        self.config = config = config or RolloutConfig()
        specs = runners if isinstance(runners, Mapping) else {"": runners}
        self._runners = {name: make_runner(spec) for name, spec in specs.items()}
        self._gateway = LocalGateway(gateway) if isinstance(gateway, Gateway) else gateway
        scorer = None
        if reward is not None:
            scorer = RewardScorer(reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s)
        self._sessions = SessionRunner(
            self._gateway,
            scorer,
            options=config.session,
            export_policy=config.export_policy,
            timeout_s=config.timeout_s,
            max_staleness=config.max_staleness,
            require_reward=config.require_reward,
        )
        self._judge = judge
        self._sinks = list(sinks)
        self._resume = resume
        self._log_folder = log_folder
        self._run_id = run_id
        self._slots = asyncio.Semaphore(config.concurrency)
        self._groups: list[TaskSessions] = []
        self._finished_tasks = 0
        self._is_running = False
        self.stats = stats or RolloutStats()
        """The figures of the current run, or of the latest."""

    async def run(self, tasks: object) -> RolloutStats:
        """Runs all tasks (see `read_tasks`) and returns the figures of this run's sessions; if it is resumed,
        also of those that are in `stats`.

        Raises InputError, before anything runs: while another `run` of it is in progress, for a task that
        names an unknown agent and, unless it is resumed, for a `run_id` that a sink or the gateway has
        already. Raises SinkError if a sink fails; running sessions are then aborted. Failures of sessions
        are in the figures.
        """
        if self._is_running:
            raise InputError("run: this rollout is running; wait for it, or make a Rollout for each")
        self._is_running = True
        try:
            return await self._run(tasks)
        finally:
            self._is_running = False

    async def _run(self, tasks: object) -> RolloutStats:
        run_id = new_run_id() if self._run_id is None else self._run_id
        self._groups = self._plan([replace(task, run=run_id) for task in read_tasks(tasks)])
        await self._check_new()
        self.stats = deepcopy(self.stats) if self._resume else RolloutStats()
        self._finished_tasks = 0
        by_runner: dict[str, list[TaskSessions]] = {}
        for group in self._groups:
            by_runner.setdefault(group.task.agent_name, []).append(group)
        try:
            if self._resume:
                await self._recover_sessions()
            async with asyncio.TaskGroup() as running:
                for name, groups in by_runner.items():
                    running.create_task(self._dispatch(running, name, groups))
            for group in self._groups:
                await self._end_group(group)
        except* Exception as errors:
            raise _first_error(errors) from errors
        finally:
            await self._end_interrupted()
        return self.stats

    def _plan(self, tasks: Sequence[RolloutTask]) -> list[TaskSessions]:
        groups: list[TaskSessions] = []
        retries = self.config.retries
        size = self.config.n + self.config.oversample
        for index, task in enumerate(tasks):
            try:
                runner = select_runner(self._runners, task.agent_name)
            except InputError as error:
                raise InputError(f"tasks[{index}].{error}") from error
            task.copy()  # It is refused now if that is impossible.
            groups.append(TaskSessions(task, runner, [Slot(index, retries) for index in range(size)]))
        for name in self.config.runner_concurrency:
            if name not in self._runners and name not in {task.agent_name for task in tasks}:
                raise InputError(f"runner_concurrency: got {name!r}, expected one of {sorted(self._runners)}")
        return groups

    async def _check_new(self) -> None:
        """Raises InputError if a run was begun before under the same id, and is not resumed."""
        if self._resume or self._run_id is None:
            return
        jobs = [SessionJob(group.task, slot) for group in self._groups for slot in range(len(group.slots))]
        found = [
            (session, type(sink).__name__)
            for session in [job.session_id for job in jobs]
            for sink in self._sinks
            if sink.contains(session)
        ]
        # A run opens its first session first.
        first = jobs[0].session_id
        if not found and await self._gateway.find_state(first) is not None:
            found = [(first, "the gateway")]
        for session, where in found:
            raise InputError(
                f"run_id: got {self._run_id!r}, of which {where} has session {session} already, expected "
                "another one, or resume=True"
            )

    async def _dispatch(self, running: asyncio.TaskGroup, name: str, groups: Sequence[TaskSessions]) -> None:
        """Starts the sessions of one runner in order, each when the runner and the rollout have a place."""
        limit = self.config.runner_concurrency.get(name, self.config.concurrency)
        places = asyncio.Semaphore(limit)

        def release(_task: object = None) -> None:
            places.release()
            self._slots.release()

        for group in groups:
            for slot in group.slots:
                if slot.is_ended:
                    continue
                await places.acquire()
                await self._slots.acquire()
                if group.stop_cause is not None and not slot.is_completed:
                    release()
                    continue
                running.create_task(self._run_slot(group, slot)).add_done_callback(release)

    async def _run_slot(self, group: TaskSessions, slot: Slot) -> None:
        """Runs one session of a task, again if its cause is retried, until it has ended or waits for the
        judge; the last session of a task ends the task."""
        while not slot.is_ended and (group.stop_cause is None or slot.is_completed):
            job = SessionJob(group.task, slot.index, slot.attempt)
            slot.end_attempt(await self._run_session(group, job, is_completed=slot.is_completed))
        group.open_slots -= 1
        if self.config.oversample and group.finished + len(group.completed) >= self.config.n:
            group.stop(EndCause.EARLY_STOP)
        if group.open_slots == 0:
            await self._end_group(group)

    async def _recover_sessions(self) -> None:
        """Recovers all sessions that ended in an earlier process, before any is run: tasks that have enough
        sessions, and a run that has enough tasks, start no others. What an early stop aborted is run again
        where that is no longer so."""
        limit = asyncio.Semaphore(self.config.concurrency)
        async with asyncio.TaskGroup() as recovering:
            for group in self._groups:
                for slot in group.slots:
                    recovering.create_task(self._recover_slot(limit, group, slot))
        for group in self._groups:
            if self._has_enough(group):
                group.stop(EndCause.EARLY_STOP)
                for slot in group.slots:
                    slot.is_ended = not slot.is_completed
            group.open_slots = sum(not slot.is_ended for slot in group.slots)
        for group in self._groups:
            if group.open_slots == 0:
                await self._end_group(group)

    def _has_enough(self, group: TaskSessions) -> bool:
        """Whether no other session of a task is to be started, given those of an earlier process."""
        if self._judge is not None and group.finished:
            return True  # The group was judged: a further session would have no others to be compared with.
        waiting = sum(slot.is_completed for slot in group.slots) if self._judge is not None else 0
        return self.config.oversample > 0 and group.finished + waiting >= self.config.n

    async def _recover_slot(self, limit: asyncio.Semaphore, group: TaskSessions, slot: Slot) -> None:
        async with limit:
            while not slot.is_ended:
                end = await self._recover(group, slot, SessionJob(group.task, slot.index, slot.attempt))
                if end is None:
                    break
                slot.end_attempt(end)
                if end.cause == EndCause.EARLY_STOP:
                    slot.is_ended = False

    async def _recover(self, group: TaskSessions, slot: Slot, job: SessionJob) -> SessionEnd | None:
        """Writes a session of an earlier process to the sinks that do not have it, and returns how it ended;
        None if it has to be run, or scored."""
        written = self.stats.causes.get(job.session_id)
        missing = [sink for sink in self._sinks if not sink.contains(job.session_id)]
        known = None
        if written is None or missing:
            known = await self._gateway.find_state(job.session_id)
        if written is not None and known is None:
            # Also if the journal is gone, with the machine that had it.
            if written == "" and missing:
                names = ", ".join(type(sink).__name__ for sink in missing)
                raise InputError(
                    f"session {job.session_id}: got a line of a finished session and no samples in {names}, "
                    "and the journal does not have the session; expected one of them"
                )
            group.finished += written == ""
            return SessionEnd(EndCause(written) if written else None)
        if known is None:
            if len(missing) < len(self._sinks):
                (has, *_) = [type(sink).__name__ for sink in self._sinks if sink not in missing]
                raise InputError(
                    f"session {job.session_id}: {has} has it, and neither `stats` nor the journal say how "
                    f"it ended; expected one of them: `stats` are the figures of run {job.task.run!r}"
                )
            return None
        if await self._is_unscored(job, known[0]):
            slot.is_completed = True
            return None
        end = SessionEnd.from_state(*known)
        if missing:
            return await self._finish(group, job, end)
        group.finished += end.cause is None
        return end

    async def _run_session(self, group: TaskSessions, job: SessionJob, *, is_completed: bool) -> SessionEnd:
        """Runs a session and writes it, unless it has to wait for the judge. `is_completed`: its agent was
        done in an earlier process."""
        try:
            end = await (self._sessions.complete(job) if is_completed else self._run_agent(group, job))
            if end.cause is None and self._judge is not None:
                group.completed.append(job)
                return end
            if end.cause is None:
                end = await self._sessions.score(job)
        except asyncio.CancelledError:
            await self._finish(group, job, SessionEnd(EndCause.INTERRUPTED))
            raise
        return await self._finish(group, job, end)

    async def _run_agent(self, group: TaskSessions, job: SessionJob) -> SessionEnd:
        """Runs the agent; an early stop ends it, and nothing but the agent."""
        task = asyncio.current_task()
        assert task is not None
        group.agents.add(task)
        try:
            return await self._sessions.run_agent(job, group.runner)
        except asyncio.CancelledError:
            if group.stop_cause is None or task.uncancel() > 0:
                raise
            return SessionEnd(group.stop_cause)
        finally:
            group.agents.discard(task)

    async def _is_unscored(self, job: SessionJob, state: SessionState) -> bool:
        """Whether the agent of a session of an earlier process is done, and the session is not scored."""
        if state != "finalized":
            return state == "completed"
        return await self._sessions.is_unscored(job, is_judged=self._judge is not None)

    async def _finish(self, group: TaskSessions, job: SessionJob, end: SessionEnd) -> SessionEnd:
        """Ends a session, reads it and writes it; returns how it ended.

        A cancellation waits for that, and gives up a sink that blocks: the journal has the session.
        """
        work = asyncio.create_task(self._end_and_write(group, job, end))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=_SINK_GRACE_S)
            if not work.done():
                log.warning("session %s: not written, because a sink blocks", job.session_id)
            elif not work.cancelled() and (error := work.exception()) is not None:
                log.warning("session %s: not written: %s", job.session_id, error)
            raise
        finally:
            work.cancel()

    async def _end_and_write(self, group: TaskSessions, job: SessionJob, end: SessionEnd) -> SessionEnd:
        try:
            result = await self._sessions.finish(job, end)
        except SessionError as error:
            if error.kind != "unknown":
                raise
            return end  # it was never opened
        for sink in self._sinks:
            if not sink.contains(result.session):
                try:
                    await sink.write(result)
                except SessionRefusedError as error:
                    name = type(sink).__name__
                    log.error("%s: %s", name, error)
                    self.stats.refused[f"{name}: {error.reason}"] += 1
        self.stats.add(result.line)
        group.finished += result.status == "finished"
        await self._gateway.release(result.session)
        if result.status == "failed":
            group.first_error = group.first_error or result.end.reason.partition("\n")[0]
            reason = result.end.reason.replace("\n", " / ")
            kept = await asyncio.to_thread(keep_traceback, self._log_folder, result.session, result.end.trace)
            log.warning("session %s failed: %s%s", result.session, reason, kept)
        return result.end

    async def _end_group(self, group: TaskSessions) -> None:
        """Judges the sessions of a task whose agents are done, and ends the task; once."""
        if group.is_ended:
            return
        group.is_ended = True
        if self._judge is not None and group.completed:
            await self._judge_group(group, self._judge)
        if group.finished:
            self._finished_tasks += 1
        elif group.stop_cause is None:
            error = group.first_error or self.stats.task_errors.get((group.task.run, group.task.uid))
            log.error("task %s: all sessions failed, the first with %s", group.task.uid, error)
        for sink in self._sinks:
            await sink.end_prompt(group.task, "finished" if group.finished else "failure")
        if self._finished_tasks == self.config.stop_after:
            for other in self._groups:
                other.stop(EndCause.EARLY_STOP)

    async def _judge_group(self, group: TaskSessions, judge: Judge) -> None:
        jobs, ends = group.completed[:], [SessionEnd()] * len(group.completed)
        trajectories: list[Trajectory] = []
        was_judged: list[bool] = []
        for index, job in enumerate(jobs):
            trajectory, figures, ends[index] = await self._sessions.read(job)
            trajectories.append(trajectory)
            was_judged.append(any(one.get("extras") == _JUDGE_EXTRAS for one in figures.rewards))
        valid = [index for index, end in enumerate(ends) if end.cause is None]
        if group.finished or all(was_judged[index] for index in valid):
            # By an earlier process: all rewards of a group are posted before its first session is finished.
            for index in valid:
                if not was_judged[index]:
                    ends[index] = SessionEnd(EndCause.JUDGE_ERROR, "the judge of an earlier process failed")
        else:
            judged = [trajectories[index] for index in valid]
            judgements = await judge_group(judge, group.task.row, judged, self.config.reward_timeout_s)
            for index, judgement in zip(valid, judgements, strict=True):
                if judgement.score is None:
                    ends[index] = SessionEnd(EndCause.JUDGE_ERROR, judgement.problem, judgement.trace)
                else:
                    reward = {"score": judgement.score, "extras": _JUDGE_EXTRAS}
                    ends[index] = await self._sessions.post_reward(jobs[index], reward)
        for job, end in zip(jobs, ends, strict=True):
            group.completed.remove(job)
            await self._finish(group, job, end)

    async def _end_interrupted(self) -> None:
        """Ends the sessions that still wait for the judge, and closes the sinks."""
        for group in self._groups:
            for job in group.completed:
                await self._finish(group, job, SessionEnd(EndCause.INTERRUPTED))
            group.completed = []
        for sink in self._sinks:
            await sink.close()


def _first_error(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Returns the first error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
