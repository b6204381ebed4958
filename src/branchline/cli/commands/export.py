"""The options and texts of `branchline export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from branchline.cli.options.command import Command
from branchline.core.option_fields import option


@dataclass(frozen=True, kw_only=True)
class ExportRunOptions:
    """A run, and the file that it is written to."""

    run_folder: Path = option(positional=True, metavar="DIR")
    """The folder of the run."""
    to: Literal["parquet", "jsonl", "messages"] = option(basic=True)
    """The format."""
    output: Path | None = option(None, basic=True, metavar="FILE")
    """The file; by default DIR/export.parquet or DIR/export.jsonl."""


_DESCRIPTION = """\
Writes the samples of a run to one file. Only finished sessions have samples.
"""
_EXAMPLES = """\
formats:
  parquet    one row per sample: key, uid, group, agent_name, session, prompt_ids, response_ids,
             response_mask, response_logprobs, shares, reward, …
  jsonl      the same as JSON lines
  messages   the main history of each finished session: {"messages": […], "reward": …, "session": …}

example:
  branchline export runs/first --to parquet --output first.parquet
"""
COMMAND = Command("export", ExportRunOptions, "branchline.cli.export_run:run", _DESCRIPTION, _EXAMPLES)
