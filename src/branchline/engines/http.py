"""Engines behind HTTP: one small streaming client, and what all such engines share.

A generation is one request at a time. Closing its stream closes the connection, which aborts it at the
server. A pause does the same to every running request: after it, each goes on behind the ids it has
emitted, in a new request under the new weights. So no server has to know how to pause, and no key-value
cache of old weights survives: requests name their version where the server keys its cache by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, LogprobKind, SamplingParams
from branchline.engines.relay import Progress, Pump

# The server's way of saying that this request can never be answered, here or elsewhere.
REFUSALS = frozenset({400, 413, 422})
# A control endpoint that this server does not have, or does not open to us.
ABSENT = frozenset({401, 403, 404, 405, 501})


@dataclass(frozen=True)
class Server:
    """Where an engine listens, and how long to wait for it."""

    url: str
    api_key: str = field(default="", repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 600.0
    """Between two pieces of a stream; the first waits for the server's queue and the whole prefill."""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise InputError(f"url: got {self.url!r}, expected http://HOST:PORT")

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def place(self) -> str:
        """Host and port: the address as a name, without what might be secret in it."""
        return urlsplit(self.url).netloc.rpartition("@")[2]


class HttpClient:
    """Requests to one server. Every failure is an EngineError that says where and in whose words."""

    def __init__(self, server: Server, base_url: str) -> None:
        self.place = server.place
        headers = {"content-type": "application/json"}
        if server.api_key:
            headers["authorization"] = f"Bearer {server.api_key}"
        self._base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(server.read_timeout_s, connect=server.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def get(self, path: str) -> Any:
        """The JSON that a path answers, or None for an empty body."""
        return _json(await self._ask("GET", path))

    async def control(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Asks for something beside generations; False where the server has no such thing."""
        try:
            await self._ask("POST", path, msgspec.json.encode(body or {}), timeout_s)
        except _AbsentError:
            return False
        return True

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event of an answer. Closing this closes the connection.

        An answer is read to its very end, so that its connection can be used again.
        """
        request = self._client.build_request("POST", self._base_url + path, content=body)
        try:
            response = await self._client.send(request, stream=True)
            try:
                if not response.is_success:
                    raise refusal(self.place, response.status_code, await response.aread())
                rest = b""
                async for piece in response.aiter_raw():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            data = line[5:].strip()
                            if data != b"[DONE]":
                                yield data
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._broken(error) from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            response = await self._client.request(
                method, self._base_url + path, content=body, timeout=timeout
            )
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        if response.status_code in ABSENT:
            raise _AbsentError(f"{self.place}{path}: status {response.status_code}")
        if not response.is_success:
            raise refusal(self.place, response.status_code, response.content)
        return response

    def _broken(self, error: httpx.HTTPError) -> EngineError:
        return EngineError(f"{self.place}: {type(error).__name__}: {error}".rstrip(": "))


class _AbsentError(EngineError):
    """An endpoint that is not there for us."""


class HttpEngine:
    """What engines behind HTTP have in common; a subclass says what one request is."""

    def __init__(
        self,
        server: Server | str,
        *,
        name: str = "",
        kind: str,
        version: int = 0,
        logprob_kind: LogprobKind,
        max_context: int | None = None,
    ) -> None:
        server = Server(server) if isinstance(server, str) else server
        self.name = name or f"{kind}@{server.place}"
        self.version = version
        self.logprob_kind: LogprobKind = logprob_kind
        self.max_context = max_context
        self.client = HttpClient(server, server.root)
        self._running: set[Pump] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        """A pause is over before a resume begins, at the server too."""
        self._closed = False

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        progress = Progress(prompt_ids, params)
        while (finish := progress.finish) is None:
            while not self._open.is_set():
                await self._open.wait()
            if self._closed:
                raise EngineError(f"{self.name}: closed")
            pump = Pump(self.request(progress.prompt_ids, progress.params))
            self._running.add(pump)
            try:
                async for chunk in pump:
                    progress.add(chunk)
                    yield chunk
                    if chunk.finish is not None:
                        return
            finally:
                self._running.discard(pump)
                await pump.cut()
        yield progress.end(finish, self.version)

    def request(self, prompt_ids: Ids, params: SamplingParams) -> AsyncIterator[Chunk]:
        """One request, from its first chunk to its finish."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Holds every generation; when it returns, nothing of ours runs at the server."""
        async with self._turn:
            self._open.clear()
            await self._cut()
            await self.pause_server()

    async def resume(self, version: int | None = None) -> None:
        async with self._turn:
            self.version = self.version if version is None else version
            try:
                await self.resume_server(version)
            finally:
                self._open.set()

    async def pause_server(self) -> None:
        """Tells the server too, where it can be told."""

    async def resume_server(self, version: int | None) -> None:
        """Undoes `pause_server`; a new version is told to a server that keeps one."""

    async def close(self) -> None:
        """Ends what still runs, with an error for those who wait for it."""
        self._closed = True
        self._open.set()
        await self._cut()
        await self.client.close()

    async def read_model(self) -> str:
        """The first model that the server serves; its context length becomes `max_context`."""
        listed = await self.client.get("/v1/models")
        try:
            model = listed["data"][0]
            if self.max_context is None:
                self.max_context = model.get("max_model_len")
            return str(model["id"])
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name}: /v1/models answered {listed!r}, expected a model") from error

    async def _cut(self) -> None:
        await asyncio.gather(*[pump.cut() for pump in self._running])


def refusal(place: str, status: int, body: bytes) -> EngineError:
    """The error for an answer that is none, in the server's own words."""
    try:
        words = _words(msgspec.json.decode(body))
    except msgspec.DecodeError:
        words = ""
    words = words or body.decode(errors="replace").strip()[:500] or "no reason given"
    kind = EngineInputError if status in REFUSALS else EngineError
    return kind(f"{place}: status {status}: {words}")


def error_event(place: str, event: bytes) -> EngineError:
    """The error that a stream ended with: `{"error": {"message": …, "code": 400}}` and its variants."""
    given = msgspec.json.decode(event)
    error = given.get("error")
    code = (error if isinstance(error, dict) else given).get("code")
    return refusal(place, code if isinstance(code, int) else 500, event)


def _words(given: Any) -> str:
    while isinstance(given, dict):
        given = next((given[key] for key in ("error", "message", "detail") if given.get(key)), "")
    return given if isinstance(given, str) else str(given)


def _json(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content) if response.content else None
    except msgspec.DecodeError as error:
        raise EngineError(f"{response.url.path}: not JSON: {response.text[:200]!r}") from error
