"""The account of a merged log: the object that `branchline merge --json` prints, and the tables made from it.

Every sampled token is delivered by a timeline or listed under `dropped` with a reason; outputs that were
logged without token ids, and could not be encoded, are listed there with 0 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.cli.call_log import CallLogFile, LoggedSession, skipped_lines, skipped_to_json
from branchline.cli.render import format_count, more_lines, pluralize, sanitize
from branchline.cli.train_selection import models_to_json
from branchline.core.sample import DropReason
from branchline.export.jsonl import report_to_json
from branchline.export.samples import Export
from branchline.timelines.alignment import Permission
from branchline.timelines.diagnosis import Diagnosis
from branchline.timelines.log import LoggedCall
from branchline.timelines.message_spans import MessageSpans, Span
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Node

_EXCERPT_CHARS = 200
_MAX_TIMELINES = 50
_MAX_FORKS = 20
_MAX_MODELS = 20
_MAX_KEYS = 10
_OPTIONS = {
    Permission.REPAIR: "--repair",
    Permission.IGNORE_TOOLS: "--ignore-tools",
    Permission.INEXACT: "--inexact",
}
_REMEDIES = {
    DropReason.INEXACT: "ids or prompt not logged; --inexact trains them",
    "no_token_ids": "--tokenizer with --inexact encodes and trains them",
    "not_encoded": "logged without ids, and the tokenizer's chat template does not show them whole",
    DropReason.CANCELLED: "cut off, or logged without finish_reason; if the logger left it out, add it",
    DropReason.UNTRAINED: "--train-model, --rule",
}

JsonDict = dict[str, Any]


# -- report ---------------------------------------------------------------------------------------------


def build_report(log: CallLogFile, exports: Sequence[Export]) -> JsonDict:
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
        omitted = list(_omitted_outputs(session, log.tokenizer is not None))
        sampled += report["sampled_tokens"] + sum(entry["tokens"] for entry in omitted)
        delivered += report["trained_tokens"]
        inexact += report["inexact_tokens"]
        dropped += [*report["dropped"], *omitted]
        forks += [_fork_to_json(session, diagnosis) for diagnosis in log.diagnoses(session)]
    forks.sort(key=lambda fork: -fork["tokens_computed_again"])
    return {
        "calls": len(log.all_calls),
        "sessions": len(log.sessions),
        "models": models_to_json(log.all_calls),
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
        "kept_apart": [
            {"line": apart.line, "options": [_OPTIONS[permission] for permission in apart.missing]}
            for session in log.sessions
            for apart in session.merged.kept_apart
        ],
        "logged_twice": [
            {
                "line": call.line,
                "tokens": sum(len(output.ids) for output in call.outputs if output.ids is not None),
            }
            for call in log.repeated
        ],
        "contradicting": sorted(line for session in log.sessions for line in session.merged.contradicting),
        "forks": forks,
        "causes": dict(Counter(fork["cause"] for fork in forks).most_common()),
        "skipped": skipped_to_json(log.skipped),
        "replaced_text": log.replaced_text,
        "logprobs_of_other_tokens": log.other_tokens,
        "ignored_keys": log.ignored_keys,
    }


def _timeline_to_json(
    session: LoggedSession, timeline: Timeline, trained: Collection[int], spans: Sequence[Span | None]
) -> JsonDict:
    sampled = timeline.sampled_nodes
    last = timeline.leaf.output
    return {
        "session": session.name or None,
        "agent": timeline.agent or None,
        "model": session.merged.logged_call(timeline.calls[-1].index).model or None
        if timeline.calls
        else None,
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


def _model(session: LoggedSession, timeline: Timeline) -> str | None:
    calls = timeline.calls
    return (session.merged.logged_call(calls[-1].index).model or None) if calls else None


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


def _omitted_outputs(session: LoggedSession, with_tokenizer: bool) -> Iterator[JsonDict]:
    """Outputs that are not in the tree because of --dedupe, and outputs in the tree without token ids."""
    duplicates = set(session.merged.duplicates)
    for index, call in enumerate(session.merged.calls):
        for choice, output in enumerate(call.outputs):
            if (index, choice) in duplicates:
                tokens = 0 if output.ids is None else len(output.ids)
                yield {"reason": "duplicate", "call": _call_name(call), "tokens": tokens}
            elif output.ids is None:
                reason = "not_encoded" if with_tokenizer else "no_token_ids"
                yield {"reason": reason, "call": _call_name(call), "tokens": 0}


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


# -- tables ---------------------------------------------------------------------------------------------


def report_tables(report: JsonDict, log: CallLogFile) -> Iterator[RenderableType]:
    yield _timeline_table(report)
    yield Text(
        f"{pluralize(report['calls'], 'call')} in {pluralize(report['sessions'], 'session')} "
        f"became {pluralize(len(report['timelines']), 'timeline')}"
    )
    delivered, inexact = format_count(report["delivered_tokens"]), format_count(report["inexact_tokens"])
    yield Text(
        f"{pluralize(report['sampled_tokens'], 'sampled token')}, {delivered} delivered"
        + (f", {inexact} of them inexact" if inexact != "0" else "")
    )
    if len(report["models"]) > 1:
        models = [
            f"{sanitize(entry['model'] or '(no name)')}: {pluralize(entry['calls'], 'call')}"
            + ("" if entry["trained_calls"] else ", not trained")
            for entry in report["models"][:_MAX_MODELS]
        ]
        yield Text(f"{pluralize(len(report['models']), 'model')}: {'; '.join(models)}")
    tokens: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    for entry in report["dropped"]:
        tokens[entry["reason"]] += entry["tokens"]
        outputs[entry["reason"]] += 1
    for reason, count in outputs.most_common():
        remedy = f" ({_REMEDIES[reason]})" if reason in _REMEDIES else ""
        yield Text(
            f"dropped, {reason}: {pluralize(count, 'output')}, {pluralize(tokens[reason], 'token')}{remedy}"
        )
    apart = Counter(" ".join(entry["options"]) for entry in report["kept_apart"])
    for names, count in apart.most_common():
        yield Text(f"kept apart: {pluralize(count, 'call')} ({names} would join)")
    for method, count in Counter(repair["method"] for repair in report["repairs"]).most_common():
        yield Text(f"repaired by {method}: {pluralize(count, 'call')}")
    if report["logged_twice"]:
        yield Text(f"logged twice: {pluralize(len(report['logged_twice']), 'call')}, counted once")
    if contradicting := report["contradicting"]:
        yield Text(
            "other answers or requests under one response id and index: "
            f"{pluralize(len(contradicting), 'line')}, each counted (first: line {contradicting[0]})"
        )
    yield from _fork_lines(report)
    yield from skipped_lines(log.skipped)
    if log.replaced_text:
        yield Text(f"bytes that are not UTF-8 were replaced in {pluralize(len(log.replaced_text), 'line')}")
    if log.other_tokens:
        yield Text(
            f"logprobs left out: {pluralize(len(log.other_tokens), 'answer')} logged without ids, whose "
            "logprobs name other tokens than the tokenizer's"
        )
    if log.ignored_keys:
        keys = list(log.ignored_keys)
        shown = ", ".join(sanitize(key) for key in keys[:_MAX_KEYS]) + ", …" * (len(keys) > _MAX_KEYS)
        yield Text(f"ignored keys of lines: {shown} (session, agent, request and response are read)")
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
    with_model = len(report["models"]) > 1
    if with_model:
        table.add_column("model")
    for heading in ("messages", "tokens", "trained", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for timeline in timelines[:_MAX_TIMELINES]:
        names = [timeline["session"] or "-"] if with_session else []
        names.append(timeline["agent"] or "-")
        names += [timeline["model"] or "-"] if with_model else []
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
