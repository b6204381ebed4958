"""The types of one call: its id, what a caller asks, what came out, and the record that observers get.

`CallRequest` goes in, `CallResult` comes out; both are free of any wire protocol. `CallRecord` collects what
metrics, logs and traces need and is complete when the call is over, however it ended.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from branchline.core.call import Equivalence, Request
from branchline.core.errors import JournalError, MessageError, SessionError
from branchline.core.message import Message
from branchline.core.token_arrays import Floats, Ids
from branchline.engines.base import SamplingParams
from branchline.engines.upstream_events import TokenUsage
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.headers import CALL_HEADER
from branchline.runtime.managed_session import ManagedSession

Outcome = Literal["ok", "refused", "failed", "cancelled"]
"""`refused`: the client's error. `failed`: the engine's or the journal's. `cancelled`: by a disconnect."""
Phase = Literal["prepare", "queue", "generate", "commit"]
_CALL_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
ATTEMPT_SEPARATOR = "~"
"""Cannot be in a name; the number of the attempt follows it."""


def new_call_id(managed: ManagedSession, prefix: str = "chatcmpl-", name: str = "") -> str:
    """Returns a random id, or for a named call the id of its next attempt: the name, name~2, name~3, …"""
    if not name:
        return prefix + secrets.token_hex(12)
    if not _CALL_NAME.fullmatch(name):
        raise MessageError(CALL_HEADER, name, "letters, digits, '-', '_' or '.', at most 96")
    count = managed.attempt_counts.get(name)
    if count is None:
        # No attempt since this process started, but the journal may have some.
        ids = [call.id for call in managed.session.tree.calls if call_name(call.id) == name]
        count = max([attempt_number(call_id) for call_id in ids], default=0)
    managed.attempt_counts[name] = count + 1
    return attempt_id(name, count + 1)


def attempt_id(name: str, number: int) -> str:
    return name if number == 1 else f"{name}{ATTEMPT_SEPARATOR}{number}"


def call_name(call_id: str) -> str:
    return call_id.partition(ATTEMPT_SEPARATOR)[0]


def attempt_number(call_id: str) -> int:
    _, separator, number = call_id.partition(ATTEMPT_SEPARATOR)
    return int(number) if separator and number.isdigit() else 1


def attempts_of(managed: ManagedSession, names: Sequence[str]) -> list[str]:
    """The ids of all recorded attempts of these named calls."""
    return [call.id for call in managed.session.tree.calls if call_name(call.id) in names]


@dataclass(frozen=True)
class CallRequest:
    """What a caller asks for: a conversation, how to sample, how many answers."""

    request: Request
    params: SamplingParams
    n: int = 1
    stream: bool = False
    """Whether the caller reads the answer while it is sampled; if not, engines may buffer it."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. Engines never see them: the runtime ends the generation."""
    single_tool_call: bool = False
    """At most one tool call per answer."""
    raw_prompt: str | Ids | None = None
    """A prompt without a chat template, as text or ids; None for a conversation."""
    is_compacted: bool = False
    """Whether the conversation is used as it is, whatever the session's `compaction` says."""
    tool_choice: object = None
    """The `tool_choice` of Chat Completions, for an upstream. Engines leave the choice to the model."""
    other_fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the request that its protocol does not read."""
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Fields that engines here cannot follow; they are recorded."""
    not_applied: tuple[str, ...] = ()
    """What the protocol found that nobody does, beside the fields in `requested`: tools of vendors, …"""
    ignored_fields: Mapping[str, Any] = field(default_factory=dict)
    """Unsupported fields of a lenient client; they are recorded."""
    overridden_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the session's sampling overrides, as the request has them; they are recorded."""
    ignores_unsupported: bool = False
    """Whether fields that the engine does not support are ignored instead of refused."""
    upstream_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of another protocol that an upstream gets, under their names in Chat Completions."""
    upstream_options: Mapping[str, Any] | None = None
    """The other fields of a Chat Completions request for an upstream, as the client wrote them. Its `tools`
    are those that the upstream runs itself. None: the fields are made from `params`."""
    body_bytes: int = 0
    """The size of the request's body; 0 if it had none."""
    upstream_messages: Sequence[Mapping[str, Any]] | None = None
    """The messages of a Chat Completions request for an upstream, as the client wrote them. None: they are
    made from the request."""


