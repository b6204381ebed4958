"""What HTTP engines share: a generation is one streamed request at a time, and its events become chunks.

Closing a generation closes its connection, which aborts it at the server. A pause does the same to every
running request; after it, each generation continues after the ids it has yielded, in a new request under the
new weights. So a server need not be able to pause, and no KV cache of old weights is reused: requests carry
their version where the server keys its cache by it.

All events that have arrived become one chunk, at most once per `SamplingParams.flush_s`, counted from the
last chunk that the consumer received. Tokens that arrived but were not yielded when a generation is closed
are dropped; a continuation samples them again.

What a server returns is checked: ids of the vocabulary, logprobs that can be, one choice, no more tokens than
asked for, none after the finish reason. A chunk that fails is an EngineOutputError and is not yielded.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from branchline.chat.vision import ImageSpan
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import EngineError, EngineOutputError
from branchline.core.message import Media
from branchline.core.token_arrays import NO_IDS, Ids, as_ids
from branchline.engines.base import (
    Chunk,
    FinishReason,
    LogprobKind,
    SamplingParams,
    remaining_request,
)
from branchline.engines.client import HttpClient, HttpResponse, ServerConfig

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
STREAM_INTERVAL = 32
"""Tokens per event that a server is asked for if the call is not streamed. An aborted request loses at most
the tokens of one event; they are sampled again."""
_LOWEST_LOGPROB = -3.4028235e38
"""The lowest number of single precision as servers write it, which is rounded down."""
_HIGHEST_LOGPROB = 1e-4
"""Logprobs of almost certain tokens may exceed 0 by a rounding error."""


@dataclass(eq=False)
class EngineRequest:
    """One request, and the tokens of its response that were not yielded yet. A subclass reads the events."""

    engine: str
    response: HttpResponse
    version: int
    """The policy version of tokens that arrive from now on."""
    params: SamplingParams
    request_id: str = ""
    """The id that the request has at the server, if the client chooses it."""
    ids: list[int] = field(default_factory=list)
    """Tokens that were read and are in no chunk yet."""
    logprobs: list[float] = field(default_factory=list)
    count: int = 0
    """Tokens in all chunks so far."""
    finish_reason: FinishReason | None = None
    pending_chunks: deque[Chunk] = field(default_factory=deque)
    error: EngineError | None = None
    """Raised after all pending chunks."""

    def read(self, events: Sequence[bytes]) -> None:
        """Appends the tokens of events. Raises EngineError at the first invalid event, after reading those
        before it."""
        raise NotImplementedError

    async def next_chunk(self, not_before: float) -> Chunk | None:
        """Returns the tokens that arrived since the last call, no sooner than the loop time `not_before`
        unless the response ends; None after an abort."""
        while not self.pending_chunks:
            if self.error is not None:
                raise self.error
            events: list[bytes] = []
            try:
                events = await self.response.next_events(not_before)
                if self.error is None:  # Tokens after an invalid event would be at the wrong position.
                    self.read(events)
            except EngineError as error:
                self._fail(error)
            # A finished response is read to its end, so that its connection can be used again.
            if self.finish_reason is not None and self.error is None and not self.response.is_ended:
                continue
            if self.ids or self.finish_reason is not None:
                self._append_chunk()
            elif not events and self.response.is_ended and not self.pending_chunks and self.error is None:
                if self.response.is_aborted:
                    return None
                self.error = EngineError(f"{self.engine}: the stream ended before its generation did")
        return self.pending_chunks.popleft()

    def set_version(self, version: int) -> None:
        """Tokens that arrive from now on have the new version; those that have arrived keep the old one."""
        events = self.response.events_nowait()
        try:
            if self.error is None:
                self.read(events)
        except EngineError as error:
            self._fail(error)
        if self.ids:
            self._append_chunk()
        self.version = version

    def choice_error(self, index: int, new_ids: Sequence[int]) -> EngineOutputError:
        """The error of an event with another index than 0, or with ids after the finish reason."""
        if index:
            return EngineOutputError(f"{self.engine}: choice {index}, expected 0, the only one asked for")
        return EngineOutputError(f"{self.engine}: {len(new_ids)} ids after the finish reason, expected none")

    def _append_chunk(self) -> None:
        """Makes a chunk of the tokens that were read, or an error of those that cannot be right."""
        self.count += len(self.ids)
        vocab_size, max_tokens = self.params.vocab_size, self.params.max_tokens
        # Chunks are short: Python is faster than array operations.
        wrong_logprobs = [x for x in self.logprobs if not _LOWEST_LOGPROB <= x <= _HIGHEST_LOGPROB]
        if vocab_size is not None and max(self.ids, default=0) >= vocab_size:
            problem = f"id {max(self.ids)}, expected ids below {vocab_size}, the size of the vocabulary"
        elif wrong_logprobs:
            problem = f"logprob {wrong_logprobs[0]:g}, expected a finite number, at most 0"
        elif self.count > max_tokens:
            problem = f"{self.count} tokens, expected at most max_tokens={max_tokens}"
        else:
            ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
            self.pending_chunks.append(Chunk(ids, logprobs, self.version, self.finish_reason))
            self.ids, self.logprobs = [], []
            return
        self._fail(EngineOutputError(f"{self.engine}: {problem}"))

    def _fail(self, error: EngineError) -> None:
        """Keeps the first error. Tokens of an output that cannot be right are dropped, and so is its end."""
        self.error = self.error or error
        if isinstance(error, EngineOutputError):
            self.ids, self.logprobs, self.finish_reason = [], [], None


class PromptEncoder:
    """Encodes the prompts of many sessions as JSON lists of ids; of a known session only the new ids.

    The next prompt of a session mostly begins with its last one, and at 100,000 ids encoding all of it takes
    milliseconds.

    >>> encoder = PromptEncoder()
    >>> encoder.encode(np.array([1, 2], np.int32), "s"), encoder.encode(np.array([1, 2, 3], np.int32), "s")
    (b'[1,2]', b'[1,2,3]')
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._cache: ByteLimitedCache[tuple[Ids, bytes]] = ByteLimitedCache(max_bytes)

    def encode(self, ids: Ids, session: str = "") -> bytes:
        """Returns the ids as JSON, and caches them for the session's next prompt if it has a name."""
        if not session:
            return msgspec.json.encode(ids.tolist())
        cached_ids, encoded = self._cache.get(session) or (NO_IDS, b"")
        count = len(cached_ids)
        if not count or not np.array_equal(ids[:count], cached_ids):
            encoded = msgspec.json.encode(ids.tolist())
        elif len(ids) > count:
            encoded = b"%b,%b" % (encoded[:-1], msgspec.json.encode(ids[count:].tolist())[1:])
        self._cache.put(session, (ids, encoded), ids.nbytes + len(encoded) + 200)
        return encoded


