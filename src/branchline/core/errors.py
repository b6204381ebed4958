"""Every error that Branchline raises deliberately, as one tree; each type names the boundary that failed.

    BranchlineError
    ├── InputError              input from a caller or a file is not what was expected
    │   ├── AddressError        nothing can listen on an address (also an OSError)
    │   ├── MessageError        a message or request cannot be read
    │   └── LogError            a line of a call log is invalid; carries file and line number
    ├── CodecError              messages could not be turned into ids, or ids into messages
    │   └── TemplateError       the chat template rejected a conversation
    ├── SessionError            a session is unknown, closed, exhausted, or not opened by this key
    ├── TreeError               a commit does not fit its tree
    ├── EngineError             an engine failed; the call can be retried
    │   ├── EngineBusyError     the engine accepts no requests for now; may carry Retry-After
    │   ├── EngineUnavailableError  its server cannot be reached, is silent, or closed the connection
    │   ├── EngineOutputError   the engine returned tokens that cannot be right
    │   └── EngineInputError    the engine cannot do what was requested: unsupported, out of range
    │       └── ContextLengthError  the prompt exceeds the model's context
    ├── GatewayError            a gateway cannot be reached, or something else answered for it
    │   └── NodeLostError       the gateway of a session is gone, and the session with it
    ├── ToolError               a tool could not be set up, or its server is not reachable
    │   └── ToolUnavailableError  a tool's server is gone; the trajectory ends and is not trained
    ├── InteractionError        an interaction could not start, respond or score
    ├── CompactionError         a compaction policy raised, or its plan cannot be applied
    ├── JournalError            the journal could not be opened, written or read
    ├── SinkError               the results of a rollout could not be written
    │   └── SessionRefusedError  a sink cannot carry one session; the others go on
    ├── EpisodesFailedError     no episode of a training step finished
    ├── MissingExtraError       a package of an optional extra is not installed (also an ImportError)
    └── ExportError             samples must not be trained on without an explicit option
        └── MissingLogprobsError

Messages state the key, the value and the expectation. Only the gateway knows HTTP status codes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Bounds the representation of arbitrary values in messages.
_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = 120


class BranchlineError(Exception):
    """Base class of all errors raised deliberately."""


class InputError(BranchlineError):
    """Input from a caller or a file is not what was expected."""


class AddressError(InputError, OSError):
    """Nothing can listen on an address; `errno` says why, if the system has a number for it."""

    def __init__(self, problem: str, number: int | None) -> None:
        super().__init__(problem)
        self.errno = number


class MessageError(InputError):
    """A message or request cannot be read.

    >>> str(MessageError("messages[2].role", "wizard", "one of system, user"))
    "messages[2].role: got 'wizard', expected one of system, user"
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: got {_short_repr.repr(value)}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class LogError(InputError):
    """A line of a call log is invalid; the message names file, line number and expectation."""

    def __init__(self, file: str, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}")
        self.file = file
        self.line = line
        self.problem = problem


class CodecError(BranchlineError):
    """Messages could not be turned into ids, or ids into messages."""


class TemplateError(CodecError):
    """The chat template rejected a conversation; the message is the template's own."""


SessionErrorKind = Literal[
    "unknown", "closed", "out_of_calls", "out_of_tokens", "forbidden", "no_key", "exists", "conflict", "busy"
]


