"""Reads the events of an upstream's stream, and its errors, into deltas of an answer.

Whatever an upstream leaves out, adds or writes differently is read or passed on; an event is refused only if
it has no answer in it. An event that carries an error is an error, also if it has choices.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from branchline.core.errors import EngineError, EngineInputError, UpstreamErrorResponse
from branchline.core.reader import replace_surrogates, replace_surrogates_deep
from branchline.engines.error_responses import error_from_response

_RELAYED_HEADERS = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
_RELAYED_PREFIXES = ("x-ratelimit-", "ratelimit-", "anthropic-ratelimit-")
_REQUEST_ID_HEADERS = ("x-request-id", "request-id")
_READ_FIELDS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call"}
)
_READ_TOOL_CALL_FIELDS = frozenset({"index", "id", "type", "function"})
_TEXT_PARTS = ("text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")


@dataclass(frozen=True)
class ToolCallDelta:
    """The next part of the tool call with this index; only the first part has a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the call that are not read here."""


@dataclass(frozen=True)
class TokenUsage:
    """How many tokens an upstream counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The usage as the upstream wrote it."""


@dataclass(frozen=True)
class ChatDelta:
    """The next part of an answer."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    refusal: str = ""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, `content_filter` or another value of the upstream."""
    usage: TokenUsage | None = None
    """At most once, after the finish reason."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message that are not read here."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    """The logprobs of the content's tokens, as the upstream wrote them."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the response for the client; only in the first delta."""


# -- events ------------------------------------------------------------------------------------------


class _SurrogateJoiner:
    """Joins texts whose pieces may end in the middle of a surrogate pair."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> str:
        """Returns the text that is complete."""
        if text.isascii() and not self._pending:
            return text
        text = self._pending + text
        is_split = "\ud800" <= text[-1:] <= "\udbff"
        self._pending = text[-1:] if is_split else ""
        return replace_surrogates(text[:-1] if is_split else text)

    def flush(self) -> str:
        """Returns the replacement of what was never completed."""
        pending, self._pending = self._pending, ""
        return replace_surrogates(pending)


class EventReader:
    """Reads the events of one answer, whatever their upstream leaves out or adds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tool_calls = _ToolCallTracker()
        self._joiners: defaultdict[object, _SurrogateJoiner] = defaultdict(_SurrogateJoiner)
        """One for each text of the answer."""

    def read(self, data: bytes) -> ChatDelta:
        """Returns what an event adds. Raises EngineError for an error event and for what is no event."""
        try:
            event = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Half a surrogate pair, or bytes that are not UTF-8.
            event = self._decode_leniently(data)
        match event:
            case {"error": error} if error:
                raise _event_error(self._name, error)
            case {"choices": [{"error": error}, *_]} if error:
                raise _event_error(self._name, error)
            case {"choices": [{"finish_reason": "error"}, *_]}:
                raise _event_error(self._name, event.get("message") or "the answer ended with an error")
            case {"choices": [dict(choice), *_]}:
                return self._read_choice(choice, _read_usage(event.get("usage")))
            case {"choices": []} | {"choices": None, "usage": dict()}:
                return ChatDelta(usage=_read_usage(event.get("usage")))
            case {"message": str(message)} | {"detail": str(message)}:
                raise _event_error(self._name, {**event, "message": message})
        raise EngineError(f"{self._name}: got {data[:200]!r}, expected an event with choices")

    def flush(self) -> ChatDelta:
        """Returns the rest of texts that ended in the middle of a character."""
        content, reasoning = self._joiners["content"].flush(), self._joiners["reasoning"].flush()
        return ChatDelta(content, reasoning, refusal=self._joiners["refusal"].flush())

    def _decode_leniently(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self._name}: {error} in {data[:200]!r}") from error

    def _read_choice(self, choice: Mapping[str, Any], usage: TokenUsage | None) -> ChatDelta:
        delta = choice.get("delta") or choice.get("message") or {}
        if not isinstance(delta, dict):
            raise EngineError(f"{self._name}: delta: got {delta!r:.200}, expected an object")
        content, part_reasoning, other_parts = _read_content(delta.get("content"))
        reasoning = _as_text(delta.get("reasoning_content")) or _as_text(delta.get("reasoning"))
        calls = delta.get("tool_calls")
        if isinstance(function := delta.get("function_call"), dict):
            calls = [{"index": 0, "function": function}]
        extra = {
            name: value for name, value in delta.items() if name not in _READ_FIELDS and value is not None
        }
        if other_parts:
            extra["content_parts"] = other_parts
        finish = choice.get("finish_reason")
        join = self._joiners
        return ChatDelta(
            join["content"].feed(content),
            join["reasoning"].feed(reasoning + part_reasoning),
            tuple([self._read_tool_call(i, part) for i, part in enumerate(calls)])
            if isinstance(calls, list)
            else (),
            join["refusal"].feed(_as_text(delta.get("refusal"))),
            None if finish is None else str(finish),
            usage,
            replace_surrogates_deep(extra) if extra else {},
            _read_logprobs(choice.get("logprobs")),
        )

    def _read_tool_call(self, position: int, part: object) -> ToolCallDelta:
        function = part.get("function") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(function, dict | None):
            raise EngineError(f"{self._name}: tool_calls: got {part!r:.200}, expected an object")
        function = function or {}
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        extra = {name: value for name, value in part.items() if name not in _READ_TOOL_CALL_FIELDS}
        index = part.get("index")
        delta = self._tool_calls.assign_index(
            position,
            index if isinstance(index, int) else None,
            _as_text(part.get("id")),
            replace_surrogates(_as_text(function.get("name"))),
            arguments or "",
        )
        return replace(
            delta,
            arguments=self._joiners[delta.index].feed(delta.arguments),
            extra=replace_surrogates_deep(
                {name: value for name, value in extra.items() if value is not None}
            ),
        )


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _read_content(content: object) -> tuple[str, str, list[Any]]:
    """The text, the reasoning and the other parts of a content, which may be a list of parts."""
    if not isinstance(content, list):
        return _as_text(content), "", []
    text = reasoning = ""
    others: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            text += part
        elif kind in _TEXT_PARTS:
            text += _as_text(part.get("text"))
        elif kind in _REASONING_PARTS:
            inner = part.get("thinking") or part.get("reasoning") or part.get("text")
            reasoning += inner if isinstance(inner, str) else _read_content(inner)[0]
        else:
            others.append(part)
    return text, reasoning, others


