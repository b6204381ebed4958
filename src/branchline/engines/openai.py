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
from branchline.engines.client import HttpClient, Server, error_event


@dataclass(frozen=True)
class ToolDelta:
    """The next piece of the tool call at `index`, one number for each call; its name comes once."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class ChatDelta:
    """The next piece of an answer."""

    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()
    refusal: str = ""
    finish: str | None = None
    """`stop`, `length`, `tool_calls`, `content_filter` or whatever else the upstream says."""
    usage: Usage | None = None
    """Once, after the finish, where the upstream counts at all."""


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_read = msgspec.json.Decoder(_Event).decode


class UpstreamChat:
    """One model of an upstream, asked with whole conversations.

    upstream = UpstreamChat(Server("https://api.example.com/v1", api_key=key), model="large")
    """

    exact = False
    """Its outputs come without the ids that were sampled."""

    def __init__(self, server: Server | str, *, model: str = "", name: str = "") -> None:
        """Without a model the name that each request brings is passed on."""
        server = Server(server) if isinstance(server, str) else server
        self.model = model
        self.name = name or f"openai@{server.place}"
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
        calls = _Calls()
        reply = self.client.post("/chat/completions", msgspec.json.encode(body))
        try:
            while events := await reply.events():
                for data in events:
                    delta = self._delta(data, calls)
                    finished = finished or delta.finish is not None
                    if delta != ChatDelta():
                        yield delta
        finally:
            await reply.close()
        if not finished:
            raise EngineError(f"{self.name}: the stream ended before its answer did")

    async def close(self) -> None:
        await self.client.close()

    def _delta(self, data: bytes, calls: _Calls) -> ChatDelta:
        try:
            event = _read(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: {error} in {data[:200]!r}") from error
        if event.choices is None:
            raise error_event(self.name, data)
        counted = event.usage
        usage = None if counted is None else Usage(counted.prompt_tokens, counted.completion_tokens)
        if not event.choices:
            return ChatDelta(usage=usage)
        choice = event.choices[0]
        delta = choice.delta or _Delta()
        return ChatDelta(
            delta.content or "",
            delta.reasoning_content or delta.reasoning or "",
            tuple([calls.take(place, piece) for place, piece in enumerate(delta.tool_calls or ())]),
            delta.refusal or "",
            choice.finish_reason,
            usage,
        )


@dataclass
class _Open:
    """A call of which more may come."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def goes_on(self, piece: ToolDelta) -> bool:
        """Whether a piece belongs to it: one with a name may begin another call, any other never does."""
        if not (piece.name and self.name):
            return True
        if piece.id and self.id:
            return piece.id == self.id
        return piece.name == self.name and not _is_json(self.arguments)


class _Calls:
    """Tells calls apart. Upstreams number them, or give all the same number, or none at all."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        """By the number that the upstream gave it, else by its place among those that came with it."""
        self._taken: set[int] = set()

    def take(self, place: int, piece: _ToolCall) -> ToolDelta:
        function = piece.function or _Function()
        number = place if piece.index is None else piece.index
        said = ToolDelta(number, piece.id or "", function.name or "", function.arguments or "")
        call = self._open.get(number)
        if call is None or not call.goes_on(said):
            index = number if number not in self._taken else max(self._taken) + 1
            self._taken.add(index)
            call = self._open[number] = _Open(index)
        call.id, call.name = call.id or said.id, call.name or said.name
        call.arguments += said.arguments
        return replace(said, index=call.index)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
