"""Answers in the Responses protocol: an answer as items, whole or streamed, and the response around them.

Reasoning is sent as a summary to clients that request one, else as content. Clients that request encrypted
reasoning get it encoded as well, so that they can send it back. In a stream an item is closed before the next
one opens, because clients keep items in the order in which they end. Events are numbered, so every event
that is made must be sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.message import ToolCall, freeform_input
from branchline.gateway.protocols.base import ErrorInfo, ParsedRequest, sse_event
from branchline.gateway.protocols.logprobs import LogprobAligner, LogprobEntry
from branchline.gateway.protocols.openai_tools import ToolAlias
from branchline.gateway.protocols.responses_input import encode_reasoning, item_id
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallResult
from branchline.runtime.sampling import JsonObject

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons that make a response incomplete, and their names in this protocol."""
_CALL_EVENTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The argument events of a call item, and the item's field that they fill; other types have none."""


@dataclass(frozen=True)
class ResponsesRequest(ParsedRequest):
    """A Responses request in canonical form."""

    aliases: Mapping[str, ToolAlias] = field(default_factory=dict)
    reasoning_as_summary: bool = False
    include_encrypted_reasoning: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    echoed_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the response repeats."""

    def logprob_aligner(self, codec: Codec) -> LogprobAligner | None:
        """None if no logprobs were requested."""
        return LogprobAligner(codec, with_top_logprobs=self.top_logprobs) if self.logprobs else None


# -- items -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextItemKind:
    """A kind of text: the names of its part in an item and of its events in a stream."""

    part_events: str
    text_events: str
    index_field: str
    part_type: str
    id_prefix: str
    """The prefix of its items' ids."""
    text_field: str = "text"
    part_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its parts that clients require."""
    has_logprobs: bool = False

    def to_part(self, text: str, logprobs: list[LogprobEntry] | None = None) -> dict[str, Any]:
        part = {"type": self.part_type, self.text_field: text, **self.part_fields}
        return {**part, "logprobs": logprobs or []} if self.has_logprobs else part


OUTPUT_TEXT = TextItemKind(
    "response.content_part",
    "response.output_text",
    "content_index",
    "output_text",
    "msg",
    part_fields={"annotations": []},
    has_logprobs=True,
)
REFUSAL = TextItemKind(
    "response.content_part", "response.refusal", "content_index", "refusal", "msg", text_field="refusal"
)
REASONING_TEXT = TextItemKind(
    "response.content_part", "response.reasoning_text", "content_index", "reasoning_text", "rs"
)
SUMMARY_TEXT = TextItemKind(
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
    "summary_text",
    "rs",
)


def _reasoning_kind(parsed: ResponsesRequest) -> TextItemKind:
    return SUMMARY_TEXT if parsed.reasoning_as_summary else REASONING_TEXT


def _text_item(
    parsed: ResponsesRequest,
    kind: TextItemKind,
    id: str,
    text: str | None,
    status: str,
    logprobs: list[LogprobEntry] | None = None,
) -> dict[str, Any]:
    """A message or reasoning item; `text` is None while the item has no part yet."""
    parts = [] if text is None else [kind.to_part(text, logprobs)]
    if kind.id_prefix == "msg":
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": parts}
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": []}
    item["summary" if parsed.reasoning_as_summary else "content"] = parts
    has_text = text is not None and parsed.include_encrypted_reasoning
    item["encrypted_content"] = encode_reasoning(text or "") if has_text else None
    return item


def _call_item(call: ToolCall, call_id: str, number: int, parsed: ResponsesRequest) -> dict[str, Any]:
    """A tool call as an item of the type that the client's kind of tool has."""
    alias = parsed.aliases.get(call.name, ToolAlias(call.name))
    if alias.vendor is not None:
        tool = alias.vendor
        item = {"id": item_id(tool.id_prefix, call_id, number), "type": tool.item_type, "status": "completed"}
        return {**item, "call_id": call.id, tool.arguments_field: tool.to_item(call.arguments)}
    prefix, kind = ("ctc", "custom_tool_call") if alias.is_freeform else ("fc", "function_call")
    item = {"id": item_id(prefix, call_id, number), "type": kind, "status": "completed"}
    item |= {"call_id": call.id, "name": alias.name}
    if alias.namespace:
        item["namespace"] = alias.namespace
    if alias.is_freeform:
        item["input"] = freeform_input(call.arguments)
    else:
        item["arguments"] = call.arguments
    return item


