"""One answer of the model for a trajectory: sampling, the call's name, and its entry in the state.

A call is named before it is sent, and the name is in the state, so that an interrupted call is resumed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from branchline.core.errors import SessionError
from branchline.core.message import Message
from branchline.loop.model import Model, ToolSchemas
from branchline.loop.state import AnswerTokens, LoopState
from branchline.runtime.call_record import CallResult


def effective_sampling(
    state: LoopState, max_tokens: int | None, params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The task's sampling, overridden by `params`, with an answer of at most `max_tokens`."""
    merged = dict(state.task.sampling)
    if state.task.template:
        merged["chat_template_kwargs"] = state.task.template
    merged |= params or {}
    if max_tokens is not None:
        requested = merged.get("max_tokens")
        # The model refuses a value that is no integer.
        if requested is None or (type(requested) is int and requested > max_tokens):
            merged["max_tokens"] = max_tokens
    return merged


async def ask_or_resume(
    model: Model,
    state: LoopState,
    messages: Sequence[Message],
    tools: ToolSchemas,
    params: Mapping[str, Any],
) -> CallResult:
    """The answer to a conversation. A cancelled call is resumed after the ids it had sampled, if it was
    cancelled with the same conversation."""
    # The name is stored before the request is sent, so that a cancelled call can be resumed by it.
    state.call_name = state.call_name or _new_call_name()
    with timed_generation(state):
        try:
            result = await model.ask(messages, tools=tools, params=params, call_name=state.call_name)
        except SessionError as error:
            if error.kind != "conflict":
                raise
            # The earlier attempt had another prompt, for example other tools, and cannot be resumed.
            state.abandoned_calls.append(state.call_name)
            state.call_name = _new_call_name()
            result = await model.ask(messages, tools=tools, params=params, call_name=state.call_name)
    state.call_name = ""
    add_call(state, result)
    return result


def add_call(state: LoopState, result: CallResult) -> None:
    """Lists an answered call in the state: only listed calls are trained."""
    state.call_ids.append(result.call_id)
    state.metrics.num_preempted += result.num_preempted


def append_answer(state: LoopState, result: CallResult) -> None:
    """Appends an answer to the state's conversation."""
    state.messages.append(result.message)
    state.assistant_turns += 1
    state.tokens = len(result.prompt_ids) + len(result.ids)
    state.answers.append(AnswerTokens(result.call_id, len(result.prompt_ids), len(result.ids)))


@contextmanager
def timed_generation(state: LoopState) -> Iterator[None]:
    """Adds the time to the state's metrics, and counts a cancellation."""
    started = time.perf_counter()
    try:
        yield
    except asyncio.CancelledError:
        state.metrics.num_cancelled += 1
        raise
    finally:
        state.metrics.generate_s += time.perf_counter() - started


def _new_call_name() -> str:
    return "turn-" + secrets.token_hex(12)
