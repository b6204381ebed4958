"""Calls to an upstream, which returns text without ids: forwarded, and recorded as inexact.

The tree holds the text encoded with the session's codec. Every such output is marked inexact, so no sample
takes its ids for sampled ones unless the export asks for that. What is not read here passes both ways: fields
of messages that an upstream gave an answer (thought signatures) are recorded, and sent back to it if the
client drops them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from branchline.chat.base import Codec
from branchline.chat.parsing.base import MessageDelta
from branchline.core.call import Delivery, Generation
from branchline.core.errors import EngineInputError, SessionError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import write_message
from branchline.core.token_arrays import Floats, Ids
from branchline.engines.base import STOP_FIELDS
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.upstream_events import ChatDelta, TokenUsage, ToolCallDelta
from branchline.runtime.answer import Answer, AnswerDelta, new_tool_call_id
from branchline.runtime.call_lifecycle import commit_call, prepare_call, record_delivery, record_result
from branchline.runtime.call_record import CallEvent, CallRecord, CallRequest
from branchline.runtime.limits import reserve_tokens
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.request_fields import IGNORED_FIELDS, check_recordable
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT

_TOOL_FIELDS = ("tool_choice", "parallel_tool_calls")
_TRUNCATED = frozenset({"length", "content_filter"})
"""Finish reasons of incomplete answers."""
_FINISH_REASONS = _TRUNCATED | {"tool_calls"}
"""Finish reasons that are kept; any other becomes `stop`."""


@dataclass
class _UpstreamAnswer:
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


async def run_upstream_call(
    managed: ManagedSession, upstream: UpstreamChat, call_request: CallRequest, record: CallRecord
) -> AsyncGenerator[CallEvent, None]:
    """Forwards one call and yields its deltas, then its result.

    A cancelled call leaves nothing in the tree, because its ids are not known, and cannot be resumed.
    """
    record.engine = upstream.name
    request = call_request.request
    if request.resume_call_id:
        raise SessionError("conflict", f"resume: {upstream.name} returns no ids to resume from")
    if request.is_raw_prompt or call_request.n != 1:
        raise EngineInputError(f"{upstream.name}: an upstream answers one chat completion at a time")
    with managed.count_call(record.call_id):
        recorded = replace(request, sampling=_sampling_record(call_request))
        turn = await prepare_call(managed, replace(call_request, request=recorded))
        record.end_phase("prepare")
        partial = _UpstreamAnswer()
        messages = _messages_for_upstream(managed, call_request)
        with reserve_tokens(managed, call_request, _max_answer_tokens(managed, call_request)) as max_tokens:
            tools, options = _tools_and_options(managed, upstream, call_request, record.model, max_tokens)
            deltas = upstream.chat(messages, tools=tools, options=options)
            try:
                first = await anext(deltas)
            except EngineInputError as error:
                limit_name = _other_limit_name(upstream, call_request, options, error)
                if not limit_name:
                    raise
                options[limit_name] = options.pop("max_tokens")
                deltas = upstream.chat(messages, tools=tools, options=options)
                first = await anext(deltas)
            async with aclosing(_prepend(first, deltas)) as all_deltas:
                async for delta in all_deltas:
                    for name, value in delta.headers.items():
                        record.response_headers.append((name.encode("latin-1"), value.encode("latin-1")))
                    text_deltas = partial.add(delta)
                    if not delta.headers:
                        record.end_phase("queue")
                    if text_deltas or delta.extra or delta.logprobs:
                        yield AnswerDelta(
                            0, text_deltas, extra=delta.extra or None, logprob_entries=delta.logprobs
                        )
            message, finish_reason = partial.message(record.call_id), partial.finish_reason
            if message.tool_calls:
                calls = enumerate(message.tool_calls)
                yield AnswerDelta(0, [MessageDelta(tool_call=call, index=index) for index, call in calls])
    record.end_phase("generate")
    ids = managed.session.codec.encode_reply(message)
    entries = partial.logprob_entries
    logprobs = align_logprobs(ids, entries, managed.session.codec) if entries else None
    generation = Generation(ids, logprobs, 0, finish_reason, message, inexact=True)
    call = await commit_call(managed, turn, [generation], record)
    try:
        answer = Answer(message, finish_reason, ids, logprob_entries=entries)
        yield record_result(record, call, turn, [answer], partial.usage)
    except (GeneratorExit, asyncio.CancelledError):
        record_delivery(managed, call, Delivery.LOST)
        raise
    record_delivery(managed, call, Delivery.DELIVERED)


async def _prepend(
    first: ChatDelta, deltas: AsyncGenerator[ChatDelta, None]
) -> AsyncGenerator[ChatDelta, None]:
    async with aclosing(deltas):
        yield first
        async for delta in deltas:
            yield delta


# -- the request -------------------------------------------------------------------------------------


def _sampling_record(call_request: CallRequest) -> dict[str, Any]:
    """What the upstream was asked for, for the record: its own defaults are not known."""
    sampling = dict(call_request.request.sampling)
    requested = {
        **call_request.requested,
        **{name: value for name, value in call_request.other_fields.items() if name not in IGNORED_FIELDS},
    }
    if call_request.tool_choice not in (None, "none"):
        requested["tool_choice"] = call_request.tool_choice
    constraints = [name for name in call_request.params.requested_fields if name not in STOP_FIELDS]
    sampling |= {"requested": requested} if requested else {}
    sampling |= {"constraints": constraints} if constraints else {}
    sampling |= {"ignored_fields": dict(call_request.ignored_fields)} if call_request.ignored_fields else {}
    check_recordable(sampling)
    return sampling


def _messages_for_upstream(managed: ManagedSession, call_request: CallRequest) -> list[dict[str, Any]]:
    """The messages as the client wrote them, or in Chat Completions form, with what the client dropped."""
    request, written = call_request.request, call_request.upstream_messages
    if written is None:
        written = [_write_message(message) for message in request.messages]
    if not managed.options.restore_reasoning:
        return [dict(raw) for raw in written]
    tree = managed.session.tree
    restored: list[dict[str, Any]] = []
    for raw, message in zip(written, request.messages, strict=True):
        raw = dict(raw)
        if message.role == "assistant":
            nodes = tree.sampled_by_key.get(message.key, [])
            raw = {**_from_json(next((n.message.extra_fields for n in reversed(nodes)), "")), **raw}
        if isinstance(raw.get("tool_calls"), list):
            raw["tool_calls"] = [
                _with_extra_fields(call, tree.find_sampled_tool_call(str(call.get("id"))))
                if isinstance(call, dict)
                else call
                for call in raw["tool_calls"]
            ]
        restored.append(raw)
    return restored


def _with_extra_fields(raw: dict[str, Any], sampled: ToolCall | None) -> dict[str, Any]:
    return raw if sampled is None else {**_from_json(sampled.extra_fields), **raw}


def _write_message(message: Message) -> dict[str, Any]:
    """A message in Chat Completions form; audio has a part of its own there."""
    raw = write_message(message)
    for index, part in enumerate(message.parts):
        if isinstance(part, Media) and part.kind == "audio" and part.payload:
            data = base64.b64encode(part.payload).decode()
            audio = {"data": data, "format": part.mime.partition("/")[2].partition(";")[0] or "wav"}
            raw["content"][index] = {"type": "input_audio", "input_audio": audio}
    return raw


def _other_limit_name(
    upstream: UpstreamChat, call_request: CallRequest, options: Mapping[str, Any], error: EngineInputError
) -> str:
    """The other name of `max_tokens` if the model refuses that one and no client chose it, else ""."""
    if (
        call_request.upstream_options is not None
        or error.field != "max_tokens"
        or "max_tokens" not in options
    ):
        return ""
    upstream.max_tokens_names[options["model"]] = "max_completion_tokens"
    return "max_completion_tokens"


def _max_answer_tokens(managed: ManagedSession, call_request: CallRequest) -> int:
    """The limit of the request. Without one the upstream decides, unless the session's tokens are limited."""
    max_tokens = call_request.params.max_tokens
    if max_tokens == NO_LIMIT and managed.options.limits.tokens is not None:
        return FALLBACK_MAX_TOKENS
    return max_tokens


