"""The progress of `branchline run`: a bar on a terminal, else lines; and its figures for trackers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from branchline.cli.render import format_duration

if TYPE_CHECKING:  # they need packages of the `serve` extra
    from branchline.rollout.rollout import Rollout
    from branchline.rollout.stats import RolloutStats
    from branchline.rollout.trackers import Trackers

log = logging.getLogger("branchline.rollout")
_REFRESH_S = 0.2
_LINE_S = 10.0
"""The time between two lines, and between two reports to trackers, if something has ended meanwhile."""


class _View(Protocol):
    def update(self, stats: RolloutStats) -> None: ...

    def close(self) -> None: ...


@asynccontextmanager
async def shown_progress(rollout: Rollout, total: int, trackers: Trackers) -> AsyncIterator[None]:
    """Shows on stderr how many of the sessions have ended, and how long the others may take."""
    console = Console(stderr=True)
    view: _View = _Bar(console, total) if console.is_terminal else _Lines(console, total, rollout.stats)
    reports = _Reports(trackers)

    async def refresh() -> None:
        while True:
            view.update(rollout.stats)
            await reports.send(rollout.stats)
            await asyncio.sleep(_REFRESH_S)

    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view.update(rollout.stats)
        view.close()
        await reports.close(rollout.stats)


def describe_stats(stats: RolloutStats) -> str:
    """Returns what became of the sessions so far."""
    mean = stats.reward_mean
    text = f"{stats.failed} failed, {stats.aborted} aborted, {stats.sampled_tokens:,} tokens"
    return text + ("" if mean is None else f", reward {mean:.3f}")


def describe_time(elapsed_s: float, done: int, left: int) -> str:
    """Returns how long the work took so far, and how long the rest takes at this pace.

    >>> describe_time(60, 3, 9)
    '1:00, 3:00 left'
    """
    text = format_duration(elapsed_s)
    return f"{text}, {format_duration(elapsed_s / done * left)} left" if done and left else text


class _Bar:
    def __init__(self, console: Console, total: int) -> None:
        self._total = total
        self._progress = Progress(
            TextColumn("sessions"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=total, text="")
        self._progress.start()

    def update(self, stats: RolloutStats) -> None:
        self._progress.update(self._task, completed=_done(stats, self._total), text=describe_stats(stats))

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, console: Console, total: int, stats: RolloutStats) -> None:
        self._console, self._total = console, total
        self._started_at = self._shown_at = time.monotonic()
        self._first = self._shown = _done(stats, total)
        self._stats = stats
        self._line = ""

    def update(self, stats: RolloutStats) -> None:
        self._stats = stats
        if _done(stats, self._total) > self._shown and time.monotonic() - self._shown_at >= _LINE_S:
            self._show()

    def close(self) -> None:
        self._show()

    def _show(self) -> None:
        self._shown_at, self._shown = time.monotonic(), _done(self._stats, self._total)
        times = describe_time(
            self._shown_at - self._started_at, self._shown - self._first, self._total - self._shown
        )
        line = f"sessions {self._shown}/{self._total}, {times}, {describe_stats(self._stats)}"
        if line != self._line:
            self._console.print(line, highlight=False, soft_wrap=True)
        self._line = line


def _done(stats: RolloutStats, total: int) -> int:
    return min(total, stats.finished + stats.failed)


class _Reports:
    """Sends figures to trackers, which may be slow and of which some need one thread for all calls."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers
        self._thread = ThreadPoolExecutor(1)
        self._sent_at = time.monotonic()
        self._sent = -1
        self._has_failed = False

    async def send(self, stats: RolloutStats) -> None:
        if stats.sessions > self._sent and time.monotonic() - self._sent_at >= _LINE_S:
            await self._send(stats)

    async def close(self, stats: RolloutStats) -> None:
        await self._send(stats)
        await self._call(self._trackers.close)
        self._thread.shutdown()

    async def _send(self, stats: RolloutStats) -> None:
        figures = {
            name: float(value) for name, value in stats.to_json().items() if isinstance(value, int | float)
        }
        self._sent_at, self._sent = time.monotonic(), stats.sessions
        await self._call(lambda: self._trackers.log(figures, self._sent))

    async def _call(self, function: Callable[[], None]) -> None:
        """A tracker that fails gets nothing more; the run goes on."""
        if self._has_failed:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except Exception as error:
            self._has_failed = True
            log.error("report_to: no further figures are sent: %s: %s", type(error).__name__, error)
