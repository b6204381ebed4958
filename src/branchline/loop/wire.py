"""What a gateway says over HTTP, read: the events of an answer, what it tells of a session, its refusals.

What has another form was said by somebody else, who stands between, and is an EngineError that shows it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
    SessionKind,
)
from branchline.core.message import Message, ToolCall
from branchline.core.runs import Floats, as_ids
from branchline.core.sample import Sample
from branchline.export.jsonl import read_sample
from branchline.gateway.protocols.tools import as_input
from branchline.loop.model import Reply

Id = Annotated[int, Meta(ge=0, lt=2**31)]
T = TypeVar("T")


class Opened(Struct):
    """A session that was opened."""

    base_url: str
    api_key: str
    control_key: str


class Counted(Struct):
    """A prompt's length."""

    prompt_tokens: int


class Samples(Struct):
    """A session's samples."""

    samples: list[dict[str, Any]]

    def read(self) -> list[Sample]:
        try:
            return [read_sample(raw) for raw in self.samples]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"samples: not what a gateway says: {error!r}") from error


class Function(Struct):
    """A call of a function."""

    name: str
    arguments: str


class Custom(Struct):
    """A call of a tool that takes a text."""

    name: str
    input: str


class Called(Struct):
    """A tool call; the gateway tells one when it is whole."""

    index: int
    id: str
    function: Function | None = None
    custom: Custom | None = None

    def read(self) -> ToolCall:
        if self.custom is not None:
            # As the model put it, and as a session's model in process tells it.
            return ToolCall(self.custom.name, as_input(self.custom.input), self.id)
        if self.function is None:
            raise EngineError(
                f"tool call {self.id!r}: not what a gateway says: got neither function nor custom"
            )
        return ToolCall(self.function.name, self.function.arguments, self.id)


class Delta(Struct):
    """What an event adds to an answer."""

    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Called] | None = None


class Token(Struct):
    """A sampled token."""

    logprob: float | None


class Logprobs(Struct):
    """Those of an event's tokens."""

    content: list[Token] | None = None


class Choice(Struct):
    """An event's only choice."""

    delta: Delta
    finish_reason: str | None = None
    token_ids: list[Id] = []
    logprobs: Logprobs | None = None


class Event(Struct):
    """A piece of an answer."""

    id: str
    choices: list[Choice]
    prompt_token_ids: list[Id] | None = None


class Failure(Struct):
    """An event that says why there is no more."""

    error: Any = None
    status: Any = None


def read(content: bytes, kind: type[T]) -> T:
    """What a gateway says."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"not what a gateway says: {content[:200]!r}: {error}") from error


class Answer:
    """A streamed answer, put together again."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._prompt_ids: list[int] = []
        self._call_id = self._finish = ""

    def take(self, content: bytes) -> None:
        """An event, as it came."""
        # A text that merely says so costs a second reading and nothing else.
        if b'"error"' in content:
            failure = read(content, Failure)
            if failure.error is not None:
                raise refusal(failure.status if isinstance(failure.status, int) else 500, content)
        event = read(content, Event)
        self._call_id = event.id
        if event.prompt_token_ids is not None:
            self._prompt_ids = event.prompt_token_ids
        for choice in event.choices:
            self._add(choice.delta)
            self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._logprobs += [token.logprob for token in choice.logprobs.content or ()]
            self._finish = choice.finish_reason or self._finish

    def _add(self, delta: Delta) -> None:
        self._text.append(delta.content or "")
        self._reasoning.append(delta.reasoning_content or "")
        self._refusal.append(delta.refusal or "")
        for called in delta.tool_calls or ():
            self._calls[called.index] = called.read()

    def reply(self) -> Reply:
        if not self._finish:
            raise EngineError("the gateway's stream ended before its answer did")
        message = Message(
            "assistant",
            "".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(call for _, call in sorted(self._calls.items())),
            refusal="".join(self._refusal),
            id=self._call_id,
        )
        return Reply(
            message,
            self._finish,
            self._call_id,
            as_ids(self._prompt_ids),
            as_ids(self._ids),
            self._known_logprobs(),
        )

    def _known_logprobs(self) -> Floats | None:
        """None where the engine gave none."""
        if len(self._logprobs) != len(self._ids):
            return None
        return np.array([np.nan if value is None else value for value in self._logprobs], np.float32)


# Where whoever refuses is no gateway, and names no kind.
_KINDS: dict[int, SessionKind] = {
    401: "no_key",
    403: "forbidden",
    404: "unknown",
    409: "conflict",
}


def refusal(status: int, body: bytes, retry_after: str = "") -> BranchlineError:
    """The error that a gateway refused by."""
    code, is_gateways = None, True
    try:
        error = msgspec.json.decode(body)["error"]
        words, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        words, is_gateways = body[:500].decode(errors="replace") or f"status {status}", False
    kind = code if code in get_args(SessionKind) else _KINDS.get(status)
    if kind is not None:
        return SessionError(kind, words)
    if code == "context_length_exceeded":
        return ContextLengthError(words)
    if status == 429:
        return EngineBusyError(words, retry_after)
    if status < 500:
        return InputError(words)
    # One that stops says when it may be there again, one whose journal is broken cannot know.
    if status == 503 and is_gateways and not retry_after:
        return JournalError(words)
    return EngineError(f"status {status}: {words}")
