"""An OpenAI-compatible upstream: messages in, text out. It is not an engine: it returns no token ids.

Its answers can be recorded, but not as the ids that were sampled, so such a record is never exact. Deltas are
yielded as they arrive; `SamplingParams.flush_s` does not apply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.client import HttpClient, ServerConfig
from branchline.engines.error_responses import error_from_event


@dataclass(frozen=True)
class ToolCallDelta:
    """The next part of the tool call with this index; only the first part has a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class TokenUsage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class ChatDelta:
    """The next part of an answer."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    refusal: str = ""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, `content_filter` or another value of the upstream."""
    usage: TokenUsage | None = None
    """At most once, after the finish reason."""


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


class _UpstreamEvent(Struct):
    choices: list[_UpstreamChoice] | None = None
    usage: TokenUsage | None = None


_decode_event = msgspec.json.Decoder(_UpstreamEvent).decode


class UpstreamChat:
    """A chat completions endpoint of an upstream.

    upstream = UpstreamChat(ServerConfig("https://api.example.com/v1", api_key=key), model="large")
    """

    def __init__(self, server: ServerConfig | str, *, model: str = "", name: str = "") -> None:
        """Without `model`, the model name of each request is passed on."""
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
        """Streams one answer; closing aborts it. `options` are the other fields of the request body."""
        options = dict(options or {})
        if (n := options.pop("n", None)) not in (None, 1):
            raise EngineInputError(f"n: got {n}, expected 1: an upstream is asked for one answer at a time")
        body: dict[str, Any] = {
            **options,
            "model": self.model or options.get("model", ""),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tools:
            body["tools"] = tools
        is_finished = False
        tool_calls = _ToolCallTracker()
        response = self.client.request("POST", "/chat/completions", msgspec.json.encode(body))
        try:
            while events := await response.next_events():
                for data in events:
                    delta = self._parse_event(data, tool_calls)
                    is_finished = is_finished or delta.finish_reason is not None
                    if delta != ChatDelta():
                        yield delta
        finally:
            await response.close()
        if not is_finished:
            raise EngineError(f"{self.name}: the stream ended before its answer did")

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass

    async def close(self) -> None:
        await self.client.close()

    def _parse_event(self, data: bytes, tool_calls: _ToolCallTracker) -> ChatDelta:
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: {error} in {data[:200]!r}") from error
        if event.choices is None:
            raise error_from_event(self.name, data)
        if not event.choices:
            return ChatDelta(usage=event.usage)
        choice = event.choices[0]
        delta = choice.delta or _UpstreamDelta()
        return ChatDelta(
            delta.content or "",
            delta.reasoning_content or delta.reasoning or "",
            tuple([tool_calls.assign_index(i, part) for i, part in enumerate(delta.tool_calls or ())]),
            delta.refusal or "",
            choice.finish_reason,
            event.usage,
        )


@dataclass
class _OpenToolCall:
    """A tool call that may receive further parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def is_continued_by(self, part: ToolCallDelta) -> bool:
        """Whether a part belongs to this call. Only a part with a name can begin another call."""
        if not (part.name and self.name):
            return True
        if part.id and self.id:
            return part.id == self.id
        return part.name == self.name and not _is_json(self.arguments)


class _ToolCallTracker:
    """Gives each tool call its own index: some upstreams send the same index for all calls, or none."""

    def __init__(self) -> None:
        self._open_calls: dict[int, _OpenToolCall] = {}
        """By the upstream's index, or by the position in its event if there is none."""
        self._used_indexes: set[int] = set()

    def assign_index(self, position: int, part: _UpstreamToolCall) -> ToolCallDelta:
        function = part.function or _UpstreamFunction()
        key = position if part.index is None else part.index
        delta = ToolCallDelta(key, part.id or "", function.name or "", function.arguments or "")
        call = self._open_calls.get(key)
        if call is None or not call.is_continued_by(delta):
            index = key if key not in self._used_indexes else max(self._used_indexes) + 1
            self._used_indexes.add(index)
            call = self._open_calls[key] = _OpenToolCall(index)
        call.id, call.name = call.id or delta.id, call.name or delta.name
        call.arguments += delta.arguments
        return replace(delta, index=call.index)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
