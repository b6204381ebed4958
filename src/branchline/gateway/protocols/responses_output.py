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
from branchline.core.message import ToolCall, freeform_input
from branchline.gateway.protocols.base import ParsedRequest
from branchline.gateway.protocols.logprobs import LogprobAligner, LogprobEntry
from branchline.gateway.protocols.openai_tools import ToolAlias
from branchline.gateway.protocols.responses_history import item_id
from branchline.gateway.protocols.responses_items import encode_reasoning
from branchline.runtime.answer import Answer
from branchline.runtime.call_record import CallResult
from branchline.runtime.sampling import JsonObject

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The finish reasons that are no completion, by the names they have here."""


@dataclass(frozen=True)
class ResponsesRequest(ParsedRequest):
    """A request, read."""

    aliases: Mapping[str, ToolAlias] = field(default_factory=dict)
    """Tools that the client calls otherwise than the model does."""
    reasoning_as_summary: bool = False
    """Reasoning is told as its summary."""
    include_encrypted_reasoning: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    echoed_fields: Mapping[str, Any] = field(default_factory=dict)
    """What the response repeats."""

    def logprob_aligner(self, codec: Codec) -> LogprobAligner | None:
        """What hands out the tokens of texts, if they were asked for."""
        return LogprobAligner(codec, with_top_logprobs=self.top_logprobs) if self.logprobs else None


# -- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextItemKind:
    """A kind of text: what its part of an item is called, and its events while it arrives."""

    part_events: str
    text_events: str
    index_field: str
    part_type: str
    id_prefix: str
    """Of the ids of its items."""
    text_field: str = "text"
    """The field it stands in."""
    part_fields: Mapping[str, Any] = field(default_factory=dict)
    """What clients look for in its parts though there is nothing to say."""
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


def reasoning_item_kind(ask: ResponsesRequest) -> TextItemKind:
    return SUMMARY_TEXT if ask.reasoning_as_summary else REASONING_TEXT


# -- items -------------------------------------------------------------------------------------------


def text_item(
    ask: ResponsesRequest,
    flow: TextItemKind,
    id: str,
    text: str | None,
    status: str,
    logprobs: list[LogprobEntry] | None = None,
) -> dict[str, Any]:
    """A message or reasoning; None: nothing of it was said yet."""
    parts = [] if text is None else [flow.to_part(text, logprobs)]
    if flow.id_prefix == "msg":
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": parts}
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": []}
    item["summary" if ask.reasoning_as_summary else "content"] = parts
    item["encrypted_content"] = (
        encode_reasoning(text) if text is not None and ask.include_encrypted_reasoning else None
    )
    return item


def call_item(call: ToolCall, call_id: str, number: int, ask: ResponsesRequest) -> dict[str, Any]:
    """A call of a tool, as the client's kind of tool is called."""
    alias = ask.aliases.get(call.name, ToolAlias(call.name))
    if alias.vendor is not None:
        tool = alias.vendor
        own = {"id": item_id(tool.id_prefix, call_id, number), "type": tool.item_type, "status": "completed"}
        return {**own, "call_id": call.id, tool.arguments_field: tool.to_item(call.arguments)}
    prefix, kind = ("ctc", "custom_tool_call") if alias.is_freeform else ("fc", "function_call")
    item: dict[str, Any] = {"id": item_id(prefix, call_id, number), "type": kind, "status": "completed"}
    item |= {"call_id": call.id, "name": alias.name}
    if alias.namespace:
        item["namespace"] = alias.namespace
    if alias.is_freeform:
        item["input"] = freeform_input(call.arguments)
    else:
        item["arguments"] = call.arguments
    return item


def _output_items(
    ask: ResponsesRequest, call_id: str, answer: Answer, codec: Codec
) -> Iterator[dict[str, Any]]:
    said, trail = answer.message, ask.logprob_aligner(codec)
    if trail is not None:
        trail.add_tokens(answer.ids, answer.logprobs)
        trail.entries_for_text(said.reasoning_content)
    if said.reasoning_content:
        flow = reasoning_item_kind(ask)
        yield text_item(ask, flow, item_id("rs", call_id, 0), said.reasoning_content, "completed")
    status = "completed" if said.tool_calls else response_status(answer)
    # An answer of nothing is an item too: who keeps items must have something to send back.
    is_text = bool(said.content) or not (said.tool_calls or said.refusal)
    if is_text:
        logprobs = trail.entries_for_text(said.content) if trail is not None else None
        yield text_item(ask, OUTPUT_TEXT, item_id("msg", call_id, 0), said.content, status, logprobs)
    if said.refusal:
        yield text_item(ask, REFUSAL, item_id("msg", call_id, int(is_text)), said.refusal, status)
    for number, call in enumerate(said.tool_calls):
        yield call_item(call, call_id, number, ask)


def response_status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason in _INCOMPLETE_REASONS else "completed"


# -- responses ---------------------------------------------------------------------------------------


def build_response(ask: ResponsesRequest, done: CallResult, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    items = list(_output_items(ask, done.call_id, done.answers[0], codec))
    return finish_response(response_fields(ask, done.call_id, int(time.time())), items, done, codec)


def response_fields(ask: ResponsesRequest, call_id: str, created: int) -> dict[str, Any]:
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
        "temperature": ask.call_request.params.temperature,
        "top_p": ask.call_request.params.top_p,
        **ask.echoed_fields,
    }


def finish_response(
    begun: JsonObject, items: list[dict[str, Any]], done: CallResult, codec: Codec
) -> dict[str, Any]:
    """A response of which all is known."""
    status, reason = response_status(done.answers[0]), _INCOMPLETE_REASONS.get(done.answers[0].finish_reason)
    return {
        **begun,
        "status": status,
        "completed_at": int(time.time()) if reason is None else None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": items,
        "usage": _usage(done, codec),
    }


def _usage(done: CallResult, codec: Codec) -> dict[str, Any]:
    prompt, sampled = done.prompt_tokens, done.sampled_tokens
    reasoning = done.answers[0].message.reasoning_content
    thought = min(sampled, len(codec.encode(reasoning))) if reasoning else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": done.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + sampled,
    }
