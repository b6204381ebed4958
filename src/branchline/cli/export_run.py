"""`branchline export`: the samples of a run in another format."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from branchline.cli.render import pluralize
from branchline.core.errors import InputError

_DESCRIPTION = """\
Writes the samples of a run to one file. Only finished sessions have samples.
"""
_EPILOG = """\
formats:
  parquet    one row per sample: key, uid, group, agent_name, session, prompt_ids, response_ids,
             response_mask, response_logprobs, shares, reward, …
  jsonl      the same as JSON lines
  messages   the main history of each finished session: {"messages": […], "reward": …, "session": …}

example:
  branchline export runs/first --to parquet --output first.parquet
"""
FORMATS = ("parquet", "jsonl", "messages")


def add_export(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "export",
        help="write the samples of a run as Parquet or JSON lines",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file (default: DIR/export.parquet or DIR/export.jsonl)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Writes the file; after an error the old one is unchanged."""
    from branchline.export.jsonl import write_jsonl
    from branchline.rollout.run_folder import RunFolder, find_run_folder

    folder: RunFolder = find_run_folder(options.folder)
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
