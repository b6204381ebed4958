"""`branchline merge`: the timelines of a log, an account of every sampled token in it, and its samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from branchline.cli.call_log import CallLogFile, load_call_log
from branchline.cli.commands.merge import MergeOptions
from branchline.cli.merge_report import build_report, report_tables
from branchline.cli.render import to_text
from branchline.cli.train_selection import select_trained
from branchline.core.errors import ExportError, InputError, MissingLogprobsError
from branchline.core.sample import Sample
from branchline.export.jsonl import write_jsonl
from branchline.export.samples import Export, ExportPolicy, export_samples

JsonDict = dict[str, Any]


def run(options: MergeOptions) -> str:
    """The account of the log, as tables or as JSON."""
    if options.samples is not None:
        _check_target(options.samples, options.log.calls)
    log = load_call_log(
        options.log, lambda calls: select_trained(calls, options.selection, options.samples is not None)
    )
    policy = ExportPolicy(
        include_inexact=True if options.log.inexact else "context" if _joins_other_ids(options) else False,
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


def _joins_other_ids(options: MergeOptions) -> bool:
    """Whether calls may continue after other ids than they were sampled after."""
    return bool(options.log.repair or options.log.ignore_tools)


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


def _write_samples(log: CallLogFile, exports: Sequence[Export], options: MergeOptions) -> JsonDict:
    assert options.samples is not None
    dropped: Counter[str] = Counter()
    if not options.allow_missing_logprobs and options.missing_logprob is None:
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
