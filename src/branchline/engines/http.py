"""What HTTP engines share: a generation is one streamed request at a time, and its events become chunks.

Closing a generation closes its connection, which aborts it at the server. A pause does the same to every
running request; after it, each generation continues after the ids it has yielded, in a new request under the
new weights. So a server need not be able to pause, and no KV cache of old weights is reused: requests carry
their version where the server keys its cache by it.

All events that have arrived become one chunk, at most once per `SamplingParams.flush_s`, counted from the
last chunk that the consumer received. Tokens that arrived but were not yielded when a generation is closed
are dropped; a continuation samples them again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, FinishReason, LogprobKind, SamplingParams
from branchline.engines.client import HttpClient, HttpResponse, ServerConfig
from branchline.engines.continuation import GenerationState
from branchline.engines.prompt_encoder import PromptEncoder

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
STREAM_INTERVAL = 32
"""Tokens per event that a server is asked for if the call is not streamed. An aborted request loses at most
the tokens of one event; they are sampled again."""


class OutputReader:
    """Reads the events of one response into lists, which `drain` turns into chunks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def read(self, events: Sequence[bytes]) -> None:
        """Appends the tokens of events. Raises EngineError at the first invalid event, after reading those
        before it."""
        raise NotImplementedError

    def drain(self, version: int) -> Chunk:
        """Returns the tokens that were read since the last call, as one chunk."""
        ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
        self.ids, self.logprobs = [], []
        return Chunk(ids, logprobs, version, self.finish_reason)


@dataclass(frozen=True)
class EngineRequest:
    """One request, and the reader of its response."""

    path: str
    body: bytes
    reader: OutputReader
    request_id: str = ""
    """The id that the request has at the server, if the client chooses it."""


class ActiveRequest:
    """A request that was sent, until its response finishes or is aborted."""

    def __init__(self, engine: str, request: EngineRequest, response: HttpResponse, version: int) -> None:
        self.request = request
        self.response = response
        self._engine = engine
        self._version = version
        self._pending_chunks: deque[Chunk] = deque()
        self._error: Exception | None = None
        """Raised after all pending chunks."""

    async def next_chunk(self, not_before: float) -> Chunk | None:
        """Returns the tokens that arrived since the last call, no sooner than the loop time `not_before`
        unless the response ends; None after an abort."""
        reader, response = self.request.reader, self.response
        while not self._pending_chunks:
            if self._error is not None:
                raise self._error
            try:
                events = await response.next_events(not_before)
            except EngineError as error:
                self._error, events = self._error or error, []
            self._read(events)
            # A finished response is read to its end, so that its connection can be used again.
            if reader.finish_reason is not None and self._error is None and not response.is_ended:
                continue
            if reader.ids or reader.finish_reason is not None:
                self._pending_chunks.append(reader.drain(self._version))
            elif not events and response.is_ended and not self._pending_chunks and self._error is None:
                if response.is_aborted:
                    return None
                self._error = EngineError(f"{self._engine}: the stream ended before its generation did")
        return self._pending_chunks.popleft()

    def set_version(self, version: int) -> None:
        """Tokens that arrive from now on have the new version; those that have arrived keep the old one."""
        self._read(self.response.events_nowait())
        if self.request.reader.ids:
            self._pending_chunks.append(self.request.reader.drain(self._version))
        self._version = version

    def _read(self, events: Sequence[bytes]) -> None:
        if self._error is not None:
            return  # Tokens after an invalid event would be at the wrong position.
        try:
            self.request.reader.read(events)
        except EngineError as error:
            self._error = error


