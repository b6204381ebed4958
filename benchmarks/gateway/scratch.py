"""Where the journals of a benchmark lie while it runs."""

from __future__ import annotations

from pathlib import Path


def scratch() -> Path:
    """A folder on a real disk: in many systems /tmp is memory, and an fsync there costs nothing."""
    folder = Path(".cache")
    folder.mkdir(exist_ok=True)
    return folder
