"""Assigns posted rewards to the parts of a tree that they are for.

A reward is an object with a `score`. Without one of the keys below it is for the whole session; the last one
counts.

    {"score": 1.0, "call": "chatcmpl-42"}    the answers of a call, by the id of its response
    {"score": 1.0, "turn": 2}                the second answer of the main conversation (or of an `agent`)
    {"score": 1.0, "timeline": 17}           every timeline through a node, by the `id` of a timeline
    {"score": 1.0, "tool": "search"}         a tool in the whole session; with `call` or `turn`, in one answer

A later reward for the same part replaces the earlier one. Rewards with different `id`s are all kept, for
several calls of one tool in one answer, for example. A reward stays with the ids that it is for: it is in the
samples that train them, and in no other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from branchline.core.errors import MessageError
from branchline.timelines.causes import ForkReport
from branchline.tree.tree import NO_NODE, Node, Tree

PART_KEYS = ("call", "turn", "timeline", "tool")
"""A reward with one of these is not for the whole session."""
_MAX_TURN = 2**31 - 1


@dataclass(frozen=True)
class PartReward:
    """A reward for a part of a session."""

    score: float
    turn: int | None = None
    tool: str = ""
    is_timeline: bool = False


@dataclass
class AssignedRewards:
    """The rewards of a tree by the nodes that they are for."""

    by_node: dict[int, list[PartReward]] = field(default_factory=dict)
    """Rewards of sampled nodes."""
    by_timeline_node: dict[int, list[PartReward]] = field(default_factory=dict)
    """Rewards of all timelines through a node."""
    of_tools: list[PartReward] = field(default_factory=list)
    """Rewards of tools in the whole session."""
    unresolved: int = 0
    """Rewards for a turn that the main conversation does not have."""

    def for_timeline(self, nodes: Sequence[Node]) -> Iterator[PartReward]:
        """Yields the rewards of a timeline and of the session's tools."""
        for node in nodes:
            yield from self.by_timeline_node.get(node.id, ())
        yield from self.of_tools

    def timeline_reward(self, nodes: Sequence[Node]) -> float | None:
        """Returns the reward of the deepest rewarded node of a timeline, or None."""
        scores = [
            reward.score
            for node in nodes
            for reward in self.by_timeline_node.get(node.id, ())
            if reward.is_timeline
        ]
        return scores[-1] if scores else None

    def count_unassigned(self, trained_nodes: Collection[int], path_nodes: Collection[int]) -> int:
        """Returns the number of rewards that no sample has, given the nodes that samples train and those on
        their paths."""
        lost = [rewards for node, rewards in self.by_node.items() if node not in trained_nodes]
        lost += [rewards for node, rewards in self.by_timeline_node.items() if node not in path_nodes]
        lost += [] if path_nodes else [self.of_tools]
        return self.unresolved + sum(map(len, lost))


def session_reward(rewards: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the last score for the whole session, or None.

    >>> session_reward([{"score": 1}, {"score": 0.5}, {"score": 9, "turn": 1}])
    0.5
    """
    for reward in reversed(rewards):
        if "score" in reward and not any(key in reward for key in PART_KEYS):
            return float(reward["score"])
    return None


def validate_reward(raw: object) -> dict[str, Any]:
    """Returns a reward with a finite `score`. Takes a number, or an object with a `score` (or `reward`).

    Raises MessageError for what the journal could not hold: a recorded reward is permanent.

    >>> validate_reward(1)
    {'score': 1.0}
    """
    reward: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else {"score": raw}
    if "score" not in reward and "reward" in reward:
        reward["score"] = reward["reward"]
    score = reward.get("score")
    if score is None or isinstance(score, bool | str | bytes):
        raise MessageError("score", score, "a finite number, or an object with a score")
    try:
        reward["score"] = float(score)
    except (TypeError, ValueError, OverflowError):
        raise MessageError("score", score, "a finite number, or an object with a score") from None
    if not math.isfinite(reward["score"]):
        raise MessageError("score", score, "a finite number")
    for name, value in reward.items():
        try:
            msgspec.json.encode(value)
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise MessageError(str(name), type(value).__name__, f"JSON ({error})") from None
    return reward


def check_reward_part(tree: Tree, reward: Mapping[str, Any]) -> None:
    """Raises MessageError if a reward names a part that the tree does not have."""
    call, turn, node, tool = (reward.get(key) for key in PART_KEYS)
    if "call" in reward and (not isinstance(call, str) or tree.find_call(call) is None):
        raise MessageError("call", call, "the id of a call of this session")
    if "turn" in reward and (type(turn) is not int or not 1 <= turn <= _MAX_TURN):
        raise MessageError("turn", turn, "the number of an answer, from 1 on")
    if "timeline" in reward and (type(node) is not int or not 0 < node < len(tree.nodes)):
        raise MessageError("timeline", node, "the id of a timeline of this session")
    if "tool" in reward and (not isinstance(tool, str) or not tool):
        raise MessageError("tool", tool, "the name of a tool")


def assign_rewards(
    tree: Tree, rewards: Sequence[Mapping[str, Any]], fork_report: ForkReport
) -> AssignedRewards:
    """Returns the rewards for parts of a tree."""
    latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for reward in rewards:
        if "score" in reward and any(key in reward for key in PART_KEYS):
            part = tuple(repr(reward.get(key)) for key in (*PART_KEYS, "agent", "id"))
            latest.pop(part, None)
            latest[part] = reward
    assigned = AssignedRewards()
    for reward in latest.values():
        _assign(assigned, tree, reward, fork_report)
    return assigned


def _assign(
    assigned: AssignedRewards, tree: Tree, reward: Mapping[str, Any], fork_report: ForkReport
) -> None:
    turn, tool = reward.get("turn"), str(reward.get("tool") or "")
    part = PartReward(float(reward["score"]), turn, tool, is_timeline=turn is None and not tool)
    if "call" in reward:
        call = tree.find_call(str(reward["call"]))
        while call is not None and tree.is_resumed(call):
            # The answer of a resumed call is in the call that continued it.
            call = next(other for other in tree.calls if other.resumed_call_index == call.index)
        for node_id in call.outputs if call is not None else ():
            assigned.by_node.setdefault(node_id, []).append(part)
        assigned.unresolved += call is None
    elif turn is not None:
        node = _answer_of_turn(tree, _conversation_leaf(tree, reward, fork_report), turn)
        if node is None:
            assigned.unresolved += 1
        else:
            assigned.by_node.setdefault(node.id, []).append(part)
    elif "timeline" in reward:
        assigned.by_timeline_node.setdefault(int(reward["timeline"]), []).append(part)
    else:
        assigned.of_tools.append(part)


def _conversation_leaf(tree: Tree, reward: Mapping[str, Any], fork_report: ForkReport) -> Node | None:
    """Returns the end of the named timeline, else of the named agent's conversation, else of the main
    history. Its last answer may be cancelled: the turns before it count."""
    if "timeline" in reward:
        return tree.nodes[int(reward["timeline"])]
    if "agent" in reward:
        return fork_report.leaf_of(str(reward["agent"]))
    return fork_report.main_leaf


def _answer_of_turn(tree: Tree, leaf: Node | None, turn: int) -> Node | None:
    """Returns the sampled node of a conversation's n-th answer. An answer that the conversation repeats as
    context, after its template has dropped the reasoning, was sampled on another branch."""
    answers = [
        node if node.is_sampled else tree.nodes[node.source_id]
        for node in (leaf.path() if leaf is not None else ())
        if node.is_sampled or node.source_id != NO_NODE
    ]
    return answers[turn - 1] if turn <= len(answers) else None
