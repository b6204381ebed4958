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
from branchline.gateway.answers import Said
from branchline.gateway.calls import Done
from branchline.gateway.protocols.base import sse
from branchline.gateway.protocols.logprobs import Entry, Trail
from branchline.gateway.protocols.responses_answers import (
    OUTPUT_TEXT,
    REFUSAL,
    Flow,
    ResponsesAsk,
    call_item,
    finished,
    flow_of_reasoning,
    frame,
    status_of,
    text_item,
)
from branchline.gateway.protocols.responses_past import item_id

_CALL_EVENTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The events of what a tool is called with, and the field of its item that they fill; others have none."""


@dataclass
class _Open:
    """The item that is being said."""

    flow: Flow
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)


@dataclass
class Stream:
    """The events of a streamed response; its last one leaves with `end`."""

    ask: ResponsesAsk
    call_id: str
    codec: Codec
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open: _Open | None = None
    _frame: dict[str, Any] = field(init=False)
    _trail: Trail | None = field(init=False)

    def __post_init__(self) -> None:
        self._frame = frame(self.ask, self.call_id, int(time.time()))
        self._trail = self.ask.trail(self.codec)

    def said(self, said: Said) -> bytes:
        """What one bit of an answer becomes."""
        return b"".join([*self._begin(), *self._said(said)])

    def end(self, done: Done) -> bytes:
        """What is open is closed, then the whole response."""
        return b"".join([*self._begin(), *self._end(done)])

    def beat(self) -> bytes:
        """Once more that it is in progress."""
        begun = list(self._begin())
        return b"".join(begun or [self._event("response.in_progress", response=self._frame)])

    def failed(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        plain = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        problem = {"code": code or plain, "message": message, "param": field_name}
        response = {**self._frame, "status": "failed", "output": self._items, "error": problem}
        return b"".join([*self._begin(), self._event("response.failed", response=response)])

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(event, kind)

    def _begin(self) -> Iterator[bytes]:
        if not self._sequence:
            yield self._event("response.created", response=self._frame)
            yield self._event("response.in_progress", response=self._frame)

    def _said(self, said: Said) -> Iterator[bytes]:
        if self._trail is not None:
            self._trail.take(said.ids, said.logprobs)
        for delta in said.deltas:
            if delta.call is not None:
                yield from self._close("completed")
                yield from self._call(delta.call)
            elif delta.reasoning:
                yield from self._text(flow_of_reasoning(self.ask), delta.reasoning)
            elif delta.text:
                yield from self._text(OUTPUT_TEXT, delta.text)

    def _end(self, done: Done) -> Iterator[bytes]:
        status, said = status_of(done.answers[0]), done.answers[0].message
        if said.refusal:
            yield from self._text(REFUSAL, said.refusal)
        is_message = self._open is not None and self._open.flow.prefix == "msg"
        if not is_message and not said.calls:
            yield from self._text(OUTPUT_TEXT, "")
        yield from self._close(status)
        response = finished(self._frame, self._items, done, self.codec)
        yield self._event(f"response.{status}", response=response)

    def _text(self, flow: Flow, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.flow is not flow:
            yield from self._close("completed")
            number = sum(item["id"].startswith(flow.prefix) for item in self._items)
            self._open = _Open(flow, item_id(flow.prefix, self.call_id, number))
            yield self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item=text_item(self.ask, flow, self._open.id, None, "in_progress"),
            )
            yield self._event(f"{flow.part_events}.added", **self._place(self._open), part=flow.part(""))
        if text:
            logprobs = [] if self._trail is None else self._trail.said(text)
            told = {"logprobs": logprobs} if flow.has_logprobs else {}
            self._open.texts.append(text)
            self._open.logprobs += logprobs
            yield self._event(f"{flow.text_events}.delta", **self._place(self._open), delta=text, **told)

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the item that is being said."""
        if self._open is None:
            return
        current, self._open = self._open, None
        flow, text, place = current.flow, "".join(current.texts), self._place(current)
        told = {"logprobs": current.logprobs} if flow.has_logprobs else {}
        yield self._event(f"{flow.text_events}.done", **place, **{flow.name: text}, **told)
        yield self._event(f"{flow.part_events}.done", **place, part=flow.part(text, current.logprobs))
        yield self._finish(text_item(self.ask, flow, current.id, text, status, current.logprobs))

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        number = sum("call_id" in item for item in self._items)
        item = call_item(call, self.call_id, number, self.ask)
        events, name = _CALL_EVENTS.get(item["type"], ("", ""))
        begun = {**item, "status": "in_progress"} | ({name: ""} if name else {})
        place = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        if name:
            yield self._event(f"response.{events}.delta", **place, delta=item[name])
            yield self._event(f"response.{events}.done", **place, **{name: item[name]})
        yield self._finish(item)

    def _finish(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, current: _Open) -> dict[str, Any]:
        return {"item_id": current.id, "output_index": len(self._items), current.flow.index: 0}