def _read_usage(usage: object) -> TokenUsage | None:
    """The counts of an upstream; None unless it has both."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = _as_count(usage.get("prompt_tokens")), _as_count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    inner = [usage.get(f"{name}_tokens_details") for name in ("prompt", "completion")]
    prompt_details, completion_details = [value if isinstance(value, dict) else {} for value in inner]
    cached = _as_count(prompt_details.get("cached_tokens"))
    reasoning = _as_count(completion_details.get("reasoning_tokens"))
    return TokenUsage(prompt, completion, cached, reasoning, replace_surrogates_deep(usage))


def _as_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)


def _read_logprobs(logprobs: object) -> tuple[Mapping[str, Any], ...]:
    """The entries of a choice's logprobs; those without a token and a number are left out."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return tuple(
        [
            replace_surrogates_deep(entry)
            for entry in (content if isinstance(content, list) else ())
            if isinstance(entry, dict)
            and isinstance(entry.get("token"), str)
            and isinstance(entry.get("logprob"), int | float)
        ]
    )


# -- indexes of tool calls ---------------------------------------------------------------------------


@dataclass
class _OpenToolCall:
    """A tool call that may receive further parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def is_continued_by(self, part: ToolCallDelta) -> bool:
        """Whether a part belongs to this call. Only a part with a name can begin another call."""
        if not (part.name and self.name):
            return True
        if part.id and self.id:
            return part.id == self.id
        return part.name == self.name and not _is_json(self.arguments)


class _ToolCallTracker:
    """Gives each tool call its own index: some upstreams send the same index for all calls, or none."""

    def __init__(self) -> None:
        self._open_calls: dict[int, _OpenToolCall] = {}
        """By the upstream's index, or by the position in its event if there is none."""
        self._used_indexes: set[int] = set()

    def assign_index(
        self, position: int, index: int | None, id: str, name: str, arguments: str
    ) -> ToolCallDelta:
        key = position if index is None else index
        delta = ToolCallDelta(key, id, name, arguments)
        call = self._open_calls.get(key)
        if call is None or not call.is_continued_by(delta):
            new_index = key if key not in self._used_indexes else max(self._used_indexes) + 1
            self._used_indexes.add(new_index)
            call = self._open_calls[key] = _OpenToolCall(new_index)
        call.id, call.name = call.id or delta.id, call.name or delta.name
        call.arguments += delta.arguments
        return replace(delta, index=call.index)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


# -- errors and headers ------------------------------------------------------------------------------


def relayed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that clients read. The id of the request gets a name of its own: a call here has an id."""
    relayed = {
        name: value
        for name, value in headers.items()
        if name in _RELAYED_HEADERS or name.startswith(_RELAYED_PREFIXES)
    }
    request_id = next((headers[name] for name in _REQUEST_ID_HEADERS if headers.get(name)), "")
    return {**relayed, "x-upstream-request-id": request_id} if request_id else relayed


def upstream_error(name: str, status: int, body: bytes, headers: Mapping[str, str]) -> EngineError:
    """The error for a response without success, with the upstream's own error for its client."""
    error = error_from_response(name, status, body, headers.get("retry-after", ""))
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    fields = content.get("error", content) if isinstance(content, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    message = str(error).removeprefix(f"{name}: status {status}: ")
    error.upstream_response = UpstreamErrorResponse(
        status,
        replace_surrogates(_as_text(fields.get("message")) or message),
        _error_field(fields, "type"),
        _error_field(fields, "code"),
        _error_field(fields, "param"),
        relayed_headers(headers),
    )
    if isinstance(error, EngineInputError):
        error.field = error.upstream_response.param or ""
    return error


def _error_field(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return None if value is None else replace_surrogates(str(value))


def _event_error(name: str, error: object) -> EngineError:
    """The error of an event. Its code is a status in some upstreams and a name in others."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    code = fields.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return upstream_error(name, status, json.dumps({"error": fields}).encode(), {})
