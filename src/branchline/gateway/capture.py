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

from branchline.chat.parsing.base import Delta
from branchline.core.call import Generation
from branchline.core.errors import EngineInputError, MessageError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.engines.openai import ChatDelta, ToolDelta, UpstreamChat, Usage
from branchline.gateway.answers import Answer, Said, new_call_id
from branchline.gateway.bodies import decode_json
from branchline.gateway.calls import Asked, Done, Event, begin, commit, delivery
from branchline.gateway.config import ROOM_LEFT, UNKNOWN_ROOM
from branchline.gateway.limits import reserved, under_way
from branchline.gateway.live import LiveSession, SessionOptions
from branchline.gateway.protocols.tools import is_offered, offered_choice
from branchline.gateway.record import CallRecord

_SAID_ANEW = frozenset(
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
_ABOUT_TOOLS = ("tool_choice", "parallel_tool_calls")
_CUT = frozenset({"length", "content_filter"})
"""Ends before an answer was whole."""
_FINISHES = _CUT | {"tool_calls"}
"""Ends that mean the same here; all others are a stop."""


@dataclass
class _Reply:
    """An upstream's answer while it arrives."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tools: dict[int, ToolDelta] = field(default_factory=dict)
    ended: str = "stop"
    """In the upstream's own word."""
    usage: Usage | None = None

    def take(self, delta: ChatDelta) -> list[Delta]:
        """What can be said at once; tool calls and refusals are said when they are whole, at the end."""
        self.usage = delta.usage or self.usage
        self.ended = delta.finish or self.ended
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for tool in delta.tools:
            known = self.tools.get(tool.index, ToolDelta(tool.index))
            self.tools[tool.index] = ToolDelta(
                tool.index, known.id or tool.id, known.name or tool.name, known.arguments + tool.arguments
            )
        said: list[Delta] = []
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
            said.append(Delta(reasoning=delta.reasoning))
        if delta.text:
            self.text.append(delta.text)
            said.append(Delta(text=delta.text))
        return said

    @property
    def finish(self) -> str:
        """In ours. An answer that calls tools waits for their results, whatever the upstream calls that."""
        if self.tools and self.ended not in _CUT:
            return "tool_calls"
        return self.ended if self.ended in _FINISHES else "stop"

    def message(self, call_id: str) -> Message:
        """All that was said. A call that came without an id gets one, for its result must name it."""
        calls = [
            ToolCall(tool.name, tool.arguments, tool.id or new_call_id())
            for _, tool in sorted(self.tools.items())
        ]
        return Message(
            "assistant",
            "".join(self.text),
            reasoning="".join(self.reasoning),
            calls=tuple(calls),
            refusal="".join(self.refusal),
            id=call_id,
        )


async def run_capture(
    live: LiveSession, upstream: UpstreamChat, asked: Asked, record: CallRecord, body: bytes = b""
) -> AsyncGenerator[Event, None]:
    """Passes one call on, with every field of its `body` where that is a chat completion request too.

    One that is broken off leaves nothing: what was sampled is not known.
    """
    if asked.request.raw or asked.choices != 1:
        raise EngineInputError(f"{upstream.name}: an upstream is asked for one chat completion at a time")
    with under_way(live, asked, record):
        turn = await begin(live, asked, record, None)
        reply = _Reply()
        messages = [write_message(message) for message in asked.request.messages]
        with reserved(live, asked, _room(live, asked)) as allowed:
            tools, options = _wishes(live, asked, record.model, body, allowed)
            async with aclosing(upstream.chat(messages, tools=tools, options=options)) as deltas:
                async for delta in deltas:
                    said = reply.take(delta)
                    record.close_phase("queue")
                    if said:
                        yield Said(0, said)
            message, finish, usage = reply.message(record.call_id), reply.finish, reply.usage
            if message.calls:
                yield Said(0, [Delta(call=call, index=index) for index, call in enumerate(message.calls)])
    record.close_phase("generate")
    ids = live.session.codec.spell(message)
    call = await commit(live, turn, [Generation(ids, None, 0, finish, message, inexact=True)], record)
    record.done = Done(
        call,
        [Answer(message, finish, ids, None)],
        # Both counts are the upstream's, or both ours.
        len(turn.prompt_ids) if usage is None else usage.prompt_tokens,
        turn.prompt_ids,
        None if usage is None else usage.completion_tokens,
    )
    with delivery(live, call):
        yield record.done


def _room(live: LiveSession, asked: Asked) -> int:
    """How many tokens the answer may have; the upstream knows best, unless others must be left some."""
    is_open = asked.params.max_tokens == ROOM_LEFT and live.options.limits.tokens is not None
    return UNKNOWN_ROOM if is_open else asked.params.max_tokens


def _wishes(
    live: LiveSession, asked: Asked, model: str, body: bytes, allowed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools that an upstream is offered, and the other fields of what it is asked."""
    options = _passed(body, live.options) if body else _options(asked)
    options["model"] = model
    if allowed != ROOM_LEFT:
        # Under the name that is in use: some upstreams know only one.
        named = "max_completion_tokens" if "max_completion_tokens" in options else "max_tokens"
        options[named] = allowed
    if asked.single_call:
        options["parallel_tool_calls"] = False
    # What nobody here can run, the upstream may.
    hosted = [tool for tool in options.pop("tools", ()) if not is_offered(tool)]
    tools = [*asked.request.tools, *hosted]
    if not tools:
        # Without tools there is nothing to choose, and upstreams refuse to be told about it.
        options = {name: value for name, value in options.items() if name not in _ABOUT_TOOLS}
    elif "tool_choice" in options:
        options["tool_choice"] = offered_choice(options["tool_choice"], asked.request.tools)
    return tools, options


def _passed(body: bytes, session: SessionOptions) -> dict[str, Any]:
    """The client's fields as it wrote them, whether anybody here knows them or not."""
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # In a field that nobody has looked at before.
        raise MessageError("body", body[:60], f"JSON ({error})") from error
    given = {name: value for name, value in fields.items() if value is not None and name not in _SAID_ANEW}
    options = {**session.sampling_defaults, **given, **session.sampling}
    if "max_completion_tokens" in options:
        # The same limit under two names: the session's own goes first, then the newer one.
        options.pop("max_completion_tokens" if "max_tokens" in session.sampling else "max_tokens", None)
    options.pop("n", None)
    wanted = options.pop("function_call", None)
    if isinstance(wanted, dict):
        options["tool_choice"] = {"type": "function", "function": wanted}
    return options


def _options(asked: Asked) -> dict[str, Any]:
    """The wishes of a client that speaks another protocol; what was left open stays open."""
    params, given = asked.params, asked.request.sampling
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if params.stop:
        options["stop"] = list(params.stop)
    if params.grammar is not None:
        options["response_format"] = dict(params.grammar)
    if asked.tool_choice is not None:
        options["tool_choice"] = asked.tool_choice
    return options
