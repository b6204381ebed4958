"""Calls to an upstream, which returns text without ids: forwarded, and recorded as inexact.

The tree holds the text encoded with the session's codec. Every such output is marked inexact, so no sample
takes its ids for sampled ones unless the export asks for that. What is not read here passes both ways: fields
of messages that an upstream gave an answer (thought signatures) are recorded, and sent back to it if the
client drops them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from branchline.chat.parsing.base import MessageDelta
from branchline.core.call import Delivery, Generation
from branchline.core.errors import EngineInputError, SessionError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import write_message
from branchline.engines.base import STOP_FIELDS
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.upstream_events import ChatDelta
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_lifecycle import commit_call, prepare_call, record_delivery, record_result
from branchline.runtime.call_record import CallEvent, CallRecord, CallRequest
from branchline.runtime.limits import reserve_tokens
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.not_applied import APPLIED_BY_UPSTREAMS, not_applied_fields
from branchline.runtime.request_fields import HINT_FIELDS, check_recordable
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT, merge_fields
from branchline.runtime.upstream_answer import UpstreamAnswer, align_logprobs

_TOOL_FIELDS = ("tool_choice", "parallel_tool_calls")


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
        partial = UpstreamAnswer()
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
        **{name: value for name, value in call_request.other_fields.items() if name not in HINT_FIELDS},
    }
    if call_request.tool_choice not in (None, "none"):
        requested["tool_choice"] = call_request.tool_choice
    constraints = [name for name in call_request.params.requested_fields if name not in STOP_FIELDS]
    sampling |= {"requested": requested} if requested else {}
    sampling |= {"constraints": constraints} if constraints else {}
    if call_request.overridden_fields:
        sampling["overridden"] = dict(call_request.overridden_fields)
    # An upstream of the same protocol gets the fields as they are.
    not_applied = (
        not_applied_fields(call_request, APPLIED_BY_UPSTREAMS)
        if call_request.upstream_options is None
        else []
    )
    sampling |= {"not_applied": not_applied} if not_applied else {}
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
    constraints = merge_fields(call_request.other_fields, session)
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


def _from_json(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text) if text else {}
