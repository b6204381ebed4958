"""The lifecycle of a call: prepare, reserve, generate, commit, deliver.

Every call takes this path, whichever protocol it came by. An engine yields chunks, an `AnswerBuilder` turns
each into an `AnswerDelta`, and the caller gets the deltas as they arrive. The last event, `CallResult`, is
yielded only after the call is in the tree and in the journal. A generation that fails changes nothing. A call
whose caller closes the generator is aborted, and what was yielded is kept as a cancelled call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial

from branchline.chat.vision import ImageSpan
from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.context_edits import build_view
from branchline.core.errors import ContextLengthError, EngineInputError, JournalError
from branchline.core.token_arrays import Ids
from branchline.engines.base import BUFFERED_FLUSH_S, Engine, SamplingParams
from branchline.engines.upstream_events import TokenUsage
from branchline.runtime.answer import Answer, AnswerBuilder, AnswerDelta
from branchline.runtime.call_record import (
    ATTEMPT_SEPARATOR,
    CallEvent,
    CallRecord,
    CallRequest,
    CallResult,
    new_call_id,
)
from branchline.runtime.compaction import build_edit, compacted_prefix, plan_edit, summary_prompt
from branchline.runtime.limits import reserve_tokens, run_in_prepare_thread
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.not_applied import not_applied_fields
from branchline.runtime.request_fields import check_recordable
from branchline.runtime.resume import find_earlier_attempt, load_partial, replay_partial
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT, check_supported, sampling_record
from branchline.tree.session import Session
from branchline.tree.tree import Delivered, Turn

log = logging.getLogger("branchline.runtime")

_THREAD_CHARACTERS = 30_000
"""Requests with as much new text are prepared in a thread, so that the event loop is not blocked. It is the
limit of a session with one call in progress; the calls of a session share it, so that many of them at once do
not delay those of other sessions."""
_THREAD_BODY_BYTES = 40_000
"""So are requests with a larger body: rendering takes time too, and it may be tools. For shorter ones a
thread costs more than preparing them."""


async def run_call(
    managed: ManagedSession,
    engine: Engine,
    call_request: CallRequest,
    record: CallRecord,
    max_prompt_tokens: int | None = None,
    flush_s: float = 0.0,
) -> AsyncGenerator[CallEvent, None]:
    """Runs one call and yields its deltas, then its result. Closing the generator cancels the call.

    A call whose id is a further attempt of a named call resumes the earlier attempt.
    """
    record.engine = engine.name
    request = call_request.request
    resumes = request.resume_call_id
    if not resumes and ATTEMPT_SEPARATOR in record.call_id:
        resumes = await find_earlier_attempt(managed, record.call_id)
    if call_request.params.requested_fields:
        call_request = check_supported(engine, call_request)
    sampling = sampling_record(engine, call_request.params)
    requested = dict(call_request.requested)
    if call_request.tool_choice not in (None, "none"):
        requested["tool_choice"] = call_request.tool_choice
    if requested:
        sampling["requested"] = requested
    if call_request.ignored_fields:
        sampling["ignored_fields"] = dict(call_request.ignored_fields)
    if call_request.overridden_fields:
        sampling["overridden"] = dict(call_request.overridden_fields)
    if not_applied := not_applied_fields(call_request):
        sampling["not_applied"] = not_applied
    if (
        requested
        or call_request.overridden_fields
        or call_request.other_fields
        or call_request.params.requested_fields
    ):
        check_recordable(sampling)
    call_request = replace(call_request, request=replace(request, sampling=sampling, resume_call_id=resumes))
    with managed.count_call(record.call_id, resumes):
        is_conversation = call_request.raw_prompt is None and not call_request.is_compacted
        compacts = managed.options.compaction is not None and is_conversation
        turn = await prepare_call(managed, call_request, None if compacts else max_prompt_tokens)
        if compacts:
            turn = await _compact_prompt(managed, engine, call_request, turn, max_prompt_tokens)
        record.end_phase("prepare")
        if turn.images and not engine.supports_images:
            raise EngineInputError(
                f"images: got {len(turn.images)}, expected none: {engine.name} takes no images"
            )
        others = {media.kind for message in turn.messages for media in message.media} - {"image"}
        if others:
            raise EngineInputError(f"media: got {', '.join(sorted(others))}, expected text and images")
        earlier = await load_partial(managed, turn, call_request.n, record.call_id) if resumes else []
        params = _engine_params(managed, engine, turn, call_request, flush_s)
        with ExitStack() as stack:
            if managed.options.limits.tokens is not None:
                reservation = reserve_tokens(managed, call_request, params.max_tokens, earlier)
                params = replace(params, max_tokens=stack.enter_context(reservation))
            builders = _answer_builders(managed, call_request, record.call_id)
            prompt_ids = turn.prompt_ids
            try:
                if earlier:
                    replayed, prompt_ids, params = replay_partial(builders[0], earlier, params, prompt_ids)
                    for delta in replayed:
                        yield delta
                if params.max_tokens > 0:
                    streams = [
                        _generate(engine, prompt_ids, params, builder, managed.id, turn.images)
                        for builder in builders
                    ]
                    async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as deltas:
                        async for delta in deltas:
                            record.end_phase("queue")
                            yield delta
            except (GeneratorExit, asyncio.CancelledError):
                _commit_cancelled(managed, turn, builders, record.call_id)
                raise
    record.end_phase("generate")
    generations = [builder.generation() for builder in builders]
    call = await commit_call(managed, turn, generations, record)
    answers = [builder.answer(generation) for builder, generation in zip(builders, generations, strict=True)]
    try:
        yield record_result(record, call, turn, answers)
    except (GeneratorExit, asyncio.CancelledError):
        record_delivery(managed, call, Delivery.LOST)
        raise
    record_delivery(managed, call, Delivery.DELIVERED)


async def prepare_call(
    managed: ManagedSession, call_request: CallRequest, max_prompt_tokens: int | None = None
) -> Turn:
    """Returns the turn with its prompt; nothing is sampled or recorded.

    Raises SessionError if the session is closed and ContextLengthError if the prompt is too long.
    """
    managed.require_open()
    request, prompt, session = call_request.request, call_request.raw_prompt, managed.session
    max_characters = _THREAD_CHARACTERS // max(1, len(managed.call_tasks))
    if managed.compactions.prefixes and not call_request.is_compacted:
        view, _ = managed.compactions.view(request.messages, request.agent)
        request = replace(request, messages=view.messages)
    if prompt is None:
        prepare = partial(session.prepare, request)
        length = sum([len(message.content) for message in request.messages])
        if length >= max_characters and call_request.body_bytes < _THREAD_BODY_BYTES:
            length = session.count_new_characters(request)
    else:
        prepare = partial(_prepare_raw_prompt, session, request, prompt)
        length = len(prompt)
    if length < max_characters and call_request.body_bytes < _THREAD_BODY_BYTES:
        turn = prepare()
    else:
        turn = await run_in_prepare_thread(managed, prepare, max(length, call_request.body_bytes))
    if max_prompt_tokens is not None and len(turn.prompt_ids) > max_prompt_tokens:
        raise ContextLengthError.for_prompt(len(turn.prompt_ids), max_prompt_tokens)
    return turn


async def _compact_prompt(
    managed: ManagedSession,
    engine: Engine,
    call_request: CallRequest,
    turn: Turn,
    max_prompt_tokens: int | None,
) -> Turn:
    """Returns the turn, or, if its prompt is too long for the session's `compaction`, one of the compacted
    conversation: for this call and for all later ones that continue it."""
    options = managed.options.compaction
    assert options is not None
    if len(turn.prompt_ids) > options.trigger_tokens:
        async with managed.compactions.lock:
            # Another call may have compacted the conversation in the meantime.
            turn = await prepare_call(managed, call_request)
            while len(turn.prompt_ids) > options.trigger_tokens and await _compact(
                managed, engine, call_request, len(turn.prompt_ids) - options.target
            ):
                turn = await prepare_call(managed, call_request)
    if max_prompt_tokens is not None and len(turn.prompt_ids) > max_prompt_tokens:
        raise ContextLengthError.for_prompt(len(turn.prompt_ids), max_prompt_tokens)
    return turn


async def _compact(managed: ManagedSession, engine: Engine, call_request: CallRequest, excess: int) -> bool:
    """Adds an edit that shortens the conversation; returns False if nothing can be replaced."""
    assert managed.options.compaction is not None
    request, codec = call_request.request, managed.session.codec
    view, edits = managed.compactions.view(request.messages, request.agent)
    policy = managed.options.compaction.build_policy()
    plan = partial(plan_edit, policy, view, codec, excess)
    view_length = sum([len(message.content) for message in view.messages])
    compaction = await run_in_prepare_thread(managed, plan, view_length)
    if compaction is None:
        return False
    summary = ""
    if compaction.summary_instruction:
        summary_request = replace(request, messages=summary_prompt(view, compaction), resume_call_id="")
        record = CallRecord(managed.id, "compaction", new_call_id(managed), managed.created_at)
        record.agent, record.group = request.agent, managed.options.group
        asked = CallRequest(summary_request, call_request.params, is_compacted=True)
        async with aclosing(run_call(managed, engine, asked, record)) as events:
            async for _ in events:
                pass
        assert record.result is not None, "a call yields its result or raises"
        summary = record.result.message.content
    edit = build_edit(view, edits, compaction, summary)
    if build_view(request.messages, [*edits, edit]).messages == view.messages:
        return False
    await managed.add_compaction(compacted_prefix(request.messages, request.agent, edit))
    return True


def _prepare_raw_prompt(session: Session, request: Request, prompt: str | Ids) -> Turn:
    return session.prepare_ids(request, session.codec.encode(prompt) if isinstance(prompt, str) else prompt)


async def commit_call(
    managed: ManagedSession, turn: Turn, generations: Sequence[Generation], record: CallRecord
) -> Call:
    """Commits a call and returns it when the journal has it.

    Raises SessionError, and commits nothing, if the session was closed while the call was sampled.
    """
    managed.require_open()
    committed = managed.session.commit(turn, *generations, call_id=record.call_id)
    durable = committed.durable
    if durable is not None and (not durable.done() or durable.exception() is not None):
        try:
            await asyncio.wrap_future(durable)
        except asyncio.CancelledError:
            # The journal will have the call, but its caller has gone.
            record_delivery(managed, committed.call, Delivery.LOST)
            raise
        except JournalError:
            # Its caller will not get it, so it must not be trained: neither now nor, if the journal recovers
            # and has the call after all, after a restart.
            record_delivery(managed, committed.call, Delivery.LOST)
            managed.session.tree.apply(Delivered(committed.call.index, Delivery.LOST))
            raise
    managed.last_used = time.monotonic()
    record.end_phase("commit")
    return committed.call


def record_result(
    record: CallRecord, call: Call, turn: Turn, answers: Sequence[Answer], usage: TokenUsage | None = None
) -> CallResult:
    """Returns the result of a committed call and keeps it in its record."""
    counted = usage
    usage = usage or TokenUsage(len(turn.prompt_ids), sum([len(answer.ids) for answer in answers]))
    record.result = CallResult(
        call.id,
        turn.prompt_ids,
        answers,
        usage.prompt_tokens,
        usage.completion_tokens,
        call.encoded_tokens,
        max(0, usage.prompt_tokens - call.encoded_tokens),
        tuple([applied.equivalence for applied in call.applied_equivalences]),
        call.ambiguous_match,
        call.not_applied,
        counted,
    )
    return record.result


def record_delivery(managed: ManagedSession, call: Call, delivery: Delivery) -> None:
    """Records whether the caller took the result. A failing journal is logged, not raised."""
    try:
        managed.session.record_delivery(call, delivery)
    except JournalError as error:
        # The caller has its answer or has gone.
        log.warning("call %s of session %s: %s", call.id, managed.id, error)


def _commit_cancelled(
    managed: ManagedSession, turn: Turn, builders: Sequence[AnswerBuilder], call_id: str
) -> None:
    if managed.is_closed or not any(len(chunk.ids) for builder in builders for chunk in builder.chunks):
        return
    generations = [builder.generation("cancelled") for builder in builders]
    call = managed.session.commit(turn, *generations, call_id=call_id).call
    managed.session.record_delivery(call, Delivery.CANCELLED)


# -- sampling ----------------------------------------------------------------------------------------


def _answer_builders(managed: ManagedSession, call_request: CallRequest, call_id: str) -> list[AnswerBuilder]:
    codec, request = managed.session.codec, call_request.request
    return [
        AnswerBuilder(
            index,
            codec.plain_parser()
            if request.is_raw_prompt
            else codec.parser(request.tools, request.chat_template_kwargs),
            call_request.stop,
            call_request.single_tool_call,
            codec.stop_ids,
            response_id=call_id,
        )
        for index in range(call_request.n)
    ]


def _engine_params(
    managed: ManagedSession, engine: Engine, turn: Turn, call_request: CallRequest, flush_s: float
) -> SamplingParams:
    """The parameters of the request for the engine: with the codec's stop ids, limited to its context.

    A prompt that fills the context exactly leaves 0 tokens, and the answer is empty.
    """
    max_tokens, max_context, length = call_request.params.max_tokens, engine.max_context, len(turn.prompt_ids)
    if max_context is None:
        max_tokens = FALLBACK_MAX_TOKENS if max_tokens == NO_LIMIT else max_tokens
    elif length > max_context:
        raise ContextLengthError.for_prompt(length, max_context)
    else:
        max_tokens = min(max_tokens, max_context - length)
    # A stop text or a tool call can end an answer early; buffered tokens would be sampled for nothing.
    may_end_early = bool(call_request.stop) or call_request.single_tool_call
    params, stop_ids = call_request.params, managed.session.codec.stop_ids
    if params.requested_fields:
        stop_ids = (frozenset() if params.ignore_eos else stop_ids).union(params.stop_token_ids)
    return replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_ids=tuple(sorted(stop_ids)),
        vocab_size=managed.session.codec.vocab_size,
        flush_s=flush_s if call_request.stream or may_end_early else BUFFERED_FLUSH_S,
    )


async def _generate(
    engine: Engine,
    prompt_ids: Ids,
    params: SamplingParams,
    builder: AnswerBuilder,
    session: str,
    images: Sequence[ImageSpan],
) -> AsyncGenerator[AnswerDelta, None]:
    """Samples one answer and yields its deltas."""
    if params.seed is not None:
        params = replace(params, seed=params.seed + builder.index)
    async with aclosing(engine.generate(prompt_ids, params, session=session, images=images)) as chunks:
        async for chunk in chunks:
            yield builder.add(chunk)
            if builder.is_stopped:
                return


async def _merge(streams: Sequence[AsyncGenerator[AnswerDelta, None]]) -> AsyncGenerator[AnswerDelta, None]:
    """Runs several streams at the same time and yields their deltas in the order they arrive."""
    queue: asyncio.Queue[AnswerDelta | Exception | None] = asyncio.Queue()

    async def forward(stream: AsyncGenerator[AnswerDelta, None]) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
