"""What becomes of one session of a rollout: how it ended, its trajectory and its figures.

Every session ends in exactly one status. `finished`: the agent is done and the session is data. `failed`: the
agent, the reward or the judge broke. `aborted`: the session was stopped for a reason outside of it: enough
others had finished, its tokens were too old, the run was interrupted, or a client of the control API aborted
it. Failed and aborted sessions keep their histories and export no samples. The reason is in the gateway's
journal, so it can be read back after the process died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from branchline.core.reader import replace_surrogates
from branchline.core.sample import DropReason, Sample
from branchline.export.columns import SampleOrigin, SampleRow
from branchline.export.histories import History
from branchline.export.trajectory import Trajectory
from branchline.gateway.views import message_view
from branchline.loop.timeouts import describe_error
from branchline.rollout.connection_faults import is_connection_fault
from branchline.rollout.failures import describe_traceback, own_place
from branchline.rollout.tasks import RolloutTask
from branchline.runtime.managed_session import SessionState

SessionStatus = Literal["finished", "failed", "aborted"]
_MAX_ERROR_CHARS = 500


class EndCause(StrEnum):
    """Why a session failed or was aborted; `retries` of a rollout are given for these names."""

    RUNNER_ERROR = "runner_error"
    """The agent raised."""
    TIMEOUT = "timeout"
    EXIT_CODE = "exit_code"
    """The agent's command ended with another code than 0."""
    CONNECTION = "connection"
    """The agent could not reach the gateway, or another server, or got nothing from it in time."""
    NO_CALLS = "no_calls"
    """No model call of the agent was answered."""
    NO_REWARD = "no_reward"
    REWARD_ERROR = "reward_error"
    """The reward function raised, or its value is no reward."""
    JUDGE_ERROR = "judge_error"
    """The judge gave no score."""
    STALE = "stale"
    """Sampled by a policy that is too many versions old."""
    EARLY_STOP = "early_stop"
    """Enough other sessions have finished."""
    INTERRUPTED = "interrupted"
    """The run ended before the session; a resumed run starts it again."""
    SESSION_ABORTED = "session_aborted"
    """Aborted through the gateway's control API, or by the agent."""
    NODE_LOST = "node_lost"
    """Its gateway, or the process of its agent, is gone; it is run again."""


_ABORTED_CAUSES = (
    EndCause.STALE,
    EndCause.EARLY_STOP,
    EndCause.INTERRUPTED,
    EndCause.SESSION_ABORTED,
    EndCause.NODE_LOST,
)


