"""Calls in process: a managed session, an engine, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from branchline.chat.toy import ToyCodec
from branchline.core.call import Request
from branchline.core.message import Message
from branchline.engines.base import Engine, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_lifecycle import run_call
from branchline.runtime.call_record import CallEvent, CallRecord, CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession, read_session_options
from branchline.runtime.session_store import SessionStore
from branchline.tree.journal import Journal

_call_numbers = count(1)


def open_session(
    codec: ToyCodec | None = None, journal: Journal | None = None, **options: Any
) -> ManagedSession:
    """A session of its own store; `options` are those of `POST /sessions`."""
    store = SessionStore(codec or ToyCodec.chatml(), journal=journal)
    return store.open(read_session_options(options))[0]


def call_request(
    prompt: str = "p",
    *later: Message,
    params: SamplingParams | None = None,
    resume_call_id: str = "",
    **fields: Any,
) -> CallRequest:
    request = Request((Message("user", prompt), *later), resume_call_id=resume_call_id)
    return CallRequest(request, params or SamplingParams(max_tokens=100), **fields)


def start_call(
    managed: ManagedSession,
    engine: Engine,
    request: CallRequest | None = None,
    call_id: str = "",
    **options: Any,
) -> tuple[AsyncGenerator[CallEvent, None], CallRecord]:
    """The events of a call that has not begun, and its record."""
    record = CallRecord(managed.id, "test", call_id or f"call-{next(_call_numbers)}")
    return run_call(managed, engine, request or call_request(), record, **options), record


async def complete_call(
    managed: ManagedSession,
    engine: Engine,
    request: CallRequest | None = None,
    call_id: str = "",
    **options: Any,
) -> tuple[list[AnswerDelta], CallResult]:
    """Runs a call to its end; its deltas and its result."""
    events, record = start_call(managed, engine, request, call_id, **options)
    deltas: list[AnswerDelta] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AnswerDelta):
                deltas.append(event)
            else:
                assert event is record.result
    assert record.result is not None
    return deltas, record.result


ANSWER = "a long answer about many things"


def _rest_of_answer(request: ScriptedRequest) -> str:
    """Always the same answer; after a part of it, the rest."""
    _, _, begun = request.prompt_text.rpartition("assistant:")
    return ANSWER.removeprefix(begun) if ANSWER.startswith(begun) else ANSWER


def resumable_engine() -> ScriptedEngine:
    """An engine that samples `ANSWER`, one token per chunk, and continues it after a part of it."""
    return ScriptedEngine(ToyCodec.chatml(), _rest_of_answer, chunk_size=1)


async def cancel_call(
    managed: ManagedSession,
    engine: Engine,
    tokens: int,
    request: CallRequest | None = None,
    call_id: str = "",
) -> str:
    """Takes so many tokens of a call and cancels it; returns its id."""
    events, record = start_call(managed, engine, request, call_id)
    taken = 0
    while taken < tokens:
        event = await anext(events)
        assert isinstance(event, AnswerDelta)
        taken += len(event.ids)
    await events.aclose()
    return record.call_id
