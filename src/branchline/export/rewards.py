"""Assigns posted rewards to the parts of a tree that they are for.

A reward without one of the keys below is for the whole session; the last one counts.

    {"score": 1.0, "agent": "critic"}    the answers of an agent, in every sample that trains them
    {"score": 1.0, "call": "chatcmpl-42"}    the answers of a call, by the id of its response
    {"score": 1.0, "turn": 2}                the second answer of the main conversation (or of an `agent`)
    {"score": 1.0, "timeline": 17}           a timeline by its `id`, the node that ends it; if it was
                                             continued, or its last call resumed, every timeline that
                                             continues it
    {"score": 1.0, "tool": "search"}         a tool in the whole session; with `agent`, `call` or `turn`, in
                                             the answers of these that call it

The tokens of an answer get the reward of their sample's timeline, else that of their agent, else that of the
session. Rewards of calls, turns and tools are kept beside it.

A later reward for the same part replaces the earlier one, also if it names the part otherwise. Rewards with
different `id`s are all kept, for several calls of one tool in one answer, for example. A reward stays with
the ids that it is for: it is in the samples that train them, and in no other. The answer that a turn names
is that of the time when the reward was posted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import msgspec

from branchline.core.call import Call
from branchline.core.errors import MessageError
from branchline.core.reward import PART_KEYS, Reward, read_recorded_reward
from branchline.core.sample import RewardSpan
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.tree.tree import Node, Tree

_MAX_SHOWN = 20
"""How many names an error lists."""


@dataclass(frozen=True)
class PartReward:
    """A reward for a part of a session."""

    score: float
    turn: int | None = None
    tool: str = ""
    agent: str = ""
    """The agent whose tokens are rewarded; empty if the reward is for another part."""
    extras: Mapping[str, Any] = field(default_factory=dict)

    def span(self, start: int, end: int, call: str = "") -> RewardSpan:
        extras = encode_extras(self.extras)
        return RewardSpan(self.score, start, end, call, self.turn, self.tool, self.agent, extras)


@dataclass
class AssignedRewards:
    """The rewards of a tree by the nodes that they are for."""

    by_node: dict[int, list[PartReward]] = field(default_factory=dict)
    """Rewards of sampled nodes."""
    by_timeline_node: dict[int, list[PartReward]] = field(default_factory=dict)
    """Rewards of all timelines through a node."""
    by_agent: dict[str, list[PartReward]] = field(default_factory=dict)
    """Rewards of agents, and of tools of agents."""
    of_tools: list[PartReward] = field(default_factory=list)
    """Rewards of tools in the whole session."""
    unresolved: int = 0
    """Rewards for a part that the tree does not have: another branch is the main conversation now, or an
    older release recorded them."""

    def for_timeline(self, nodes: Sequence[Node], agent: str) -> Iterator[PartReward]:
        """Yields the rewards of a timeline, of the session's tools and of the timeline's agent."""
        for node in nodes:
            yield from self.by_timeline_node.get(node.id, ())
        yield from self.of_tools
        yield from self.by_agent.get(agent, ())

    def timeline_reward(self, nodes: Sequence[Node]) -> PartReward | None:
        """Returns the reward of the deepest rewarded node of a timeline, or None."""
        rewards = [reward for node in nodes for reward in self.by_timeline_node.get(node.id, ())]
        return rewards[-1] if rewards else None

    def count_unassigned(
        self, trained_nodes: Collection[int], path_nodes: Collection[int], trained_agents: Collection[str]
    ) -> int:
        """Returns the number of rewards that no sample has, given the nodes that samples train, those on
        their paths and the agents whose answers they train."""
        places = [(rewards, node in trained_nodes) for node, rewards in self.by_node.items()]
        places += [(rewards, node in path_nodes) for node, rewards in self.by_timeline_node.items()]
        places += [(rewards, agent in trained_agents) for agent, rewards in self.by_agent.items()]
        places += [(self.of_tools, bool(path_nodes))]
        # By identity: a reward of a call with several choices is one reward at several nodes.
        has_sample: dict[int, bool] = {}
        for rewards, is_exported in places:
            for reward in rewards:
                has_sample[id(reward)] = has_sample.get(id(reward), False) or is_exported
        return self.unresolved + sum(not found for found in has_sample.values())


def _whole_reward(rewards: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the last reward for the whole session, or None."""
    whole = [reward for reward in rewards if "score" in reward and reward.keys().isdisjoint(PART_KEYS)]
    return whole[-1] if whole else None