@dataclass(frozen=True)
class CallResult:
    """A call that is committed and in the journal."""

    call_id: str
    prompt_ids: Ids
    answers: Sequence[Answer]
    prompt_tokens: int
    """As an upstream counted them, where ids encoded from its text are not exact."""
    sampled_tokens: int
    encoded_tokens: int = 0
    """Tokens of the prompt that were made by encoding text."""
    reused_tokens: int = 0
    """Tokens of the prompt that were in the tree before."""
    equivalences: tuple[Equivalence, ...] = ()
    """What was tolerated to recognise messages of the request, once for each message."""
    ambiguous_match: bool = False
    """Several recorded outputs matched an assistant message of the request."""
    not_applied: tuple[str, ...] = ()
    """What the request asked for and nobody did."""
    upstream_usage: TokenUsage | None = None
    """The counts of an upstream; None if Branchline counted."""

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version that sampled; None if not known."""
        versions = [version for answer in self.answers for version in answer.versions]
        return (min(versions), max(versions)) if versions else None

    # -- the first answer, which is the only one unless n > 1 was asked for --------------------------

    @property
    def message(self) -> Message:
        return self.answers[0].message

    @property
    def finish_reason(self) -> str:
        return self.answers[0].finish_reason

    @property
    def ids(self) -> Ids:
        return self.answers[0].ids

    @property
    def logprobs(self) -> Floats | None:
        return self.answers[0].logprobs

    @property
    def num_preempted(self) -> int:
        return self.answers[0].num_preempted


CallEvent = AnswerDelta | CallResult
"""What a running call yields: deltas, then its result."""


@dataclass(frozen=True)
class CallFailure:
    """The error that ended a call. `message` may quote messages; `error_type` never does.

    >>> failure = CallFailure.from_error(MessageError("messages[0].role", "wizard", "one of system, user"))
    >>> failure.error_type, failure.field
    ('MessageError', 'messages[0].role')
    """

    error_type: str
    """The error's type and those of its causes: `EngineError from ConnectionRefusedError`."""
    message: str
    field: str = ""
    may_quote_messages: bool = True

    @classmethod
    def from_error(cls, error: BaseException) -> CallFailure:
        """Copies the texts only: the error itself would keep the failed request alive."""
        return cls(
            " from ".join([type(cause).__name__ for cause in cause_chain(error)]),
            str(error),
            error.field if isinstance(error, MessageError) else "",
            not isinstance(error, SessionError | JournalError),
        )


def cause_chain(error: BaseException, *, include_context: bool = False) -> list[BaseException]:
    """An error and its causes, each once; with `include_context` also errors that were being handled."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        is_hidden = cause.__suppress_context__ or not include_context
        cause = cause.__cause__ or (None if is_hidden else cause.__context__)
    return chain


@dataclass
class CallRecord:
    """One call as observers see it; filled in while the call runs."""

    session_id: str
    protocol: str
    call_id: str
    session_created_at: float = 0.0
    """Seconds since 1970. Session ids may be used again, so the id and this time name a session."""
    model: str = ""
    agent: str = ""
    group: str = ""
    engine: str = ""
    call_request: CallRequest | None = None
    """None until the request has been read."""
    result: CallResult | None = None
    outcome: Outcome = "ok"
    status: int = 200
    failure: CallFailure | None = None
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers of the response. Those of an upstream are added when its response begins."""
    traceparent: str = ""
    """The client's own trace, if it sent one."""
    started_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    started_perf_s: float = field(default_factory=time.perf_counter)
    phase_s: dict[Phase, float] = field(default_factory=dict)
    """`queue` is the wait for the first token: the engine's queue, a pause, the prefill."""
    total_s: float = 0.0

    @property
    def streamed(self) -> bool:
        return self.call_request is not None and self.call_request.stream

    def end_phase(self, phase: Phase) -> None:
        """Records how long a phase lasted, counted from the end of the one before; only the first time."""
        if phase not in self.phase_s:
            elapsed = time.perf_counter() - self.started_perf_s
            self.phase_s[phase] = elapsed - sum(self.phase_s.values())


CallObserver = Callable[[CallRecord], None]
"""Called once per call, when it is over."""


@dataclass(frozen=True)
class StepRecord:
    """A call of a tool or an interaction in an agent loop, as observers see it."""

    session_id: str
    session_created_at: float
    kind: Literal["tool", "interaction"]
    name: str
    operation: str
    """`execute` of a tool; `start`, `respond` or `score` of an interaction."""
    started_at: float
    """Seconds since 1970."""
    total_s: float
    tool_call_id: str = ""
    error_type: str = ""
    """Empty if it succeeded; `cancelled` if it was interrupted."""


StepObserver = Callable[[StepRecord], None]
"""Called once per call of a tool or an interaction, when it is over."""
