"""A session as JSON: its state, its tree, its timelines, its samples.

Views of a tree run in a thread: each reads a snapshot, and calls continue meanwhile. What may be large is
built in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from branchline.core.call import count_not_applied
from branchline.core.message import Message
from branchline.core.reader import write_message
from branchline.core.token_arrays import Floats
from branchline.export.jsonl import report_to_json, sample_to_json
from branchline.export.samples import Export, SampleStream
from branchline.export.tree_lines import tree_lines
from branchline.gateway.export_options import ExportOptions, SampleFormat
from branchline.runtime.managed_session import ManagedSession
from branchline.timelines.causes import classify_forks
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree


def gateway_index(url: str) -> dict[str, Any]:
    """What this is and where to go on; nothing about its sessions and engines, because it needs no key."""
    return {
        "name": "branchline",
        "version": metadata.version("branchline"),
        "description": "A gateway that serves a model to agents and records every call of a session, which is"
        " one episode.",
        "documents": {
            "openapi": "/openapi.json",
            "alive": "/healthz",
            "ready": "/readyz",
            "metrics": "/metrics",
        },
        "open_a_session": f"curl -X POST {url}/sessions -H 'authorization: Bearer ADMIN_KEY'",
    }


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
        "answered_calls": managed.answered_calls,
        "in_flight": managed.in_flight,
        "tokens": tree.token_count,
        "sampled_tokens": managed.sampled_tokens,
        "reward": managed.reward,
        "rewards": managed.rewards,
        "not_applied": count_not_applied(tree.calls),
    }


def tree_parts(managed: ManagedSession) -> Iterator[bytes]:
    """Yields the JSON of a tree: every node, with the cause of the branch it begins, how each call was
    sampled, and what it asked for and nobody did."""
    tree = managed.session.snapshot()
    yield from _list_parts("nodes", _node_views(tree))
    calls = [
        {"id": call.id, "agent": call.agent, "sampling": call.sampling, "not_applied": call.not_applied}
        for call in tree.calls
    ]
    yield b',"calls":' + msgspec.json.encode(calls) + b"}"


def _node_views(tree: Tree) -> Iterator[dict[str, Any]]:
    causes = {fork.branch.id: str(fork.cause) for fork in classify_forks(tree).forks}
    for node in tree.nodes[1:]:
        assert node.parent is not None
        yield {
            "id": node.id,
            "parent": node.parent.id,
            "role": node.message.role,
            "text": node.message.content,
            "ids": node.ids.tolist(),
            "spans": [[count, ("template", "context", "sampled")[origin]] for count, origin in node.spans],
            "cause": causes.get(node.id),
            "call": tree.calls[node.output.call_index].id if node.output is not None else None,
            "finish": node.output.finish_reason if node.output is not None else None,
            "source": node.source_id if node.source_id >= 0 else None,
        }


def timeline_parts(managed: ManagedSession) -> Iterator[bytes]:
    """Yields the JSON of every root-to-leaf path."""
    timelines = timelines_of(managed.session.snapshot())
    yield from _list_parts("timelines", (_timeline_view(timeline) for timeline in timelines))
    yield b"}"


def _list_parts(
    name: str, rows: Iterable[object], fields: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[bytes]:
    """Yields an object with some fields and a list, row by row; the caller closes the object."""
    head = msgspec.json.encode(dict(fields))[:-1] + b"," if fields else b"{"
    yield head + b'"' + name.encode() + b'":['
    separator = b""
    for row in rows:
        yield separator + msgspec.json.encode(row)
        separator = b","
    yield b"]"


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
    fork_report = classify_forks(tree)
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


def sample_parts(
    managed: ManagedSession,
    options: ExportOptions,
    format: SampleFormat = "json",
    *,
    has_session: bool = False,
) -> Iterator[bytes]:
    """Yields the samples of the session as it is now, and the report on every sampled token.

    `json` is one object, which begins with the fields of `session_view` if `has_session` is set; `jsonl` is a
    line per sample and one for the report, `tree` the lines of `export/tree_lines.py`.
    """
    stream = options.export(managed)
    # A trainer reads line by line, so each sample carries its group and metadata.
    fields = {"group": managed.options.group, "metadata": managed.options.metadata}
    if format == "tree" and isinstance(stream, SampleStream):
        for line in tree_lines(stream, fields):
            yield msgspec.json.encode(line) + b"\n"
        return
    written_digests: set[str] = set()
    samples = stream.samples if isinstance(stream, Export) else stream
    rows = ({**sample_to_json(sample, written_digests), **fields} for sample in samples)
    if format == "json":
        yield from _list_parts("samples", rows, session_view(managed) if has_session else {})
        yield b',"report":' + msgspec.json.encode(report_to_json(stream.report)) + b"}"
    else:
        for row in rows:
            yield msgspec.json.encode(row) + b"\n"
        yield msgspec.json.encode({"report": report_to_json(stream.report)}) + b"\n"


def report_view(managed: ManagedSession, options: ExportOptions) -> dict[str, Any]:
    stream = options.export(managed)
    if isinstance(stream, SampleStream):
        for _ in stream:  # the report counts the samples
            pass
    return report_to_json(stream.report)


def _nan_to_none(logprobs: Floats) -> list[float | None]:
    unknown = np.isnan(logprobs).tolist()
    return [None if missing else value for value, missing in zip(logprobs.tolist(), unknown, strict=True)]