def session_reward(rewards: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the last score for the whole session, or None.

    >>> session_reward([{"score": 1}, {"score": 0.5}, {"score": 9, "turn": 1}])
    0.5
    """
    reward = _whole_reward(rewards)
    return None if reward is None else float(reward["score"])


def session_extras(rewards: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the extras of the last reward for the whole session."""
    reward = _whole_reward(rewards)
    extras: Mapping[str, Any] = {} if reward is None else read_recorded_reward(reward).get("extras", {})
    return extras


def agent_rewards(rewards: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the last score of each agent that was rewarded itself.

    >>> agent_rewards([{"score": 1, "agent": "critic"}, {"score": 0}, {"score": 9, "agent": "a", "turn": 1}])
    {'critic': 1.0}
    """
    return {
        reward["agent"]: float(reward["score"])
        for reward in rewards
        if [key for key in PART_KEYS if key in reward] == ["agent"]
    }


def encode_extras(extras: Mapping[str, Any]) -> str:
    """Returns extras as the JSON of a sample; empty if there are none."""
    return msgspec.json.encode(extras).decode() if extras else ""


def sample_extras(session: Mapping[str, Any], spans: Sequence[RewardSpan]) -> str:
    """Returns the `reward_extras` of a sample: the extras of the session's reward, and above them those of
    its agent's and of its timeline's, name by name."""
    own = [span.extras for span in spans if span.agent and not span.tool]
    timeline = [span.extras for span in spans if span.is_timeline]
    merged = dict(session)
    for texts in (own, timeline):
        if texts and texts[-1]:
            merged |= msgspec.json.decode(texts[-1])
    return encode_extras(merged)


def _list_names(names: Sequence[object]) -> str:
    """Lists the first names, or says that there are none."""
    shown = ", ".join(map(repr, names[:_MAX_SHOWN]))
    return (shown or "none") + (f" and {len(names) - _MAX_SHOWN} more" if names[_MAX_SHOWN:] else "")


def assign_rewards(
    tree: Tree, rewards: Sequence[Mapping[str, Any]], fork_report: ForkReport
) -> AssignedRewards:
    """Returns the rewards for parts of a tree."""
    assigned, parts = AssignedRewards(), RewardParts(tree, fork_report)
    # By what it is for, not by how that was named: a turn and a call may be one answer.
    latest: dict[tuple[RewardTarget, str], PartReward] = {}
    for recorded in rewards:
        if "score" not in recorded or recorded.keys().isdisjoint(PART_KEYS):
            continue
        reward = read_recorded_reward(recorded)
        turn, tool = reward.get("turn"), str(reward.get("tool") or "")
        part = PartReward(float(reward["score"]), turn, tool, extras=reward.get("extras", {}))
        for target in parts.targets(reward):
            key = (target, repr(reward.get("id")))
            latest.pop(key, None)
            latest[key] = replace(part, agent=reward["agent"]) if target.kind == "agent" else part
    for (target, _), part in latest.items():
        kind, name = target.kind, target.name
        if kind == "answer":
            assigned.by_node.setdefault(cast(int, name), []).append(part)
        elif kind == "timeline":
            assigned.by_timeline_node.setdefault(cast(int, name), []).append(part)
        elif kind == "agent":
            assigned.by_agent.setdefault(cast(str, name), []).append(part)
        elif kind == "tool":
            assigned.of_tools.append(part)
        else:
            assigned.unresolved += 1
    return assigned


class RewardTarget(NamedTuple):
    """What a reward is for. A later reward for it, with the same `id`, replaces an earlier one."""

    kind: Literal["answer", "timeline", "agent", "tool", "nothing"]
    name: str | int
    """The id or the name that it has in its tree."""
    tool: str


def _has_tool_call(node: Node, tool: str) -> bool:
    return any(call.name == tool for call in node.message.tool_calls)


class RewardParts:
    """The parts of a tree that rewards may be for; each is computed once."""

    def __init__(self, tree: Tree, fork_report: ForkReport | None = None) -> None:
        self._tree = tree
        self._given_fork_report = fork_report
        self._conversations: dict[tuple[object, object], list[Node]] = {}
        self._tools: dict[tuple[object, ...], list[str]] = {}

    @cached_property
    def agents(self) -> list[str]:
        """The names of agents that made a call."""
        return list(dict.fromkeys(call.agent for call in self._tree.calls if call.agent))

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The latest call with each id."""
        return {call.id: call for call in self._tree.calls}

    @cached_property
    def _fork_report(self) -> ForkReport:
        return self._given_fork_report or classify_forks(self._tree)

    @cached_property
    def _continued_by(self) -> dict[int, Call]:
        """By the index of a resumed call, the call that continued it."""
        return {call.resumed_call_index: call for call in reversed(self._tree.calls)}

    def resolve(self, reward: Reward) -> Reward:
        """Returns the reward, one of a turn with the answer that the turn is now: another branch may become
        the conversation whose turns are numbered. Raises MessageError, which names what there is, if it is
        for a part that the tree does not have."""
        if "agent" in reward and reward["agent"] not in self.agents:
            expected = f"an agent of this session: {_list_names(self.agents)}"
            raise MessageError("agent", reward["agent"], expected)
        if "call" in reward and reward["call"] not in self.calls:
            expected = f"the id of a call of this session: {_list_names(list(self.calls))}"
            raise MessageError("call", reward["call"], expected)
        if "timeline" in reward and not self.has_timeline(reward["timeline"]):
            leaves = [leaf.id for leaf in self._tree.leaves()]
            expected = f"the id of a timeline of this session: {_list_names(leaves)}"
            raise MessageError("timeline", reward["timeline"], expected)
        if "turn" in reward and reward["turn"] > (count := len(self.conversation(reward))):
            whose = f"agent {reward['agent']!r}" if "agent" in reward else "the main conversation"
            expected = f"the number of an answer, from 1 on: {whose} has {count}"
            raise MessageError("turn", reward["turn"], expected)
        if "tool" in reward and reward["tool"] not in (tools := self.tools(reward)):
            where = "that part" if len(reward.keys() & {*PART_KEYS}) > 1 else "this session"
            expected = f"a tool that is called in {where}: {_list_names(tools)}"
            raise MessageError("tool", reward["tool"], expected)
        if "turn" in reward:
            (node,) = self.answers(reward)
            return {**reward, "turn_node": node.id}
        return reward

    def targets(self, reward: Mapping[str, Any]) -> list[RewardTarget]:
        """Returns what a reward is for."""
        tool = str(reward.get("tool") or "")
        found: list[RewardTarget] = []
        if "call" in reward or reward.get("turn") is not None:
            answers = [node for node in self.answers(reward) if not tool or _has_tool_call(node, tool)]
            found = [RewardTarget("answer", node.id, tool) for node in answers]
        elif "timeline" in reward:
            ends = self.timeline_ends(int(reward["timeline"]))
            found = [RewardTarget("timeline", node.id, tool) for node in ends]
        elif "agent" in reward:
            found = [RewardTarget("agent", reward["agent"], tool)]
        else:
            found = [RewardTarget("tool", "", tool)]
        return found or [RewardTarget("nothing", repr([reward.get(key) for key in PART_KEYS]), tool)]

    def has_timeline(self, node_id: int) -> bool:
        """Whether a timeline ends at this node, or ended there before it was continued."""
        if not 0 < node_id < len(self._tree.nodes):
            return False
        node = self._tree.nodes[node_id]
        return node.is_sampled or not node.children

    def timeline_ends(self, node_id: int) -> list[Node]:
        """Returns the node that ends a timeline, or ended it before it was continued; none if there is no
        such timeline. A cancelled answer that was resumed is continued by the whole answer, which is beside
        it, and by messages after it."""
        if not self.has_timeline(node_id):
            return []
        node = self._tree.nodes[node_id]
        if not node.is_sampled or not self._tree.is_resumed(call := self._tree.call_of(node)):
            return [node]
        return [*([node] if node.children else []), *self._outputs(call)]

    def answers(self, reward: Mapping[str, Any]) -> list[Node]:
        """Returns the sampled nodes of the part that a reward, for a tool perhaps, is for."""
        if "call" in reward:
            call = self.calls.get(str(reward["call"]))
            return [] if call is None else self._outputs(call)
        if "turn_node" in reward:
            node = self._tree.nodes[reward["turn_node"]]
            call = self._tree.call_of(node)
            return self._outputs(call) if self._tree.is_resumed(call) else [node]
        if "turn" in reward:
            return self.conversation(reward)[reward["turn"] - 1 : reward["turn"]]
        sampled = [node for node in self._tree.nodes if node.is_sampled]
        return [node for node in sampled if "agent" not in reward or node.agent == reward["agent"]]

    def _outputs(self, call: Call) -> list[Node]:
        """Returns the answers of a call; those of a resumed call are in the call that continued it."""
        while self._tree.is_resumed(call):
            call = self._continued_by[call.index]
        return [self._tree.nodes[node_id] for node_id in call.outputs]

    def tools(self, reward: Mapping[str, Any]) -> list[str]:
        """Returns the names of the tools that the answers of a part call."""
        key = tuple(reward.get(name) for name in ("call", "turn", "agent"))
        if key not in self._tools:
            calls = [call for node in self.answers(reward) for call in node.message.tool_calls]
            self._tools[key] = list(dict.fromkeys(call.name for call in calls))
        return self._tools[key]

    def conversation(self, reward: Mapping[str, Any]) -> list[Node]:
        """Returns the sampled nodes of the conversation whose turns a reward numbers."""
        key = reward.get("timeline"), reward.get("agent")
        if key not in self._conversations:
            leaf = self._conversation_leaf(reward)
            answers = map(self._tree.answer_at, leaf.path() if leaf is not None else ())
            self._conversations[key] = [answer for answer in answers if answer is not None]
        return self._conversations[key]

    def _conversation_leaf(self, reward: Mapping[str, Any]) -> Node | None:
        """Returns the end of the named timeline (only in older journals), else of the named agent's
        conversation, else of the main history. Its last answer may be cancelled: the turns before it
        count."""
        if "timeline" in reward:
            return self._tree.nodes[int(reward["timeline"])]
        if "agent" in reward:
            return self._fork_report.leaf_of(str(reward["agent"]))
        return self._fork_report.main_leaf
