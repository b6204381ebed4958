"""Calls to an upstream, which returns text without ids: forwarded, and recorded as inexact.

The tree holds the text encoded with the session's codec. Every such output is marked inexact, so no sample
takes its ids for sampled ones unless the export asks for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.parsing.base import MessageDelta
from branchline.core.call import Delivery, Generation
from branchline.core.errors import EngineInputError, SessionError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.engines.upstream_chat import ChatDelta, TokenUsage, ToolCallDelta, UpstreamChat
from branchline.runtime.answer import Answer, AnswerDelta, new_tool_call_id
from branchline.runtime.call_lifecycle import commit_call, prepare_call, record_delivery, record_result
from branchline.runtime.call_record import CallEvent, CallRecord, CallRequest
from branchline.runtime.limits import reserve_tokens
from branchline.runtime.managed_session import ManagedSession
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
    upstream_finish_reason: str = "stop"
    usage: TokenUsage | None = None

    def add(self, delta: ChatDelta) -> list[MessageDelta]:
        """Returns the text to yield at once; tool calls and refusals are yielded complete, at the end."""
        self.usage = delta.usage or self.usage
        self.upstream_finish_reason = delta.finish_reason or self.upstream_finish_reason
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for tool in delta.tool_calls:
            known = self.tool_calls.get(tool.index, ToolCallDelta(tool.index))
            self.tool_calls[tool.index] = ToolCallDelta(
                tool.index, known.id or tool.id, known.name or tool.name, known.arguments + tool.arguments
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
            ToolCall(tool.name, tool.arguments, tool.id or new_tool_call_id())
            for _, tool in sorted(self.tool_calls.items())
        ]
        return Message(
            "assistant",
            "".join(self.content),
            reasoning_content="".join(self.reasoning_content),
            tool_calls=tuple(calls),
            refusal="".join(self.refusal),
            id=call_id,
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
        turn = await prepare_call(managed, call_request)
        record.end_phase("prepare")
        partial = _UpstreamAnswer()
        messages = [write_message(message) for message in request.messages]
        with reserve_tokens(managed, call_request, _max_answer_tokens(managed, call_request)) as max_tokens:
            tools, options = _tools_and_options(call_request, record.model, max_tokens)
            async with aclosing(upstream.chat(messages, tools=tools, options=options)) as deltas:
                async for delta in deltas:
                    text_deltas = partial.add(delta)
                    record.end_phase("queue")
                    if text_deltas:
                        yield AnswerDelta(0, text_deltas)
            message, finish_reason = partial.message(record.call_id), partial.finish_reason
            if message.tool_calls:
                calls = enumerate(message.tool_calls)
                yield AnswerDelta(0, [MessageDelta(tool_call=call, index=index) for index, call in calls])
    record.end_phase("generate")
    ids = managed.session.codec.encode_reply(message)
    generation = Generation(ids, None, 0, finish_reason, message, inexact=True)
    call = await commit_call(managed, turn, [generation], record)
    try:
        yield record_result(record, call, turn, [Answer(message, finish_reason, ids)], partial.usage)
    except (GeneratorExit, asyncio.CancelledError):
        record_delivery(managed, call, Delivery.LOST)
        raise
    record_delivery(managed, call, Delivery.DELIVERED)


def _max_answer_tokens(managed: ManagedSession, call_request: CallRequest) -> int:
    """The limit of the request. Without one the upstream decides, unless the session's tokens are limited."""
    max_tokens = call_request.params.max_tokens
    if max_tokens == NO_LIMIT and managed.options.limits.tokens is not None:
        return FALLBACK_MAX_TOKENS
    return max_tokens


def _tools_and_options(
    call_request: CallRequest, model: str, max_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the tools that an upstream is offered and the other fields of its request."""
    if call_request.upstream_options is None:
        options = _options_from_params(call_request)
    else:
        options = dict(call_request.upstream_options)
    options["model"] = model
    if max_tokens != NO_LIMIT:
        # Some upstreams accept only one of the two names.
        name = "max_completion_tokens" if "max_completion_tokens" in options else "max_tokens"
        options[name] = max_tokens
    if call_request.single_tool_call:
        options["parallel_tool_calls"] = False
    tools = [*map(dict, call_request.request.tools), *options.pop("tools", ())]
    if not tools:
        # Upstreams refuse these fields without tools.
        options = {name: value for name, value in options.items() if name not in _TOOL_FIELDS}
    return tools, options


def _options_from_params(call_request: CallRequest) -> dict[str, Any]:
    """The fields that a client of another protocol set; all others keep the upstream's defaults."""
    options: dict[str, Any] = {
        name: value for name, value in call_request.request.sampling.items() if value is not None
    }
    if call_request.stop:
        options["stop"] = list(call_request.stop)
    if call_request.params.grammar is not None:
        options["response_format"] = dict(call_request.params.grammar)
    if call_request.tool_choice is not None:
        options["tool_choice"] = call_request.tool_choice
    return options
