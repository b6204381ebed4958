"""The answer of an upstream while it arrives: its message, the fields to send back, its logprobs.

What arrives in pieces is joined; nothing of it is left out. An id has the upstream's logprob only if it
stands for the same bytes at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from branchline.chat.base import Codec
from branchline.chat.parsing.base import MessageDelta
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Floats, Ids
from branchline.engines.upstream_events import ChatDelta, TokenUsage, ToolCallDelta
from branchline.runtime.answer import new_tool_call_id

_TRUNCATED = frozenset({"length", "content_filter"})
"""Finish reasons of incomplete answers."""
_FINISH_REASONS = _TRUNCATED | {"tool_calls"}
"""Finish reasons that are kept; any other becomes `stop`."""


@dataclass
class UpstreamAnswer:
    """The answer of an upstream while it arrives."""

    content: list[str] = field(default_factory=list)
    reasoning_content: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    logprob_entries: list[Mapping[str, Any]] = field(default_factory=list)
    upstream_finish_reason: str = "stop"
    usage: TokenUsage | None = None

    def add(self, delta: ChatDelta) -> list[MessageDelta]:
        """Returns the text to yield at once; tool calls and refusals are yielded complete, at the end."""
        self.usage = delta.usage or self.usage
        self.upstream_finish_reason = delta.finish_reason or self.upstream_finish_reason
        self.extra = merge_extra(self.extra, delta.extra)
        self.logprob_entries += delta.logprobs
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for tool in delta.tool_calls:
            known = self.tool_calls.get(tool.index, ToolCallDelta(tool.index))
            self.tool_calls[tool.index] = ToolCallDelta(
                tool.index,
                known.id or tool.id,
                known.name or tool.name,
                known.arguments + tool.arguments,
                merge_extra(known.extra, tool.extra),
            )
        deltas: list[MessageDelta] = []
        if delta.reasoning_content:
            self.reasoning_content.append(delta.reasoning_content)
            deltas.append(MessageDelta(reasoning_content=delta.reasoning_content))
        if delta.content:
            self.content.append(delta.content)
            deltas.append(MessageDelta(content=delta.content))
        return deltas

    @property
    def finish_reason(self) -> str:
        """An answer with tool calls waits for their results, whatever finish reason the upstream sends."""
        if self.tool_calls and self.upstream_finish_reason not in _TRUNCATED:
            return "tool_calls"
        return self.upstream_finish_reason if self.upstream_finish_reason in _FINISH_REASONS else "stop"

    def message(self, call_id: str) -> Message:
        """The complete message. A tool call without an id gets one, because its result must name it."""
        calls = [
            ToolCall(
                tool.name,
                tool.arguments,
                tool.id or new_tool_call_id(),
                extra_fields=_to_json(tool.extra),
            )
            for _, tool in sorted(self.tool_calls.items())
        ]
        return Message(
            "assistant",
            "".join(self.content),
            reasoning_content="".join(self.reasoning_content),
            tool_calls=tuple(calls),
            refusal="".join(self.refusal),
            id=call_id,
            extra_fields=_to_json(self.extra),
        )


# -- parts -------------------------------------------------------------------------------------------

_JOINED_TEXTS = ("text", "summary", "data", "thinking", "content", "arguments")
"""Fields of streamed entries whose pieces are joined; of any other text the last one counts."""


def merge_extra(known: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Joins fields that arrive in pieces: objects by key, lists by the `index` and `type` of their entries.

    >>> merge_extra({"details": [{"index": 0, "text": "a"}]}, {"details": [{"index": 0, "text": "b"}]})
    {'details': [{'index': 0, 'text': 'ab'}]}
    """
    merged = dict(known)
    for name, value in new.items():
        before = merged.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[name] = merge_extra(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            merged[name] = _merge_entries(before, value)
        elif isinstance(before, str) and isinstance(value, str) and name in _JOINED_TEXTS:
            merged[name] = before + value
        elif value is not None or name not in merged:
            merged[name] = value
    return merged


def _merge_entries(known: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    merged = list(known)
    for entry in new:
        last = merged[-1] if merged and isinstance(merged[-1], dict) else {}
        is_indexed = isinstance(entry, dict) and entry.get("index") is not None
        if is_indexed and all(entry.get(name) == last.get(name) for name in ("index", "type")):
            merged[-1] = merge_extra(last, entry)
        else:
            merged.append(entry)
    return merged


def _to_json(fields: Mapping[str, Any]) -> str:
    return msgspec.json.encode(fields).decode() if fields else ""


def align_logprobs(ids: Ids, entries: Sequence[Mapping[str, Any]], codec: Codec) -> Floats | None:
    """The logprob of each id whose bytes are those of one token of the upstream, at the same place.

    All others are NaN: their logprobs are not known. None if the upstream's tokens are not in the answer.
    """
    tokens = [_entry_bytes(entry) for entry in entries]
    pieces = [codec.token_bytes(int(token)) for token in ids]
    start = b"".join(pieces).find(b"".join(tokens))
    if start < 0:
        return None
    spans = pairwise(accumulate([len(data) for data in tokens], initial=start))
    known = {span: entry["logprob"] for span, entry in zip(spans, entries, strict=True)}
    own_spans = pairwise(accumulate([len(data) for data in pieces], initial=0))
    return np.array([known.get(span, np.nan) for span in own_spans], np.float32)


def _entry_bytes(entry: Mapping[str, Any]) -> bytes:
    data = entry.get("bytes")
    is_list = isinstance(data, list) and all(type(byte) is int and 0 <= byte < 256 for byte in data)
    return bytes(data) if is_list else entry["token"].encode()  # type: ignore[arg-type]
