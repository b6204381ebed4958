"""Merging foreign logs: calls captured elsewhere become one tree, whatever order they come in.

AgentJet's rule, for all calls at once: a timeline whose messages are a prefix of another's is absorbed by
it, and what the model said there is the model's. Outputs keep the ids they were sampled with; a call that
was sampled behind other ids than those now before it says so (`behind_other_ids`).

    merged = merge(read_log("calls.jsonl"))
    merged.tree, merged.line_of_call, merged.repairs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS
from branchline.timelines.alignment import AlignmentMethod
from branchline.timelines.links import Link, MergePolicy, find_links
from branchline.timelines.log import LoggedCall
from branchline.timelines.tree_builder import BuiltTree, build_tree
from branchline.tree.tree import Tree


@dataclass(frozen=True)
class Repair:
    """A place where sampled ids were put back in front of a call that was sampled behind others."""

    line: int
    method: AlignmentMethod


@dataclass
class MergeResult:
    """One session's calls as a tree."""

    calls: list[LoggedCall]
    links: list[Link | None]
    policy: MergePolicy
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    """(call, output) left out because an equal one is kept."""
    drifted: list[tuple[int, int]] = field(default_factory=list)
    """(call, depth) of calls left apart because ids disagree where texts agree."""
    _built: BuiltTree | None = None

    @property
    def repairs(self) -> list[Repair]:
        return [
            Repair(call.line, link.alignment.method)
            for call, link in zip(self.calls, self.links, strict=True)
            if link is not None
            and link.alignment is not None
            and link.alignment.method != AlignmentMethod.IDENTICAL
        ]

    @property
    def tree(self) -> Tree:
        return self._built_tree.tree

    @cached_property
    def line_of_call(self) -> list[int]:
        """The log line of each call of the tree."""
        return [self.calls[index].line for index in self._built_tree.call_order]

    @property
    def _built_tree(self) -> BuiltTree:
        if self._built is None:
            self._built = build_tree(
                self.calls, self.links, set(self.duplicates), ignore_tools=self.policy.ignore_tools
            )
        return self._built

    def timelines(self) -> Iterator[tuple[list[Message], list[int]]]:
        """Merged timelines as (messages, places the model wrote), straight from the links."""
        continued = {(link.parent, link.output) for link in self.links if link is not None}
        dropped = set(self.duplicates)
        for index, call in enumerate(self.calls):
            written: list[int] | None = None
            for choice, output in enumerate(call.outputs):
                if (index, choice) in continued or (index, choice) in dropped:
                    continue
                if written is None:
                    written = self._sampled_positions(index)
                yield [*call.request.messages, output.message], [*written, len(call.request.messages)]

    def _sampled_positions(self, index: int) -> list[int]:
        places: list[int] = []
        link = self.links[index]
        while link is not None:
            places.append(link.depth - 1)
            link = self.links[link.parent]
        return places[::-1]


def merge(calls: Iterable[LoggedCall], policy: MergePolicy | None = None) -> MergeResult:
    """Merges the calls of one session. Linear in the log; the order of calls does not matter."""
    policy = policy or MergePolicy()
    # Where nothing else decides, the earlier line does, in whatever order the calls are handed over.
    calls = sorted(calls, key=lambda call: call.line)
    scopes = _scopes(calls, policy)
    links = find_links(calls, scopes, policy)
    merged = MergeResult(calls, links.by_call, policy, drifted=links.drifted)
    if policy.deduplicate:
        merged.duplicates = list(_duplicates(calls, scopes, merged.links))
    return merged


def _scopes(calls: Sequence[LoggedCall], policy: MergePolicy) -> list[int]:
    """A number for each set of calls that may meet: one agent, and one tool list unless those are ignored."""
    numbers: dict[tuple[str, bytes], int] = {}
    return [
        numbers.setdefault(
            (call.agent, b"" if policy.ignore_tools else call.request.prompt_config_digest), len(numbers)
        )
        for call in calls
    ]


def _duplicates(
    calls: Sequence[LoggedCall], scopes: Sequence[int], links: Sequence[Link | None]
) -> Iterator[tuple[int, int]]:
    """Outputs equal to another of their prompt in every id, or in text without ids; continued ones stay."""
    continued = {(link.parent, link.output) for link in links if link is not None}
    kept: dict[object, bool] = {}
    places = [(index, choice) for index, call in enumerate(calls) for choice in range(len(call.outputs))]
    for index, choice in sorted(places, key=lambda place: place not in continued):
        call, output = calls[index], calls[index].outputs[choice]
        prompt = (call.prompt_ids if call.prompt_ids is not None else NO_IDS).tobytes()
        ids = output.ids.tobytes() if output.ids is not None else output.message.key
        identity = (scopes[index], call.request.message_keys, prompt, ids, output.message.content)
        if identity in kept and (index, choice) not in continued:
            yield index, choice
        kept[identity] = True
