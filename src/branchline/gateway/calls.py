"""A call's life in the gateway: prepare, generate, parse as it arrives, commit, deliver.

Whatever protocol asks, this is what happens, once. Events leave as tokens arrive; the last one, `Done`,
leaves only after the call is in the tree and in the journal. A generation that fails changes nothing; one
whose client goes away is aborted and kept, as far as it came, as a cancelled call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.errors import ContextLengthError, MessageError, SessionError
from branchline.core.runs import Ids
from branchline.engines.base import Engine, SamplingParams
from branchline.gateway.answers import Answer, Choice, Said
from branchline.gateway.live import LiveSession
from branchline.gateway.record import CallRecord
from branchline.gateway.resume import left_by, take_up
from branchline.tree.tree import Turn

_THREAD_LETTERS = 50_000
"""Prompts with more text to be looked at than this are prepared in a thread, for the event loop's sake."""


@dataclass(frozen=True)
class Asked:
    """What a protocol asks for: a conversation, how to sample, how many answers."""

    request: Request
    params: SamplingParams
    choices: int = 1
    single_call: bool = False
    """At most one tool call an answer."""
    prompt_ids: Ids | None = None
    """A bare prompt's ids; None for a conversation."""
    new_bytes: int | None = None
    """How much of the conversation the session had not read before; None where nobody has counted."""


@dataclass(frozen=True)
class Done:
    """The call is in the tree and safe."""

    call: Call
    answers: Sequence[Answer]
    prompt_tokens: int
    prompt_ids: Ids

    @property
    def sampled_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that did not have to be encoded."""
        return max(0, self.prompt_tokens - self.call.encoded_tokens)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest policy that had a part in it; None where that is not known."""
        versions = [version for answer in self.answers for version in answer.versions]
        return (min(versions), max(versions)) if versions else None


Event = Said | Done


async def run_call(
    live: LiveSession, engine: Engine, asked: Asked, record: CallRecord, max_prompt_tokens: int | None = None
) -> AsyncGenerator[Event, None]:
    """Runs one call to its end. Closing the iterator early is the client going away."""
    asked = replace(asked, request=replace(asked.request, sampling=_sampling(engine, asked.params)))
    turn = await begin(live, asked, record, max_prompt_tokens)
    choices = _choices(live, asked, record.call_id)
    params = _params(engine, turn, asked, live, streamed=record.streamed)
    prompt_ids, before = turn.prompt_ids, await left_by(live, turn, asked.choices)
    over = live.running[record.call_id] = asyncio.Event()
    live.in_flight += 1
    try:
        if before:
            told, prompt_ids, params = take_up(choices[0], before, params, prompt_ids)
            for event in told:
                yield event
        if params.max_tokens > 0:
            async with aclosing(_generate(engine, prompt_ids, params, choices, live.id)) as said:
                async for event in said:
                    record.close_phase("queue")
                    yield event
    except (GeneratorExit, asyncio.CancelledError):
        _keep_cancelled(live, turn, choices, record.call_id)
        raise
    finally:
        live.in_flight -= 1
        del live.running[record.call_id]
        over.set()
    record.close_phase("generate")
    generations = [choice.generation(choice.finish) for choice in choices]
    call = await commit(live, turn, generations, record)
    answers = [choice.answer for choice in choices]
    with delivery(live, call):
        yield Done(call, answers, len(turn.prompt_ids), turn.prompt_ids)


async def begin(live: LiveSession, asked: Asked, record: CallRecord, max_prompt_tokens: int | None) -> Turn:
    """The prompt, if the session takes another call."""
    live.require_open()
    _within_limits(live)
    turn = await _prepare(live, asked)
    if max_prompt_tokens is not None and len(turn.prompt_ids) > max_prompt_tokens:
        raise MessageError("prompt", f"{len(turn.prompt_ids)} tokens", f"at most {max_prompt_tokens} tokens")
    record.close_phase("prepare")
    return turn


@contextmanager
def delivery(live: LiveSession, call: Call) -> Iterator[None]:
    """Around the last event: notes whether it was taken."""
    try:
        yield
    except (GeneratorExit, asyncio.CancelledError):
        live.session.deliver(call, Delivery.LOST)
        raise
    live.session.deliver(call)


