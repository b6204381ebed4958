"""A call to an upstream that gives text and no ids: passed on as it is, recorded as inexact.

The tree holds what was said, encoded with the session's codec. Every such output is marked, so that no
sample takes its ids for the sampled ones unless that is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from branchline.chat.parsing.base import MessageDelta
from branchline.core.call import Generation
from branchline.core.errors import EngineInputError, MessageError
from branchline.core.json_fields import decode_json
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.engines.upstream_chat import ChatDelta, TokenUsage, ToolCallDelta, UpstreamChat
from branchline.gateway.protocols.openai_tools import is_client_tool, translate_tool_choice
from branchline.runtime.answer import Answer, AnswerDelta, new_tool_call_id
from branchline.runtime.call_lifecycle import (
    CallEvent,
    CallRequest,
    CallResult,
    commit_call,
    prepare_call,
    record_delivery,
)
from branchline.runtime.call_record import CallRecord
from branchline.runtime.limits import count_call, reserve_tokens
from branchline.runtime.managed_session import ManagedSession, SessionOptions
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT

_OVERRIDDEN_FIELDS = frozenset(
    {
        "model",
        "messages",
        "functions",
        "stream",
        "stream_options",
        "return_token_ids",
    }
)
"""Fields that are ours to say to an upstream."""
_TOOL_FIELDS = ("tool_choice", "parallel_tool_calls")
_TRUNCATED = frozenset({"length", "content_filter"})
"""Ends before an answer was whole."""
_FINISH_REASONS = _TRUNCATED | {"tool_calls"}
"""Ends that mean the same here; all others are a stop."""


@dataclass
class _UpstreamAnswer:
    """An upstream's answer while it arrives."""

    content: list[str] = field(default_factory=list)
    reasoning_content: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    upstream_finish_reason: str = "stop"
    """In the upstream's own word."""
    usage: TokenUsage | None = None

    def add_delta(self, delta: ChatDelta) -> list[MessageDelta]:
        """What can be said at once; tool calls and refusals are said when they are whole, at the end."""
        self.usage = delta.usage or self.usage
        self.upstream_finish_reason = delta.finish_reason or self.upstream_finish_reason
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for tool in delta.tool_calls:
            known = self.tool_calls.get(tool.index, ToolCallDelta(tool.index))
            self.tool_calls[tool.index] = ToolCallDelta(
                tool.index, known.id or tool.id, known.name or tool.name, known.arguments + tool.arguments
            )
        said: list[MessageDelta] = []
        if delta.reasoning_content:
            self.reasoning_content.append(delta.reasoning_content)
            said.append(MessageDelta(reasoning_content=delta.reasoning_content))
        if delta.content:
            self.content.append(delta.content)
            said.append(MessageDelta(content=delta.content))
        return said

    @property
    def finish_reason(self) -> str:
        """In ours. An answer that calls tools waits for their results, whatever the upstream calls that."""
        if self.tool_calls and self.upstream_finish_reason not in _TRUNCATED:
            return "tool_calls"
        return self.upstream_finish_reason if self.upstream_finish_reason in _FINISH_REASONS else "stop"

    def build_message(self, call_id: str) -> Message:
        """All that was said. A call that came without an id gets one, for its result must name it."""
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
    live: ManagedSession, upstream: UpstreamChat, asked: CallRequest, record: CallRecord, body: bytes = b""
) -> AsyncGenerator[CallEvent, None]:
    """Passes one call on, with every field of its `body` where that is a chat completion request too.

    One that is broken off leaves nothing: what was sampled is not known.
    """
    if asked.request.is_raw_prompt or asked.n != 1:
        raise EngineInputError(f"{upstream.name}: an upstream is asked for one chat completion at a time")
    with count_call(live, asked, record):
        turn = await prepare_call(live, asked, record, None)
        reply = _UpstreamAnswer()
        messages = [write_message(message) for message in asked.request.messages]
        with reserve_tokens(live, asked, _max_answer_tokens(live, asked)) as allowed:
            tools, options = _tools_and_options(live, asked, record.model, body, allowed)
            async with aclosing(upstream.chat(messages, tools=tools, options=options)) as deltas:
                async for delta in deltas:
                    said = reply.add_delta(delta)
                    record.end_phase("queue")
                    if said:
                        yield AnswerDelta(0, said)
            message, finish, usage = reply.build_message(record.call_id), reply.finish_reason, reply.usage
            if message.tool_calls:
                yield AnswerDelta(
                    0,
                    [
                        MessageDelta(tool_call=call, index=index)
                        for index, call in enumerate(message.tool_calls)
                    ],
                )
    record.end_phase("generate")
    ids = live.session.codec.encode_reply(message)
    call = await commit_call(live, turn, [Generation(ids, None, 0, finish, message, inexact=True)], record)
    record.result = CallResult(
        call,
        [Answer(message, finish, ids, None)],
        # Both counts are the upstream's, or both ours.
        len(turn.prompt_ids) if usage is None else usage.prompt_tokens,
        turn.prompt_ids,
        None if usage is None else usage.completion_tokens,
    )
    with record_delivery(live, call):
        yield record.result


