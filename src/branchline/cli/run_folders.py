"""Folders of runs that a command makes."""

from __future__ import annotations

import time
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""The options that a run began with, which `--config` reads."""


def new_run_folder(command: str) -> Path:
    """Returns `runs/COMMAND-TIME`, the folder of a run for which none was named."""
    return Path("runs") / time.strftime(f"{command}-%Y%m%d-%H%M%S")
