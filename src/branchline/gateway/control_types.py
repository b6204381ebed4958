"""Bodies and answers of the control API as types.

The OpenAPI document is made from them, and `Client` returns them. `gateway/views.py` builds the answers. A
test compares the answer of every operation with its type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from branchline.core.reward import Reward
from branchline.core.sample import AnswerSpan
from branchline.runtime.managed_session import SessionState


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A new session: where its agent finds the model, and its keys, which the gateway does not store."""

    id: str
    base_url: str
    """For OpenAI's clients; ends in `/v1`."""
    openai_base_url: str
    anthropic_base_url: str
    api_key: str
    """Opens the model API of this session; may complete it, and reward it with `agent_reward`."""
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
    answered_calls: int
    """Calls whose answers reached the client, as far as it is known."""
    in_flight: int
    """Calls that run now."""
    tokens: int
    """Stored tokens; a token shared by several paths counts once."""
    sampled_tokens: int
    reward: float | None
    """The last score for the whole session."""
    rewards: list[Reward]
    not_applied: dict[str, int]
    """What calls asked for and nobody did (accepted, not applied), with the number of calls."""


class SessionStateView(msgspec.Struct, frozen=True, kw_only=True):
    """What the API key of a session sees of it."""

    id: str
    state: SessionState
    reason: str


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions in memory, oldest first."""

    sessions: list[SessionView]


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
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


class GatewayIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What answers here, and where to go on."""

    name: str
    version: str
    description: str
    documents: dict[str, str]
    """Paths by what they are."""
    open_a_session: str
    """A command that opens one."""


class HealthState(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that answers."""

    status: str
    paused: bool
    version: int
    sessions: int
    """Sessions in memory."""


class ReadyState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a gateway would accept a call now, and what each check found."""

    status: Literal["ready", "not ready"]
    checks: dict[str, str]
    """`ok`, or what is wrong, for the journal, the engine and the policy."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the tree, and the ids that it added."""

    id: int
    parent: int
    """0 is the root, which is not listed."""
    role: str
    text: str
    ids: list[int]
    spans: list[tuple[int, Literal["template", "context", "sampled"]]]
    """How many ids, and where they come from."""
    cause: str | None
    """Why a branch begins here; null if none does."""
    call: str | None
    """The call that sampled it; null for context."""
    finish: str | None
    source: int | None
    """The node that it repeats as context."""


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A call: who made it, and how its answers were sampled."""

    id: str
    agent: str
    sampling: dict[str, Any]
    not_applied: list[str]
    """What its request asked for and nobody did."""


class TreeView(msgspec.Struct, frozen=True, kw_only=True):
    """Every node and every call of a session."""

    nodes: list[NodeView]
    calls: list[CallView]


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """A root-to-leaf path as aligned arrays."""

    id: int
    """The id of its leaf."""
    ids: list[int]
    mask: list[int]
    logprobs: list[float | None]
    versions: list[int]
    agent: str | None
    calls: list[str]
    exact: bool
    answers: list[AnswerSpan]
    messages: list[dict[str, Any]]
    authors: list[str]
    """Who wrote each message."""
    spans: list[tuple[int, int]]
    """Where the ids of each message begin and end."""


class TimelineList(msgspec.Struct, frozen=True, kw_only=True):
    """Every timeline of a session."""

    timelines: list[TimelineView]


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session."""

    history: TimelineView | None
    additional_histories: list[TimelineView]
    reward: float | None
    rewards: list[Reward]
    metrics: dict[str, float]


class ModelSession(msgspec.Struct, frozen=True, kw_only=True):
    """The session that an API key opens, and its calls."""

    id: str
    state: SessionState
    created: float
    calls: list[str]


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a session ends."""

    reason: str = ""


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version of the new weights; without one the weights are the old ones."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


class AddEngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of a server, and the version of the weights that it has loaded."""

    url: Annotated[str, msgspec.Meta(min_length=1)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


class RemoveEngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of an engine."""

    name: Annotated[str, msgspec.Meta(min_length=1)]


class ErrorView(msgspec.Struct, frozen=True, kw_only=True):
    """What was refused or failed, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    """The field of the request."""
    code: str | int | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Every error of the control API."""

    error: ErrorView
