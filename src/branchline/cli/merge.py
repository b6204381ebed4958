"""`branchline merge`: the timelines of a log, and an account of every sampled token in it.

Every sampled token is delivered by a timeline or listed under `dropped` with a reason; outputs that were
logged without token ids are listed there with 0 tokens.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.cli.call_log import (
    LOG_FORMAT_HELP,
    CallLogFile,
    LoggedSession,
    add_log_options,
    load_call_log,
    skipped_lines,
    skipped_to_json,
)
from branchline.cli.render import format_count, more_lines, pluralize, sanitize, to_text
from branchline.core.errors import ExportError, InputError, MissingLogprobsError
from branchline.core.sample import Sample
from branchline.export.jsonl import report_to_json, write_jsonl
from branchline.export.samples import Export, ExportPolicy, export_samples
from branchline.timelines.diagnosis import Diagnosis
from branchline.timelines.log import LoggedCall
from branchline.timelines.message_spans import MessageSpans, Span
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Node

_DESCRIPTION = """\
Merges calls that were captured elsewhere into timelines: a call whose messages repeat the prompt and the
answer of another call continues that call. Prints the timelines, the forks with their causes, and an account
of every sampled token. With --samples, writes training samples to a file.
"""
_EPILOG = f"""\
example:
  branchline merge calls.jsonl --tokenizer Qwen/Qwen3-8B --samples samples.jsonl

