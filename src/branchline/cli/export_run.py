"""`branchline export`: the samples of a run in another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from branchline.cli.commands.export import ExportRunOptions
from branchline.cli.render import pluralize
from branchline.core.errors import InputError


def run(options: ExportRunOptions) -> str:
    """Writes the file; after an error the old one is unchanged."""
    from branchline.export.jsonl import write_jsonl
    from branchline.rollout.run_folder import RunFolder, find_run_folder

    folder: RunFolder = find_run_folder(options.run_folder)
    suffix = "parquet" if options.to == "parquet" else "jsonl"
    target: Path = options.output or folder.path / f"export.{suffix}"
    if not target.parent.is_dir():
        raise InputError(f"--output: got {target}, expected a file in an existing folder")
    if options.to == "messages":
        count, noun = _write_messages(folder.read_trajectory_lines(), target), "session"
    elif options.to == "parquet":
        from branchline.export.parquet import write_parquet

        count, noun = write_parquet(folder.read_rows(), target), "sample"
    else:
        count, noun = write_jsonl(folder.read_rows(), target), "sample"
    return f"wrote {pluralize(count, noun)} to {target}\n"


def _write_messages(lines: Iterator[dict[str, Any]], target: Path) -> int:
    from branchline.export.jsonl import replace_file

    count = 0
    with replace_file(target) as file:
        for line in lines:
            if line["status"] == "finished" and line["histories"]:
                row = {"messages": line["histories"][0]["messages"], "reward": line["reward"]}
                file.write(msgspec.json.encode({**row, "session": line["session"]}) + b"\n")
                count += 1
    return count