class HttpEngine:
    """Base class of HTTP engines. A subclass builds requests and names the server's control endpoints."""

    kind: ClassVar[str]
    default_logprob_kind: ClassVar[LogprobKind]
    pause_endpoint: ClassVar[tuple[str, Mapping[str, Any]]]
    """Path and body."""
    resume_endpoint: ClassVar[tuple[str, Mapping[str, Any]]]
    version_options: ClassVar[Mapping[str, Any]] = {}
    """Further fields of an `/update_weight_version` request."""

    def __init__(
        self,
        server: ServerConfig | str,
        *,
        name: str = "",
        version: int = 0,
        logprob_kind: LogprobKind | None = None,
        max_context: int | None = None,
    ) -> None:
        server = ServerConfig(server) if isinstance(server, str) else server
        self.name = name or f"{self.kind}@{server.host_port}"
        self.version = version
        self.logprob_kind: LogprobKind = logprob_kind or self.default_logprob_kind
        self.max_context = max_context
        self.client = HttpClient(server, server.base_url)
        self.prompt_encoder = PromptEncoder()
        self._active_requests: set[ActiveRequest] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._update_lock = asyncio.Lock()
        """Held by pause and resume: one is complete, at the server too, before the next begins."""
        self._is_server_paused = False
        self._is_closed = False

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        state = GenerationState(prompt_ids, params)
        clock = asyncio.get_running_loop().time
        not_before = 0.0
        while (finish_reason := state.finish_reason) is None:
            while not (self._resumed.is_set() or self._is_closed):
                await self._resumed.wait()
            if self._is_closed:
                raise EngineError(f"{self.name}: closed")
            request = self.build_request(state.prompt_ids, state.remaining_params, session)
            response = self.client.request("POST", request.path, request.body)
            active = ActiveRequest(self.name, request, response, self.version)
            self._active_requests.add(active)
            try:
                while (chunk := await active.next_chunk(not_before)) is not None:
                    state.add(chunk)
                    not_before = clock() + params.flush_s
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            finally:
                self._active_requests.discard(active)
                await self._close_request(active)
        yield state.final_chunk(finish_reason, self.version)

    def build_request(self, prompt_ids: Ids, params: SamplingParams, session: str = "") -> EngineRequest:
        """Returns the request that samples a continuation of the prompt."""
        raise NotImplementedError

    async def abort_request(self, request: EngineRequest) -> None:
        """Called after a connection was closed early, for servers that do not abort its request then."""

    async def ready(self) -> None:
        """Raises EngineError until the server answers."""
        raise NotImplementedError

    def release_session(self, session: str) -> None:
        pass  # The prompt cache is bounded and drops the least recently used session.

    async def pause(self) -> None:
        """Pauses every generation. When it returns, the server runs none of our requests."""
        async with self._update_lock:
            self._resumed.clear()
            await self._abort_active_requests()
            self._is_server_paused = True  # Stays so if the response is lost.
            self._is_server_paused = await self.client.post_control(*self.pause_endpoint)

    async def resume(self, version: int | None = None) -> None:
        """If it fails, every generation is paused, and no token was sampled under the new version."""
        async with self._update_lock:
            self._resumed.clear()
            try:
                await self._resume_server(version)
            except BaseException:
                # Without a pause before it, requests run under weights that are now unknown.
                await self._abort_active_requests()
                raise
            if version is not None:
                for active in self._active_requests:
                    active.set_version(version)
                self.version = version
            self._resumed.set()

    async def close(self) -> None:
        """Ends every generation: it yields the tokens that have arrived, then raises EngineError."""
        self._is_closed = True
        self._resumed.set()
        await self._abort_active_requests()
        await self.client.close()

    async def load_model_info(self) -> str:
        """Returns the name of the server's first model, and sets `max_context` to its context length."""
        models = await self.client.get_json("/v1/models")
        try:
            model = models["data"][0]
            if self.max_context is None:
                self.max_context = model.get("max_model_len")
            return str(model["id"])
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name}: /v1/models returned {models!r}, expected a model") from error

    async def _resume_server(self, version: int | None) -> None:
        if version is not None:
            body = {"new_version": str(version), **self.version_options}
            await self.client.post_control("/update_weight_version", body)
        if self._is_server_paused:
            await self.client.post_control(*self.resume_endpoint)
            self._is_server_paused = False

    async def _abort_active_requests(self) -> None:
        await asyncio.gather(*[self._close_request(active) for active in self._active_requests])

    async def _close_request(self, active: ActiveRequest) -> None:
        is_complete = active.response.is_ended
        await active.response.close()
        if not is_complete:
            await self.abort_request(active.request)
