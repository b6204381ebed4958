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

from branchline.cli.account import Record, account
from branchline.cli.calls import LINE_HELP, CallLog, add_input_options, read_calls
from branchline.cli.show import counted, number, plain, printed
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

{LINE_HELP}"""

_DEFAULTS = ExportPolicy()
_MOST_TIMELINES = 50
_MOST_FORKS = 20
_MOST_SKIPPED = 10


def add_merge(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "merge",
        help=HELP,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_options(parser)
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="write the samples there, one JSON object a line, whole or not at all",
    )
    parser.add_argument(
        "--inexact",
        action="store_true",
        default=_DEFAULTS.inexact,
        help="with --samples: train inexact outputs too; by default they are context and are not trained",
    )
    parser.add_argument(
        "--allow-missing-logprobs",
        action="store_true",
        dest="missing_logprobs",
        default=_DEFAULTS.missing_logprobs,
        help="with --samples: train tokens without logprobs too; by default they are an error",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """What the command prints."""
    if options.samples is not None:
        _refuse_target(options.samples, options.calls)
    log = read_calls(options)
    told = account(log)
    told["samples"] = _write_samples(log, options) if options.samples is not None else None
    if options.json:
        return msgspec.json.encode(told).decode() + "\n"
    return printed(*_tables(told, log))


# -- samples --------------------------------------------------------------------------------------------


def _refuse_target(target: Path, calls: Path) -> None:
    """A file is put in place of the target, which must not be the log, a device or a pipe."""
    if target.exists() and not target.is_file():
        raise InputError(f"--samples {target}: not a regular file, expected a file to write")
    if target.exists() and calls.exists() and target.samefile(calls):
        raise InputError(f"--samples {target}: that is the log itself, expected another file")


def _write_samples(log: CallLog, options: argparse.Namespace) -> Record:
    policy = ExportPolicy(inexact=options.inexact, missing_logprobs=True)
    trained = 0
    dropped: Counter[str] = Counter()

    def samples() -> Iterator[Sample]:
        nonlocal trained
        for session in log.sessions:
            export = export_samples(
                session.merged.tree, policy, session=session.name, judgement=session.judgement
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


def _tables(told: Record, log: CallLog) -> Iterator[RenderableType]:
    yield _timelines(told)
    lines = told["timelines"]
    yield Text(
        f"{counted(told['calls'], 'call')} in {counted(told['sessions'], 'session')} "
        f"became {counted(len(lines), 'timeline')}"
    )
    yield Text(
        f"{counted(told['sampled_tokens'], 'sampled token')}, {number(told['delivered_tokens'])} delivered"
    )
    tokens: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    for entry in told["dropped"]:
        tokens[entry["reason"]] += entry["tokens"]
        outputs[entry["reason"]] += 1
    for reason, count in outputs.most_common():
        yield Text(f"dropped, {reason}: {counted(count, 'output')}, {counted(tokens[reason], 'token')}")
    for method, count in Counter(repair["method"] for repair in told["repairs"]).most_common():
        yield Text(f"repaired by {method}: {counted(count, 'call')}")
    yield from _forks(told)
    yield from _skipped(log)
    written = told["samples"]
    if written is not None:
        left = ", ".join(f"{number(count)} {why}" for why, count in written["dropped_tokens"].items())
        yield Text(
            f"wrote {counted(written['samples'], 'sample')} with "
            f"{counted(written['trained_tokens'], 'trained token')} to {written['file']}"
            + (f" (not trained: {left})" if left else "")
        )


def _timelines(told: Record) -> RenderableType:
    lines = told["timelines"]
    with_session = told["sessions"] > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if with_session:
        table.add_column("session")
    table.add_column("agent")
    for heading in ("messages", "tokens", "trained", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for line in lines[:_MOST_TIMELINES]:
        names = [plain(line["session"] or "-")] if with_session else []
        counts = [line[key] for key in ("messages", "tokens", "trained_tokens", "calls")]
        table.add_row(
            *map(Text, [*names, plain(line["agent"] or "-"), *map(number, counts)]),
            Text("yes", "green") if line["exact"] else Text("no", "yellow"),
        )
    if len(lines) > _MOST_TIMELINES:
        table.caption = f"{number(len(lines) - _MOST_TIMELINES)} more timelines; --json lists them all"
        table.caption_justify = "left"
    return table


def _forks(told: Record) -> Iterator[Text]:
    forks = told["forks"]
    if not forks:
        return
    causes = ", ".join(f"{cause} {number(count)}" for cause, count in told["causes"].items())
    yield Text(f"{counted(len(forks), 'fork')}: {causes}")
    for fork in forks[:_MOST_FORKS]:
        session = f"{plain(fork['session'])}, " if told["sessions"] > 1 and fork["session"] else ""
        yield Text(f"  {session}line {fork['line']}: {plain(fork['diagnosis'], 1000)}")
    if len(forks) > _MOST_FORKS:
        yield Text(f"  {number(len(forks) - _MOST_FORKS)} more; --json lists them all")


def _skipped(log: CallLog) -> Iterator[Text]:
    if not log.skipped:
        return
    yield Text(f"skipped {counted(len(log.skipped), 'bad line')}")
    for error in log.skipped[:_MOST_SKIPPED]:
        yield Text(f"  {plain(str(error))}")
    if len(log.skipped) > _MOST_SKIPPED:
        yield Text(f"  {number(len(log.skipped) - _MOST_SKIPPED)} more; --json lists them all")