class SessionError(BranchlineError):
    """A session is unknown, closed, exhausted, or not opened by this key; `kind` says which."""

    def __init__(self, kind: SessionErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TreeError(BranchlineError):
    """A commit does not fit its tree; the tree is unchanged."""


@dataclass(frozen=True)
class UpstreamErrorResponse:
    """The error of an upstream as it sent it, for clients that act on it."""

    status: int
    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that clients read: when to try again, what is left, the upstream's name of the request."""


class EngineError(BranchlineError):
    """An engine failed; the call changed nothing and can be retried."""

    upstream_response: UpstreamErrorResponse | None = None
    """Set for an upstream, whose own error its client gets."""


class EngineBusyError(EngineError):
    """An engine accepts no requests for now; `retry_after` is its Retry-After value, or empty.

    `is_overloaded`: it accepts none from any client (503), not only none from this one (429).
    """

    def __init__(self, message: str, retry_after: str = "", *, is_overloaded: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_overloaded = is_overloaded


class EngineUnavailableError(EngineError):
    """The server of an engine cannot be reached, closed the connection, or sent nothing in time."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class EngineOutputError(EngineError):
    """An engine returned tokens that cannot be right. None of those that were not yielded yet is used."""


class EngineInputError(EngineError):
    """An engine cannot do what was requested; `field` is the field of the request, or empty."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class GatewayError(BranchlineError):
    """A gateway cannot be reached, or a response is not a gateway's; `status` is its HTTP status, or 0.

    What a gateway itself refuses is raised as the error that it had: SessionError, InputError, and so on.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NodeLostError(GatewayError):
    """The gateway of a session is gone for good; the session is run again at another one."""


class ToolError(BranchlineError):
    """A tool cannot be used. Errors inside a tool call are reported to the model instead.

    >>> str(ToolError("search", "create", "no index"))
    "tool 'search': create: no index"
    """

    def __init__(self, tool: str, action: str, problem: str) -> None:
        super().__init__(f"tool {tool!r}: {action}: {problem}")
        self.tool = tool
        self.action = action
        self.problem = problem


class ToolUnavailableError(ToolError):
    """A tool's server is gone, and retrying did not help. It ends the trajectory instead of being shown to
    the model: what the model would answer to a failure of the infrastructure is not training data."""


class InteractionError(BranchlineError):
    """An interaction could not start, respond or score.

    >>> str(InteractionError("user", "respond", "no connection"))
    "interaction 'user': respond: no connection"
    """

    def __init__(self, interaction: str, action: str, problem: str) -> None:
        super().__init__(f"interaction {interaction!r}: {action}: {problem}")
        self.interaction = interaction
        self.action = action
        self.problem = problem


class CompactionError(BranchlineError):
    """A compaction policy raised, or returned what cannot be applied to the conversation.

    >>> str(CompactionError("DropOldest", "positions: got (7,), expected positions of 6 messages"))
    "compaction policy 'DropOldest': positions: got (7,), expected positions of 6 messages"
    """

    def __init__(self, policy: str, problem: str) -> None:
        super().__init__(f"compaction policy {policy!r}: {problem}")
        self.policy = policy
        self.problem = problem


class ContextLengthError(EngineInputError):
    """A prompt exceeds the model's context; agents compact their history when they get this error.

    >>> str(ContextLengthError.for_prompt(17, 10))
    "prompt is too long: 17 tokens > 10 maximum. This model's maximum context length is 10 tokens."
    """

    @classmethod
    def for_prompt(cls, prompt_tokens: int, max_tokens: int) -> ContextLengthError:
        """Uses the sentences that agents search for: Claude Code the first, all others the second."""
        return cls(
            f"prompt is too long: {prompt_tokens} tokens > {max_tokens} maximum. "
            f"This model's maximum context length is {max_tokens} tokens."
        )


class JournalError(BranchlineError):
    """The journal could not be opened, written or read."""


class SinkError(BranchlineError):
    """The results of a rollout could not be written; a resumed rollout writes them again."""


class SessionRefusedError(SinkError):
    """A sink cannot carry a session, and has written none of its samples. Other sessions go on; the figures
    of the rollout count it by `reason`."""

    def __init__(self, session: str, reason: str, problem: str) -> None:
        super().__init__(f"session {session}: {problem}")
        self.session = session
        self.reason = reason


class EpisodesFailedError(BranchlineError):
    """No episode of a training step finished, so there is nothing to train on."""


class MissingExtraError(BranchlineError, ImportError):
    """A package of an optional extra is not installed; `name` is its import name."""


def raise_errors(what_failed: str, errors: Sequence[BaseException]) -> None:
    """Raises what several steps have raised, if anything: the error, or all of them as one group."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(what_failed, errors)


class ExportError(BranchlineError):
    """Samples must not be trained on without an explicit option, or an export option is invalid."""


class MissingLogprobsError(ExportError):
    """Sampled tokens have no logprobs and the policy does not allow that."""
