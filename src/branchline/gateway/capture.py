"""A call to an upstream that gives text and no ids: passed on as it is, recorded as inexact.

The tree holds what was said, encoded with the session's codec. Every such output is marked, so that no
sample takes its ids for the sampled ones unless that is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.parsing.base import Delta
from branchline.core.call import Generation
from branchline.core.errors import EngineInputError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.engines.openai import ChatDelta, ToolDelta, UpstreamChat, Usage
from branchline.gateway.answers import Answer, Said
from branchline.gateway.calls import Asked, Done, Event, begin, commit, delivery
from branchline.gateway.live import LiveSession
from branchline.gateway.record import CallRecord


@dataclass
class _Reply:
    """An upstream's answer while it arrives."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, ToolDelta] = field(default_factory=dict)
    finish: str = "stop"
    usage: Usage | None = None

    def take(self, delta: ChatDelta) -> list[Delta]:
        """What can be said at once; tool calls are said when they are whole, at the end."""
        self.usage = delta.usage or self.usage
        self.finish = delta.finish or self.finish
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
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(tool.name, tool.arguments, tool.id) for _, tool in sorted(self.tools.items()))

    @property
    def message(self) -> Message:
        return Message("assistant", "".join(self.text), reasoning="".join(self.reasoning), calls=self.calls)


async def run_capture(
    live: LiveSession, upstream: UpstreamChat, asked: Asked, record: CallRecord
) -> AsyncGenerator[Event, None]:
    """Passes one call on. One that is broken off leaves nothing: what was sampled is not known."""
    if asked.request.raw or asked.choices != 1:
        raise EngineInputError(f"{upstream.name}: an upstream is asked for one chat completion at a time")
    turn = await begin(live, asked, record, None)
    reply = _Reply()
    messages = [write_message(message) for message in asked.request.messages]
    options = {"model": record.model, **_options(asked)}
    live.in_flight += 1
    try:
        async with aclosing(upstream.chat(messages, tools=asked.request.tools, options=options)) as deltas:
            async for delta in deltas:
                said = reply.take(delta)
                record.close_phase("queue")
                if said:
                    yield Said(0, said)
    finally:
        live.in_flight -= 1
    if reply.calls:
        yield Said(0, [Delta(call=call, index=index) for index, call in enumerate(reply.calls)])
    record.close_phase("generate")
    message = reply.message
    ids = live.session.codec.spell(message)
    finish = reply.finish if reply.finish in ("length", "tool_calls") else "stop"
    call = await commit(live, turn, [Generation(ids, None, 0, finish, message, inexact=True)], record)
    prompt_tokens = len(turn.prompt_ids) if reply.usage is None else reply.usage.prompt_tokens
    done = Done(call, [Answer(message, finish, ids, None)], prompt_tokens, turn.prompt_ids)
    with delivery(live, call):
        yield done


def _options(asked: Asked) -> Mapping[str, Any]:
    """The client's wishes in the upstream's words; what was left open stays open."""
    params, given = asked.params, asked.request.sampling
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if params.stop:
        options["stop"] = list(params.stop)
    if params.grammar is not None:
        options["response_format"] = dict(params.grammar)
    if asked.single_call:
        options["parallel_tool_calls"] = False
    return options
