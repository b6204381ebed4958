"""What a gateway says over HTTP, read: the events of an answer, what it tells of a session, its refusals.

What has another form was said by somebody else, who stands between, and is an EngineError that shows it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from branchline.core.arguments import freeform_arguments
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
    SessionErrorKind,
)
from branchline.core.message import Message, ToolCall
from branchline.core.sample import Sample
from branchline.core.token_arrays import Floats, as_ids
from branchline.export.jsonl import sample_from_json
from branchline.runtime.answer import Answer
from branchline.runtime.call_record import CallResult

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
T = TypeVar("T")


class OpenedJson(Struct):
    """A session that was opened."""

    base_url: str
    api_key: str
    control_key: str


class CountedJson(Struct):
    """A prompt's length."""

    prompt_tokens: int


class SamplesJson(Struct):
    """A session's samples."""

    samples: list[dict[str, Any]]

    def to_samples(self) -> list[Sample]:
        try:
            return [sample_from_json(raw) for raw in self.samples]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"samples: not what a gateway says: {error!r}") from error


class FunctionJson(Struct):
    """A call of a function."""

    name: str
    arguments: str


class CustomJson(Struct):
    """A call of a tool that takes a text."""

    name: str
    input: str


class ToolCallJson(Struct):
    """A tool call; the gateway tells one when it is whole."""

    index: int
    id: str
    function: FunctionJson | None = None
    custom: CustomJson | None = None

    def to_tool_call(self) -> ToolCall:
        if self.custom is not None:
            # As the model put it, and as a session's model in process tells it.
            return ToolCall(self.custom.name, freeform_arguments(self.custom.input), self.id)
        if self.function is None:
            raise EngineError(
                f"tool call {self.id!r}: not what a gateway says: got neither function nor custom"
            )
        return ToolCall(self.function.name, self.function.arguments, self.id)


class DeltaJson(Struct):
    """What an event adds to an answer."""

    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallJson] | None = None


class TokenJson(Struct):
    """A sampled token."""

    logprob: float | None


class LogprobsJson(Struct):
    """Those of an event's tokens."""

    content: list[TokenJson] | None = None


class ChoiceJson(Struct):
    """An event's only choice."""

    delta: DeltaJson
    finish_reason: str | None = None
    token_ids: list[TokenId] = []
    logprobs: LogprobsJson | None = None


class EventJson(Struct):
    """A piece of an answer."""

    id: str
    choices: list[ChoiceJson]
    prompt_token_ids: list[TokenId] | None = None


class FailureJson(Struct):
    """An event that says why there is no more."""

    error: Any = None
    status: Any = None


def decode_json(content: bytes, kind: type[T]) -> T:
    """What a gateway says."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"not what a gateway says: {content[:200]!r}: {error}") from error


class ReplyBuilder:
    """A streamed answer, put together again."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning_content: list[str] = []
        self._refusal: list[str] = []
        self._tool_calls: dict[int, ToolCall] = {}
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._prompt_ids: list[int] = []
        self._call_id = self._finish_reason = ""

    def add_event(self, content: bytes) -> None:
        """An event, as it came."""
        # A text that merely says so costs a second reading and nothing else.
        if b'"error"' in content:
            failure = decode_json(content, FailureJson)
            if failure.error is not None:
                raise error_from_response(failure.status if isinstance(failure.status, int) else 500, content)
        event = decode_json(content, EventJson)
        self._call_id = event.id
        if event.prompt_token_ids is not None:
            self._prompt_ids = event.prompt_token_ids
        for choice in event.choices:
            self._add_delta(choice.delta)
            self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._logprobs += [token.logprob for token in choice.logprobs.content or ()]
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _add_delta(self, delta: DeltaJson) -> None:
        self._content.append(delta.content or "")
        self._reasoning_content.append(delta.reasoning_content or "")
        self._refusal.append(delta.refusal or "")
        for called in delta.tool_calls or ():
            self._tool_calls[called.index] = called.to_tool_call()

    def build(self) -> CallResult:
        if not self._finish_reason:
            raise EngineError("the gateway's stream ended before its answer did")
        message = Message(
            "assistant",
            "".join(self._content),
            reasoning_content="".join(self._reasoning_content),
            tool_calls=tuple(call for _, call in sorted(self._tool_calls.items())),
            refusal="".join(self._refusal),
            id=self._call_id,
        )
        answer = Answer(message, self._finish_reason, as_ids(self._ids), self._logprobs_array())
        return CallResult(self._call_id, as_ids(self._prompt_ids), [answer])

    def _logprobs_array(self) -> Floats | None:
        """None where the engine gave none."""
        if len(self._logprobs) != len(self._ids):
            return None
        return np.array([np.nan if value is None else value for value in self._logprobs], np.float32)


# Where whoever refuses is no gateway, and names no kind.
_KIND_BY_STATUS: dict[int, SessionErrorKind] = {
    401: "no_key",
    403: "forbidden",
    404: "unknown",
    409: "conflict",
}


def error_from_response(status: int, body: bytes, retry_after: str = "") -> BranchlineError:
    """The error that a gateway refused by."""
    code, is_gateways = None, True
    try:
        error = msgspec.json.decode(body)["error"]
        words, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        words, is_gateways = body[:500].decode(errors="replace") or f"status {status}", False
    kind = code if code in get_args(SessionErrorKind) else _KIND_BY_STATUS.get(status)
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
