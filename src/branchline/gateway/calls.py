"""A call's life in the gateway: prepare, generate, parse as it arrives, commit, deliver.

Whatever protocol asks, this is what happens, once. Events leave as tokens arrive; the last one, `Done`,
leaves only after the call is in the tree and in the journal. A generation that fails changes nothing; one
whose client goes away is aborted and kept, as far as it came, as a cancelled call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from branchline.chat.base import IncrementalParser
from branchline.chat.parsing.base import Delta
from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.errors import SessionError
from branchline.core.message import Message, ToolCall
from branchline.core.runs import NO_IDS, Floats, Ids, as_ids
from branchline.engines.base import Chunk, Engine, SamplingParams
from branchline.gateway.live import LiveSession
from branchline.tree.tree import Turn

_THREAD_LETTERS = 50_000
"""Requests with more text than this are prepared in a thread, so that the event loop stays free."""


@dataclass(frozen=True)
class Asked:
    """What a protocol asks for: a conversation, how to sample, how many answers."""

    request: Request
    params: SamplingParams
    choices: int = 1


@dataclass(frozen=True)
class Said:
    """The next bit of an answer, and the tokens it came with."""

    choice: int
    deltas: Sequence[Delta]
    ids: Ids
    logprobs: Floats | None


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    message: Message
    finish: str
    """`stop`, `length` or `tool_calls`."""
    ids: Ids
    logprobs: Floats | None


@dataclass(frozen=True)
class Done:
    """The call is in the tree and safe."""

    call: Call
    answers: Sequence[Answer]
    prompt_ids: Ids


Event = Said | Done


@dataclass
class _Choice:
    """One answer while it is being sampled."""

    index: int
    parser: IncrementalParser
    chunks: list[Chunk] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: str = "length"

    def take(self, chunk: Chunk) -> Said:
        self.chunks.append(chunk)
        deltas = self.parser.feed(chunk.ids.tolist())
        if chunk.finish is not None:
            self.finish = chunk.finish
            deltas = [*deltas, *self.parser.finish(chunk.finish)]
        return Said(self.index, [self._named(delta) for delta in deltas], chunk.ids, chunk.logprobs)

    def _named(self, delta: Delta) -> Delta:
        """Ids on the wire are ours, unless the model's format has its own."""
        if delta.call is None:
            return delta
        call = delta.call
        if not call.id:
            call = ToolCall(call.name, call.arguments, "call_" + secrets.token_hex(12), call.kind)
        self.calls.append(call)
        return replace(delta, call=call)

    @property
    def ids(self) -> Ids:
        return as_ids(np.concatenate([NO_IDS, *(chunk.ids for chunk in self.chunks)]))

    @property
    def logprobs(self) -> Floats | None:
        if all(chunk.logprobs is None for chunk in self.chunks):
            return None
        parts = [
            np.full(len(chunk.ids), np.nan, np.float32) if chunk.logprobs is None else chunk.logprobs
            for chunk in self.chunks
        ]
        return np.concatenate(parts)

    @property
    def message(self) -> Message:
        said = self.parser.message
        return Message("assistant", said.text, reasoning=said.reasoning, calls=tuple(self.calls))

    def generation(self, finish: str) -> Generation:
        versions = np.repeat(
            np.array([chunk.version for chunk in self.chunks], np.int64),
            [len(chunk.ids) for chunk in self.chunks],
        )
        return Generation(self.ids, self.logprobs, versions, finish, self.message)

    @property
    def answer(self) -> Answer:
        finish = "tool_calls" if self.calls and self.finish == "stop" else self.finish
        return Answer(self.message, finish, self.ids, self.logprobs)


@dataclass
class Times:
    """Where a call's time went, in seconds."""

    prepare: float = 0.0
    generate: float = 0.0
    commit: float = 0.0