# -- whole responses ---------------------------------------------------------------------------------


def build_response(parsed: ResponsesRequest, result: CallResult, codec: Codec) -> dict[str, Any]:
    items = list(_output_items(parsed, result.call_id, result.answers[0], codec))
    return _finish_response(_response_fields(parsed, result.call_id), items, result, codec)


def _output_items(
    parsed: ResponsesRequest, call_id: str, answer: Answer, codec: Codec
) -> Iterator[dict[str, Any]]:
    message, aligner = answer.message, parsed.logprob_aligner(codec)
    if aligner is not None:
        aligner.add_tokens(answer.ids, answer.logprobs, answer.logprob_entries)
        aligner.entries_for_text(message.reasoning_content)
    if message.reasoning_content:
        kind, id = _reasoning_kind(parsed), item_id("rs", call_id, 0)
        yield _text_item(parsed, kind, id, message.reasoning_content, "completed")
    status = "completed" if message.tool_calls else _response_status(answer)
    # An empty answer is an item too, because clients that keep items must have one to send back.
    has_text = bool(message.content) or not (message.tool_calls or message.refusal)
    if has_text:
        logprobs = aligner.entries_for_text(message.content) if aligner is not None else None
        yield _text_item(parsed, OUTPUT_TEXT, item_id("msg", call_id, 0), message.content, status, logprobs)
    if message.refusal:
        yield _text_item(parsed, REFUSAL, item_id("msg", call_id, int(has_text)), message.refusal, status)
    for number, call in enumerate(message.tool_calls):
        yield _call_item(call, call_id, number, parsed)


def _response_status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason in _INCOMPLETE_REASONS else "completed"


def _response_fields(parsed: ResponsesRequest, call_id: str) -> dict[str, Any]:
    """A response in progress."""
    return {
        "id": call_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": parsed.model,
        "output": [],
        "usage": None,
        "temperature": parsed.call_request.params.temperature,
        "top_p": parsed.call_request.params.top_p,
        **parsed.echoed_fields,
    }


def _finish_response(
    fields: JsonObject, items: list[dict[str, Any]], result: CallResult, codec: Codec
) -> dict[str, Any]:
    """The finished response, from the fields of the one in progress."""
    answer = result.answers[0]
    reason = _INCOMPLETE_REASONS.get(answer.finish_reason)
    return {
        **fields,
        "status": _response_status(answer),
        "completed_at": int(time.time()) if reason is None else None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": items,
        "usage": _usage(result, codec),
    }


def _usage(result: CallResult, codec: Codec) -> dict[str, Any]:
    prompt, sampled = result.prompt_tokens, result.sampled_tokens
    reasoning = result.answers[0].message.reasoning_content
    reasoning_tokens = min(sampled, len(codec.encode(reasoning))) if reasoning else 0
    cached_tokens = result.reused_tokens
    if (counted := result.upstream_usage) is not None:
        cached_tokens = counted.cached_tokens or 0
        reasoning_tokens = reasoning_tokens if counted.reasoning_tokens is None else counted.reasoning_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + sampled,
    }


# -- streamed responses ------------------------------------------------------------------------------


@dataclass
class _OpenItem:
    """The text item that is being streamed."""

    kind: TextItemKind
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)


