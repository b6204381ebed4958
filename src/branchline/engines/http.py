"""What engines behind HTTP share: a generation is one request at a time, and what arrives becomes chunks.

Closing a generation closes its connection, which aborts it at the server. A pause does the same to every
running request: after it, each goes on behind the ids it has emitted, in a new request under the new
weights. So no server has to know how to pause, and no key-value cache of old weights survives: requests name
their version where the server keys its cache by it.

All events that have arrived when the consumer reads become one chunk, and it reads at most once per
`SamplingParams.flush_s`, so the cost of a token does not grow with the number of events. Tokens that had
arrived when a generation is closed and were not yielded yet are dropped: a continuation samples them again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import numpy as np

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, FinishReason, LogprobKind, SamplingParams
from branchline.engines.client import HttpClient, HttpResponse
from branchline.engines.client import ServerConfig as ServerConfig
from branchline.engines.continuation import GenerationState
from branchline.engines.prompt_encoder import PromptEncoder

# How many ids a server may gather before it says them, where nobody reads along. A cut loses those it has
# gathered: they are sampled again.
STREAM_INTERVAL = 32


class OutputReader:
    """Reads the events of one answer; what it has read waits in lists until it is taken as a chunk."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def read(self, events: Sequence[bytes]) -> None:
        """Appends what events say. Raises EngineError at the first wrong one, behind all that was right."""
        raise NotImplementedError

    def drain(self, version: int) -> Chunk:
        """What was read since the last call, as one chunk."""
        ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
        self.ids, self.logprobs = [], []
        return Chunk(ids, logprobs, version, self.finish_reason)


@dataclass(frozen=True)
class EngineRequest:
    """One request, and who reads its answer."""

    path: str
    body: bytes
    reader: OutputReader
    request_id: str = ""
    """What the server calls it, where that is ours to say."""


class ActiveRequest:
    """A request that was made, from its first chunk to its finish or its cut."""

    def __init__(
        self, engine: str, ask: EngineRequest, reply: HttpResponse, version: int, flush_s: float
    ) -> None:
        self.request = ask
        self.response = reply
        self._engine = engine
        self._version = version
        self._flush_s = flush_s
        self._pending_chunks: deque[Chunk] = deque()
        self._error: Exception | None = None
        """What comes behind all that is ready."""

    async def next_chunk(self) -> Chunk | None:
        """The next chunk; None behind a cut."""
        reader, reply = self.request.reader, self.response
        while not self._pending_chunks:
            if self._error is not None:
                raise self._error
            try:
                events = await reply.next_events(self._flush_s)
            except EngineError as error:
                self._error, events = self._error or error, []
            self._read(events)
            # A finished answer is read to its very end, so that its connection can be used again.
            if reader.finish_reason is not None and self._error is None and not reply.is_ended:
                continue
            if reader.ids or reader.finish_reason is not None:
                self._pending_chunks.append(reader.drain(self._version))
            elif not events and reply.is_ended and not self._pending_chunks and self._error is None:
                if reply.is_aborted:
                    return None
                self._error = EngineError(f"{self._engine}: the stream ended before its generation did")
        return self._pending_chunks.popleft()

    def set_version(self, version: int) -> None:
        """From now on ids are sampled under another version; those that have arrived were not."""
        self._read(self.response.events_nowait())
        if self.request.reader.ids:
            self._pending_chunks.append(self.request.reader.drain(self._version))
        self._version = version

    def _read(self, events: Sequence[bytes]) -> None:
        if self._error is not None:
            return  # Behind a gap nothing is right.
        try:
            self.request.reader.read(events)
        except EngineError as error:
            self._error = error


class HttpEngine:
    """What engines behind HTTP have in common; a subclass says what one request is."""

    def __init__(
        self,
        server: ServerConfig | str,
        *,
        name: str = "",
        kind: str,
        version: int = 0,
        logprob_kind: LogprobKind,
        max_context: int | None = None,
    ) -> None:
        server = ServerConfig(server) if isinstance(server, str) else server
        self.name = name or f"{kind}@{server.host_port}"
        self.version = version
        self.logprob_kind: LogprobKind = logprob_kind
        self.max_context = max_context
        self.client = HttpClient(server, server.base_url)
        self.prompt_encoder = PromptEncoder()
        self._active_requests: set[ActiveRequest] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._update_lock = asyncio.Lock()
        """A pause is over before a resume begins, at the server too."""
        self._is_closed = False

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        progress = GenerationState(prompt_ids, params)
        while (finish := progress.finish_reason) is None:
            while not (self._resumed.is_set() or self._is_closed):
                await self._resumed.wait()
            if self._is_closed:
                raise EngineError(f"{self.name}: closed")
            ask = self.build_request(progress.prompt_ids, progress.remaining_params, session)
            reply = self.client.post(ask.path, ask.body)
            run = ActiveRequest(self.name, ask, reply, self.version, params.flush_s)
            self._active_requests.add(run)
            try:
                while (chunk := await run.next_chunk()) is not None:
                    progress.add(chunk)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            finally:
                self._active_requests.discard(run)
                await self._cancel_request(run)
        yield progress.final_chunk(finish, self.version)

    def build_request(self, prompt_ids: Ids, params: SamplingParams, session: str = "") -> EngineRequest:
        """The request for what is to be sampled behind a prompt."""
        raise NotImplementedError

    async def abort_request(self, ask: EngineRequest) -> None:
        """Tells the server that a request was left, where a closed connection does not tell it enough."""

    async def ready(self) -> None:
        """Raises EngineError until the server answers."""
        raise NotImplementedError

    def release_session(self, session: str) -> None:
        pass

    async def pause(self) -> None:
        """Holds every generation; when it returns, nothing of ours runs at the server."""
        async with self._update_lock:
            self._resumed.clear()
            await self._cancel_active_requests()
            await self.pause_server()

    async def resume(self, version: int | None = None) -> None:
        """Where it fails every generation is held, and none was sampled under the new version."""
        async with self._update_lock:
            self._resumed.clear()
            try:
                await self.resume_server(version)
            except BaseException:
                # Without a pause before it something runs, and under which weights is not known any more.
                await self._cancel_active_requests()
                raise
            if version is not None:
                for run in self._active_requests:
                    run.set_version(version)
                self.version = version
            self._resumed.set()

    async def pause_server(self) -> None:
        """Tells the server too, where it can be told."""

    async def resume_server(self, version: int | None) -> None:
        """Undoes `pause_server`; a new version is told to a server that keeps one."""

    async def close(self) -> None:
        """Ends what still runs: what has arrived is handed out, and an error behind it."""
        self._is_closed = True
        self._resumed.set()
        await self._cancel_active_requests()
        await self.client.close()

    async def load_model_info(self) -> str:
        """The first model that the server serves; its context length becomes `max_context`."""
        listed = await self.client.get_json("/v1/models")
        try:
            model = listed["data"][0]
            if self.max_context is None:
                self.max_context = model.get("max_model_len")
            return str(model["id"])
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name}: /v1/models answered {listed!r}, expected a model") from error

    async def _cancel_active_requests(self) -> None:
        await asyncio.gather(*[self._cancel_request(run) for run in self._active_requests])

    async def _cancel_request(self, run: ActiveRequest) -> None:
        if not run.response.is_ended:
            await run.response.close()
            await self.abort_request(run.request)
