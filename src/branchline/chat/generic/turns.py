"""Whose turn it is, for templates that mind: some take a system message only at the start, some want user and
assistant strictly in turn. Agents mind neither: they say something between turns (a reminder, a second
question, a word beside a tool's result), and being refused would end their episode.

So what such a template would refuse is shown in the nearest way that it takes: later system messages as the
user's words, words of the user that follow each other as one message, words beside a tool's result inside it.
What it takes stays as it is, so the beginning of a conversation is shown the same however it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Turns:
    """What a template takes of who speaks when."""

    late_system: bool = True
    """A system message behind others."""
    in_turn: bool = False
    """User and assistant must alternate."""
    words_after_result: bool = True
    """A user may speak right behind a tool's result."""

    def order(self, written: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as a template gets them, in an order that it takes.

        >>> late = {"role": "system", "content": "Be brief."}
        >>> asked = [{"role": "user", "content": "Hi."}, late]
        >>> Turns(late_system=False).order(asked)[1]
        {'role': 'user', 'content': 'Be brief.'}
        >>> Turns(late_system=False, in_turn=True).order(asked)
        [{'role': 'user', 'content': 'Hi.\\n\\nBe brief.'}]
        """
        ordered: list[dict[str, Any]] = []
        for message in written:
            role, last = message["role"], ordered[-1]["role"] if ordered else ""
            if role == "system" and last not in ("", "system") and not self.late_system:
                role = "user"
            is_same = self.in_turn and role == last and role in ("system", "user")
            if is_same or (role == "user" and last == "tool" and not self.words_after_result):
                ordered[-1] = ordered[-1] | {"content": _joined(ordered[-1]["content"], message["content"])}
            else:
                ordered.append(message if role == message["role"] else message | {"role": role})
        return ordered


ANY_TURNS = Turns()
"""As they come."""


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts, or lists of parts where one of them has more than text."""
    if isinstance(first, str) and isinstance(second, str):
        return _BETWEEN.join(filter(None, (first, second)))
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
