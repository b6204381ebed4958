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
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, Finish, LogprobKind, SamplingParams
from branchline.engines.client import HttpClient, Reply
from branchline.engines.client import Server as Server
from branchline.engines.prompts import PromptWriter
from branchline.engines.relay import Progress

# How many ids a server may gather before it says them, where nobody reads along. A cut loses those it has
# gathered: they are sampled again.
GATHERED = 32
BUFFERED_FLUSH_S = 0.25
"""The least time between two chunks where nobody reads along."""


class Reader:
    """Reads the events of one answer; what it has read waits in lists until it is taken as a chunk."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None

    def read(self, events: Sequence[bytes]) -> None:
        """Appends what events say. Raises EngineError at the first wrong one, behind all that was right."""
        raise NotImplementedError

    def take(self, version: int) -> Chunk:
        """What was read since the last call, as one chunk."""
        ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
        self.ids, self.logprobs = [], []
        return Chunk(ids, logprobs, version, self.finish)


@dataclass(frozen=True)
class Ask:
    """One request, and who reads its answer."""

    path: str
    body: bytes
    reader: Reader
    id: str = ""
    """What the server calls it, where that is ours to say."""


class Run:
    """A request that was made, from its first chunk to its finish or its cut."""

    def __init__(self, engine: str, ask: Ask, reply: Reply, version: int, interval_s: float) -> None:
        self.ask = ask
        self.reply = reply
        self._engine = engine
        self._version = version
        self._interval_s = interval_s
        self._ready: deque[Chunk] = deque()
        self._error: Exception | None = None
        """What comes behind all that is ready."""

    async def next(self) -> Chunk | None:
        """The next chunk; None behind a cut."""
        reader, reply = self.ask.reader, self.reply
        while not self._ready:
            if self._error is not None:
                raise self._error
            try:
                events = await reply.events(self._interval_s)
            except EngineError as error:
                self._error, events = self._error or error, []
            self._read(events)
            # A finished answer is read to its very end, so that its connection can be used again.
            if reader.finish is not None and self._error is None and not reply.is_over:
                continue
            if reader.ids or reader.finish is not None:
                self._ready.append(reader.take(self._version))
            elif not events and reply.is_over and not self._ready and self._error is None:
                if reply.was_cut:
                    return None
                self._error = EngineError(f"{self._engine}: the stream ended before its generation did")
        return self._ready.popleft()

    def turn(self, version: int) -> None:
        """From now on ids are sampled under another version; those that have arrived were not."""
        self._read(self.reply.arrived())
        if self.ask.reader.ids:
            self._ready.append(self.ask.reader.take(self._version))
        self._version = version

    def _read(self, events: Sequence[bytes]) -> None:
        if self._error is not None:
            return  # Behind a gap nothing is right.
        try:
            self.ask.reader.read(events)
        except EngineError as error:
            self._error = error


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
        self.prompts = PromptWriter()
        self._running: set[Run] = set()
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
            while not (self._open.is_set() or self._closed):
                await self._open.wait()
            if self._closed:
                raise EngineError(f"{self.name}: closed")
            ask = self.ask(progress.prompt_ids, progress.params, session)
            reply = self.client.post(ask.path, ask.body)
            interval_s = BUFFERED_FLUSH_S if params.whole else params.flush_s
            run = Run(self.name, ask, reply, self.version, interval_s)
            self._running.add(run)
            try:
                while (chunk := await run.next()) is not None:
                    progress.add(chunk)
                    yield chunk
                    if chunk.finish is not None:
                        return
            finally:
                self._running.discard(run)
                await self._leave(run)
        yield progress.end(finish, self.version)

    def ask(self, prompt_ids: Ids, params: SamplingParams, session: str = "") -> Ask:
        """The request for what is to be sampled behind a prompt."""
        raise NotImplementedError

    async def abort(self, ask: Ask) -> None:
        """Tells the server that a request was left, where a closed connection does not tell it enough."""

    async def pause(self) -> None:
        """Holds every generation; when it returns, nothing of ours runs at the server."""
        async with self._turn:
            self._open.clear()
            await self._cut()
            await self.pause_server()

    async def resume(self, version: int | None = None) -> None:
        """Where it fails every generation is held, and none was sampled under the new version."""
        async with self._turn:
            self._open.clear()
            try:
                await self.resume_server(version)
            except BaseException:
                # Without a pause before it something runs, and under which weights is not known any more.
                await self._cut()
                raise
            if version is not None:
                for run in self._running:
                    run.turn(version)
                self.version = version
            self._open.set()

    async def pause_server(self) -> None:
        """Tells the server too, where it can be told."""

    async def resume_server(self, version: int | None) -> None:
        """Undoes `pause_server`; a new version is told to a server that keeps one."""

    async def close(self) -> None:
        """Ends what still runs: what has arrived is handed out, and an error behind it."""
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
        await asyncio.gather(*[self._leave(run) for run in self._running])

    async def _leave(self, run: Run) -> None:
        if not run.reply.is_over:
            await run.reply.close()
            await self.abort(run.ask)
