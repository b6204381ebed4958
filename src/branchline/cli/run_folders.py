"""Folders of runs that a command makes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from branchline.cli.options.parser import options_to_yaml

CONFIG_FILE = "config.yaml"


def new_run_folder(command: str) -> Path:
    """Returns `runs/COMMAND-TIME`, the folder of a run for which none was named."""
    return Path("runs") / time.strftime(f"{command}-%Y%m%d-%H%M%S")


def keep_config(folder: Path, options: Any) -> None:
    """Writes the options that a run begins with, for `--config`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(options_to_yaml(options), "utf-8")
