"""Whose turn it is, for templates that mind: some take a system message only at the start, some want user and
assistant strictly in turn. Agents mind neither: they say something between turns (a reminder, a second
question, a word beside a tool's result), and being refused would end their episode.

So what such a template would refuse is shown in the nearest way that it takes: later system messages as the
user's words, messages of the user or of the system that follow each other as one, and words beside a tool's
result inside it. What it takes stays as it is, so the beginning of a conversation is shown the same however
it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class RoleRules:
    """What a template takes of who speaks when."""

    allows_late_system: bool = True
    """A system message behind others."""
    must_alternate: bool = False
    """User and assistant must alternate."""
    allows_user_after_tool: bool = True
    """A user whose question was answered with a call may speak right behind its result."""
    allows_consecutive_system: bool = True
    """A system message right behind another."""

    def apply(self, written: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as a template gets them, in an order that it takes.

        >>> late = {"role": "system", "content": "Be brief."}
        >>> asked = [{"role": "user", "content": "Hi."}, late]
        >>> RoleRules(allows_late_system=False).apply(asked)[1]
        {'role': 'user', 'content': 'Be brief.'}
        >>> RoleRules(allows_late_system=False, must_alternate=True).apply(asked)
        [{'role': 'user', 'content': 'Hi.\\n\\nBe brief.'}]
        """
        ordered: list[dict[str, Any]] = []
        speaker = ""
        for message in written:
            role, last = message["role"], ordered[-1]["role"] if ordered else ""
            if role == "system" and last not in ("", "system") and not self.allows_late_system:
                role = "user"
            if self._merges_into_previous(role, last, speaker):
                ordered[-1] = ordered[-1] | {
                    "content": _join_contents(ordered[-1]["content"], message["content"])
                }
                continue
            ordered.append(message if role == message["role"] else message | {"role": role})
            if role == "user" or (role == "assistant" and not message.get("tool_calls")):
                speaker = role
        return ordered

    def _merges_into_previous(self, role: str, last: str, speaker: str) -> bool:
        """Whether a message becomes a part of the one before it.

        Turns are those of user and assistant: calls and results stand between them. Behind a result it may
        therefore be the user's turn, where a conversation begins with a call or has one behind a reply.
        """
        if role == "system":
            return last == "system" and not self.allows_consecutive_system
        if role != "user":
            return False
        if last == "tool":
            return not self.allows_user_after_tool and not (self.must_alternate and speaker != "user")
        return last == "user" and self.must_alternate


UNRESTRICTED_ROLES = RoleRules()
"""As they come."""


def _join_contents(first: Any, second: Any) -> Any:
    """Two contents as one: texts, or lists of parts where one of them has more than text."""
    if isinstance(first, str) and isinstance(second, str):
        return _SEPARATOR.join(filter(None, (first, second)))
    before, behind = _content_parts(first), _content_parts(second)
    if before and behind and before[-1]["type"] == behind[0]["type"] == "text":
        # One part, since templates trim parts and put nothing between them.
        words = _join_contents(before.pop()["text"], behind.pop(0)["text"])
        before.append({"type": "text", "text": words})
    return [*before, *behind]


def _content_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