{LOG_FORMAT_HELP}"""

_DEFAULTS = ExportPolicy()
_EXCERPT_CHARS = 200
_MAX_TIMELINES = 50
_MAX_FORKS = 20

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
    log = load_call_log(options)
    policy = ExportPolicy(
        include_inexact=options.inexact,
        include_missing_logprobs=True,
        missing_logprob=options.missing_logprob,
    )
    exports = [
        export_samples(session.merged.tree, policy, session=session.name, fork_report=session.fork_report)
        for session in log.sessions
    ]
    report = _build_report(log, exports)
    report["samples"] = _write_samples(log, exports, options) if options.samples is not None else None
    if options.json:
        return msgspec.json.encode(report).decode() + "\n"
    return to_text(*_tables(report, log))


# -- report ---------------------------------------------------------------------------------------------


def _build_report(log: CallLogFile, exports: Sequence[Export]) -> JsonDict:
    """The object that --json prints and that the tables are made from. What it calls delivered is what
    --samples writes with the same options."""
    timelines: list[JsonDict] = []
    dropped: list[JsonDict] = []
    forks: list[JsonDict] = []
    sampled = delivered = inexact = 0
    for session, export in zip(log.sessions, exports, strict=True):
        spans = MessageSpans(session.merged, log.codec)
        timelines += [
            _timeline_to_json(session, timeline, export.trained_nodes, spans.of_timeline(timeline))
            for timeline in timelines_of(session.merged.tree)
        ]
        report = report_to_json(export.report)
        omitted = list(_omitted_outputs(session))
        sampled += report["sampled_tokens"] + sum(entry["tokens"] for entry in omitted)
        delivered += report["trained_tokens"]
        inexact += report["inexact_tokens"]
        dropped += [*report["dropped"], *omitted]
        forks += [_fork_to_json(session, diagnosis) for diagnosis in log.diagnoses(session)]
    forks.sort(key=lambda fork: -fork["tokens_computed_again"])
    return {
        "calls": log.calls,
        "sessions": len(log.sessions),
        "timelines": timelines,
        "sampled_tokens": sampled,
        "delivered_tokens": delivered,
        "inexact_tokens": inexact,
        "dropped": dropped,
        "repairs": [
            {"line": repair.line, "method": repair.method}
            for session in log.sessions
            for repair in session.merged.repairs
        ],
        "forks": forks,
        "causes": dict(Counter(fork["cause"] for fork in forks).most_common()),
        "skipped": skipped_to_json(log.skipped),
    }


def _timeline_to_json(
    session: LoggedSession, timeline: Timeline, trained: Collection[int], spans: Sequence[Span | None]
) -> JsonDict:
    sampled = timeline.sampled_nodes
    last = timeline.leaf.output
    return {
        "session": session.name or None,
        "agent": timeline.agent or None,
        "messages": len(timeline.nodes),
        "tokens": len(timeline),
        "trained_tokens": sum(node.end - node.sampled_start for node in sampled if node.id in trained),
        "calls": len(sampled),
        "lines": [session.merged.line_of_call[call.index] for call in timeline.calls],
        "exact": all(node.output is not None and not node.output.inexact for node in sampled),
        "tokens_behind_other_ids": timeline.inexact_tokens,
        "missing_logprobs": sum(_missing_logprobs(node) for node in sampled),
        "finish": last.finish_reason if last is not None else None,
        "history": [_message_to_json(node, span) for node, span in zip(timeline.nodes, spans, strict=True)],
    }


def _missing_logprobs(node: Node) -> int:
    logprobs = node.output.logprobs if node.output is not None else None
    return node.end - node.sampled_start if logprobs is None else int(np.isnan(logprobs).sum())


def _message_to_json(node: Node, span: Span | None) -> JsonDict:
    """A message with the positions of its tokens on the timeline; null if the log does not tell them."""
    return {
        "role": node.message.role,
        "author": "llm" if node.is_sampled else "env",
        "text": node.message.content[:_EXCERPT_CHARS],
        "tool_calls": [call.name for call in node.message.tool_calls],
        "tokens": None if span is None else span[1] - span[0],
        "span": span,
    }


def _omitted_outputs(session: LoggedSession) -> Iterator[JsonDict]:
    """Outputs that are not in the tree because of --dedupe, and outputs in the tree without token ids."""
    duplicates = set(session.merged.duplicates)
    for index, call in enumerate(session.calls):
        for choice, output in enumerate(call.outputs):
            if (index, choice) in duplicates:
                tokens = 0 if output.ids is None else len(output.ids)
                yield {"reason": "duplicate", "call": _call_name(call), "tokens": tokens}
            elif output.ids is None:
                yield {"reason": "no_token_ids", "call": _call_name(call), "tokens": 0}


def _call_name(call: LoggedCall) -> str:
    return call.id or f"line-{call.line}"


def _fork_to_json(session: LoggedSession, diagnosis: Diagnosis) -> JsonDict:
    return {
        "session": session.name or None,
        "line": session.merged.line_of_call[diagnosis.fork.call.index],
        "cause": diagnosis.cause,
        "first_divergent_token": diagnosis.first_divergent_token,
        "before": diagnosis.before,
        "after": diagnosis.after,
        "tokens_computed_again": diagnosis.tokens_computed_again,
        "diagnosis": str(diagnosis),
    }


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
    if target.suffix != ".parquet":
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


# -- tables ---------------------------------------------------------------------------------------------


def _tables(report: JsonDict, log: CallLogFile) -> Iterator[RenderableType]:
    yield _timeline_table(report)
    yield Text(
        f"{pluralize(report['calls'], 'call')} in {pluralize(report['sessions'], 'session')} "
        f"became {pluralize(len(report['timelines']), 'timeline')}"
    )
    delivered, inexact = format_count(report["delivered_tokens"]), format_count(report["inexact_tokens"])
    yield Text(
        f"{pluralize(report['sampled_tokens'], 'sampled token')}, {delivered} delivered"
        + (f", {inexact} of them inexact (--exact keeps such calls apart)" if inexact != "0" else "")
    )
    tokens: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    for entry in report["dropped"]:
        tokens[entry["reason"]] += entry["tokens"]
        outputs[entry["reason"]] += 1
    for reason, count in outputs.most_common():
        yield Text(f"dropped, {reason}: {pluralize(count, 'output')}, {pluralize(tokens[reason], 'token')}")
    for method, count in Counter(repair["method"] for repair in report["repairs"]).most_common():
        yield Text(f"repaired by {method}: {pluralize(count, 'call')}")
    yield from _fork_lines(report)
    yield from skipped_lines(log.skipped)
    written = report["samples"]
    if written is not None:
        not_trained = ", ".join(
            f"{format_count(count)} {reason}" for reason, count in written["dropped_tokens"].items()
        )
        yield Text(
            f"wrote {pluralize(written['samples'], 'sample')} with "
            f"{pluralize(written['trained_tokens'], 'trained token')} to {written['file']}"
            + (f" (not trained: {not_trained})" if not_trained else "")
        )


def _timeline_table(report: JsonDict) -> RenderableType:
    timelines = report["timelines"]
    with_session = report["sessions"] > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if with_session:
        table.add_column("session")
    table.add_column("agent")
    for heading in ("messages", "tokens", "trained", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for timeline in timelines[:_MAX_TIMELINES]:
        names = [timeline["session"] or "-"] if with_session else []
        names.append(timeline["agent"] or "-")
        counts = [timeline[key] for key in ("messages", "tokens", "trained_tokens", "calls")]
        table.add_row(
            *(Text(sanitize(name)) for name in names),
            *(Text(format_count(count)) for count in counts),
            Text("yes", "green") if timeline["exact"] else Text("no", "yellow"),
        )
    if len(timelines) > _MAX_TIMELINES:
        more = format_count(len(timelines) - _MAX_TIMELINES)
        table.caption = f"{more} more timelines; --json lists them all"
        table.caption_justify = "left"
    return table


def _fork_lines(report: JsonDict) -> Iterator[Text]:
    forks = report["forks"]
    if not forks:
        return
    causes = ", ".join(f"{cause} {format_count(count)}" for cause, count in report["causes"].items())
    yield Text(f"{pluralize(len(forks), 'fork')}: {causes}")
    for fork in forks[:_MAX_FORKS]:
        session = f"{sanitize(fork['session'])}, " if report["sessions"] > 1 and fork["session"] else ""
        yield Text(f"  {session}line {fork['line']}: {sanitize(fork['diagnosis'], 1000)}")
    yield from more_lines(len(forks) - _MAX_FORKS)
