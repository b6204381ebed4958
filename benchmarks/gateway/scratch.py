"""The folder for the journals of a benchmark."""

from __future__ import annotations

from pathlib import Path


def scratch() -> Path:
    """A folder on a real disk: /tmp is often in memory, where an fsync costs nothing."""
    folder = Path(".cache")
    folder.mkdir(exist_ok=True)
    return folder
