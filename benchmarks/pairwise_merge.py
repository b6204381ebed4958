"""AgentJet's pairwise merging rule as documented.

A timeline that is a prefix of another, message by message in role, text and tool calls, is absorbed by it,
and its model-written messages become model-written in the other. Comparison stops at the first difference,
absorption at the first match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchline.timelines.log import LoggedCall


@dataclass(slots=True)
class Entry:
    """One message of a timeline, and whether the model wrote it."""

    role: str
    text: str
    calls: Any
    by_model: bool


Entries = list[Entry]


def to_entries(calls: Sequence[LoggedCall]) -> list[Entries]:
    """Returns each logged call as a timeline: request messages, then the output."""
    return [
        [
            *(
                Entry(message.role, message.content, message.tool_calls, False)
                for message in call.request.messages
            ),
            Entry("assistant", call.outputs[0].message.content, call.outputs[0].message.tool_calls, True),
        ]
        for call in calls
    ]


def merge_pairwise(timelines: Sequence[Entries]) -> list[Entries]:
    """Returns the timelines that are not absorbed."""
    shortest_first = sorted(timelines, key=len)
    remaining: list[Entries] = []
    for index, short in enumerate(shortest_first):
        for long in shortest_first[index + 1 :]:
            if _starts_with(long, short):
                _mark_model_messages(short, long)
                break
        else:
            remaining.append(short)
    return remaining


def _starts_with(long: Entries, short: Entries) -> bool:
    for mine, other in zip(short, long):  # noqa: B905 (lengths differ)
        if mine.text != other.text or mine.role != other.role or mine.calls != other.calls:
            return False
    return True


def _mark_model_messages(short: Entries, long: Entries) -> None:
    for mine, other in zip(short, long):  # noqa: B905
        if mine.by_model:
            other.by_model = True
