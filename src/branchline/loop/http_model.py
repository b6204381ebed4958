"""The model of a session at a gateway: streamed Chat Completions with token ids.

The conversation is sent as any client would send it, with the ids of responses and tool calls as they were
received. An error response becomes the error that the gateway raised, so that a loop behaves as it does in
process. A 429 response is retried: Retry-After is honoured, with exponential backoff up to a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.reader import write_message
from branchline.core.reward import RewardData, read_rewards
from branchline.core.sample import Sample
from branchline.engines.client import HttpClient, HttpResponse, ServerConfig
from branchline.engines.error_responses import TOO_MANY_REQUESTS
from branchline.export.samples import Export
from branchline.loop.gateway_responses import (
    ResultBuilder,
    SamplesJson,
    SessionInfoJson,
    SessionJson,
    SessionStateJson,
    TokenCountJson,
    decode_response,
    error_from_response,
)
from branchline.loop.model import SessionInfo, ToolSchemas
from branchline.runtime.call_record import CallResult
from branchline.runtime.headers import CALL_HEADER, MAX_TOKENS_HEADER

_READ_TIMEOUT_S = 24 * 3600.0
"""A request may wait in the engine's queue for as long as that takes; `ask` can be cancelled."""
_RETRY_TIMEOUT_S = 600.0
_DEFAULT_DELAY_S = 1.0
"""The delay if Retry-After is missing or invalid, and the upper bound of the backoff."""
_MIN_DELAY_S = 0.1
T = TypeVar("T")


