"""A session's model behind HTTP: Chat Completions, streamed, with the ids it was sampled as.

The conversation is written as any client would write it, with the ids of responses and tool calls sent back
as they came. A refusal becomes the error it was at the gateway, so that a loop cannot tell where it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import Any, Self, get_args

import msgspec
import numpy as np

from branchline.chat.base import Codec
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
    SessionKind,
)
from branchline.core.message import Message, ToolCall
from branchline.core.reader import write_message
from branchline.core.runs import Floats, as_ids
from branchline.core.sample import Sample
from branchline.engines.client import HttpClient, Server
from branchline.engines.client import Reply as HttpReply
from branchline.export.jsonl import read_sample
from branchline.gateway.protocols.base import LIMIT_HEADER
from branchline.gateway.resume import CALL_HEADER
from branchline.loop.model import Reply, Schemas

_SILENCE_S = 24 * 3600.0
"""An answer may wait in the engine's queue for as long as it takes; whoever asks can be cancelled."""
_PAUSE_S = 1.0
"""Between two knocks at a gateway that is busy and does not say for how long."""
# Where whoever refuses is no gateway, and names no kind.
_KINDS: dict[int, SessionKind] = {
    401: "no_key",
    403: "forbidden",
    404: "unknown",
    409: "conflict",
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
    ) -> None:
        """`patience_s`: how long to knock at a gateway that is busy."""
        self.codec = codec
        self._url = base_url.rstrip("/")
        self._headers = {"x-branchline-agent": agent} if agent else {}
        self._control_key = control_key
        self._model = model
        self._patience_s = patience_s
        # A client of its own costs next to nothing, and what others ask never stands in the way.
        self._http = _client(self._url, api_key)

    @classmethod
    async def open(
        cls, gateway: str, admin_key: str = "", *, codec: Codec | None = None, **options: Any
    ) -> Self:
        """Opens a session at a gateway; `options` are those of `POST /sessions`: `group`, `sampling`, …

        async with await HttpModel.open("http://127.0.0.1:8100", admin_key, group="doors") as model: ...
        """
        http = _client(gateway.rstrip("/"), admin_key)
        try:
            told = await _json(http.request("POST", "/sessions", msgspec.json.encode(options), whole=True))
        finally:
            await http.close()
        return cls(told["base_url"], told["api_key"], told["control_key"], codec=codec)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Schemas = (),
        params: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Reply:
        headers = {**self._headers, CALL_HEADER: name} if name else dict(self._headers)
        if params and params.get("max_tokens") is not None:
            headers[LIMIT_HEADER] = str(params["max_tokens"])
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
        body, path = self._body(messages, tools, params or {}), "/chat/completions/count_tokens"
        told = await _json(self._http.request("POST", path, body, headers=self._headers, whole=True))
        return int(told["prompt_tokens"])

    async def samples(self) -> list[Sample]:
        if not self._control_key:
            raise InputError("control_key: got none, expected the session's, which opens its samples")
        http = _client(self._url.removesuffix("/v1"), self._control_key)
        try:
            told = await _json(http.request("GET", "/samples", whole=True))
        finally:
            await http.close()
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
            reply = self._http.request("POST", path, body, headers=headers)
            try:
                if await reply.status() in (0, 200):
                    while events := await reply.events():
                        for event in events:
                            yield _decoded(event)
                    return
                status, content = await reply.content()
            finally:
                await reply.close()
            wait_s = _pause_s(reply.retry_after)
            if status != 429 or asyncio.get_running_loop().time() + wait_s > until:
                raise _refusal(status, content)
            await asyncio.sleep(wait_s)


def _client(url: str, key: str) -> HttpClient:
    """A gateway without keys wants none."""
    return HttpClient(Server(url, api_key=key, read_timeout_s=_SILENCE_S), url)


async def _json(reply: HttpReply) -> Any:
    """What a request answers that is no stream."""
    try:
        status, content = await reply.content()
    finally:
        await reply.close()
    if status // 100 != 2:
        raise _refusal(status, content)
    return _decoded(content)


def _decoded(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise EngineError(f"not what a gateway says: {content[:200]!r}") from error


def _pause_s(retry_after: str) -> float:
    """The seconds that a header says, as a number or as the date they end at.

    >>> _pause_s("2"), _pause_s("Wed, 21 Oct 2015 07:28:00 GMT"), _pause_s("soon")
    (2.0, 0.0, 1.0)
    """
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return _PAUSE_S


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
    code = None
    try:
        error = msgspec.json.decode(body)["error"]
        words, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        words = body[:500].decode(errors="replace") or f"status {status}"
    kind = code if code in get_args(SessionKind) else _KINDS.get(status)
    if kind is not None:
        return SessionError(kind, words)
    if code == "context_length_exceeded":
        return ContextLengthError(words)
    if status == 429:
        return EngineBusyError(words)
    if status < 500:
        return InputError(words)
    return JournalError(words) if status == 503 else EngineError(f"status {status}: {words}")
