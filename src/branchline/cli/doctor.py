"""`branchline doctor`: reports what a model's chat template does to conversations, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.cli.call_log import no_calls_error, skipped_lines, skipped_to_json
from branchline.cli.commands.doctor import DoctorOptions
from branchline.cli.render import format_count, pluralize, sanitize, to_text
from branchline.core.errors import LogError
from branchline.doctor.findings import Finding, Severity
from branchline.doctor.replay_report import (
    MAX_FORK_RATE,
    ReplayReport,
    SafetyVerdict,
    assess_safety,
    replay_log,
)
from branchline.doctor.template_audit import TemplateAudit, audit_template
from branchline.timelines.log import LoggedCall, LogReader

_EXIT_UNSAFE = 1
_STYLES = {Severity.FINE: "green", Severity.NOTE: "yellow", Severity.UNSAFE: "bold red"}
_MAX_REFUSALS = 5

JsonDict = dict[str, Any]


def run(options: DoctorOptions) -> tuple[str, int]:
    """Returns what the command prints, and its exit code."""
    codec = GenericCodec.open(
        options.tokenizer,
        stop_ids=options.template.stop_id,
        no_stop_ids=options.template.no_stop_id,
        default_chat_template_kwargs=options.template.default_chat_template_kwargs,
    )
    reader = LogReader(
        options.calls or Path(), skip_bad=options.skip_bad, check_ids=codec.tokenizer.invalid_id_error
    )
    calls = _read_calls(reader) if options.calls is not None else []
    audit = audit_template(codec)
    replays = [replay_log(calls, codec, history) for history in get_args(HistoryPolicy)] if calls else []
    verdict = assess_safety(audit, options.history, replays)
    if options.json:
        report = _report_to_json(audit, verdict, options.history, replays, reader.errors)
        text = msgspec.json.encode(report).decode() + "\n"
    else:
        text = to_text(*_render_report(audit, verdict, options.history, replays, reader.errors))
    return text, 0 if verdict.safe else _EXIT_UNSAFE


def _read_calls(reader: LogReader) -> list[LoggedCall]:
    calls = reader.check_counts(reader)
    if not calls:
        raise no_calls_error(reader)
    return calls


# -- as JSON --------------------------------------------------------------------------------------


def _report_to_json(
    audit: TemplateAudit,
    verdict: SafetyVerdict,
    history: HistoryPolicy,
    replays: Sequence[ReplayReport],
    skipped: Sequence[LogError],
) -> JsonDict:
    return {
        "tokenizer": audit.name,
        "history": history,
        "verdict": "safe" if verdict.safe else "unsafe",
        "advice": verdict.advice,
        "findings": [
            {
                "name": finding.name,
                "ok": finding.ok,
                "severity": finding.severity,
                "sentence": finding.sentence,
                "evidence": dict(finding.evidence),
            }
            for finding in audit.findings
        ],
        "parsers": dict(audit.parsers),
        "stop_ids": list(audit.stop_ids),
        "log": {report.history: _replay_to_json(report) for report in replays} or None,
        "skipped": skipped_to_json(skipped),
    }


def _replay_to_json(report: ReplayReport) -> JsonDict:
    return {
        "calls": report.calls,
        "continuing_calls": report.continuing_calls,
        "forked_calls": report.forked_calls,
        "fork_rate": round(report.fork_rate, 4),
        "forks": sum(report.causes.values()),
        "causes": dict(report.causes.most_common()),
        "prompt_tokens": report.prompt_tokens,
        "encoded_tokens": report.encoded_tokens,
        "tokens_computed_again": report.tokens_computed_again,
        "timelines": report.timelines,
        "drift": {
            "compared": report.compared_prompts,
            "differing": len(report.drifts),
            "same_text": sum(drift.same_text for drift in report.drifts),
            "lines": [drift.line for drift in report.drifts],
            "first": asdict(report.drifts[0]) if report.drifts else None,
        },
        "refused": [{"line": refusal.line, "words": refusal.message} for refusal in report.refusals],
    }


# -- as text -------------------------------------------------------------------------------------------


def _render_report(
    audit: TemplateAudit,
    verdict: SafetyVerdict,
    history: HistoryPolicy,
    replays: Sequence[ReplayReport],
    skipped: Sequence[LogError],
) -> Iterator[RenderableType]:
    width = max(len(finding.name) for finding in audit.findings)
    for finding in audit.findings:
        yield from _render_finding(finding, width)
    stops = ", ".join(f"{token} {_escape(name)}" for token, name in audit.stop_ids.items()) or "none"
    calls, reasoning = (audit.parsers.get(kind, "none") for kind in ("tool_calls", "reasoning"))
    yield Text(f"parsers: {calls} for tool calls, {reasoning} for reasoning; stop ids: {stops}")
    if replays:
        yield _replay_table(replays)
        for report in replays:
            yield from _render_replay(report)
    yield from skipped_lines(skipped)
    counts = [f"{len(audit.findings_of(severity))} {severity}" for severity in Severity]
    chosen = [report for report in replays if report.history == history]
    figures = "; ".join(
        [f"{pluralize(len(audit.findings), 'check')}: {', '.join(counts)}", *map(_fork_rate_text, chosen)]
    )
    yield Text(figures, "dim")
    severity = Severity.FINE if verdict.safe else Severity.UNSAFE
    yield Text.assemble(
        ("safe" if verdict.safe else "unsafe", _STYLES[severity]), f": {sanitize(verdict.advice, 1000)}"
    )


def _render_finding(finding: Finding, width: int) -> Iterator[Text]:
    yield Text.assemble(
        (f"{finding.severity:<7}", _STYLES[finding.severity]), f"{finding.name:<{width}}  {finding.sentence}"
    )
    if not finding.ok:
        label = max((len(name) for name in finding.evidence), default=0)
        for name, text in finding.evidence.items():
            yield Text(f"         {name:<{label}}  {_escape(text)}", "dim")


def _escape(text: str) -> str:
    """Returns the text with control characters and newlines escaped."""
    return repr(text)[1:-1]


def _replay_table(replays: Sequence[ReplayReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("history")
    headings = ("calls", "continuing", "forked", "prompt tokens", "encoded", "again", "timelines", "drifted")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for report in replays:
        counts = (
            report.calls,
            report.continuing_calls,
            report.forked_calls,
            report.prompt_tokens,
            report.encoded_tokens,
            report.tokens_computed_again,
            report.timelines,
        )
        drifted = (
            f"{format_count(len(report.drifts))} of {format_count(report.compared_prompts)}"
            if report.compared_prompts
            else "-"
        )
        table.add_row(report.history, *map(format_count, counts), drifted)
    return table


def _render_replay(report: ReplayReport) -> Iterator[Text]:
    if report.causes:
        causes = ", ".join(f"{cause} {format_count(count)}" for cause, count in report.causes.most_common())
        yield Text(f"{report.history}: {pluralize(sum(report.causes.values()), 'fork')}: {causes}")
    if report.drifts:
        first, same = report.drifts[0], sum(drift.same_text for drift in report.drifts)
        yield Text(
            f"{report.history}: {pluralize(len(report.drifts), 'logged prompt')} with other ids than ours, "
            f"{format_count(same)} of them with the same text; "
            f"line {first.line} from token {first.first_divergent_token}:"
        )
        yield Text(f"         logged  {_escape(first.logged)}", "dim")
        yield Text(f"         ours    {_escape(first.ours)}", "dim")
    if report.refusals:
        yield Text(f"{report.history}: the template refuses {pluralize(len(report.refusals), 'call')}")
        for refusal in report.refusals[:_MAX_REFUSALS]:
            yield Text(f"         line {refusal.line}: {_escape(refusal.message)}", "dim")


def _fork_rate_text(report: ReplayReport) -> str:
    return (
        f"history={report.history} forks {format_count(report.forked_calls)} of "
        f"{pluralize(report.continuing_calls, 'continuing call')} "
        f"({report.fork_rate:.0%}; unsafe above {MAX_FORK_RATE:.0%})"
    )
