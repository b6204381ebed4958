"""Tests of faults: real processes over loopback. They take minutes; `make test-faults` runs them.

Each test adds what it counted to `fault_figures`; the run ends with one line for each test and their sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_FIGURES = pytest.StashKey["FaultFigures"]()


@dataclass
class FaultFigures:
    """What the tests of one run counted."""

    lines: list[str] = field(default_factory=list)
    lost: int = 0
    inexact: int = 0
    worst_p99_ms: float = 0.0

    def add(
        self, name: str, *, lost: int = 0, inexact: int = 0, p99_ms: float | None = None, note: str = ""
    ) -> None:
        """Adds the figures of a test: acknowledged calls that were lost, answers that are not exact, and the
        latency of the clients that did nothing wrong."""
        self.lost += lost
        self.inexact += inexact
        self.worst_p99_ms = max(self.worst_p99_ms, p99_ms or 0.0)
        p99 = "" if p99_ms is None else f", others' p99 {p99_ms:.1f} ms"
        self.lines.append(f"{name}: {lost} lost, {inexact} inexact{p99}" + (f" ({note})" if note else ""))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = FaultFigures()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("BRANCHLINE_FAULTS"):
        skip = pytest.mark.skip(reason="takes minutes: make test-faults")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture
def fault_figures(request: pytest.FixtureRequest) -> FaultFigures:
    return request.config.stash[_FIGURES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, None)
    if figures is not None and figures.lines:
        terminalreporter.section("faults")
        for line in figures.lines:
            terminalreporter.write_line(line)
        total = f"{figures.lost} lost, {figures.inexact} inexact"
        terminalreporter.write_line(f"faults: {total}, others' p99 at most {figures.worst_p99_ms:.1f} ms")
