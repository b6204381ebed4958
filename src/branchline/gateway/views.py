"""A session as JSON: its state, its tree, its timelines, its samples.

Views of a tree run in threads: each reads a snapshot, and calls continue meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from branchline.core.message import Message
from branchline.core.reader import write_message
from branchline.core.token_arrays import Floats
from branchline.export.jsonl import report_to_json, sample_to_json
from branchline.export.samples import Export, SampleStream
from branchline.export.tree_lines import tree_lines
from branchline.gateway.export_options import ExportOptions, SampleFormat
from branchline.runtime.managed_session import ManagedSession
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree


def session_view(managed: ManagedSession) -> dict[str, Any]:
    """Options, state and counts of a session."""
    tree = managed.session.tree
    return {
        "id": managed.id,
        "state": managed.state,
        "reason": managed.reason,
        "agent": managed.options.agent,
        "group": managed.options.group,
        "metadata": managed.options.metadata,
        "eval": managed.options.eval,
        "created": managed.created_at,
        "calls": len(tree.calls),
        "in_flight": managed.in_flight,
        "tokens": tree.token_count,
        "sampled_tokens": managed.sampled_tokens,
        "reward": managed.reward,
        "rewards": managed.rewards,
    }


def tree_view(managed: ManagedSession) -> dict[str, Any]:
    """Every node, with the cause of the branch it begins, and how each call was sampled."""
    tree = managed.session.snapshot()
    calls = [{"id": call.id, "agent": call.agent, "sampling": call.sampling} for call in tree.calls]
    return {"nodes": _node_views(tree), "calls": calls}


def _node_views(tree: Tree) -> list[dict[str, Any]]:
    causes = {fork.branch.id: str(fork.cause) for fork in classify_forks(tree).forks} if tree.calls else {}
    nodes = []
    for node in tree.nodes[1:]:
        assert node.parent is not None
        nodes.append(
            {
                "id": node.id,
                "parent": node.parent.id,
                "role": node.message.role,
                "text": node.message.content,
                "ids": node.ids.tolist(),
                "spans": [
                    [count, ("template", "context", "sampled")[origin]] for count, origin in node.spans
                ],
                "cause": causes.get(node.id),
                "call": tree.calls[node.output.call_index].id if node.output is not None else None,
                "finish": node.output.finish_reason if node.output is not None else None,
                "source": node.source_id if node.source_id >= 0 else None,
            }
        )
    return nodes


def timelines_view(managed: ManagedSession) -> dict[str, Any]:
    """Every root-to-leaf path."""
    return {"timelines": [_timeline_view(timeline) for timeline in timelines_of(managed.session.snapshot())]}


def _timeline_view(timeline: Timeline) -> dict[str, Any]:
    return {
        "id": timeline.leaf.id,
        "ids": timeline.ids.tolist(),
        "mask": timeline.mask.tolist(),
        "logprobs": _nan_to_none(timeline.logprobs),
        "versions": timeline.versions.tolist(),
        "agent": timeline.agent or None,
        "calls": [call.id for call in timeline.calls],
        "exact": timeline.exact,
        "answers": [asdict(answer) for answer in timeline.answers],
        "messages": [message_view(message) for message in timeline.messages],
        "authors": timeline.authors,
        "spans": [(node.start, node.end) for node in timeline.nodes],
    }


def message_view(message: Message) -> dict[str, Any]:
    """A message in Chat Completions form. Media appear with their digests; samples have their data."""
    view = write_message(msgspec.structs.replace(message, parts=()) if message.media else message)
    if message.media:
        view["content"] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": part.kind, "digest": part.digest, "url": part.url}
            for part in message.parts
        ]
    return view


def trajectory_view(managed: ManagedSession) -> dict[str, Any]:
    """The outcome of a session: the main history, the additional ones, rewards and metrics."""
    tree = managed.session.snapshot()
    fork_report = classify_forks(tree) if tree.calls else ForkReport()
    timelines = timelines_of(tree)
    main = [timeline for timeline in timelines if timeline.leaf is fork_report.main_leaf]
    return {
        "history": _timeline_view(main[0]) if main else None,
        "additional_histories": [_timeline_view(timeline) for timeline in timelines if timeline not in main],
        "reward": managed.reward,
        "rewards": managed.rewards,
        "metrics": {
            "calls": len(tree.calls),
            "sampled_tokens": managed.sampled_tokens,
            "timelines": len(timelines),
            "forks": len(fork_report.forks),
        },
    }


def samples_view(managed: ManagedSession, options: ExportOptions) -> dict[str, Any]:
    """The samples of the session as it is now, and the report on every sampled token."""
    stream = options.export(managed)
    # A trainer reads line by line, so each sample carries its group and metadata.
    fields = {"group": managed.options.group, "metadata": managed.options.metadata}
    written_digests: set[str] = set()
    samples = stream.samples if isinstance(stream, Export) else stream
    rows = [{**sample_to_json(sample, written_digests), **fields} for sample in samples]
    return {"samples": rows, "report": report_to_json(stream.report)}


def sample_parts(managed: ManagedSession, options: ExportOptions, format: SampleFormat) -> Iterator[bytes]:
    """Yields the body of `GET /samples` in parts, each when it is asked for: one part per sample or node.

    `json` is one object, `jsonl` a line per sample and one for the report, `tree` the lines of
    `export/tree_lines.py`.
    """
    stream = options.export(managed)
    fields = {"group": managed.options.group, "metadata": managed.options.metadata}
    if format == "tree" and isinstance(stream, SampleStream):
        for line in tree_lines(stream, fields):
            yield msgspec.json.encode(line) + b"\n"
        return
    is_json = format == "json"
    separator = b'{"samples":[' if is_json else b""
    written_digests: set[str] = set()
    for sample in stream.samples if isinstance(stream, Export) else stream:
        row = msgspec.json.encode({**sample_to_json(sample, written_digests), **fields})
        yield separator + row + (b"" if is_json else b"\n")
        separator = b"," if is_json else b""
    report = msgspec.json.encode(report_to_json(stream.report))
    if is_json:
        yield (b"" if separator == b"," else separator) + b'],"report":' + report + b"}"
    else:
        yield b'{"report":' + report + b"}\n"


def report_view(managed: ManagedSession, options: ExportOptions) -> dict[str, Any]:
    stream = options.export(managed)
    if isinstance(stream, SampleStream):
        for _ in stream:  # the report counts the samples
            pass
    return report_to_json(stream.report)


def _nan_to_none(logprobs: Floats) -> list[float | None]:
    unknown = np.isnan(logprobs).tolist()
    return [None if missing else value for value, missing in zip(logprobs.tolist(), unknown, strict=True)]
