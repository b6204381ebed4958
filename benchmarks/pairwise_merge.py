"""AgentJet's merging rule as its documentation states it, timeline against timeline.

A timeline that is no longer than another and equals its beginning, message by message in role, text and
tool calls, is absorbed by it; where the model wrote a message of the absorbed one, it wrote that message
of the other. Comparing stops at the first difference, and absorbing at the first fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchline import LoggedCall


@dataclass(slots=True)
class Entry:
    """One message of a timeline, and who wrote it."""

    role: str
    text: str
    calls: Any
    by_model: bool


Entries = list[Entry]


def to_entries(calls: Sequence[LoggedCall]) -> list[Entries]:
    """Each logged call as a timeline of its own: what was asked, then the output."""
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
    """What is left once every timeline that another begins with has been absorbed."""
    shortest_first = sorted(timelines, key=len)
    left: list[Entries] = []
    for place, short in enumerate(shortest_first):
        for long in shortest_first[place + 1 :]:
            if _starts_with(long, short):
                _mark_model_messages(short, long)
                break
        else:
            left.append(short)
    return left


def _starts_with(long: Entries, short: Entries) -> bool:
    for mine, other in zip(short, long):  # noqa: B905 (the longer one goes on)
        if mine.text != other.text or mine.role != other.role or mine.calls != other.calls:
            return False
    return True


def _mark_model_messages(short: Entries, long: Entries) -> None:
    for mine, other in zip(short, long):  # noqa: B905
        if mine.by_model:
            other.by_model = True
