"""An OpenAI-compatible upstream: messages in, text out. It is not an engine: it returns no token ids.

Its answers can be recorded, but not as the ids that were sampled, so such a record is never exact. Deltas are
yielded as they arrive; `SamplingParams.flush_s` does not apply. What an upstream sends and is not read here
(fields of messages, logprobs, usage, its own errors) is passed on as it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.client import HttpClient, ServerConfig
from branchline.engines.upstream_events import ChatDelta, EventReader, relayed_headers, upstream_error


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
        self.max_tokens_names: dict[str, str] = {}
        """The field for the limit of an answer by model, for models that do not accept `max_tokens`."""

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
        reader = EventReader(self.name)
        response = self.client.request("POST", "/chat/completions", msgspec.json.encode(body))
        try:
            status = await response.read_status()
            if status and status // 100 != 2:
                _, content = await response.read()
                raise upstream_error(self.name, status, content, response.headers)
            if headers := relayed_headers(response.headers):
                yield ChatDelta(headers=headers)
            while events := await response.next_events():
                for data in events:
                    delta = reader.read(data)
                    is_finished = is_finished or delta.finish_reason is not None
                    if delta != ChatDelta():
                        yield delta
        finally:
            await response.close()
        if not is_finished:
            raise EngineError(f"{self.name}: the stream ended before its answer did")
        if (rest := reader.flush()) != ChatDelta():
            yield rest

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass

    async def close(self) -> None:
        await self.client.close()
