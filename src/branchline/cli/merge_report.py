"""The account of a merged log as plain values: what `merge --json` prints and what its tables show.

Every sampled token is delivered by some timeline or stands under `dropped` with a reason; tokens that were
never logged are listed there as outputs with none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from branchline.cli.call_log import CallLogFile, LoggedSession
from branchline.export.jsonl import report_to_json
from branchline.export.samples import ExportPolicy, export_samples
from branchline.timelines.diagnosis import Diagnosis
from branchline.timelines.log import LoggedCall
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Node

_INCLUDE_ALL = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
"""What could be trained at all: whether it should is the exporter's question, not the account's."""
_EXCERPT_CHARS = 200

JsonDict = dict[str, Any]


def build_merge_report(log: CallLogFile) -> JsonDict:
    """One object that says where everything in a log went."""
    lines: list[JsonDict] = []
    dropped: list[JsonDict] = []
    forks: list[JsonDict] = []
    sampled = delivered = 0
    for session in log.sessions:
        tree = session.merged.tree
        lines += [_timeline_to_json(session, timeline) for timeline in timelines_of(tree)]
        report = report_to_json(
            export_samples(tree, _INCLUDE_ALL, session=session.name, fork_report=session.fork_report).report
        )
        left_out = list(_omitted_outputs(session))
        sampled += report["sampled_tokens"] + sum(entry["tokens"] for entry in left_out)
        delivered += report["trained_tokens"]
        dropped += [*report["dropped"], *left_out]
        forks += [_fork_to_json(session, diagnosis) for diagnosis in log.diagnoses(session)]
    forks.sort(key=lambda fork: -fork["tokens_computed_again"])
    return {
        "calls": log.calls,
        "sessions": len(log.sessions),
        "timelines": lines,
        "sampled_tokens": sampled,
        "delivered_tokens": delivered,
        "dropped": dropped,
        "repairs": [
            {"line": repair.line, "method": repair.method}
            for session in log.sessions
            for repair in session.merged.repairs
        ],
        "forks": forks,
        "causes": dict(Counter(fork["cause"] for fork in forks).most_common()),
        "skipped": [{"line": error.line, "problem": error.problem} for error in log.skipped],
    }


def _is_exact(node: Node) -> bool:
    """Whether a sampled node stands behind the ids it was sampled behind; without ids nobody knows."""
    return node.output is not None and not node.output.inexact


def _timeline_to_json(session: LoggedSession, timeline: Timeline) -> JsonDict:
    sampled = timeline.sampled_nodes
    last = timeline.leaf.output
    return {
        "session": session.name or None,
        "agent": timeline.agent or None,
        "messages": len(timeline.nodes),
        "tokens": len(timeline),
        "trained_tokens": sum(len(node.ids) - (node.sampled_start - node.start) for node in sampled),
        "calls": len(sampled),
        "lines": [session.line_of_call[call.index] for call in timeline.calls],
        "exact": all(_is_exact(node) for node in sampled),
        "tokens_behind_other_ids": timeline.inexact_tokens,
        "missing_logprobs": sum(_missing_logprobs(node) for node in sampled),
        "finish": last.finish_reason if last is not None else None,
        "history": [_message_to_json(node) for node in timeline.nodes],
    }


def _missing_logprobs(node: Node) -> int:
    given = node.output.logprobs if node.output is not None else None
    return node.end - node.sampled_start if given is None else int(np.isnan(given).sum())


def _message_to_json(node: Node) -> JsonDict:
    return {
        "role": node.message.role,
        "author": "llm" if node.is_sampled else "env",
        "text": node.message.content[:_EXCERPT_CHARS],
        "tool_calls": [call.name for call in node.message.tool_calls],
        "tokens": len(node.ids),
    }


def _omitted_outputs(session: LoggedSession) -> Iterator[JsonDict]:
    """Outputs that are not in the tree, or are there without a single id."""
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
        "line": session.line_of_call[diagnosis.fork.call.index],
        "cause": diagnosis.cause,
        "first_divergent_token": diagnosis.first_divergent_token,
        "before": diagnosis.before,
        "after": diagnosis.after,
        "tokens_computed_again": diagnosis.tokens_computed_again,
        "diagnosis": str(diagnosis),
    }
