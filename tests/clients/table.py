"""The table of docs/guides/clients.md with the results of each client, rendered and parsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "clients.md"
HEAD = (
    "client",
    "version",
    "template",
    "calls",
    "agents",
    "timelines",
    "forks by cause",
    "tolerated in its history",
    "sampled tokens trained",
)


@dataclass(frozen=True)
class Row:
    """One client on one template."""

    client: str
    version: str
    template: str
    calls: int
    agents: int
    timelines: int
    forks: Counter[str]
    tolerated: tuple[str, ...]
    sampled: int
    accounted: int

    @property
    def cells(self) -> tuple[str, ...]:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.forks.items()))
        share = "100 %" if self.accounted == self.sampled else f"{self.accounted / self.sampled:.1%}"
        return (
            self.client,
            self.version,
            self.template,
            str(self.calls),
            str(self.agents),
            str(self.timelines),
            causes or "none",
            ", ".join(self.tolerated) or "nothing",
            f"{self.accounted} of {self.sampled} ({share})",
        )


def render_table(rows: Iterable[Row]) -> str:
    """The table in the form of the guide."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def guide_rows() -> list[tuple[str, ...]]:
    """The rows of the guide's table."""
    return parse_table(GUIDE.read_text())


def parse_table(text: str) -> list[tuple[str, ...]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines]
    start = cells.index(HEAD)
    return [row for row in cells[start + 2 :] if len(row) == len(HEAD)]


def comparable(cells: Sequence[str]) -> tuple[str, ...]:
    """A row without token counts, which depend on the paths of the machine."""
    return (*cells[:-1], cells[-1].partition("(")[2])