def _sampling(engine: Engine, params: SamplingParams) -> dict[str, Any]:
    """How a call was sampled, for the record: without it its logprobs cannot be read."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        # A grammar takes tokens away before anything is measured, whatever the engine calls raw.
        "logprobs": "processed" if params.grammar is not None else engine.logprob_kind,
        "engine": engine.name,
    }


def _choices(live: LiveSession, asked: Asked, call_id: str) -> list[Choice]:
    codec, request = live.session.codec, asked.request
    return [
        Choice(
            index,
            codec.plain_parser() if request.raw else codec.parser(request.tools, request.template),
            asked.params.stop,
            asked.single_call,
            call_id,
        )
        for index in range(asked.choices)
    ]


def _params(engine: Engine, turn: Turn, asked: Asked, live: LiveSession, *, streamed: bool) -> SamplingParams:
    """What the engine is asked for. A prompt at the limit leaves room for no token, which is an answer."""
    room, most, length = asked.params.max_tokens, engine.max_context, len(turn.prompt_ids)
    if most is not None:
        if length > most:
            # The words that clients look for when they decide to compact.
            raise ContextLengthError(f"prompt is too long: {length} tokens > {most} maximum context length")
        room = min(room, most - length)
    return replace(
        asked.params,
        max_tokens=room,
        stop=(),
        stop_ids=tuple(sorted(live.session.codec.stop_ids)),
        whole=not (streamed or asked.params.stop or asked.single_call),
    )


async def _prepare(live: LiveSession, asked: Asked) -> Turn:
    request = asked.request
    if asked.prompt_ids is not None:
        return live.session.prepare_ids(request, asked.prompt_ids)
    work = asked.new_bytes
    if work is None or live.session.history == "template":
        # A template is rendered whole, whatever was there before.
        work = sum([len(message.text) for message in request.messages])
    if work < _THREAD_LETTERS:
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


async def _generate(
    engine: Engine, prompt_ids: Ids, params: SamplingParams, choices: Sequence[Choice], session: str
) -> AsyncGenerator[Said, None]:
    """All choices side by side, their bits in the order they arrive."""
    if len(choices) == 1:
        async with aclosing(_one(engine, prompt_ids, params, choices[0], session)) as said:
            async for bit in said:
                yield bit
        return
    queue: asyncio.Queue[Said | Exception | None] = asyncio.Queue()

    async def one(choice: Choice) -> None:
        seed = None if params.seed is None else params.seed + choice.index
        try:
            async with aclosing(
                _one(engine, prompt_ids, replace(params, seed=seed), choice, session)
            ) as said:
                async for event in said:
                    queue.put_nowait(event)
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


async def _one(
    engine: Engine, prompt_ids: Ids, params: SamplingParams, choice: Choice, session: str
) -> AsyncGenerator[Said, None]:
    params = replace(params, left=choice.keep)
    async with aclosing(engine.generate(prompt_ids, params, session=session)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            yield choice.take(chunk)
            if choice.ended:
                return


async def commit(
    live: LiveSession, turn: Turn, generations: Sequence[Generation], record: CallRecord
) -> Call:
    """The call in the tree, once it is safe."""
    # Finalized or aborted while it was being sampled: the answer comes too late and changes nothing.
    live.require_open()
    named = [_named(generation, record.call_id) for generation in generations]
    committed = live.session.commit(turn, *named, call_id=record.call_id)
    if committed.durable is not None:
        try:
            await asyncio.wrap_future(committed.durable)
        except asyncio.CancelledError:
            # It will be in the journal, but nobody is there to be told.
            live.session.deliver(committed.call, Delivery.LOST)
            raise
    live.last_used = time.monotonic()
    record.close_phase("commit")
    return committed.call


def _named(generation: Generation, call_id: str) -> Generation:
    """An answer that knows its response; of equal ones, whoever sends the id back says which is meant."""
    if generation.message is None:
        return generation
    return replace(generation, message=structs.replace(generation.message, id=call_id))


def _keep_cancelled(live: LiveSession, turn: Turn, choices: Sequence[Choice], call_id: str) -> None:
    if live.is_closed or not any(len(choice.ids) for choice in choices):
        return
    generations = [choice.generation("cancelled") for choice in choices]
    call = live.session.commit(turn, *generations, call_id=call_id).call
    live.session.deliver(call, Delivery.CANCELLED)
