"""Answers in the Responses protocol: an answer as items, and the response that holds them.

Reasoning is told as a summary to those who ask for one, else as content; who asks for it encrypted gets it
sealed as well, so that it comes back from clients that keep nothing else. How it is told while it is said is
in `responses_stream`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.message import ToolCall
from branchline.gateway.answers import Answer
from branchline.gateway.calls import Done
from branchline.gateway.protocols.base import Ask, Fields
from branchline.gateway.protocols.logprobs import Entry, Trail
from branchline.gateway.protocols.responses_items import seal
from branchline.gateway.protocols.responses_past import item_id
from branchline.gateway.protocols.tools import Alias, free_text

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The finish reasons that are no completion, by the names they have here."""


@dataclass(frozen=True)
class ResponsesAsk(Ask):
    """A request, read."""

    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Tools that the client calls otherwise than the model does."""
    is_summary: bool = False
    """Reasoning is told as its summary."""
    is_sealed: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What the response repeats."""

    def trail(self, codec: Codec) -> Trail | None:
        """What hands out the tokens of texts, if they were asked for."""
        return Trail(codec, tops=self.top_logprobs) if self.logprobs else None


# -- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """A kind of text: what its part of an item is called, and its events while it arrives."""

    part_events: str
    text_events: str
    index: str
    type: str
    prefix: str
    """Of the ids of its items."""
    name: str = "text"
    """The field it stands in."""
    part_fields: Mapping[str, Any] = field(default_factory=dict)
    """What clients look for in its parts though there is nothing to say."""
    has_logprobs: bool = False

    def part(self, text: str, logprobs: list[Entry] | None = None) -> dict[str, Any]:
        part = {"type": self.type, self.name: text, **self.part_fields}
        return {**part, "logprobs": logprobs or []} if self.has_logprobs else part


OUTPUT_TEXT = Flow(
    "response.content_part",
    "response.output_text",
    "content_index",
    "output_text",
    "msg",
    part_fields={"annotations": []},
    has_logprobs=True,
)
REFUSAL = Flow("response.content_part", "response.refusal", "content_index", "refusal", "msg", name="refusal")
REASONING_TEXT = Flow(
    "response.content_part", "response.reasoning_text", "content_index", "reasoning_text", "rs"
)
SUMMARY_TEXT = Flow(
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
    "summary_text",
    "rs",
)


def flow_of_reasoning(ask: ResponsesAsk) -> Flow:
    return SUMMARY_TEXT if ask.is_summary else REASONING_TEXT


# -- items -------------------------------------------------------------------------------------------


def text_item(
    ask: ResponsesAsk, flow: Flow, id: str, text: str | None, status: str, logprobs: list[Entry] | None = None
) -> dict[str, Any]:
    """A message or reasoning; None: nothing of it was said yet."""
    parts = [] if text is None else [flow.part(text, logprobs)]
    if flow.prefix == "msg":
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": parts}
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": []}
    item["summary" if ask.is_summary else "content"] = parts
    item["encrypted_content"] = seal(text) if text is not None and ask.is_sealed else None
    return item


def call_item(call: ToolCall, call_id: str, number: int, ask: ResponsesAsk) -> dict[str, Any]:
    """A call of a tool, as the client's kind of tool is called."""
    alias = ask.aliases.get(call.name, Alias(call.name))
    if alias.vendor is not None:
        tool = alias.vendor
        own = {"id": item_id(tool.prefix, call_id, number), "type": tool.item, "status": "completed"}
        return {**own, "call_id": call.id, tool.place: tool.write(call.arguments)}
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


def _items(ask: ResponsesAsk, call_id: str, answer: Answer, codec: Codec) -> Iterator[dict[str, Any]]:
    said, trail = answer.message, ask.trail(codec)
    if trail is not None:
        trail.take(answer.ids, answer.logprobs)
        trail.said(said.reasoning)
    if said.reasoning:
        flow = flow_of_reasoning(ask)
        yield text_item(ask, flow, item_id("rs", call_id, 0), said.reasoning, "completed")
    status = "completed" if said.calls else status_of(answer)
    # An answer of nothing is an item too: who keeps items must have something to send back.
    is_text = bool(said.text) or not (said.calls or said.refusal)
    if is_text:
        logprobs = trail.said(said.text) if trail is not None else None
        yield text_item(ask, OUTPUT_TEXT, item_id("msg", call_id, 0), said.text, status, logprobs)
    if said.refusal:
        yield text_item(ask, REFUSAL, item_id("msg", call_id, int(is_text)), said.refusal, status)
    for number, call in enumerate(said.calls):
        yield call_item(call, call_id, number, ask)


def status_of(answer: Answer) -> str:
    return "incomplete" if answer.finish in _INCOMPLETE else "completed"


# -- responses ---------------------------------------------------------------------------------------


def whole(ask: ResponsesAsk, done: Done, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    items = list(_items(ask, done.call.id, done.answers[0], codec))
    return finished(frame(ask, done.call.id, int(time.time())), items, done, codec)


def frame(ask: ResponsesAsk, call_id: str, created: int) -> dict[str, Any]:
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


def finished(begun: Fields, items: list[dict[str, Any]], done: Done, codec: Codec) -> dict[str, Any]:
    """A response of which all is known."""
    status, reason = status_of(done.answers[0]), _INCOMPLETE.get(done.answers[0].finish)
    return {
        **begun,
        "status": status,
        "completed_at": int(time.time()) if reason is None else None,
        "incomplete_details": None if reason is None else {"reason": reason},
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
