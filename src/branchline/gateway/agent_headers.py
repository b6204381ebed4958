"""Who asks, and who sent them: what the headers of clients say of an agent and of its parent.

Branchline's own headers name anybody. Of the clients that are known, only sub-agents are named: a client's
first agent is the session's, whatever that client calls it, so that it stays one agent when it is started
again. A parent is handed on under the client's name for it; the tree knows the first agent by exclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Headers = Mapping[str, str]


@dataclass(frozen=True)
class AgentIdentity:
    """An agent and its parent; nothing where a header does not say."""

    agent: str = ""
    parent: str = ""


def identify_agent(headers: Headers) -> AgentIdentity:
    """What the headers say.

    >>> identify_agent({"x-session-id": "s2", "x-parent-session-id": "s1"})
    AgentIdentity(agent='s2', parent='s1')
    """
    for read in _READERS:
        named = read(headers)
        if named.agent or named.parent:
            return named
    return AgentIdentity()


def _branchline(headers: Headers) -> AgentIdentity:
    return AgentIdentity(headers.get("x-branchline-agent", ""), headers.get("x-branchline-parent-agent", ""))


def _claude_code(headers: Headers) -> AgentIdentity:
    return AgentIdentity(
        headers.get("x-claude-code-agent-id", ""), headers.get("x-claude-code-parent-agent-id", "")
    )


def _codex(headers: Headers) -> AgentIdentity:
    """A thread of its own under the thread that the session began with."""
    thread, session = headers.get("thread-id", ""), headers.get("session-id", "")
    if not session or thread in ("", session):
        return AgentIdentity()
    return AgentIdentity(thread, headers.get("x-codex-parent-thread-id", ""))


def _opencode(headers: Headers) -> AgentIdentity:
    """A session with a parent; one without is the user's own."""
    parent = headers.get("x-parent-session-id", "")
    return AgentIdentity(headers.get("x-session-id", ""), parent) if parent else AgentIdentity()


_READERS: tuple[Callable[[Headers], AgentIdentity], ...] = (_branchline, _claude_code, _codex, _opencode)
