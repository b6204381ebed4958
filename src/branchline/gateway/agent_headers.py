"""Reads from a request's headers which agent sent it and which agent started that one.

Branchline's own headers can name any agent. For known clients only sub-agents are named: a client's first
agent is the session's default agent under any name, so that it stays the same agent after a restart. A
parent is passed on under the client's name for it; the tree resolves the first agent by exclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Headers = Mapping[str, str]


@dataclass(frozen=True)
class AgentIdentity:
    """An agent and its parent; "" if no header names them."""

    agent: str = ""
    parent: str = ""


def identify_agent(headers: Headers) -> AgentIdentity:
    """The agent and parent from the first set of headers that is present.

    >>> identify_agent({"x-session-id": "s2", "x-parent-session-id": "s1"})
    AgentIdentity(agent='s2', parent='s1')
    """
    for read in _READERS:
        identity = read(headers)
        if identity.agent or identity.parent:
            return identity
    return AgentIdentity()


def _branchline(headers: Headers) -> AgentIdentity:
    return AgentIdentity(headers.get("x-branchline-agent", ""), headers.get("x-branchline-parent-agent", ""))


def _claude_code(headers: Headers) -> AgentIdentity:
    return AgentIdentity(
        headers.get("x-claude-code-agent-id", ""), headers.get("x-claude-code-parent-agent-id", "")
    )


def _codex(headers: Headers) -> AgentIdentity:
    """A sub-agent's thread id differs from the session id."""
    thread, session = headers.get("thread-id", ""), headers.get("session-id", "")
    if not session or thread in ("", session):
        return AgentIdentity()
    return AgentIdentity(thread, headers.get("x-codex-parent-thread-id", ""))


def _opencode(headers: Headers) -> AgentIdentity:
    """A sub-agent's session has a parent; the user's own has none."""
    parent = headers.get("x-parent-session-id", "")
    return AgentIdentity(headers.get("x-session-id", ""), parent) if parent else AgentIdentity()


_READERS: tuple[Callable[[Headers], AgentIdentity], ...] = (_branchline, _claude_code, _codex, _opencode)
