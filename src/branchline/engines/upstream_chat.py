"""Any OpenAI-compatible upstream: messages in, text out. Not an engine, because no ids come with it.

What it says can be recorded, but the ids that were sampled are not known: every record of it is inexact.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.client import HttpClient, ServerConfig, error_from_event


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of the tool call at `index`, one number for each call; its name comes once."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class ChatDelta:
    """The next piece of an answer."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    refusal: str = ""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, `content_filter` or whatever else the upstream says."""
    usage: TokenUsage | None = None
    """Once, after the finish, where the upstream counts at all."""


class _UpstreamFunction(Struct):
    name: str | None = None
    arguments: str | None = None


class _UpstreamToolCall(Struct):
    index: int | None = None
    id: str | None = None
    function: _UpstreamFunction | None = None


class _UpstreamDelta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_UpstreamToolCall] | None = None


class _UpstreamChoice(Struct):
    delta: _UpstreamDelta | None = None
    finish_reason: str | None = None


class _UpstreamUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _UpstreamEvent(Struct):
    choices: list[_UpstreamChoice] | None = None
    usage: _UpstreamUsage | None = None


_decode_event = msgspec.json.Decoder(_UpstreamEvent).decode


class UpstreamChat:
    """One model of an upstream, asked with whole conversations.

    upstream = UpstreamChat(Server("https://api.example.com/v1", api_key=key), model="large")
    """

    exact = False
    """Its outputs come without the ids that were sampled."""

    def __init__(self, server: ServerConfig | str, *, model: str = "", name: str = "") -> None:
        """Without a model the name that each request brings is passed on."""
        server = ServerConfig(server) if isinstance(server, str) else server
        self.model = model
        self.name = name or f"openai@{server.host_port}"
        self.client = HttpClient(server, server.url)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[ChatDelta, None]:
        """Streams one answer; `options` are the other fields of a chat completion request. Closing aborts."""
        options = dict(options or {})
        if options.pop("n", None) not in (None, 1):
            raise EngineInputError("n: an upstream is asked for one answer at a time")
        body: dict[str, Any] = {
            **options,
            "model": self.model or options.get("model", ""),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tools:
            body["tools"] = tools
        finished = False
        calls = _ToolCallTracker()
        reply = self.client.post("/chat/completions", msgspec.json.encode(body))
        try:
            while events := await reply.next_events():
                for data in events:
                    delta = self._parse_event(data, calls)
                    finished = finished or delta.finish_reason is not None
                    if delta != ChatDelta():
                        yield delta
        finally:
            await reply.close()
        if not finished:
            raise EngineError(f"{self.name}: the stream ended before its answer did")

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass

    async def close(self) -> None:
        await self.client.close()

    def _parse_event(self, data: bytes, calls: _ToolCallTracker) -> ChatDelta:
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: {error} in {data[:200]!r}") from error
        if event.choices is None:
            raise error_from_event(self.name, data)
        counted = event.usage
        usage = None if counted is None else TokenUsage(counted.prompt_tokens, counted.completion_tokens)
        if not event.choices:
            return ChatDelta(usage=usage)
        choice = event.choices[0]
        delta = choice.delta or _UpstreamDelta()
        return ChatDelta(
            delta.content or "",
            delta.reasoning_content or delta.reasoning or "",
            tuple([calls.assign_index(place, piece) for place, piece in enumerate(delta.tool_calls or ())]),
            delta.refusal or "",
            choice.finish_reason,
            usage,
        )


@dataclass
class _OpenToolCall:
    """A call of which more may come."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def continues(self, piece: ToolCallDelta) -> bool:
        """Whether a piece belongs to it: one with a name may begin another call, any other never does."""
        if not (piece.name and self.name):
            return True
        if piece.id and self.id:
            return piece.id == self.id
        return piece.name == self.name and not _is_json(self.arguments)


class _ToolCallTracker:
    """Tells calls apart. Upstreams number them, or give all the same number, or none at all."""

    def __init__(self) -> None:
        self._open_calls: dict[int, _OpenToolCall] = {}
        """By the number that the upstream gave it, else by its place among those that came with it."""
        self._used_indexes: set[int] = set()

    def assign_index(self, place: int, piece: _UpstreamToolCall) -> ToolCallDelta:
        function = piece.function or _UpstreamFunction()
        number = place if piece.index is None else piece.index
        said = ToolCallDelta(number, piece.id or "", function.name or "", function.arguments or "")
        call = self._open_calls.get(number)
        if call is None or not call.continues(said):
            index = number if number not in self._used_indexes else max(self._used_indexes) + 1
            self._used_indexes.add(index)
            call = self._open_calls[number] = _OpenToolCall(index)
        call.id, call.name = call.id or said.id, call.name or said.name
        call.arguments += said.arguments
        return replace(said, index=call.index)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
