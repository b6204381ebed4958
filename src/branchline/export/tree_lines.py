"""The samples of a session as JSON lines in which shared prefixes are written once: a tree.

First one line per node, parents before children, with the ids that the node adds; then one line per sample,
which names the node at its end; and last the report. A sample is the path to its node:
`samples_from_tree_lines` returns samples equal to those that were exported.

    {"node": 3, "parent": 2, "ids": [7, 8, 9], "sampled": 2, "logprobs": [-0.5, -0.1], "versions": [4, 4],
     "share": 0.5, "call": "call-1", "measurement": {…}}
    {"sample": 0, "leaf": 3, "start": 12, "tokens": 15, "session": "s", "reward": 1.0, …}
    {"report": {…}}

`sampled` ids at the end of a node were sampled. They are trained with `share` in every sample through the
node; 0 is context. With `shares=first` a sample trains only the nodes in its `trains`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from branchline.core.sample import AnswerSpan, LogprobMeasurement, Sample
from branchline.core.token_arrays import decode_runs
from branchline.export.jsonl import floats_to_json, report_to_json, sample_from_json, sample_to_json
from branchline.export.samples import SampleStream, nodes_above
from branchline.timelines.timeline import NO_VERSION
from branchline.tree.tree import Node

_ARRAY_COLUMNS = frozenset(
    {"prompt_ids", "response_ids", "response_mask", "response_logprobs", "response_versions", "shares"}
)
_DERIVED_COLUMNS = _ARRAY_COLUMNS | {"calls", "answers"}
"""What a sample line leaves out, because the nodes have it."""


def tree_lines(
    stream: SampleStream, extra_fields: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the lines; `extra_fields` are added to every sample."""
    for node_id in sorted(nodes_above(stream.leaves)):
        yield _node_line(stream, stream.tree.nodes[node_id])
    written_digests: set[str] = set()
    for number, (leaf, sample) in enumerate(stream.with_leaves()):
        line = sample_to_json(sample, written_digests, without=_DERIVED_COLUMNS)
        line |= {"sample": number, "leaf": leaf.id, "start": len(sample.prompt_ids)}
        line |= {"tokens": len(sample.prompt_ids) + len(sample.response_ids)}
        if stream.policy.shares == "first":
            line["trains"] = [answer.node for answer in sample.answers]
        yield {**line, **(extra_fields or {})}
    yield {"report": report_to_json(stream.report)}


def _node_line(stream: SampleStream, node: Node) -> dict[str, Any]:
    assert node.parent is not None
    line: dict[str, Any] = {"node": node.id, "parent": node.parent.id or None, "ids": node.ids.tolist()}
    if node.output is None or node.sampled_ids is None:
        return line
    call = stream.tree.call_of(node)
    count = stream.counts.get(node.id, 0)
    share = 0.0 if not count else 1.0 / count if stream.policy.shares == "split" else 1.0
    line |= {"sampled": len(node.sampled_ids), "call": call.id, "share": share}
    if share:
        logprobs = node.output.logprobs
        if logprobs is None:
            logprobs = np.full(len(node.sampled_ids), np.nan, np.float32)
        if stream.policy.missing_logprob is not None:
            logprobs = np.where(np.isnan(logprobs), np.float32(stream.policy.missing_logprob), logprobs)
        line |= {
            "logprobs": floats_to_json(logprobs),
            "versions": decode_runs(node.output.versions).tolist(),
            "measurement": asdict(LogprobMeasurement.from_sampling(call.sampling)),
        }
    return line


def samples_from_tree_lines(lines: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """Yields the samples of decoded lines that `tree_lines` wrote."""
    nodes: dict[int, Mapping[str, Any]] = {}
    payloads: dict[str, bytes] = {}
    for line in lines:
        if "node" in line:
            nodes[line["node"]] = line
        elif "sample" in line:
            yield sample_from_json({**line, **_derived_columns(line, nodes)}, payloads)


def _derived_columns(line: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the columns of a sample that follow from the nodes of its path."""
    path: list[Mapping[str, Any]] = []
    node_id: int | None = line["leaf"]
    while node_id is not None:
        path.append(nodes[node_id])
        node_id = nodes[node_id]["parent"]
    path.reverse()
    tokens, start = line["tokens"], line["start"]
    total = sum(len(node["ids"]) for node in path)
    ids = [token for node in path for token in node["ids"]]
    mask, versions = np.zeros(total, np.int8), np.full(total, NO_VERSION, np.int32)
    logprobs: list[float | None] = [0.0] * total
    shares = np.zeros(total, np.float32)
    answers: list[AnswerSpan] = []
    position = 0
    for node in path:
        position += len(node["ids"])
        sampled = slice(position - node.get("sampled", 0), position)
        if not node.get("share") or node["node"] not in line.get("trains", (node["node"],)):
            continue
        mask[sampled], shares[sampled], versions[sampled] = 1, node["share"], node["versions"]
        logprobs[sampled] = node["logprobs"]
        if sampled.start < min(position, tokens):
            measurement = LogprobMeasurement(**node["measurement"])
            end = min(position, tokens) - start
            answers.append(AnswerSpan(sampled.start - start, end, node["call"], node["node"], measurement))
    response = slice(start, tokens)
    return {
        "prompt_ids": ids[:start],
        "response_ids": ids[response],
        "response_mask": mask[response].tolist(),
        "response_logprobs": logprobs[response],
        "response_versions": versions[response].tolist(),
        "shares": shares[response].tolist(),
        "calls": [node["call"] for node in path if "call" in node],
        "answers": [asdict(answer) for answer in answers],
    }
