"""The sessions of one task in a rollout: which have ended, which run, and which wait for the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from branchline.rollout.runners import Runner
from branchline.rollout.session_result import EndCause, SessionEnd, SessionJob
from branchline.rollout.tasks import RolloutTask

_NODE_LOST_RETRIES = 3


class Slot:
    """One of the sessions that a task is to have, with its repetitions."""

    def __init__(self, index: int, retries: Mapping[str, int]) -> None:
        self.index = index
        self.attempt = 0
        """The next one, or the one that runs."""
        self.is_ended = False
        self.is_completed = False
        """The agent of this attempt was done in an earlier process; it has to be scored."""
        self._retries = {EndCause.NODE_LOST: _NODE_LOST_RETRIES, **retries}

    def end_attempt(self, end: SessionEnd) -> None:
        self.attempt += 1
        self.is_completed = False
        if end.cause == EndCause.INTERRUPTED:
            return  # by the end of an earlier process
        cause = str(end.cause or "")
        if self._retries.get(cause, 0) < 1:
            self.is_ended = True
        else:
            self._retries[cause] -= 1


class TaskSessions:
    """The sessions of one task."""

    def __init__(self, task: RolloutTask, runner: Runner, slots: Sequence[Slot]) -> None:
        self.task = task
        self.runner = runner
        self.slots = slots
        self.open_slots = len(slots)
        """Sessions that have not ended, or not begun."""
        self.finished = 0
        self.completed: list[SessionJob] = []
        """Sessions whose agents are done and that wait for the judge."""
        self.agents: set[asyncio.Task[None]] = set()
        """Tasks whose agents run."""
        self.stop_cause: EndCause | None = None
        self.is_ended = False
        self.first_error = ""
        """Why the first session failed."""

    def stop(self, cause: EndCause) -> None:
        """Aborts the sessions whose agents run, and starts no more."""
        if self.stop_cause is None and not self.is_ended:
            self.stop_cause = cause
            for task in self.agents:
                task.cancel()
