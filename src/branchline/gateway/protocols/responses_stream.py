"""A response while it is said: items open, grow and close, and the last event holds all of them.

An item is closed before the next one opens: clients keep items in the order in which they end. Events are
numbered, so every one that is made must leave.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.message import ToolCall
from branchline.gateway.protocols.base import sse_event
from branchline.gateway.protocols.logprobs import LogprobAligner, LogprobEntry
from branchline.gateway.protocols.responses_history import item_id
from branchline.gateway.protocols.responses_output import (
    OUTPUT_TEXT,
    REFUSAL,
    ResponsesRequest,
    TextItemKind,
    call_item,
    finish_response,
    reasoning_item_kind,
    response_fields,
    response_status,
    text_item,
)
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_record import CallResult

_CALL_EVENTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The events of what a tool is called with, and the field of its item that they fill; others have none."""


@dataclass
class _OpenItem:
    """The item that is being said."""

    kind: TextItemKind
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)


@dataclass
class ResponsesStream:
    """The events of a streamed response; its last one leaves with `end`."""

    request: ResponsesRequest
    call_id: str
    codec: Codec
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open_item: _OpenItem | None = None
    _response_fields: dict[str, Any] = field(init=False)
    _logprob_aligner: LogprobAligner | None = field(init=False)

    def __post_init__(self) -> None:
        self._response_fields = response_fields(self.request, self.call_id, int(time.time()))
        self._logprob_aligner = self.request.logprob_aligner(self.codec)

    def encode_delta(self, said: AnswerDelta) -> bytes:
        """What one bit of an answer becomes."""
        return b"".join([*self._start_response(), *self._delta_events(said)])

    def encode_end(self, done: CallResult) -> bytes:
        """What is open is closed, then the whole response."""
        return b"".join([*self._start_response(), *self._end_events(done)])

    def encode_ping(self) -> bytes:
        """Once more that it is in progress."""
        begun = list(self._start_response())
        return b"".join(begun or [self._event("response.in_progress", response=self._response_fields)])

    def encode_error(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        plain = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        problem = {"code": code or plain, "message": message, "param": field_name}
        response = {**self._response_fields, "status": "failed", "output": self._items, "error": problem}
        return b"".join([*self._start_response(), self._event("response.failed", response=response)])

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse_event(event, kind)

    def _start_response(self) -> Iterator[bytes]:
        if not self._sequence:
            yield self._event("response.created", response=self._response_fields)
            yield self._event("response.in_progress", response=self._response_fields)

    def _delta_events(self, said: AnswerDelta) -> Iterator[bytes]:
        if self._logprob_aligner is not None:
            self._logprob_aligner.add_tokens(said.ids, said.logprobs)
        for delta in said.deltas:
            if delta.tool_call is not None:
                yield from self._close_item("completed")
                yield from self._tool_call_events(delta.tool_call)
            elif delta.reasoning_content:
                yield from self._text_events(reasoning_item_kind(self.request), delta.reasoning_content)
            elif delta.content:
                yield from self._text_events(OUTPUT_TEXT, delta.content)

    def _end_events(self, done: CallResult) -> Iterator[bytes]:
        status, said = response_status(done.answers[0]), done.answers[0].message
        if said.refusal:
            yield from self._text_events(REFUSAL, said.refusal)
        is_message = self._open_item is not None and self._open_item.kind.id_prefix == "msg"
        if not is_message and not said.tool_calls:
            yield from self._text_events(OUTPUT_TEXT, "")
        yield from self._close_item(status)
        response = finish_response(self._response_fields, self._items, done, self.codec)
        yield self._event(f"response.{status}", response=response)

    def _text_events(self, flow: TextItemKind, text: str) -> Iterator[bytes]:
        if self._open_item is None or self._open_item.kind is not flow:
            yield from self._close_item("completed")
            number = sum(item["id"].startswith(flow.id_prefix) for item in self._items)
            self._open_item = _OpenItem(flow, item_id(flow.id_prefix, self.call_id, number))
            yield self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item=text_item(self.request, flow, self._open_item.id, None, "in_progress"),
            )
            yield self._event(
                f"{flow.part_events}.added", **self._event_position(self._open_item), part=flow.to_part("")
            )
        if text:
            logprobs = [] if self._logprob_aligner is None else self._logprob_aligner.entries_for_text(text)
            told = {"logprobs": logprobs} if flow.has_logprobs else {}
            self._open_item.texts.append(text)
            self._open_item.logprobs += logprobs
            yield self._event(
                f"{flow.text_events}.delta", **self._event_position(self._open_item), delta=text, **told
            )

    def _close_item(self, status: str) -> Iterator[bytes]:
        """Ends the item that is being said."""
        if self._open_item is None:
            return
        current, self._open_item = self._open_item, None
        flow, text, place = current.kind, "".join(current.texts), self._event_position(current)
        told = {"logprobs": current.logprobs} if flow.has_logprobs else {}
        yield self._event(f"{flow.text_events}.done", **place, **{flow.text_field: text}, **told)
        yield self._event(f"{flow.part_events}.done", **place, part=flow.to_part(text, current.logprobs))
        yield self._item_done(text_item(self.request, flow, current.id, text, status, current.logprobs))

    def _tool_call_events(self, call: ToolCall) -> Iterator[bytes]:
        number = sum("call_id" in item for item in self._items)
        item = call_item(call, self.call_id, number, self.request)
        events, name = _CALL_EVENTS.get(item["type"], ("", ""))
        begun = {**item, "status": "in_progress"} | ({name: ""} if name else {})
        place = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        if name:
            yield self._event(f"response.{events}.delta", **place, delta=item[name])
            yield self._event(f"response.{events}.done", **place, **{name: item[name]})
        yield self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event_position(self, current: _OpenItem) -> dict[str, Any]:
        return {"item_id": current.id, "output_index": len(self._items), current.kind.index_field: 0}
