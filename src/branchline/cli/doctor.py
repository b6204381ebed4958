"""`branchline doctor`: what a model's chat template does to conversations, and what that costs a log."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.chat.audit.findings import Finding, Severity
from branchline.chat.audit.template_audit import TemplateAudit, audit_codec
from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.cli.render import format_count, pluralize, sanitize, to_text
from branchline.core.errors import InputError, LogError
from branchline.timelines.log import LoggedCall, LogReader
from branchline.timelines.replay_report import (
    MAX_FORK_RATE,
    ReplayReport,
    SafetyVerdict,
    assess_safety,
    replay_log,
)

HELP = "say whether a model's chat template is safe to train with, and what it costs"
_DESCRIPTION = """\
Tries a model's chat template: is it append-only, does it strip thinking, move the system text, drop text
beside tool calls, print dates, and can what the model says be read back. With a log, its conversations are
replayed under both history policies, to see how often each forks and what that costs in tokens. Ends with
safe (exit code 0) or unsafe (1), and the sentence that says what to do.
"""
_EPILOG = """\
example:
  branchline doctor --tokenizer ~/models/Qwen3-8B
  branchline doctor --tokenizer ~/models/Qwen3-8B calls.jsonl --history verbatim
  branchline doctor --tokenizer ~/models/Qwen3-8B --json | jq '.findings[] | select(.ok | not)'

history policies:
  template  a prompt shows what the chat template shows for the conversation. Where the template leaves out
            or moves something, the prompt forks from the path that was sampled.
  verbatim  the path stays as it was sampled, and only new messages are rendered behind it.

`branchline merge --help` shows what a line of CALLS.jsonl looks like.
"""
_EXIT_UNSAFE = 1
_STYLES = {Severity.FINE: "green", Severity.NOTE: "yellow", Severity.UNSAFE: "bold red"}
_MAX_REFUSALS = 5
_MAX_SKIPPED = 10

JsonDict = dict[str, Any]


def add_doctor(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "doctor",
        help=HELP,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "calls", type=Path, nargs="?", metavar="CALLS.jsonl", help="a log to replay, one call a line"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        required=True,
        help="a model's directory with tokenizer.json and its chat template",
    )
    parser.add_argument(
        "--history",
        choices=get_args(HistoryPolicy),
        default="template",
        help="the policy that the verdict is about (default: %(default)s); figures are given for both",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out lines that cannot be read, and count them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> tuple[str, int]:
    """What the command prints, and its exit code."""
    codec = GenericCodec.open(options.tokenizer)
    reading = LogReader(
        options.calls or Path(), skip_bad=options.skip_bad, check_ids=codec.tokenizer.invalid_id_error
    )
    calls = _read_calls(reading) if options.calls is not None else []
    audit = audit_codec(codec)
    replays = [replay_log(calls, codec, history) for history in get_args(HistoryPolicy)] if calls else []
    verdict = assess_safety(audit, options.history, replays)
    if options.json:
        told = _report_to_json(audit, verdict, options.history, replays, reading.errors)
        text = msgspec.json.encode(told).decode() + "\n"
    else:
        text = to_text(*_render_report(audit, verdict, options.history, replays, reading.errors))
    return text, 0 if verdict.safe else _EXIT_UNSAFE


def _read_calls(reading: LogReader) -> list[LoggedCall]:
    calls = list(reading)
    if not calls:
        bad = reading.errors
        problem = f"; the first of {len(bad)} bad lines: {bad[0]}" if bad else ""
        raise InputError(f"{reading.path}: no calls in it, expected one JSON object a line{problem}")
    return calls


# -- as one object --------------------------------------------------------------------------------------


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
        "log": {told.history: _replay_to_json(told) for told in replays} or None,
        "skipped": [{"line": error.line, "problem": error.problem} for error in skipped],
    }


def _replay_to_json(told: ReplayReport) -> JsonDict:
    return {
        "calls": told.calls,
        "continuing_calls": told.continuing_calls,
        "forked_calls": told.forked_calls,
        "fork_rate": round(told.fork_rate, 4),
        "forks": sum(told.causes.values()),
        "causes": dict(told.causes.most_common()),
        "prompt_tokens": told.prompt_tokens,
        "encoded_tokens": told.encoded_tokens,
        "tokens_computed_again": told.tokens_computed_again,
        "timelines": told.timelines,
        "drift": {
            "compared": told.compared_prompts,
            "differing": len(told.drifts),
            "same_text": sum(drift.same_text for drift in told.drifts),
            "lines": [drift.line for drift in told.drifts],
            "first": asdict(told.drifts[0]) if told.drifts else None,
        },
        "refused": [asdict(refusal) for refusal in told.refusals],
    }


# -- as lines -------------------------------------------------------------------------------------------


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
        for told in replays:
            yield from _render_replay(told)
    if skipped:
        yield Text(f"skipped {pluralize(len(skipped), 'bad line')}")
        for error in skipped[:_MAX_SKIPPED]:
            yield Text(f"  {sanitize(str(error))}")
    counts = [f"{len(audit.findings_with(severity))} {severity}" for severity in Severity]
    chosen = [told for told in replays if told.history == history]
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
    """Somebody's text with its line ends to be seen, harmless to a terminal."""
    return repr(text)[1:-1]


def _replay_table(replays: Sequence[ReplayReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("history")
    headings = ("calls", "continuing", "forked", "prompt tokens", "encoded", "again", "timelines", "drifted")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for told in replays:
        counts = (
            told.calls,
            told.continuing_calls,
            told.forked_calls,
            told.prompt_tokens,
            told.encoded_tokens,
            told.tokens_computed_again,
            told.timelines,
        )
        drifted = (
            f"{format_count(len(told.drifts))} of {format_count(told.compared_prompts)}"
            if told.compared_prompts
            else "-"
        )
        table.add_row(told.history, *map(format_count, counts), drifted)
    return table


def _render_replay(told: ReplayReport) -> Iterator[Text]:
    if told.causes:
        causes = ", ".join(f"{cause} {format_count(count)}" for cause, count in told.causes.most_common())
        yield Text(f"{told.history}: {pluralize(sum(told.causes.values()), 'fork')}: {causes}")
    if told.drifts:
        first, same = told.drifts[0], sum(drift.same_text for drift in told.drifts)
        yield Text(
            f"{told.history}: {pluralize(len(told.drifts), 'logged prompt')} not as we would have sent them, "
            f"{format_count(same)} in ids alone; line {first.line} from token {first.first_divergent_token}:"
        )
        yield Text(f"         logged  {_escape(first.logged)}", "dim")
        yield Text(f"         ours    {_escape(first.ours)}", "dim")
    if told.refusals:
        yield Text(f"{told.history}: the template refuses {pluralize(len(told.refusals), 'call')}")
        for refusal in told.refusals[:_MAX_REFUSALS]:
            yield Text(f"         line {refusal.line}: {_escape(refusal.words)}", "dim")


def _fork_rate_text(told: ReplayReport) -> str:
    return (
        f"history={told.history} forks {format_count(told.forked_calls)} of "
        f"{pluralize(told.continuing_calls, 'continuing call')} ({told.fork_rate:.0%}; unsafe above {MAX_FORK_RATE:.0%})"
    )
