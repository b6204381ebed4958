"""Answers in the Responses protocol: an answer as items, whole or as events while it is said.

Reasoning is told as a summary to those who ask for one, else as content; who asks for it encrypted gets it
sealed as well, so that it comes back from clients that keep nothing else. An item is closed before the next
one opens: clients keep items in the order in which they end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.message import ToolCall
from branchline.gateway.answers import Answer, Said
from branchline.gateway.calls import Done
from branchline.gateway.protocols.base import Ask, Fields, sse
from branchline.gateway.protocols.responses_items import item_id, seal
from branchline.gateway.protocols.responses_tools import Alias, free_text

_STATUS = {"length": "incomplete"}
"""The one finish reason that is no completion."""


@dataclass(frozen=True)
class ResponsesAsk(Ask):
    """A request, read."""

    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Tools that the client calls otherwise than the model does."""
    is_summary: bool = False
    """Reasoning is told as its summary."""
    is_sealed: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What the response repeats."""


# -- items of an answer ------------------------------------------------------------------------------


def _message_item(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_OUTPUT_TEXT.part(text)]
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def _reasoning_item(id: str, text: str | None, status: str, ask: ResponsesAsk) -> dict[str, Any]:
    flow = _flow_of_reasoning(ask)
    parts = [] if text is None else [flow.part(text)]
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": []}
    item["summary" if ask.is_summary else "content"] = parts
    item["encrypted_content"] = seal(text) if text is not None and ask.is_sealed else None
    return item


def _call_item(call: ToolCall, call_id: str, number: int, ask: ResponsesAsk) -> dict[str, Any]:
    alias = ask.aliases.get(call.name, Alias(call.name))
    prefix, kind = ("ctc", "custom_tool_call") if alias.is_freeform else ("fc", "function_call")
    item: dict[str, Any] = {"id": item_id(prefix, call_id, number), "type": kind, "status": "completed"}
    item |= {"call_id": call.id, "name": alias.name}
    if alias.namespace:
        item["namespace"] = alias.namespace
    if alias.is_freeform:
        item["input"] = free_text(call.arguments)
    else:
        item["arguments"] = call.arguments
    return item


def _items(ask: ResponsesAsk, call_id: str, answer: Answer) -> Iterator[dict[str, Any]]:
    said = answer.message
    if said.reasoning:
        yield _reasoning_item(item_id("rs", call_id, 0), said.reasoning, "completed", ask)
    if said.text or not said.calls:
        # An answer of nothing is an item too: who keeps items must have something to send back.
        status = "completed" if said.calls else _status(answer)
        yield _message_item(item_id("msg", call_id, 0), said.text, status)
    for number, call in enumerate(said.calls):
        yield _call_item(call, call_id, number, ask)


def _status(answer: Answer) -> str:
    return _STATUS.get(answer.finish, "completed")


# -- responses ---------------------------------------------------------------------------------------


def whole(ask: ResponsesAsk, done: Done, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    items = list(_items(ask, done.call.id, done.answers[0]))
    return _finished(_frame(ask, done.call.id, int(time.time())), items, done, codec)


def _frame(ask: ResponsesAsk, call_id: str, created: int) -> dict[str, Any]:
    """A response of which nothing is known yet."""
    return {
        "id": call_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "usage": None,
        "temperature": ask.asked.params.temperature,
        "top_p": ask.asked.params.top_p,
        **ask.shown,
    }


def _finished(frame: Fields, items: list[dict[str, Any]], done: Done, codec: Codec) -> dict[str, Any]:
    status = _status(done.answers[0])
    return {
        **frame,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
        "output": items,
        "usage": _usage(done, codec),
    }


def _usage(done: Done, codec: Codec) -> dict[str, Any]:
    prompt, sampled = done.prompt_tokens, done.sampled_tokens
    reasoning = done.answers[0].message.reasoning
    thought = min(sampled, len(codec.encode(reasoning))) if reasoning else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": done.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + sampled,
    }


# -- streams -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flow:
    """How a text that arrives bit by bit is told."""

    part_events: str
    text_events: str
    index: str
    type: str
    event_fields: Mapping[str, Any] = field(default_factory=dict)
    """What clients look for in its events though there is nothing to say."""
    part_fields: Mapping[str, Any] = field(default_factory=dict)
    """The same in its parts."""

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.type, "text": text, **self.part_fields}


_OUTPUT_TEXT = _Flow(
    "response.content_part",
    "response.output_text",
    "content_index",
    "output_text",
    {"logprobs": []},
    {"annotations": [], "logprobs": []},
)
_REASONING_TEXT = _Flow("response.content_part", "response.reasoning_text", "content_index", "reasoning_text")
_SUMMARY_TEXT = _Flow(
    "response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index", "summary_text"
)


def _flow_of_reasoning(ask: ResponsesAsk) -> _Flow:
    return _SUMMARY_TEXT if ask.is_summary else _REASONING_TEXT


@dataclass
class _Open:
    """The item that is being said."""

    flow: _Flow
    id: str
    texts: list[str] = field(default_factory=list)


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

    def __post_init__(self) -> None:
        self._frame = _frame(self.ask, self.call_id, int(time.time()))

    def said(self, said: Said) -> bytes:
        """What one bit of an answer becomes."""
        return b"".join([*self._begin(), *self._said(said)])

    def end(self, done: Done) -> bytes:
        """What is open is closed, then the whole response."""
        return b"".join([*self._begin(), *self._end(done)])

    def failed(self, status: int, message: str, field_name: str | None) -> bytes:
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        problem = {"code": code, "message": message, "param": field_name}
        response = {**self._frame, "status": "failed", "output": self._items, "error": problem}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(event, kind)

    def _begin(self) -> Iterator[bytes]:
        if not self._sequence:
            yield self._event("response.created", response=self._frame)
            yield self._event("response.in_progress", response=self._frame)

    def _said(self, said: Said) -> Iterator[bytes]:
        for delta in said.deltas:
            if delta.call is not None:
                yield from self._close("completed")
                yield from self._call(delta.call)
            elif delta.reasoning:
                yield from self._text(_flow_of_reasoning(self.ask), delta.reasoning)
            elif delta.text:
                yield from self._text(_OUTPUT_TEXT, delta.text)

    def _end(self, done: Done) -> Iterator[bytes]:
        status = _status(done.answers[0])
        is_message = self._open is not None and self._open.flow is _OUTPUT_TEXT
        if not is_message and not done.answers[0].message.calls:
            yield from self._text(_OUTPUT_TEXT, "")
        yield from self._close(status)
        response = _finished(self._frame, self._items, done, self.codec)
        yield self._event(f"response.{status}", response=response)

    def _text(self, flow: _Flow, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.flow is not flow:
            yield from self._close("completed")
            prefix = "msg" if flow is _OUTPUT_TEXT else "rs"
            number = sum(item["id"].startswith(prefix) for item in self._items)
            self._open = _Open(flow, item_id(prefix, self.call_id, number))
            yield self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item=self._item(self._open, None, "in_progress"),
            )
            yield self._event(f"{flow.part_events}.added", **self._place(self._open), part=flow.part(""))
        if text:
            self._open.texts.append(text)
            place = self._place(self._open)
            yield self._event(f"{flow.text_events}.delta", **place, delta=text, **flow.event_fields)

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the item that is being said."""
        if self._open is None:
            return
        current, self._open = self._open, None
        flow, text, place = current.flow, "".join(current.texts), self._place(current)
        yield self._event(f"{flow.text_events}.done", **place, text=text, **flow.event_fields)
        yield self._event(f"{flow.part_events}.done", **place, part=flow.part(text))
        yield self._finish(self._item(current, text, status))

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        number = sum("call_id" in item for item in self._items)
        item = _call_item(call, self.call_id, number, self.ask)
        name = "input" if item["type"] == "custom_tool_call" else "arguments"
        events = "custom_tool_call_input" if name == "input" else "function_call_arguments"
        begun = {**item, "status": "in_progress", name: ""}
        place = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._event(f"response.{events}.delta", **place, delta=item[name])
        yield self._event(f"response.{events}.done", **place, **{name: item[name]})
        yield self._finish(item)

    def _finish(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item(self, current: _Open, text: str | None, status: str) -> dict[str, Any]:
        if current.flow is _OUTPUT_TEXT:
            return _message_item(current.id, text, status)
        return _reasoning_item(current.id, text, status, self.ask)

    def _place(self, current: _Open) -> dict[str, Any]:
        return {"item_id": current.id, "output_index": len(self._items), current.flow.index: 0}
