"""The answers of the control API as types: the OpenAPI document is made from them, and `Client` returns them.

`gateway/views.py` builds the answers. A test compares the answer of every operation with its type.
"""

from __future__ import annotations

from typing import Any

import msgspec

from branchline.runtime.managed_session import SessionState


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A new session: where its agent finds the model, and its keys, which the gateway does not store."""

    id: str
    base_url: str
    """For OpenAI's clients; ends in `/v1`."""
    openai_base_url: str
    anthropic_base_url: str
    api_key: str
    """Opens the model API of this session and nothing else."""
    control_key: str
    """Reads, rewards and ends the session."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """Options, state and counts of a session."""

    id: str
    state: SessionState
    reason: str
    agent: str
    group: str
    metadata: dict[str, Any]
    eval: bool
    created: float
    """Seconds since 1970."""
    calls: int
    in_flight: int
    """Calls that run now."""
    tokens: int
    """Stored tokens; a token shared by several paths counts once."""
    sampled_tokens: int
    reward: float | None
    """The last score for the whole session."""
    rewards: list[dict[str, Any]]


class SessionStateView(msgspec.Struct, frozen=True, kw_only=True):
    """What the API key of a session sees of it."""

    id: str
    state: SessionState
    reason: str


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions in memory, oldest first."""

    sessions: list[SessionView]


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy: whether it is paused for a weight update, and its version."""

    paused: bool
    version: int


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine; the fields after `version` are those of replicas."""

    name: str
    version: int
    in_flight: int | None = None
    failing: bool = False
    """Not used for a while, after a failure."""
    behind: bool = False
    """Has other weights than the policy, and is not used before the next pause and resume."""


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The policy and its engines."""

    paused: bool
    version: int
    engines: list[EngineState]


class HealthState(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that answers."""

    status: str
    engine: str
    paused: bool
    version: int
    sessions: int
    """Sessions in memory."""
