"""A call's life in the gateway: prepare, generate, parse as it arrives, commit, deliver.

Whatever protocol asks, this is what happens, once. Events leave as tokens arrive; the last one, `Done`,
leaves only after the call is in the tree and in the journal. A generation that fails changes nothing; one
whose client goes away is aborted and kept, as far as it came, as a cancelled call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.errors import ContextLengthError, JournalError
from branchline.core.token_arrays import Ids
from branchline.engines.base import BUFFERED_FLUSH_S, Engine, SamplingParams
from branchline.runtime.answer import Answer, AnswerBuilder, AnswerDelta
from branchline.runtime.call_record import CallRecord
from branchline.runtime.limits import count_call, reserve_tokens
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.resume import load_partial, replay_partial
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT
from branchline.tree.delta import Delivered
from branchline.tree.tree import Turn

log = logging.getLogger("branchline.gateway")

_THREAD_CHARACTERS = 50_000
"""Prompts with more text to be looked at than this are prepared in a thread, for the event loop's sake."""


@dataclass(frozen=True)
class CallRequest:
    """What a protocol asks for: a conversation, how to sample, how many answers."""

    request: Request
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end an answer. Engines never see them: the runtime ends the generation."""
    single_tool_call: bool = False
    """At most one tool call an answer."""
    tool_choice: object = None
    """Which tool to call, as Chat Completions say it, for an upstream; a model here chooses for itself."""
    raw_prompt: str | Ids | None = None
    """A bare prompt, its text or its ids; None for a conversation."""
    new_bytes: int | None = None
    """How much of the conversation the session had not read before; None where nobody has counted."""


@dataclass(frozen=True)
class CallResult:
    """The call is in the tree and safe."""

    call: Call
    answers: Sequence[Answer]
    prompt_tokens: int
    prompt_ids: Ids
    upstream_completion_tokens: int | None = None
    """What was sampled as an upstream counts it, which knows better than ids that were made from its text."""

    @property
    def sampled_tokens(self) -> int:
        if self.upstream_completion_tokens is not None:
            return self.upstream_completion_tokens
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


CallEvent = AnswerDelta | CallResult


async def run_call(
    live: ManagedSession,
    engine: Engine,
    asked: CallRequest,
    record: CallRecord,
    max_prompt_tokens: int | None = None,
    flush_s: float = 0.0,
) -> AsyncGenerator[CallEvent, None]:
    """Runs one call to its end. Closing the iterator early is the client going away."""
    asked = replace(asked, request=replace(asked.request, sampling=_sampling_record(engine, asked.params)))
    with count_call(live, asked, record):
        turn = await prepare_call(live, asked, record, max_prompt_tokens)
        before = await load_partial(live, turn, asked.n, record.call_id)
        with reserve_tokens(live, asked, _max_answer_tokens(engine, turn, asked), before) as allowed:
            choices = _answer_builders(live, asked, record.call_id)
            params = _engine_params(asked, live, allowed, flush_s, streamed=record.streamed)
            prompt_ids = turn.prompt_ids
            try:
                if before:
                    told, prompt_ids, params = replay_partial(choices[0], before, params, prompt_ids)
                    for event in told:
                        yield event
                if params.max_tokens > 0:
                    sampled = _generate_one if len(choices) == 1 else _generate_concurrently
                    async with aclosing(sampled(engine, prompt_ids, params, choices, live.id)) as said:
                        async for event in said:
                            record.end_phase("queue")
                            yield event
            except (GeneratorExit, asyncio.CancelledError):
                _commit_cancelled(live, turn, choices, record.call_id)
                raise
    record.end_phase("generate")
    generations = [choice.generation(choice.finish_reason) for choice in choices]
    call = await commit_call(live, turn, generations, record)
    answers = [choice.answer for choice in choices]
    record.result = CallResult(call, answers, len(turn.prompt_ids), turn.prompt_ids)
    with record_delivery(live, call):
        yield record.result


async def prepare_call(
    live: ManagedSession, asked: CallRequest, record: CallRecord, max_prompt_tokens: int | None
) -> Turn:
    """The prompt, if the session takes another call."""
    live.require_open()
    turn = await _prepare_turn(live, asked)
    if max_prompt_tokens is not None and len(turn.prompt_ids) > max_prompt_tokens:
        raise ContextLengthError.for_prompt(len(turn.prompt_ids), max_prompt_tokens)
    record.end_phase("prepare")
    return turn


@contextmanager
def record_delivery(live: ManagedSession, call: Call) -> Iterator[None]:
    """Around the last event: notes whether it was taken."""
    try:
        yield
    except (GeneratorExit, asyncio.CancelledError):
        _journal_delivery(live, call, Delivery.LOST)
        raise
    _journal_delivery(live, call, Delivery.DELIVERED)


def _journal_delivery(live: ManagedSession, call: Call, delivered: Delivery) -> None:
    try:
        live.session.record_delivery(call, delivered)
    except JournalError as error:
        # The answer has left, or nobody is there: there is no one to be told but the log.
        log.warning("call %s of session %s: %s", call.id, live.id, error)


def _sampling_record(engine: Engine, params: SamplingParams) -> dict[str, Any]:
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
        "max_tokens": None if params.max_tokens == NO_LIMIT else params.max_tokens,
        # A grammar takes tokens away before anything is measured, whatever the engine calls raw.
        "logprobs": "processed" if params.grammar is not None else engine.logprob_kind,
        "engine": engine.name,
    }


def _answer_builders(live: ManagedSession, asked: CallRequest, call_id: str) -> list[AnswerBuilder]:
    codec, request = live.session.codec, asked.request
    return [
        AnswerBuilder(
            index,
            codec.plain_parser()
            if request.is_raw_prompt
            else codec.parser(request.tools, request.chat_template_kwargs),
            asked.stop,
            asked.single_tool_call,
            codec.stop_ids,
            response_id=call_id,
        )
        for index in range(asked.n)
    ]


def _max_answer_tokens(engine: Engine, turn: Turn, asked: CallRequest) -> int:
    """How many tokens an answer may have as far as its client and the engine go.

    A prompt at the limit leaves room for no token, which is an answer.
    """
    room, most, length = asked.params.max_tokens, engine.max_context, len(turn.prompt_ids)
    if most is None:
        return FALLBACK_MAX_TOKENS if room == NO_LIMIT else room
    if length > most:
        raise ContextLengthError.for_prompt(length, most)
    return min(room, most - length)


def _engine_params(
    asked: CallRequest, live: ManagedSession, allowed: int, flush_s: float, *, streamed: bool
) -> SamplingParams:
    """What the engine is asked for."""
    return replace(
        asked.params,
        max_tokens=allowed,
        stop_ids=tuple(sorted(live.session.codec.stop_ids)),
        flush_s=flush_s if streamed or asked.stop or asked.single_tool_call else BUFFERED_FLUSH_S,
    )


async def _prepare_turn(live: ManagedSession, asked: CallRequest) -> Turn:
    request, prompt, session = asked.request, asked.raw_prompt, live.session
    if prompt is not None:

        def bare() -> Turn:
            ids = session.codec.encode(prompt) if isinstance(prompt, str) else prompt
            return session.prepare_ids(request, ids)

        return bare() if len(prompt) < _THREAD_CHARACTERS else await asyncio.to_thread(bare)
    work = asked.new_bytes
    if work is None or live.session.history == "template":
        # A template is rendered whole, whatever was there before.
        work = sum([len(message.content) for message in request.messages])
    if work < _THREAD_CHARACTERS:
        return live.session.prepare(request)
    return await asyncio.to_thread(live.session.prepare, request)


async def _generate_concurrently(
    engine: Engine, prompt_ids: Ids, params: SamplingParams, choices: Sequence[AnswerBuilder], session: str
) -> AsyncGenerator[AnswerDelta, None]:
    """All choices side by side, their bits in the order they arrive."""
    queue: asyncio.Queue[AnswerDelta | Exception | None] = asyncio.Queue()

    async def one(choice: AnswerBuilder) -> None:
        seed = None if params.seed is None else params.seed + choice.index
        try:
            own = replace(params, seed=seed)
            async with aclosing(_generate_one(engine, prompt_ids, own, [choice], session)) as said:
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


async def _generate_one(
    engine: Engine, prompt_ids: Ids, params: SamplingParams, choices: Sequence[AnswerBuilder], session: str
) -> AsyncGenerator[AnswerDelta, None]:
    (choice,) = choices
    async with aclosing(engine.generate(prompt_ids, params, session=session)) as chunks:
        async for chunk in chunks:
            yield choice.add_chunk(chunk)
            if choice.is_stopped:
                return


async def commit_call(
    live: ManagedSession, turn: Turn, generations: Sequence[Generation], record: CallRecord
) -> Call:
    """The call in the tree, once it is safe."""
    # Finalized or aborted while it was being sampled: the answer comes too late and changes nothing.
    live.require_open()
    committed = live.session.commit(turn, *generations, call_id=record.call_id)
    if committed.durable is not None and not committed.durable.done():
        try:
            await asyncio.wrap_future(committed.durable)
        except asyncio.CancelledError:
            # It will be in the journal, but nobody is there to be told.
            _journal_delivery(live, committed.call, Delivery.LOST)
            raise
        except JournalError:
            # The journal does not have it and its client will not get it: it must not be trained.
            live.session.tree.apply(Delivered(committed.call.index, Delivery.LOST))
            raise
    live.last_used = time.monotonic()
    record.end_phase("commit")
    return committed.call


def _commit_cancelled(
    live: ManagedSession, turn: Turn, choices: Sequence[AnswerBuilder], call_id: str
) -> None:
    if live.is_closed or not any(len(choice.ids) for choice in choices):
        return
    generations = [choice.generation("cancelled") for choice in choices]
    call = live.session.commit(turn, *generations, call_id=call_id).call
    live.session.record_delivery(call, Delivery.CANCELLED)
