"""`branchline merge`: the timelines of a log, an account of every sampled token in it, and its samples."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from branchline.cli.call_log import (
    LOG_FORMAT_HELP,
    CallLogFile,
    add_log_options,
    load_call_log,
)
from branchline.cli.merge_report import build_report, report_tables
from branchline.cli.render import to_text
from branchline.cli.train_selection import add_train_options, select_trained
from branchline.core.errors import ExportError, InputError, MissingLogprobsError
from branchline.core.sample import Sample
from branchline.export.jsonl import write_jsonl
from branchline.export.samples import Export, ExportPolicy, export_samples

_DESCRIPTION = """\
Merges calls that were captured elsewhere into timelines: a call whose messages and token ids repeat the
prompt and the answer of another call continues that call. Prints the timelines, the forks with their causes,
and an account of every sampled token. With --samples, writes training samples to a file.
"""
_EPILOG = f"""\
example:
  branchline merge calls.jsonl --tokenizer Qwen/Qwen3-8B --samples samples.jsonl

{LOG_FORMAT_HELP}"""

_DEFAULTS = ExportPolicy()
JsonDict = dict[str, Any]


def add_merge(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "merge",
        help="merge the calls of a log into timelines and account for every sampled token",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_log_options(parser)
    add_train_options(parser)
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="write the samples to FILE: as Parquet if its name ends in .parquet, else one JSON object per "
        "line; after an error FILE is left as it was",
    )
    parser.add_argument(
        "--allow-missing-logprobs",
        action="store_true",
        dest="missing_logprobs",
        default=_DEFAULTS.include_missing_logprobs,
        help="with --samples: train tokens without logprobs too, as null; by default they are an error",
    )
    parser.add_argument(
        "--missing-logprob",
        type=float,
        metavar="NUMBER",
        default=_DEFAULTS.missing_logprob,
        help="with --samples: train tokens without logprobs too, with NUMBER as their logprob",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """The account of the log, as tables or as JSON."""
    if options.samples is not None:
        _check_target(options.samples, options.calls)
    log = load_call_log(options, lambda calls: select_trained(calls, options))
    policy = ExportPolicy(
        include_inexact=True if options.inexact else "context" if _joins_other_ids(options) else False,
        include_missing_logprobs=True,
        missing_logprob=options.missing_logprob,
    )
    exports = [
        export_samples(session.merged.tree, policy, session=session.name, fork_report=session.fork_report)
        for session in log.sessions
    ]
    report = build_report(log, exports)
    report["samples"] = _write_samples(log, exports, options) if options.samples is not None else None
    if options.json:
        return msgspec.json.encode(report).decode() + "\n"
    return to_text(*report_tables(report, log))


def _joins_other_ids(options: argparse.Namespace) -> bool:
    """Whether calls may continue after other ids than they were sampled after."""
    return bool(options.repair or options.ignore_tools)


# -- samples --------------------------------------------------------------------------------------------


def _check_target(target: Path, calls: Path) -> None:
    """Refuses a target that is the log itself, a folder, a device or a pipe: writing replaces the file."""
    if target.exists() and not target.is_file():
        raise InputError(f"--samples {target}: not a regular file, expected a file to write")
    if target.exists() and calls.exists() and target.samefile(calls):
        raise InputError(f"--samples {target}: that is the log itself, expected another file")
    _sample_writer(target)  # Raises MissingExtraError before the log is read.


def _sample_writer(target: Path) -> Callable[[Iterable[Sample], Path], int]:
    """Returns the function that writes samples in the format of a file's name."""
    if target.suffix.lower() != ".parquet":
        return write_jsonl
    from branchline.export.parquet import write_parquet

    return write_parquet


def _write_samples(log: CallLogFile, exports: Sequence[Export], options: argparse.Namespace) -> JsonDict:
    dropped: Counter[str] = Counter()
    if not options.missing_logprobs and options.missing_logprob is None:
        for session, export in zip(log.sessions, exports, strict=True):
            report = export.report
            if report.missing_logprobs:
                where = f"session {session.name!r}: " if session.name else ""
                raise MissingLogprobsError(
                    f"--samples: {where}{report.missing_logprobs} of {report.trained_tokens} sampled tokens "
                    "have no logprobs; --allow-missing-logprobs or --missing-logprob writes them anyway"
                )
    for export in exports:
        for entry in export.report.dropped:
            dropped[entry.reason] += entry.tokens
    samples = (sample for export in exports for sample in export.samples)
    try:
        count = _sample_writer(options.samples)(samples, options.samples)
    except OSError as error:
        raise ExportError(f"--samples {options.samples}: cannot be written: {error.strerror}") from error
    return {
        "file": os.fsencode(options.samples).decode("utf-8", "replace"),
        "samples": count,
        "trained_tokens": sum(export.report.trained_tokens for export in exports),
        "inexact_tokens": sum(export.report.inexact_tokens for export in exports),
        "dropped_tokens": dict(dropped),
    }