class HttpModel:
    """A session of a remote gateway.

    async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
        result = await model.ask([Message("user", "2+2?")])

    Samples, rewards and the end of the session need the control key; truncating tool results by tokens needs
    a codec. The admin key of the gateway can replace both keys.
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
        """`retry_timeout_s`: for how long a request to a busy gateway is retried."""
        self.codec = codec
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.control_key = control_key
        self._headers = {"x-branchline-agent": agent} if agent else {}
        self._model = model
        self._retry_timeout_s = retry_timeout_s
        self._http = _client(self.base_url, api_key)
        self._control_http: HttpClient | None = None

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

        async with await HttpModel.open("http://127.0.0.1:8100", admin_key, group="doors") as model: ...
        """
        http, body = _client(gateway.rstrip("/"), admin_key), msgspec.json.encode(options)
        try:
            session = await _request_json(
                lambda: http.request("POST", "/sessions", body), SessionJson, retry_timeout_s
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
        if self._control_http is not None:
            await self._control_http.close()

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
        options = {"stream": True, "return_token_ids": True, "logprobs": True}
        body = self._body(messages, tools, {**(params or {}), **options})
        result = ResultBuilder()
        async with aclosing(self._events("/chat/completions", body, headers)) as events:
            async for event in events:
                result.add_event(event)
        return result.build()

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        body, path = self._body(messages, tools, params or {}), "/chat/completions/count_tokens"
        count = await _request_json(
            lambda: self._http.request("POST", path, body, headers=self._headers),
            TokenCountJson,
            self._retry_timeout_s,
        )
        return count.prompt_tokens

    async def samples(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        export = await self.export(include_aborted=include_aborted, keep_calls=keep_calls, policy=policy)
        return export.samples

    async def export(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> Export:
        params = [("keep_call", call_id) for call_id in keep_calls]
        if include_aborted:
            params.append(("include_aborted", "true"))
        for name, value in (policy or {}).items():
            # A list is a repeated parameter, an empty list an empty one.
            is_list = isinstance(value, set | frozenset | list | tuple)
            params += [(name, _query_text(one)) for one in (value or ("",) if is_list else (value,))]
        path = f"/samples?{urlencode(params)}" if params else "/samples"
        return (await self._control("GET", path, SamplesJson)).to_export()

    # -- the session ---------------------------------------------------------------------------------

    @property
    def session(self) -> Self:
        return self

    @property
    def session_id(self) -> str:
        """The id in the base URL; empty if the key alone names the session."""
        return self.base_url.removesuffix("/v1").partition("/sessions/")[2].partition("/")[0]

    @property
    def can_control(self) -> bool:
        return bool(self.control_key and self.session_id)

    async def read_session(self) -> SessionInfo:
        info = await _request_json(
            lambda: self._http.request("GET", "/session"), SessionInfoJson, self._retry_timeout_s
        )
        return SessionInfo(info.id, info.created, tuple(info.calls))

    async def reward(self, reward: RewardData) -> None:
        await self._control("POST", "/reward", SessionStateJson, read_rewards(reward))

    async def complete(self, reason: str = "") -> None:
        await self._control("POST", "/complete", SessionStateJson, {"reason": reason})

    async def finalize(self, reason: str = "") -> None:
        await self._control("POST", "/finalize", SessionStateJson, {"reason": reason})

    async def abort(self, reason: str = "") -> None:
        await self._control("POST", "/abort", SessionStateJson, {"reason": reason})

    async def _control(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        """The response of the session's control API."""
        if not self.control_key:
            what = path.partition("?")[0]
            raise InputError(f"control_key: got none, expected the session's: it opens {what}")
        if self._control_http is None:
            root, found, rest = self.base_url.partition("/sessions/")
            self._control_http = _client(f"{root}{found}{rest.partition('/')[0]}", self.control_key)
        http, content = self._control_http, b"" if body is None else msgspec.json.encode(body)
        return await _request_json(lambda: http.request(method, path, content), kind, self._retry_timeout_s)

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
        """The events of a stream. Closing it closes the connection, which cancels the call."""
        retry = Retry(self._retry_timeout_s)
        while True:
            response = self._http.request("POST", path, body, headers=headers)
            try:
                if await response.read_status() in (0, 200):
                    while events := await response.next_events():
                        for event in events:
                            yield event
                    return
                status, content = await response.read()
            finally:
                await response.close()
            if not await retry.wait_to_retry(status, response.headers.get("retry-after", "")):
                raise error_from_response(status, content, response.headers.get("retry-after", ""))


class Retry:
    """The retry policy of one request: 429 responses, until a deadline `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._min_delay_s = _MIN_DELAY_S

    async def wait_to_retry(self, status: int, retry_after: str) -> bool:
        """Returns True when it is time to retry, False at once if the request must not be retried."""
        return status == TOO_MANY_REQUESTS and await self.wait(retry_after)

    async def wait(self, retry_after: str = "") -> bool:
        """Waits before the next attempt; returns False at once if it would be after the deadline."""
        delay_s = self.next_delay_s(retry_after)
        if asyncio.get_running_loop().time() + delay_s > self._deadline:
            return False
        await asyncio.sleep(delay_s)
        return True

    def next_delay_s(self, retry_after: str) -> float:
        """The longer of Retry-After and the backoff, which doubles with each call."""
        backoff_s, self._min_delay_s = self._min_delay_s, min(2 * self._min_delay_s, _DEFAULT_DELAY_S)
        return max(parse_retry_after(retry_after), backoff_s)


def parse_retry_after(retry_after: str) -> float:
    """The seconds of a Retry-After header, which is a number of seconds or a date.

    >>> parse_retry_after("2"), parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), parse_retry_after("soon")
    (2.0, 0.0, 1.0)
    """
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return _DEFAULT_DELAY_S


def _client(url: str, key: str) -> HttpClient:
    return HttpClient(ServerConfig(url, api_key=key, read_timeout_s=_READ_TIMEOUT_S), url)


async def _request_json(send: Callable[[], HttpResponse], kind: type[T], retry_timeout_s: float) -> T:
    """The decoded body of a response that is not streamed."""
    retry = Retry(retry_timeout_s)
    while True:
        response = send()
        try:
            status, content = await response.read()
        finally:
            await response.close()
        if status // 100 == 2:
            return decode_response(content, kind)
        if not await retry.wait_to_retry(status, response.headers.get("retry-after", "")):
            raise error_from_response(status, content, response.headers.get("retry-after", ""))


def _query_text(value: Any) -> str:
    """A value of ExportPolicy as the gateway reads it from a query."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _message_json(message: Message) -> dict[str, Any]:
    """A message on the wire; the response id distinguishes equal answers."""
    raw = write_message(message)
    return {**raw, "id": message.id} if message.id else raw
