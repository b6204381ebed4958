"""A call as those who watch see it: what metrics count, logs say and traces show, once it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from branchline.core.errors import JournalError, MessageError, SessionError

if TYPE_CHECKING:
    from branchline.runtime.call_lifecycle import CallRequest, CallResult
    from branchline.runtime.managed_session import ManagedSession

Outcome = Literal["ok", "refused", "failed", "cancelled"]
"""`refused`: the client's mistake. `failed`: the engine's or the journal's. `cancelled`: the client left."""
Phase = Literal["prepare", "queue", "generate", "commit"]


@dataclass(frozen=True)
class CallFailure:
    """What a call ended by. Its words may quote messages; its kind never does.

    >>> told = CallFailure.from_error(MessageError("messages[0].role", "wizard", "one from_error system, user"))
    >>> told.error_type, told.field
    ('MessageError', 'messages[0].role')
    """

    error_type: str
    """The error's type, and those of its causes: `EngineError from ConnectionRefusedError`."""
    message: str
    field: str = ""
    may_quote_messages: bool = True

    @classmethod
    def from_error(cls, error: BaseException) -> CallFailure:
        """Keeps what is said of an error, and not the error: that holds on to the request it failed."""
        return cls(
            error_type_chain(error),
            str(error),
            error.field if isinstance(error, MessageError) else "",
            not isinstance(error, SessionError | JournalError),
        )


def error_type_chain(error: BaseException) -> str:
    return " from ".join([type(cause).__name__ for cause in cause_chain(error)])


def cause_chain(error: BaseException, *, include_context: bool = False) -> list[BaseException]:
    """An error and what led to it; with `contexts` also what was merely being handled. Each once."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        is_hidden = cause.__suppress_context__ or not include_context
        cause = cause.__cause__ or (None if is_hidden else cause.__context__)
    return chain


@dataclass
class CallRecord:
    """One call, filled in while it goes on."""

    session_id: str
    protocol: str
    call_id: str
    session_created_at: float = 0.0
    """When its session was opened, in seconds since 1970: ids of sessions may come again, this does not."""
    model: str = ""
    agent: str = ""
    group: str = ""
    engine: str = ""
    streamed: bool = False
    call_request: CallRequest | None = None
    result: CallResult | None = None
    outcome: Outcome = "ok"
    status: int = 200
    failure: CallFailure | None = None
    traceparent: str = ""
    """The client's own trace, where it says so."""
    started_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    started_perf_s: float = field(default_factory=time.perf_counter)
    phase_s: dict[Phase, float] = field(default_factory=dict)
    """`queue` is the wait for the first token: the engine's queue, a pause, the prefill."""
    total_s: float = 0.0

    def end_phase(self, phase: Phase) -> None:
        """A phase lasts from the end of the one before it."""
        if phase not in self.phase_s:
            spent = time.perf_counter() - self.started_perf_s
            self.phase_s[phase] = spent - sum(self.phase_s.values())

    def close(self) -> None:
        self.total_s = time.perf_counter() - self.started_perf_s


CallObserver = Callable[[CallRecord], None]
SessionObserver = Callable[["ManagedSession"], None]
"""Told once when a session is closed for good, or ends with the gateway because no journal keeps it."""
