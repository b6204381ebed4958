"""A session's model behind HTTP: Chat Completions, streamed, with the ids it was sampled as.

The conversation is written as any client would write it, with the ids of responses and tool calls sent back
as they came. A refusal becomes the error it was at the gateway, so that a loop cannot tell where it runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.reader import write_message
from branchline.core.sample import Sample
from branchline.engines.client import HttpClient, Server
from branchline.engines.client import Reply as HttpReply
from branchline.gateway.protocols.base import LIMIT_HEADER
from branchline.gateway.resume import CALL_HEADER
from branchline.loop.model import Reply, Schemas
from branchline.loop.patience import Patience
from branchline.loop.wire import Answer, Counted, Opened, Samples, read, refusal

_SILENCE_S = 24 * 3600.0
"""An answer may wait in the engine's queue for as long as it takes; whoever asks can be cancelled."""
_PATIENCE_S = 600.0
T = TypeVar("T")


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
        patience_s: float = _PATIENCE_S,
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
        cls,
        gateway: str,
        admin_key: str = "",
        *,
        codec: Codec | None = None,
        patience_s: float = _PATIENCE_S,
        **options: Any,
    ) -> Self:
        """Opens a session at a gateway; `options` are those of `POST /sessions`: `group`, `sampling`, …

        `patience_s` is for the opening too.

        async with await HttpModel.open("http://127.0.0.1:8100", admin_key, group="doors") as model: ...
        """
        http, body = _client(gateway.rstrip("/"), admin_key), msgspec.json.encode(options)
        try:
            session = await _told(
                lambda: http.request("POST", "/sessions", body), Opened, patience_s
            )
        finally:
            await http.close()
        return cls(session.base_url, session.api_key, session.control_key, codec=codec, patience_s=patience_s)

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
        answer = Answer()
        async with aclosing(self._events("/chat/completions", body, headers)) as events:
            async for event in events:
                answer.take(event)
        return answer.reply()

    async def count(
        self, messages: Sequence[Message], *, tools: Schemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        body, path = self._body(messages, tools, params or {}), "/chat/completions/count_tokens"
        counted = await _told(
            lambda: self._http.request("POST", path, body, headers=self._headers),
            Counted,
            self._patience_s,
        )
        return counted.prompt_tokens

    async def samples(self) -> list[Sample]:
        if not self._control_key:
            raise InputError("control_key: got none, expected the session's, which opens its samples")
        http = _client(self._url.removesuffix("/v1"), self._control_key)
        try:
            told = await _told(lambda: http.request("GET", "/samples"), Samples, self._patience_s)
        finally:
            await http.close()
        return told.read()

    def _body(self, messages: Sequence[Message], tools: Schemas, params: Mapping[str, Any]) -> bytes:
        body: dict[str, Any] = {"model": self._model, "messages": [_written(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        return msgspec.json.encode({**body, **params})

    async def _events(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. Leaving it closes the connection, which is what aborts a call."""
        patience = Patience(self._patience_s)
        while True:
            reply = self._http.request("POST", path, body, headers=headers)
            try:
                if await reply.status() in (0, 200):
                    while events := await reply.events():
                        for event in events:
                            yield event
                    return
                status, content = await reply.content()
            finally:
                await reply.close()
            if not await patience.allows(status, reply.retry_after):
                raise refusal(status, content, reply.retry_after)


def _client(url: str, key: str) -> HttpClient:
    """A gateway without keys wants none."""
    return HttpClient(Server(url, api_key=key, read_timeout_s=_SILENCE_S), url)


async def _told(send: Callable[[], HttpReply], kind: type[T], patience_s: float) -> T:
    """What a request answers that is no stream."""
    patience = Patience(patience_s)
    while True:
        reply = send()
        try:
            status, content = await reply.content()
        finally:
            await reply.close()
        if status // 100 == 2:
            return read(content, kind)
        if not await patience.allows(status, reply.retry_after):
            raise refusal(status, content, reply.retry_after)


def _written(message: Message) -> dict[str, Any]:
    """A message on the wire; an answer says which response it was, so that equal ones are told apart."""
    raw = write_message(message)
    return {**raw, "id": message.id} if message.id else raw
