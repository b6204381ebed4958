"""Progress lines of a run: how many sessions have ended, and the time that the others may take."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from branchline.cli import progress
from branchline.rollout.stats import RolloutStats


def test_lines_have_total_and_time_left_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    written = io.StringIO()
    # Two of twelve sessions are those of an earlier process: they took no time of this one.
    lines = progress._Lines(Console(file=written), 12, RolloutStats(finished=2))
    for second in range(1, 26):
        now = float(second)
        lines.update(RolloutStats(finished=2 + second // 5, failed=second // 20, sampled_tokens=100 * second))
    now = 40.0
    lines.update(RolloutStats(finished=10, failed=2))
    lines.close()
    assert written.getvalue().splitlines() == [
        "sessions 4/12, 0:10, 0:40 left, 0 failed, 0 aborted, 1,000 tokens",
        "sessions 7/12, 0:20, 0:20 left, 1 failed, 0 aborted, 2,000 tokens",
        "sessions 12/12, 0:40, 2 failed, 0 aborted, 0 tokens",
    ]


def test_a_bar_has_total_and_time_left() -> None:
    written = io.StringIO()
    bar = progress._Bar(Console(file=written, force_terminal=True, width=120), 4)
    bar.update(RolloutStats(finished=1, failed=1))
    bar.close()
    assert "2/4" in written.getvalue()
    assert "-:--:--" in written.getvalue() or "0:00:0" in written.getvalue()
