"""The settings of a rollout, which are options of `branchline run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from branchline.core.errors import InputError
from branchline.core.option_checks import check_count, check_number
from branchline.core.option_fields import not_an_option, option

if TYPE_CHECKING:
    from branchline.export.samples import ExportPolicy


@dataclass(frozen=True)
class RolloutConfig:
    """How many sessions run, for how long, and what happens to those that do not finish."""

    n: int = option(1, basic=True)
    """Sessions of each task."""
    concurrency: int = option(64, basic=True)
    """Sessions that run at the same time."""
    runner_concurrency: Mapping[str, int] = option(factory=dict, name="agent_concurrency")
    """The same for the agent of a name."""
    timeout_s: float | None = option(None, basic=True, metavar="S")
    """Time limit of an agent; by default none. Scoring has its own."""
    retries: Mapping[str, int] = option(factory=dict, name="retry", metavar="CAUSE=N")
    """How often a session that ended for a cause is run again: timeout, connection, no_calls, exit_code,
    runner_error, reward_error, stale and others."""
    oversample: int = 0
    """Sessions of each task beyond `n`; when n have finished, the others are aborted."""
    stop_after: int | None = None
    """When this many tasks have a finished session and no running one, the others are aborted; a resumed run
    runs these again."""
    max_staleness: int | None = None
    """A session with a token sampled more than this many policy versions ago is aborted when it ends."""
    require_reward: bool = False
    """A session without a reward fails."""
    reward_workers: int = 8
    """Rewards that are computed at the same time."""
    reward_timeout_s: float | None = option(600.0, metavar="S")
    """Time limit of a reward function, verifier or judge, for each session or task."""
    session: Mapping[str, Any] = option(factory=dict, name="session_options")
    """Options of every session: '{"sampling": {"temperature": 1}, "limits": {"calls": 50}}'."""
    export_policy: ExportPolicy | None = not_an_option(None)
    """Which outputs become samples; None: the sessions' own policy."""

    def __post_init__(self) -> None:
        leasts = (("n", 1), ("concurrency", 1), ("oversample", 0), ("reward_workers", 1), ("stop_after", 1),
                  ("max_staleness", 0))  # fmt: skip
        for name, least in leasts:
            if (value := getattr(self, name)) is not None or name not in ("stop_after", "max_staleness"):
                check_count(name, value, least)
        for name in ("timeout_s", "reward_timeout_s"):
            if (seconds := getattr(self, name)) is not None:
                check_number(name, seconds, above=0)
        for name in ("runner_concurrency", "retries", "session"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise InputError(f"{name}: got {value!r}, expected an object")
        for name, limit in self.runner_concurrency.items():
            check_count(f"runner_concurrency.{name}", limit)
        if self.retries:
            from branchline.rollout.session_result import EndCause
        for cause, times in self.retries.items():
            if cause not in set(EndCause):
                raise InputError(f"retries: got {cause}={times}, expected a cause: {', '.join(EndCause)}")
            check_count(f"retries.{cause}", times, 0)
        for name in {"id", "group"} & self.session.keys():
            raise InputError(
                f"session.{name}: got {self.session[name]!r}, expected none: a rollout chooses it"
            )
        if self.export_policy is not None:
            from branchline.export.samples import ExportPolicy

            if not isinstance(self.export_policy, ExportPolicy):
                raise InputError(f"export_policy: got {self.export_policy!r}, expected an ExportPolicy")