def _tools_and_options(
    managed: ManagedSession, upstream: UpstreamChat, call_request: CallRequest, model: str, max_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the tools that an upstream is offered and the other fields of its request."""
    if call_request.upstream_options is None:
        options = _options_from_params(managed, call_request)
    else:
        options = dict(call_request.upstream_options)
    options["model"] = model
    if max_tokens != NO_LIMIT:
        # Some upstreams accept only one of the two names.
        is_newer = "max_completion_tokens" in options
        known_name = "max_tokens"
        if call_request.upstream_options is None:
            known_name = upstream.max_tokens_names.get(model, known_name)
            options.pop("max_tokens", None)
        options["max_completion_tokens" if is_newer else known_name] = max_tokens
    if call_request.single_tool_call:
        options["parallel_tool_calls"] = False
    tools = [*map(dict, call_request.request.tools), *options.pop("tools", ())]
    if not tools:
        # Upstreams refuse these fields without tools.
        options = {name: value for name, value in options.items() if name not in _TOOL_FIELDS}
    return tools, options


def _options_from_params(managed: ManagedSession, call_request: CallRequest) -> dict[str, Any]:
    """The fields that a client of another protocol set; all others keep the upstream's defaults."""
    options: dict[str, Any] = {
        name: value for name, value in call_request.request.sampling.items() if value is not None
    }
    session = managed.options
    constraints = {**session.sampling_defaults, **call_request.other_fields, **session.sampling}
    for name in call_request.params.requested_fields:
        if name in constraints:
            options[name] = constraints[name]
    options |= call_request.upstream_fields
    if call_request.stop:
        options["stop"] = list(call_request.stop)
    if call_request.params.grammar is not None:
        options["response_format"] = dict(call_request.params.grammar)
    if call_request.tool_choice is not None:
        options["tool_choice"] = call_request.tool_choice
    return options


# -- the answer --------------------------------------------------------------------------------------

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


def _from_json(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text) if text else {}


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
