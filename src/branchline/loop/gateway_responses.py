"""Decodes a gateway's HTTP responses: stream events, session data and errors.

A body of another form was not written by a gateway, for example by a proxy; it becomes an EngineError that
quotes it.
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
    SessionErrorKind,
)
from branchline.core.message import Message, ToolCall, freeform_arguments
from branchline.core.token_arrays import Floats, as_ids
from branchline.export.jsonl import report_from_json, sample_from_json
from branchline.export.samples import Export
from branchline.runtime.answer import Answer
from branchline.runtime.call_record import CallResult

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
T = TypeVar("T")

_KIND_BY_STATUS: dict[int, SessionErrorKind] = {
    401: "no_key",
    403: "forbidden",
    404: "unknown",
    409: "conflict",
}
"""For responses without a gateway's error code."""


class SessionJson(Struct):
    """The response of `POST /sessions`."""

    base_url: str
    api_key: str
    control_key: str


class SessionInfoJson(Struct):
    """The response of `GET /v1/session`."""

    id: str
    created: float
    calls: list[str]


class SessionStateJson(Struct):
    """The response to a reward or to the end of a session."""

    id: str
    state: str


class TokenCountJson(Struct):
    """The response of `count_tokens`."""

    prompt_tokens: int


class SamplesJson(Struct):
    """The response of `GET /samples`."""

    samples: list[dict[str, Any]]
    report: dict[str, Any]

    def to_export(self) -> Export:
        payloads: dict[str, bytes] = {}
        try:
            samples = [sample_from_json(raw, payloads) for raw in self.samples]
            return Export(samples, report_from_json(self.report))
        except (InputError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"samples: not a gateway's response: {error!r}") from error


class FunctionJson(Struct):
    """The function of a tool call."""

    name: str
    arguments: str


class CustomJson(Struct):
    """The call of a custom tool, whose input is a text."""

    name: str
    input: str


class ToolCallJson(Struct):
    """A tool call; a gateway sends each as a whole."""

    index: int
    id: str
    function: FunctionJson | None = None
    custom: CustomJson | None = None

    def to_tool_call(self) -> ToolCall:
        if self.custom is not None:
            # The form that SessionModel returns for a custom tool.
            return ToolCall(self.custom.name, freeform_arguments(self.custom.input), self.id)
        if self.function is None:
            raise EngineError(
                f"tool call {self.id!r}: not a gateway's response: got neither function nor custom"
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
    """The log-probabilities of an event's tokens."""

    content: list[TokenJson] | None = None


class ChoiceJson(Struct):
    """The only choice of an event."""

    delta: DeltaJson
    finish_reason: str | None = None
    token_ids: list[TokenId] = []
    logprobs: LogprobsJson | None = None
    num_preempted: int = 0


class EventJson(Struct):
    """One event of a stream: part of an answer, or the error that ended it."""

    id: str = ""
    choices: list[ChoiceJson] = []
    prompt_token_ids: list[TokenId] | None = None
    error: Any = None
    status: Any = None


def decode_response(content: bytes, kind: type[T]) -> T:
    """The decoded body. Raises EngineError if it has another form."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"not a gateway's response: {content[:200]!r}: {error}") from error


class ResultBuilder:
    """Builds the result of a call from the events of its stream."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning_content: list[str] = []
        self._refusal: list[str] = []
        self._tool_calls: dict[int, ToolCall] = {}
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._prompt_ids: list[int] = []
        self._call_id = self._finish_reason = ""
        self._num_preempted = 0

    def add_event(self, content: bytes) -> None:
        """Adds an event. Raises the error that an error event carries."""
        event = decode_response(content, EventJson)
        if event.error is not None:
            raise error_from_response(event.status if isinstance(event.status, int) else 500, content)
        if not event.id:
            raise EngineError(f"not a gateway's response: {content[:200]!r}: got no `id`")
        self._call_id = event.id
        if event.prompt_token_ids is not None:
            self._prompt_ids = event.prompt_token_ids
        for choice in event.choices:
            self._add_delta(choice.delta)
            self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._logprobs += [token.logprob for token in choice.logprobs.content or ()]
            self._finish_reason = choice.finish_reason or self._finish_reason
            self._num_preempted = max(self._num_preempted, choice.num_preempted)

    def _add_delta(self, delta: DeltaJson) -> None:
        self._content.append(delta.content or "")
        self._reasoning_content.append(delta.reasoning_content or "")
        self._refusal.append(delta.refusal or "")
        for call in delta.tool_calls or ():
            self._tool_calls[call.index] = call.to_tool_call()

    def build(self) -> CallResult:
        """The result. Raises EngineError if the stream ended without a finish reason."""
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
        ids, logprobs = as_ids(self._ids), self._logprobs_array()
        answer = Answer(message, self._finish_reason, ids, logprobs, num_preempted=self._num_preempted)
        return CallResult(
            self._call_id, as_ids(self._prompt_ids), [answer], len(self._prompt_ids), len(answer.ids)
        )

    def _logprobs_array(self) -> Floats | None:
        """None if the engine returned none."""
        if len(self._logprobs) != len(self._ids):
            return None
        return np.array([np.nan if value is None else value for value in self._logprobs], np.float32)


def error_from_response(
    status: int, body: bytes, retry_after: str = "", request: str = ""
) -> BranchlineError:
    """The error that a gateway raised before it sent this response. `request` begins its message."""
    code, is_gateway = None, True
    try:
        error = msgspec.json.decode(body)["error"]
        text, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        text, is_gateway = body[:500].decode(errors="replace") or f"status {status}", False
    if request:
        text = f"{request}: status {status}{f' ({code})' if code else ''}: {text}"
    kind = code if code in get_args(SessionErrorKind) else _KIND_BY_STATUS.get(status)
    if kind is not None:
        return SessionError(kind, text)
    if code == "context_length_exceeded":
        return ContextLengthError(text)
    if status == 429:
        return EngineBusyError(text, retry_after)
    if status < 500:
        return InputError(text)
    # A stopping gateway sends Retry-After with its 503, one with a broken journal does not.
    if status == 503 and is_gateway and not retry_after:
        return JournalError(text)
    return EngineError(f"status {status}: {text}")
