"""A session as JSON: its state, its tree, its timelines, its samples.

Views of a tree are for threads: each reads the tree as it was when it began, and calls go on meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from branchline.core.token_arrays import Floats
from branchline.export.jsonl import report_to_json, sample_to_json
from branchline.runtime.managed_session import ManagedSession
from branchline.timelines.causes import classify_forks
from branchline.timelines.timeline import timelines_of
from branchline.tree.tree import Tree


def session_view(live: ManagedSession) -> dict[str, Any]:
    """What is known of a session at a glance."""
    tree = live.session.tree
    return {
        "id": live.id,
        "state": live.state,
        "reason": live.reason,
        "agent": live.options.agent,
        "group": live.options.group,
        "metadata": live.options.metadata,
        "eval": live.options.eval,
        "created": live.created_at,
        "calls": len(tree.calls),
        "in_flight": live.in_flight,
        "tokens": tree.token_count,
        "sampled_tokens": live.sampled_tokens,
        "reward": live.reward,
        "rewards": live.rewards,
    }


def tree_view(live: ManagedSession) -> dict[str, Any]:
    """Every node, with the cause of the branch it begins."""
    tree = live.session.snapshot()
    return {"nodes": _node_views(tree)}


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


def timelines_view(live: ManagedSession) -> dict[str, Any]:
    """Every root-to-leaf path."""
    tree = live.session.snapshot()
    return {
        "timelines": [
            {
                "ids": line.ids.tolist(),
                "mask": line.mask.tolist(),
                "logprobs": _nan_to_none(line.logprobs),
                "versions": line.versions.tolist(),
                "agent": line.agent or None,
                "calls": [call.id for call in line.calls],
            }
            for line in timelines_of(tree)
        ]
    }


def samples_view(live: ManagedSession) -> dict[str, Any]:
    """The samples as they would be trained now, and the account of every sampled token."""
    export = live.export()
    # A trainer reads a line at a time: each says by itself where it belongs.
    place = {"group": live.options.group, "metadata": live.options.metadata}
    return {
        "samples": [{**sample_to_json(sample), **place} for sample in export.samples],
        "report": report_to_json(export.report),
    }


def report_view(live: ManagedSession) -> dict[str, Any]:
    return report_to_json(live.export().report)


def _nan_to_none(logprobs: Floats) -> list[float | None]:
    unknown = np.isnan(logprobs).tolist()
    return [None if missing else value for value, missing in zip(logprobs.tolist(), unknown, strict=True)]