def _max_answer_tokens(live: ManagedSession, asked: CallRequest) -> int:
    """How many tokens the answer may have; the upstream knows best, unless others must be left some."""
    is_open = asked.params.max_tokens == NO_LIMIT and live.options.limits.tokens is not None
    return FALLBACK_MAX_TOKENS if is_open else asked.params.max_tokens


def _tools_and_options(
    live: ManagedSession, asked: CallRequest, model: str, body: bytes, allowed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools that an upstream is offered, and the other fields of what it is asked."""
    options = _forwarded_options(body, live.options) if body else _options_from_params(asked)
    options["model"] = model
    if allowed != NO_LIMIT:
        # Under the name that is in use: some upstreams know only one.
        named = "max_completion_tokens" if "max_completion_tokens" in options else "max_tokens"
        options[named] = allowed
    if asked.single_tool_call:
        options["parallel_tool_calls"] = False
    # What nobody here can run, the upstream may.
    hosted = [tool for tool in options.pop("tools", ()) if not is_client_tool(tool)]
    tools = [*asked.request.tools, *hosted]
    if not tools:
        # Without tools there is nothing to choose, and upstreams refuse to be told about it.
        options = {name: value for name, value in options.items() if name not in _TOOL_FIELDS}
    elif "tool_choice" in options:
        options["tool_choice"] = translate_tool_choice(options["tool_choice"], asked.request.tools)
    return tools, options


def _forwarded_options(body: bytes, session: SessionOptions) -> dict[str, Any]:
    """The client's fields as it wrote them, whether anybody here knows them or not."""
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # In a field that nobody has looked at before.
        raise MessageError("body", body[:60], f"JSON ({error})") from error
    given = {
        name: value for name, value in fields.items() if value is not None and name not in _OVERRIDDEN_FIELDS
    }
    options = {**session.sampling_defaults, **given, **session.sampling}
    if "max_completion_tokens" in options:
        # The same limit under two names: the session's own goes first, then the newer one.
        options.pop("max_completion_tokens" if "max_tokens" in session.sampling else "max_tokens", None)
    options.pop("n", None)
    wanted = options.pop("function_call", None)
    if isinstance(wanted, dict):
        options["tool_choice"] = {"type": "function", "function": wanted}
    return options


def _options_from_params(asked: CallRequest) -> dict[str, Any]:
    """The wishes of a client that speaks another protocol; what was left open stays open."""
    params, given = asked.params, asked.request.sampling
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if asked.stop:
        options["stop"] = list(asked.stop)
    if params.grammar is not None:
        options["response_format"] = dict(params.grammar)
    if asked.tool_choice is not None:
        options["tool_choice"] = asked.tool_choice
    return options
