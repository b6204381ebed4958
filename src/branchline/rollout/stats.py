"""The figures of a run, or of several in one folder: sessions by status, why they failed, tokens, forks.

They are sums over the lines of `trajectories.jsonl`, so they can be computed again from the file at any time:
`stats.json` is a copy that is easy to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from branchline.rollout.tasks import group_name

PromptStatus = Literal["finished", "failure"]
TaskKey = tuple[str, str]
"""The run and the uid of a task: several runs may have the same tasks."""
_T = TypeVar("_T")
_MAX_REASONS = 100
_OTHER = "other"
_MAX_REASON_CHARS = 200


@dataclass
class RolloutStats:
    """Sums over sessions of one run or of several."""

    sessions: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    failure_reasons: Counter[str] = field(default_factory=Counter)
    """Failed sessions by cause and error."""
    abort_reasons: Counter[str] = field(default_factory=Counter)
    """Aborted sessions by cause."""
    sampled_tokens: int = 0
    delivered_tokens: int = 0
    """Sampled tokens that samples of finished sessions train."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that no sample trains, by reason."""
    forks: int = 0
    fork_causes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    samples: int = 0
    task_statuses: dict[TaskKey, PromptStatus] = field(default_factory=dict)
    """Each task of each run: `finished` if one of its sessions is."""
    task_errors: dict[TaskKey, str] = field(default_factory=dict)
    """Why the first session of each failed task failed."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of finished sessions."""
    refused: Counter[str] = field(default_factory=Counter)
    """Sessions that a sink could not carry, by sink and reason. Not in the lines: counted in this process."""
    causes: dict[str, str] = field(default_factory=dict, repr=False)
    """The sessions that were added, and why each failed or was aborted; empty: it finished."""

    @classmethod
    def from_lines(cls, lines: Iterable[Mapping[str, Any]]) -> RolloutStats:
        """Returns the figures of lines of `trajectories.jsonl`."""
        stats = cls()
        for line in lines:
            stats.add(line)
        return stats

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a session, as `SessionResult.line` has it; one that was added before is not counted again."""
        if line["session"] in self.causes:
            return
        self.causes[line["session"]] = line.get("cause", "")
        status, cause, metrics = line["status"], line.get("cause", ""), line.get("metrics", {})
        self.sessions += 1
        setattr(self, status, getattr(self, status) + 1)
        # The first line: what follows, such as the output of a command, differs between sessions.
        error = line.get("error", "").partition("\n")[0]
        reason = ": ".join([part for part in (cause, error) if part])[:_MAX_REASON_CHARS]
        if status == "failed":
            is_known = reason in self.failure_reasons or len(self.failure_reasons) < _MAX_REASONS
            self.failure_reasons[reason if is_known else _OTHER] += 1
        elif status == "aborted":
            self.abort_reasons[cause] += 1
        elif line.get("reward") is not None:
            self.rewards.append(line["reward"])
        self.sampled_tokens += metrics.get("sampled_tokens", 0)
        self.delivered_tokens += metrics.get("delivered_tokens", 0)
        self.dropped_tokens.update(line.get("dropped_tokens", {}))
        self.forks += metrics.get("forks", 0)
        self.fork_causes.update(line.get("fork_causes", {}))
        self.calls += metrics.get("calls", 0)
        self.samples += metrics.get("samples", 0)
        self._add_to_task((line.get("run", ""), line["uid"]), status, reason)

    def _add_to_task(self, task: TaskKey, status: str, reason: str) -> None:
        if status == "finished":
            self.task_statuses[task] = "finished"
            self.task_errors.pop(task, None)
        elif self.task_statuses.get(task) != "finished":
            self.task_statuses[task] = "failure"
            self.task_errors.setdefault(task, reason)

    @property
    def runs(self) -> set[str]:
        """The ids of the runs that the sessions are of."""
        return {run for run, _uid in self.task_statuses}

    @property
    def prompts(self) -> dict[str, PromptStatus]:
        """The status of each task by its uid, or by its group, `{run}-{uid}`, if there are several runs."""
        return self._by_name(self.task_statuses)

    @property
    def errors(self) -> dict[str, str]:
        """Why the first session of each failed task failed, by the same names."""
        return self._by_name(self.task_errors)

    def _by_name(self, values: Mapping[TaskKey, _T]) -> dict[str, _T]:
        is_one_run = len(self.runs) == 1
        return {uid if is_one_run else group_name(run, uid): value for (run, uid), value in values.items()}

    @property
    def reward_mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def to_json(self) -> dict[str, Any]:
        """The content of `stats.json`."""
        statuses = Counter(self.task_statuses.values())
        return {
            "runs": len(self.runs),
            "sessions": self.sessions,
            "finished": self.finished,
            "failed": self.failed,
            "aborted": self.aborted,
            "failure_reasons": dict(self.failure_reasons.most_common()),
            "abort_reasons": dict(self.abort_reasons.most_common()),
            "sampled_tokens": self.sampled_tokens,
            "delivered_tokens": self.delivered_tokens,
            "dropped_tokens": dict(self.dropped_tokens.most_common()),
            "forks": self.forks,
            "fork_causes": dict(self.fork_causes.most_common()),
            **({"refused": dict(self.refused.most_common())} if self.refused else {}),
            "calls": self.calls,
            "samples": self.samples,
            "rewarded": len(self.rewards),
            "reward_mean": self.reward_mean,
            "prompts": {"finished": statuses["finished"], "failure": statuses["failure"]},
            "errors": dict(list(self.errors.items())[:_MAX_REASONS]),
        }