@dataclass
class ResponsesStream:
    """The events of a streamed response."""

    parsed: ResponsesRequest
    call_id: str
    codec: Codec
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open_item: _OpenItem | None = None
    response: dict[str, Any] | None = field(default=None, init=False)
    """The complete response, when it was sent."""
    _response_fields: dict[str, Any] = field(init=False)
    _logprob_aligner: LogprobAligner | None = field(init=False)

    def __post_init__(self) -> None:
        self._response_fields = _response_fields(self.parsed, self.call_id)
        self._logprob_aligner = self.parsed.logprob_aligner(self.codec)

    def encode_delta(self, delta: AnswerDelta) -> bytes:
        return b"".join([*self._start_response(), *self._delta_events(delta)])

    def encode_end(self, result: CallResult) -> bytes:
        """Closes the open item, then sends the complete response."""
        return b"".join([*self._start_response(), *self._end_events(result)])

    def encode_ping(self) -> bytes:
        started = list(self._start_response())
        return b"".join(started or [self._event("response.in_progress", response=self._response_fields)])

    def encode_error(self, info: ErrorInfo) -> bytes:
        default_code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(info.status, "server_error")
        error = {"code": info.code or default_code, "message": info.message, "param": info.param}
        response = {**self._response_fields, "status": "failed", "output": self._items, "error": error}
        return b"".join([*self._start_response(), self._event("response.failed", response=response)])

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse_event(event, kind)

    def _start_response(self) -> Iterator[bytes]:
        if not self._sequence:
            yield self._event("response.created", response=self._response_fields)
            yield self._event("response.in_progress", response=self._response_fields)

    def _delta_events(self, delta: AnswerDelta) -> Iterator[bytes]:
        if self._logprob_aligner is not None:
            self._logprob_aligner.add_tokens(delta.ids, delta.logprobs, delta.logprob_entries)
        for part in delta.deltas:
            if part.tool_call is not None:
                yield from self._close_item("completed")
                yield from self._tool_call_events(part.tool_call)
            elif part.reasoning_content:
                yield from self._text_events(_reasoning_kind(self.parsed), part.reasoning_content)
            elif part.content:
                yield from self._text_events(OUTPUT_TEXT, part.content)

    def _end_events(self, result: CallResult) -> Iterator[bytes]:
        status, message = _response_status(result.answers[0]), result.answers[0].message
        if message.refusal:
            yield from self._text_events(REFUSAL, message.refusal)
        is_message = self._open_item is not None and self._open_item.kind.id_prefix == "msg"
        if not is_message and not message.tool_calls:
            yield from self._text_events(OUTPUT_TEXT, "")
        yield from self._close_item(status)
        self.response = _finish_response(self._response_fields, self._items, result, self.codec)
        yield self._event(f"response.{status}", response=self.response)

    def _text_events(self, kind: TextItemKind, text: str) -> Iterator[bytes]:
        if self._open_item is None or self._open_item.kind is not kind:
            yield from self._close_item("completed")
            number = sum(item["id"].startswith(kind.id_prefix) for item in self._items)
            self._open_item = _OpenItem(kind, item_id(kind.id_prefix, self.call_id, number))
            item = _text_item(self.parsed, kind, self._open_item.id, None, "in_progress")
            yield self._event("response.output_item.added", output_index=len(self._items), item=item)
            position = self._event_position(self._open_item)
            yield self._event(f"{kind.part_events}.added", **position, part=kind.to_part(""))
        if text:
            logprobs = [] if self._logprob_aligner is None else self._logprob_aligner.entries_for_text(text)
            extra = {"logprobs": logprobs} if kind.has_logprobs else {}
            self._open_item.texts.append(text)
            self._open_item.logprobs += logprobs
            position = self._event_position(self._open_item)
            yield self._event(f"{kind.text_events}.delta", **position, delta=text, **extra)

    def _close_item(self, status: str) -> Iterator[bytes]:
        if self._open_item is None:
            return
        open_item, self._open_item = self._open_item, None
        kind, text, position = open_item.kind, "".join(open_item.texts), self._event_position(open_item)
        extra = {"logprobs": open_item.logprobs} if kind.has_logprobs else {}
        part = kind.to_part(text, open_item.logprobs)
        yield self._event(f"{kind.text_events}.done", **position, **{kind.text_field: text}, **extra)
        yield self._event(f"{kind.part_events}.done", **position, part=part)
        yield self._item_done(_text_item(self.parsed, kind, open_item.id, text, status, open_item.logprobs))

    def _tool_call_events(self, call: ToolCall) -> Iterator[bytes]:
        number = sum("call_id" in item for item in self._items)
        item = _call_item(call, self.call_id, number, self.parsed)
        events, name = _CALL_EVENTS.get(item["type"], ("", ""))
        started = {**item, "status": "in_progress"} | ({name: ""} if name else {})
        position = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._event("response.output_item.added", output_index=len(self._items), item=started)
        if name:
            yield self._event(f"response.{events}.delta", **position, delta=item[name])
            yield self._event(f"response.{events}.done", **position, **{name: item[name]})
        yield self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event_position(self, open_item: _OpenItem) -> dict[str, Any]:
        return {"item_id": open_item.id, "output_index": len(self._items), open_item.kind.index_field: 0}