def collapse_placeholders(prompt_ids: Ids, images: Sequence[ImageSpan]) -> Ids:
    """Returns a prompt with one placeholder for each image, as servers expect that process images themselves.

    They repeat it again; the prompt that they report must then be the original one.
    """
    is_kept = np.ones(len(prompt_ids), np.bool_)
    for image in images:
        is_kept[image.offset + 1 : image.offset + image.length] = False
    return as_ids(prompt_ids[is_kept])


def to_data_url(media: Media) -> str:
    """Returns an image as a data URL; servers detect its type from its bytes."""
    return f"data:{media.mime or 'image/png'};base64,{base64.b64encode(media.payload).decode()}"


def check_server_prompt(engine: str, seen: Sequence[int], prompt_ids: Ids) -> None:
    """Raises EngineError unless the prompt that a server saw is the one that it was to see."""
    if not np.array_equal(seen, prompt_ids):
        raise EngineError(
            f"{engine}: the server saw another prompt than the one it was sent: {len(seen)} ids, expected "
            f"{len(prompt_ids)}; its image processor or its tokenizer differs from ours"
        )


class HttpEngine:
    """Base class of HTTP engines. A subclass builds requests and names the server's control endpoints."""

    supports_images = False
    supported_fields: frozenset[str] = frozenset()
    constrains_raw_logprobs = False
    kind: ClassVar[str]
    default_logprob_kind: ClassVar[LogprobKind]
    logprobs_after_truncation: bool | None = True
    greedy_logprob_temperature: float | None = 1.0
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
        self._active_requests: set[EngineRequest] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._update_lock = asyncio.Lock()
        """Held by pause and resume: one is complete, at the server too, before the next begins."""
        self._is_server_paused = False
        self._is_closed = False

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        if params.max_tokens <= 0:
            yield Chunk(version=self.version, finish_reason="length")
            return
        clock = asyncio.get_running_loop().time
        yielded: list[Chunk] = []
        not_before = 0.0
        request_ids, request_params, preempted = prompt_ids, params, 0
        while True:
            while not (self._resumed.is_set() or self._is_closed):
                await self._resumed.wait()
            if self._is_closed:
                raise EngineError(f"{self.name}: closed")
            request = self.build_request(request_ids, request_params, session, images)
            self._active_requests.add(request)
            try:
                while (chunk := await request.next_chunk(not_before)) is not None:
                    if preempted:
                        chunk = msgspec.structs.replace(chunk, num_preempted=preempted)
                    yielded.append(chunk)
                    not_before = clock() + params.flush_s
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            finally:
                self._active_requests.discard(request)
                if not request.response.is_ended:
                    await self._abort(request)
            rest = remaining_request(prompt_ids, params, yielded, self.version)
            if isinstance(rest, Chunk):
                yield rest
                return
            request_ids, request_params = rest
            # A request that ended before its first token is only sent again.
            preempted = yielded[-1].num_preempted + 1 if yielded else 0

    def build_request(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> EngineRequest:
        """Returns the request that samples a continuation of the prompt; reading its response sends it."""
        raise NotImplementedError

    async def abort_at_server(self, request: EngineRequest) -> None:
        """Called after a connection was closed early, for servers that do not abort its request then."""

    async def ready(self) -> None:
        """Raises EngineError until the server answers."""
        raise NotImplementedError

    async def tokenizer_name(self) -> str:
        """Returns the tokenizer that the server reports: a folder there, or a Hugging Face name."""
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
                for request in self._active_requests:
                    request.set_version(version)
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
        requests = [request for request in self._active_requests if not request.response.is_ended]
        await asyncio.gather(*[self._abort(request) for request in requests])

    async def _abort(self, request: EngineRequest) -> None:
        await request.response.close()
        await self.abort_at_server(request)
