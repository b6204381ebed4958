"""A session's model behind HTTP: Chat Completions, streamed, with the ids it was sampled as.

The conversation is written as any client would write it, with the ids of responses and tool calls sent back
as they came. A refusal becomes the error it was at the gateway, so that a loop cannot tell where it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Self

import httpx
import msgspec
import numpy as np

from branchline.chat.base import Codec
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
)
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.core.runs import Floats, as_ids
from branchline.core.sample import Sample
from branchline.engines.events import EventReader
from branchline.export.jsonl import read_sample
from branchline.gateway.resume import CALL_HEADER
from branchline.loop.model import Reply, Schemas

SessionKind = Literal["unknown", "closed", "forbidden", "no_key", "exists", "conflict", "busy"]
_KINDS: dict[int, SessionKind] = {
    401: "no_key",
    403: "forbidden",
    404: "unknown",
    409: "conflict",
    429: "busy",
}


class HttpModel:
    """A session of a gateway elsewhere.

    async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
        reply = await model.ask([Message("user", "2+2?")])

    Without a control key samples cannot be read. A codec is needed only where results are cut by tokens.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        control_key: str = "",
        *,
        agent: str = "",
        codec: Codec | None = None,
        model: str = "branchline",
        patience_s: float = 600.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """`patience_s`: how long to knock at a gateway that is busy. A client that is given stays open."""
        self.codec = codec
        self._url = base_url.rstrip("/")
        # A gateway without keys wants none.
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if agent:
            self._headers["x-branchline-agent"] = agent
        self._control_key = control_key
        self._model = model
        self._patience_s = patience_s
        self._owns = http is None
        # An answer may wait in the engine's queue for as long as it takes; whoever asks can be cancelled.
        self._http = http or httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owns:
            await self._http.aclose()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Schemas = (),
        params: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Reply:
        headers = {**self._headers, CALL_HEADER: name} if name else self._headers
        wanted = {"stream": True, "return_token_ids": True, "logprobs": True}
        body = self._body(messages, tools, {**(params or {}), **wanted})
        answer = _Answer()
        async with aclosing(self._events("/chat/completions", body, headers)) as events:
            async for event in events:
                answer.take(event)
        return answer.reply()

    async def count(
        self, messages: Sequence[Message], *, tools: Schemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        body = self._body(messages, tools, params or {})
        path = f"{self._url}/chat/completions/count_tokens"
        told = await self._json("POST", path, content=body, headers=self._headers)
        return int(told["prompt_tokens"])

    async def samples(self) -> list[Sample]:
        if not self._control_key:
            raise InputError("control_key: got none, expected the session's, which opens its samples")
        headers = {"authorization": f"Bearer {self._control_key}"}
        told = await self._json("GET", self._url.removesuffix("/v1") + "/samples", headers=headers)
        return [read_sample(raw) for raw in told["samples"]]

    def _body(self, messages: Sequence[Message], tools: Schemas, params: Mapping[str, Any]) -> bytes:
        body: dict[str, Any] = {"model": self._model, "messages": [_written(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        return msgspec.json.encode({**body, **params})

    async def _events(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream. Leaving it closes the connection, which is what aborts a call."""
        until = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                async with self._http.stream("POST", self._url + path, content=body, headers=headers) as http:
                    if http.status_code == 200:
                        reader = EventReader()
                        async for piece in http.aiter_bytes():
                            for event in reader.feed(piece):
                                yield msgspec.json.decode(event)
                        return
                    refused = _refusal(http.status_code, await http.aread())
                    wait_s = float(http.headers.get("retry-after", "1"))
            except httpx.HTTPError as error:
                raise EngineError(f"{self._url}: {type(error).__name__}: {error}") from error
            if http.status_code != 429 or asyncio.get_running_loop().time() + wait_s > until:
                raise refused
            await asyncio.sleep(wait_s)

    async def _json(self, method: str, url: str, **sent: Any) -> Any:
        try:
            response = await self._http.request(method, url, **sent)
        except httpx.HTTPError as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        return msgspec.json.decode(response.content)


class _Answer:
    """A streamed answer, put together again."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._prompt_ids: list[int] = []
        self._call_id = self._finish = ""

    def take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise _refusal(int(event.get("status", 500)), msgspec.json.encode(event))
        self._call_id = event["id"]
        self._prompt_ids = event.get("prompt_token_ids", self._prompt_ids)
        for choice in event["choices"]:
            self._add(choice["delta"])
            self._ids += choice.get("token_ids", ())
            logprobs = choice.get("logprobs") or {"content": ()}
            self._logprobs += [token["logprob"] for token in logprobs["content"]]
            self._finish = choice["finish_reason"] or self._finish

    def _add(self, delta: Mapping[str, Any]) -> None:
        self._text.append(delta.get("content") or "")
        self._reasoning.append(delta.get("reasoning_content") or "")
        for raw in delta.get("tool_calls", ()):
            # The gateway tells a call when it is whole.
            function = raw["function"]
            self._calls[raw["index"]] = ToolCall(function["name"], function["arguments"], raw["id"])

    def reply(self) -> Reply:
        if not self._finish:
            raise EngineError("the gateway's stream ended before its answer did")
        message = Message(
            "assistant",
            "".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(call for _, call in sorted(self._calls.items())),
            id=self._call_id,
        )
        return Reply(
            message,
            self._finish,
            self._call_id,
            as_ids(self._prompt_ids),
            as_ids(self._ids),
            self._known_logprobs(),
        )

    def _known_logprobs(self) -> Floats | None:
        """None where the engine gave none."""
        if len(self._logprobs) != len(self._ids):
            return None
        return np.array([np.nan if value is None else value for value in self._logprobs], np.float32)


def _written(message: Message) -> dict[str, Any]:
    """A message on the wire; an answer says which response it was, so that equal ones are told apart."""
    raw = write_message(message)
    return {**raw, "id": message.id} if message.id else raw


def _refusal(status: int, body: bytes) -> BranchlineError:
    """The error that a gateway refused by."""
    try:
        words = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        words = body[:500].decode(errors="replace") or f"status {status}"
    if status in _KINDS:
        return SessionError(_KINDS[status], words)
    if status == 400 and words.startswith("prompt is too long"):
        return ContextLengthError(words)
    if status < 500:
        return InputError(words)
    return JournalError(words) if status == 503 else EngineError(f"status {status}: {words}")
