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
from branchline.engines.client import HttpClient, ServerConfig
from branchline.engines.client import HttpResponse as HttpReply
from branchline.loop.gateway_responses import (
    CountedJson,
    OpenedJson,
    ReplyBuilder,
    SamplesJson,
    decode_json,
    error_from_response,
)
from branchline.loop.model import ToolSchemas
from branchline.loop.retry import Retry
from branchline.runtime.call_record import CallResult
from branchline.runtime.headers import CALL_HEADER, MAX_TOKENS_HEADER

_READ_TIMEOUT_S = 24 * 3600.0
"""An answer may wait in the engine's queue for as long as it takes; whoever asks can be cancelled."""
_RETRY_TIMEOUT_S = 600.0
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
        retry_timeout_s: float = _RETRY_TIMEOUT_S,
    ) -> None:
        """`patience_s`: how long to knock at a gateway that is busy."""
        self.codec = codec
        self._url = base_url.rstrip("/")
        self._headers = {"x-branchline-agent": agent} if agent else {}
        self._control_key = control_key
        self._model = model
        self._retry_timeout_s = retry_timeout_s
        # A client of its own costs next to nothing, and what others ask never stands in the way.
        self._http = _client(self._url, api_key)

    @classmethod
    async def open(
        cls,
        gateway: str,
        admin_key: str = "",
        *,
        codec: Codec | None = None,
        retry_timeout_s: float = _RETRY_TIMEOUT_S,
        **options: Any,
    ) -> Self:
        """Opens a session at a gateway; `options` are those of `POST /sessions`: `group`, `sampling`, …

        `patience_s` is for the opening too.

        async with await HttpModel.open("http://127.0.0.1:8100", admin_key, group="doors") as model: ...
        """
        http, body = _client(gateway.rstrip("/"), admin_key), msgspec.json.encode(options)
        try:
            session = await _request_json(
                lambda: http.request("POST", "/sessions", body), OpenedJson, retry_timeout_s
            )
        finally:
            await http.close()
        return cls(
            session.base_url,
            session.api_key,
            session.control_key,
            codec=codec,
            retry_timeout_s=retry_timeout_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
        call_name: str = "",
    ) -> CallResult:
        headers = {**self._headers, CALL_HEADER: call_name} if call_name else dict(self._headers)
        if params and params.get("max_tokens") is not None:
            headers[MAX_TOKENS_HEADER] = str(params["max_tokens"])
        wanted = {"stream": True, "return_token_ids": True, "logprobs": True}
        body = self._body(messages, tools, {**(params or {}), **wanted})
        answer = ReplyBuilder()
        async with aclosing(self._events("/chat/completions", body, headers)) as events:
            async for event in events:
                answer.add_event(event)
        return answer.build()

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        body, path = self._body(messages, tools, params or {}), "/chat/completions/count_tokens"
        counted = await _request_json(
            lambda: self._http.request("POST", path, body, headers=self._headers),
            CountedJson,
            self._retry_timeout_s,
        )
        return counted.prompt_tokens

    async def samples(self) -> list[Sample]:
        if not self._control_key:
            raise InputError("control_key: got none, expected the session's, which opens its samples")
        http = _client(self._url.removesuffix("/v1"), self._control_key)
        try:
            told = await _request_json(
                lambda: http.request("GET", "/samples"), SamplesJson, self._retry_timeout_s
            )
        finally:
            await http.close()
        return told.to_samples()

    def _body(self, messages: Sequence[Message], tools: ToolSchemas, params: Mapping[str, Any]) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message_json(message) for message in messages],
        }
        if tools:
            body["tools"] = list(tools)
        return msgspec.json.encode({**body, **params})

    async def _events(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. Leaving it closes the connection, which is what aborts a call."""
        patience = Retry(self._retry_timeout_s)
        while True:
            reply = self._http.request("POST", path, body, headers=headers)
            try:
                if await reply.read_status() in (0, 200):
                    while events := await reply.next_events():
                        for event in events:
                            yield event
                    return
                status, content = await reply.read()
            finally:
                await reply.close()
            if not await patience.wait_to_retry(status, reply.retry_after):
                raise error_from_response(status, content, reply.retry_after)


def _client(url: str, key: str) -> HttpClient:
    """A gateway without keys wants none."""
    return HttpClient(ServerConfig(url, api_key=key, read_timeout_s=_READ_TIMEOUT_S), url)


async def _request_json(send: Callable[[], HttpReply], kind: type[T], patience_s: float) -> T:
    """What a request answers that is no stream."""
    patience = Retry(patience_s)
    while True:
        reply = send()
        try:
            status, content = await reply.read()
        finally:
            await reply.close()
        if status // 100 == 2:
            return decode_json(content, kind)
        if not await patience.wait_to_retry(status, reply.retry_after):
            raise error_from_response(status, content, reply.retry_after)


def _message_json(message: Message) -> dict[str, Any]:
    """A message on the wire; an answer says which response it was, so that equal ones are told apart."""
    raw = write_message(message)
    return {**raw, "id": message.id} if message.id else raw