async def run_call(
    live: LiveSession, engine: Engine, asked: Asked, call_id: str, times: Times | None = None
) -> AsyncGenerator[Event, None]:
    """Runs one call to its end. Closing the iterator early is the client going away."""
    times = times or Times()
    live.require_open()
    _within_limits(live)
    started = time.perf_counter()
    turn = await _prepare(live, asked.request)
    times.prepare = time.perf_counter() - started
    codec = live.session.codec
    choices = [
        _Choice(index, codec.parser(asked.request.tools, asked.request.template))
        for index in range(asked.choices)
    ]
    params = _within_room(engine, turn, replace(asked.params, stop_ids=tuple(sorted(codec.stop_ids))))
    started = time.perf_counter()
    live.in_flight += 1
    try:
        if params.max_tokens > 0:
            async with aclosing(_generate(engine, turn.prompt_ids, params, choices, live.id)) as said:
                async for event in said:
                    yield event
    except (GeneratorExit, asyncio.CancelledError):
        _keep_cancelled(live, turn, choices, call_id)
        raise
    finally:
        live.in_flight -= 1
    times.generate = time.perf_counter() - started
    started = time.perf_counter()
    call = await _commit(live, turn, choices, call_id)
    times.commit = time.perf_counter() - started
    try:
        yield Done(call, [choice.answer for choice in choices], turn.prompt_ids)
    except (GeneratorExit, asyncio.CancelledError):
        live.session.deliver(call, Delivery.LOST)
        raise
    live.session.deliver(call)


async def _prepare(live: LiveSession, request: Request) -> Turn:
    letters = sum(len(message.text) for message in request.messages)
    if letters < _THREAD_LETTERS:
        return live.session.prepare(request)
    return await asyncio.to_thread(live.session.prepare, request)


def _within_limits(live: LiveSession) -> None:
    limits = live.options.limits
    calls = limits.get("calls")
    if calls is not None and len(live.session.tree.calls) + live.in_flight >= calls:
        raise SessionError("closed", f"session {live.id} may make {calls} calls and has made them")
    tokens = limits.get("tokens")
    if tokens is not None and live.sampled_tokens >= tokens:
        raise SessionError("closed", f"session {live.id} may sample {tokens} tokens and has sampled them")


def _within_room(engine: Engine, turn: Turn, params: SamplingParams) -> SamplingParams:
    """A prompt at the limit leaves room for no token, and an empty answer is an answer."""
    if engine.max_context is None:
        return params
    room = max(0, engine.max_context - len(turn.prompt_ids))
    return replace(params, max_tokens=min(params.max_tokens, room))


async def _generate(
    engine: Engine, prompt_ids: Ids, params: SamplingParams, choices: Sequence[_Choice], session: str
) -> AsyncGenerator[Said, None]:
    """All choices side by side, their bits in the order they arrive."""
    if len(choices) == 1:
        async with aclosing(engine.generate(prompt_ids, params, session=session)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield choices[0].take(chunk)
        return
    queue: asyncio.Queue[Said | Exception | None] = asyncio.Queue()

    async def one(choice: _Choice) -> None:
        seed = None if params.seed is None else params.seed + choice.index
        own = replace(params, seed=seed)
        try:
            async with aclosing(engine.generate(prompt_ids, own, session=session)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    queue.put_nowait(choice.take(chunk))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(one(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _commit(live: LiveSession, turn: Turn, choices: Sequence[_Choice], call_id: str) -> Call:
    # Finalized or aborted while it was being sampled: the answer comes too late and changes nothing.
    live.require_open()
    committed = live.session.commit(
        turn, *(choice.generation(choice.finish) for choice in choices), call_id=call_id
    )
    if committed.durable is not None:
        try:
            await asyncio.wrap_future(committed.durable)
        except asyncio.CancelledError:
            # It will be in the journal, but nobody is there to be told.
            live.session.deliver(committed.call, Delivery.LOST)
            raise
    live.last_used = time.monotonic()
    return committed.call


def _keep_cancelled(live: LiveSession, turn: Turn, choices: Sequence[_Choice], call_id: str) -> None:
    if live.is_closed or not any(len(choice.ids) for choice in choices):
        return
    generations = [choice.generation("cancelled") for choice in choices]
    call = live.session.commit(turn, *generations, call_id=call_id).call
    live.session.deliver(call, Delivery.CANCELLED)