class RunnerError(Exception):
    """A runner's failure whose cause is known."""

    def __init__(self, cause: EndCause, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.trace = trace
        """The traceback of what failed in the runner."""


@dataclass(frozen=True)
class SessionEnd:
    """How a session ended."""

    cause: EndCause | None = None
    """None: it finished."""
    error: str = ""
    trace: str = field(default="", repr=False, compare=False)
    """The whole traceback of the error; empty if the session was read back from a journal."""

    def __post_init__(self) -> None:
        # Files and the journal are UTF-8, and an exception may quote half an emoji.
        object.__setattr__(self, "error", replace_surrogates(self.error))

    @classmethod
    def from_error(cls, error: BaseException) -> SessionEnd:
        """Returns the end of a session whose agent raised."""
        if isinstance(error, RunnerError):
            return cls(error.cause, str(error)[:_MAX_ERROR_CHARS], error.trace)
        text = describe_error(error)
        name = type(error).__name__
        text = text if text.startswith(name) else f"{name}: {text}"
        cause = EndCause.CONNECTION if is_connection_fault(error) else EndCause.RUNNER_ERROR
        place = own_place(error)
        return cls(cause, text[: _MAX_ERROR_CHARS - len(place)] + place, describe_traceback(error))

    @classmethod
    def from_state(cls, state: SessionState, reason: str) -> SessionEnd:
        """Reads how a session ended from its state at the gateway; an open one was interrupted."""
        if state in ("finalized", "completed"):
            return cls()
        if state == "open":
            return cls(EndCause.INTERRUPTED)
        status, _, rest = reason.partition(": ")
        cause, _, error = rest.partition(": ")
        if status in ("failed", "aborted") and cause in set(EndCause):
            return cls(EndCause(cause), error)
        return cls(EndCause.SESSION_ABORTED, reason)

    @property
    def status(self) -> SessionStatus:
        if self.cause is None:
            return "finished"
        return "aborted" if self.cause in _ABORTED_CAUSES else "failed"

    @property
    def reason(self) -> str:
        """Cause and error in one text; empty for a finished session."""
        return ": ".join([part for part in (str(self.cause or ""), self.error) if part])

    @property
    def gateway_reason(self) -> str:
        """What the gateway's journal keeps; `from_state` reads it."""
        return f"{self.status}: {self.reason}" if self.cause is not None else ""


@dataclass(frozen=True)
class SessionJob:
    """One session that a rollout runs: the n-th of a task, and which attempt at it."""

    task: RolloutTask
    slot: int = 0
    """From 0 on; the sessions of one task have different slots."""
    attempt: int = 0
    """From 0 on; a repeated session is a new one."""

    @property
    def session_id(self) -> str:
        repeated = f"-r{self.attempt}" if self.attempt else ""
        return f"{self.task.group}-{self.slot}{repeated}"


def sample_key(group: str, slot: int, index: int) -> str:
    """Returns the key of a sample. One attempt at a slot at most finishes."""
    return f"{group}_{slot}_{index}"


@dataclass(frozen=True)
class SessionResult:
    """One session that has ended."""

    job: SessionJob
    end: SessionEnd
    trajectory: Trajectory
    rewards: Sequence[Mapping[str, Any]] = ()
    """All rewards that were posted."""
    calls: int = 0
    answer_lengths: Sequence[int] = ()
    """Sampled tokens of each answer."""
    truncated_answers: int = 0
    """Answers that `max_tokens` or the context window ended."""
    duration_s: float = 0.0
    version: int = 0
    """The policy version when the session ended."""
    exception: Exception | None = field(default=None, repr=False, compare=False)
    """What the agent or the reward raised; None if the session was read back from a journal."""

    @property
    def session(self) -> str:
        return self.job.session_id

    @property
    def status(self) -> SessionStatus:
        return self.end.status

    @property
    def agent_name(self) -> str:
        return self.job.task.agent_name

    @property
    def reward(self) -> float | None:
        """The reward of the episode; None for a session that did not finish."""
        return self.trajectory.episode_reward if self.status == "finished" else None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples of a finished session."""
        return self.trajectory.samples if self.status == "finished" else ()

    @property
    def sample_keys(self) -> list[str]:
        """The key of each sample: `{group}_{slot}_{index}`."""
        return [sample_key(self.job.task.group, self.job.slot, index) for index in range(len(self.samples))]

    @property
    def rows(self) -> list[SampleRow]:
        """The samples with where they come from, as files have them."""
        job = self.job
        return [
            SampleRow(
                sample,
                SampleOrigin(key, job.task.uid, job.task.group, job.task.agent_name, job.slot, job.attempt),
            )
            for key, sample in zip(self.sample_keys, self.samples, strict=True)
        ]

    @property
    def delivered_tokens(self) -> int:
        """Sampled tokens that the samples train."""
        report = self.trajectory.report
        return report.trained_tokens if report is not None and self.status == "finished" else 0

    @cached_property
    def line(self) -> dict[str, Any]:
        """The session as JSON, as `trajectories.jsonl` has it."""
        trajectory = self.trajectory
        report = trajectory.report
        dropped: Counter[str] = Counter()
        for entry in report.dropped if report is not None else ():
            # The gateway aborts a session that failed.
            reason = self.status if entry.reason == DropReason.ABORTED else entry.reason
            dropped[str(reason)] += entry.tokens
        main = [] if trajectory.history is None else [trajectory.history]
        return {
            "task": self.job.task.row,
            "uid": self.job.task.uid,
            "run": self.job.task.run,
            "group": self.job.task.group,
            "agent_name": self.agent_name,
            "session": self.session,
            "slot": self.job.slot,
            "attempt": self.job.attempt,
            "status": self.status,
            "cause": str(self.end.cause or ""),
            "error": self.end.error,
            "reward": self.reward,
            "rewards": list(self.rewards),
            "histories": [_history_json(one) for one in (*main, *trajectory.additional_histories)],
            "metrics": {
                "calls": self.calls,
                "answers": len(self.answer_lengths),
                "truncated_answers": self.truncated_answers,
                "sampled_tokens": report.sampled_tokens if report is not None else 0,
                "delivered_tokens": self.delivered_tokens,
                "samples": len(self.samples),
                "forks": sum(trajectory.fork_causes.values()),
                "duration_s": round(self.duration_s, 3),
                **trajectory.metrics,
            },
            "fork_causes": dict(trajectory.fork_causes),
            "dropped_tokens": dict(dropped),
            "finished": trajectory.finished,
            "version": self.version,
        }


def _history_json(history: History) -> dict[str, Any]:
    """A history as Chat Completions messages, with the positions of those that the model sampled."""
    return {
        "agent": history.agent,
        "messages": [message_view(message) for message in history.messages],
        "sampled": list(history.sampled),
    }
