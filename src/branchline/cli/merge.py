"""`branchline merge`: the timelines of a log, and where every sampled token of it went."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.cli.call_log import LOG_FORMAT_HELP, CallLogFile, add_log_options, load_call_log
from branchline.cli.merge_report import JsonDict, build_merge_report
from branchline.cli.render import format_count, pluralize, sanitize, to_text
from branchline.core.errors import ExportError, InputError, MissingLogprobsError
from branchline.core.sample import Sample
from branchline.export.jsonl import write_jsonl
from branchline.export.samples import ExportPolicy, export_samples

HELP = "merge the calls of a log into timelines, and account for every sampled token"
_DESCRIPTION = """\
Merges calls that were captured elsewhere into timelines: a call whose messages repeat what another was
asked and answered continues it. Prints the timelines, what forked and why, and where every sampled token
went; --samples writes what can be trained.
"""
_EPILOG = f"""\
example:
  branchline merge calls.jsonl --tokenizer ~/models/Qwen3-8B --samples samples.jsonl

{LOG_FORMAT_HELP}"""

_DEFAULTS = ExportPolicy()
_MAX_TIMELINES = 50
_MAX_FORKS = 20
_MAX_SKIPPED = 10


def add_merge(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "merge",
        help=HELP,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_log_options(parser)
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="write the samples there, one JSON object a line, whole or not at all",
    )
    parser.add_argument(
        "--inexact",
        action="store_true",
        default=_DEFAULTS.include_inexact,
        help="with --samples: train inexact outputs too; by default they are context and are not trained",
    )
    parser.add_argument(
        "--allow-missing-logprobs",
        action="store_true",
        dest="missing_logprobs",
        default=_DEFAULTS.include_missing_logprobs,
        help="with --samples: train tokens without logprobs too; by default they are an error",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """What the command prints."""
    if options.samples is not None:
        _check_target(options.samples, options.calls)
    log = load_call_log(options)
    told = build_merge_report(log)
    told["samples"] = _write_samples(log, options) if options.samples is not None else None
    if options.json:
        return msgspec.json.encode(told).decode() + "\n"
    return to_text(*_tables(told, log))


# -- samples --------------------------------------------------------------------------------------------


def _check_target(target: Path, calls: Path) -> None:
    """A file is put in place of the target, which must not be the log, a device or a pipe."""
    if target.exists() and not target.is_file():
        raise InputError(f"--samples {target}: not a regular file, expected a file to write")
    if target.exists() and calls.exists() and target.samefile(calls):
        raise InputError(f"--samples {target}: that is the log itself, expected another file")


def _write_samples(log: CallLogFile, options: argparse.Namespace) -> JsonDict:
    policy = ExportPolicy(include_inexact=options.inexact, include_missing_logprobs=True)
    trained = 0
    dropped: Counter[str] = Counter()

    def samples() -> Iterator[Sample]:
        nonlocal trained
        for session in log.sessions:
            export = export_samples(
                session.merged.tree, policy, session=session.name, fork_report=session.fork_report
            )
            report = export.report
            if report.missing_logprobs and not options.missing_logprobs:
                where = f"session {session.name!r}: " if session.name else ""
                raise MissingLogprobsError(
                    f"--samples: {where}{report.missing_logprobs} of {report.trained_tokens} sampled tokens "
                    "came without logprobs; --allow-missing-logprobs writes them all the same"
                )
            trained += report.trained_tokens
            for entry in report.dropped:
                dropped[entry.reason] += entry.tokens
            yield from export.samples

    try:
        count = write_jsonl(samples(), options.samples)
    except OSError as error:
        raise ExportError(f"--samples {options.samples}: cannot be written: {error.strerror}") from error
    return {
        "file": os.fsencode(options.samples).decode("utf-8", "replace"),
        "samples": count,
        "trained_tokens": trained,
        "dropped_tokens": dict(dropped),
    }


# -- tables ---------------------------------------------------------------------------------------------


def _tables(told: JsonDict, log: CallLogFile) -> Iterator[RenderableType]:
    yield _timeline_table(told)
    lines = told["timelines"]
    yield Text(
        f"{pluralize(told['calls'], 'call')} in {pluralize(told['sessions'], 'session')} "
        f"became {pluralize(len(lines), 'timeline')}"
    )
    yield Text(
        f"{pluralize(told['sampled_tokens'], 'sampled token')}, {format_count(told['delivered_tokens'])} delivered"
    )
    tokens: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    for entry in told["dropped"]:
        tokens[entry["reason"]] += entry["tokens"]
        outputs[entry["reason"]] += 1
    for reason, count in outputs.most_common():
        yield Text(f"dropped, {reason}: {pluralize(count, 'output')}, {pluralize(tokens[reason], 'token')}")
    for method, count in Counter(repair["method"] for repair in told["repairs"]).most_common():
        yield Text(f"repaired by {method}: {pluralize(count, 'call')}")
    yield from _forks(told)
    yield from _skipped(log)
    written = told["samples"]
    if written is not None:
        left = ", ".join(f"{format_count(count)} {why}" for why, count in written["dropped_tokens"].items())
        yield Text(
            f"wrote {pluralize(written['samples'], 'sample')} with "
            f"{pluralize(written['trained_tokens'], 'trained token')} to {written['file']}"
            + (f" (not trained: {left})" if left else "")
        )


def _timeline_table(told: JsonDict) -> RenderableType:
    lines = told["timelines"]
    with_session = told["sessions"] > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if with_session:
        table.add_column("session")
    table.add_column("agent")
    for heading in ("messages", "tokens", "trained", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for line in lines[:_MAX_TIMELINES]:
        names = [sanitize(line["session"] or "-")] if with_session else []
        counts = [line[key] for key in ("messages", "tokens", "trained_tokens", "calls")]
        table.add_row(
            *map(Text, [*names, sanitize(line["agent"] or "-"), *map(format_count, counts)]),
            Text("yes", "green") if line["exact"] else Text("no", "yellow"),
        )
    if len(lines) > _MAX_TIMELINES:
        table.caption = f"{format_count(len(lines) - _MAX_TIMELINES)} more timelines; --json lists them all"
        table.caption_justify = "left"
    return table


def _forks(told: JsonDict) -> Iterator[Text]:
    forks = told["forks"]
    if not forks:
        return
    causes = ", ".join(f"{cause} {format_count(count)}" for cause, count in told["causes"].items())
    yield Text(f"{pluralize(len(forks), 'fork')}: {causes}")
    for fork in forks[:_MAX_FORKS]:
        session = f"{sanitize(fork['session'])}, " if told["sessions"] > 1 and fork["session"] else ""
        yield Text(f"  {session}line {fork['line']}: {sanitize(fork['diagnosis'], 1000)}")
    if len(forks) > _MAX_FORKS:
        yield Text(f"  {format_count(len(forks) - _MAX_FORKS)} more; --json lists them all")


def _skipped(log: CallLogFile) -> Iterator[Text]:
    if not log.skipped:
        return
    yield Text(f"skipped {pluralize(len(log.skipped), 'bad line')}")
    for error in log.skipped[:_MAX_SKIPPED]:
        yield Text(f"  {sanitize(str(error))}")
    if len(log.skipped) > _MAX_SKIPPED:
        yield Text(f"  {format_count(len(log.skipped) - _MAX_SKIPPED)} more; --json lists them all")
