"""A turn of the model, asked for by the loop or by an agent of one's own.

The trajectory's own conversation is asked under a name that stands in the state before anything is sent: cut
off and asked again, the answer goes on behind what was sampled. Other conversations (a critic's, a draft's)
may be asked side by side; one that is cut off is asked anew.
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
from branchline.loop.limits import LoopLimits
from branchline.loop.model import Model, ToolSchemas
from branchline.loop.state import LoopState
from branchline.runtime.call_record import CallResult


async def ask(
    model: Model,
    state: LoopState,
    messages: Sequence[Message] | None,
    tools: ToolSchemas,
    params: Mapping[str, Any],
    limits: LoopLimits,
) -> CallResult:
    """The answer to a conversation, sampled as the task says; the state's own, given none, grows by it.

    It is noted, so that it is trained.
    """
    wanted = effective_sampling(state, limits.max_new_tokens, params)
    if messages is None:
        reply = await ask_or_resume(model, state, tools, wanted)
    else:
        with _timed_generation(state):
            reply = await model.ask(messages, tools=tools, params=wanted)
    state.calls.append(reply.call_id)
    if messages is None:
        state.call = ""
        state.messages.append(reply.message)
        state.assistant_turns += 1
        state.tokens = len(reply.prompt_ids) + len(reply.ids)
    return reply


def effective_sampling(
    state: LoopState, most_tokens: int | None, params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """How the task wants its answers, and whoever asks (`params`) before it; they have no more than so many
    tokens, where that is given."""
    wanted = dict(state.task.sampling)
    if state.task.template:
        wanted["chat_template_kwargs"] = state.task.template
    wanted |= params or {}
    if most_tokens is not None:
        tokens = wanted.get("max_tokens")
        # What is no number is left to the model, which refuses it.
        if tokens is None or (type(tokens) is int and tokens > most_tokens):
            wanted["max_tokens"] = most_tokens
    return wanted


async def ask_or_resume(
    model: Model, state: LoopState, tools: ToolSchemas, params: Mapping[str, Any]
) -> CallResult:
    """The answer to the state's own conversation, from where it was left if it was begun before."""
    # Named before anything is sent: whenever this is cut off, the state says what to go on with.
    state.call = state.call or _new_call_name()
    with _timed_generation(state):
        try:
            return await model.ask(state.messages, tools=tools, params=params, call_name=state.call)
        except SessionError as error:
            if error.kind != "conflict":
                raise
        # Begun behind another prompt than this, with other tools, say: there is no going on with that.
        state.call = _new_call_name()
        return await model.ask(state.messages, tools=tools, params=params, call_name=state.call)


@contextmanager
def _timed_generation(state: LoopState) -> Iterator[None]:
    """Counts the time, and whether it was cut off."""
    began = time.perf_counter()
    try:
        yield
    except asyncio.CancelledError:
        state.metrics.num_preempted += 1
        raise
    finally:
        state.metrics.generate_s += time.perf_counter() - began


def _new_call_name() -> str:
    return "turn-" + secrets.token_hex(12)
