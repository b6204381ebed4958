"""A turn of the model, asked for by an agent of one's own: the call is noted, so that it is trained.

The trajectory's own conversation is asked under a name that stands in the state before anything is sent: cut
off and asked again, the answer goes on behind what was sampled. Other conversations (a critic's, a draft's)
may be asked side by side; one that is cut off is asked anew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from branchline.core.errors import SessionError
from branchline.core.message import Message
from branchline.loop.limits import LoopLimits
from branchline.loop.model import Model, Reply, Schemas
from branchline.loop.state import LoopState


async def ask(
    model: Model,
    state: LoopState,
    messages: Sequence[Message] | None,
    tools: Schemas,
    params: Mapping[str, Any],
    limits: LoopLimits,
) -> Reply:
    """The answer to a conversation, sampled as the task says; the state's own, given none, grows by it."""
    wanted: dict[str, Any] = dict(state.task.sampling)
    if limits.max_new_tokens is not None:
        wanted["max_tokens"] = limits.max_new_tokens
    if state.task.template:
        wanted["chat_template_kwargs"] = state.task.template
    wanted.update(params)
    began = time.perf_counter()
    try:
        if messages is None:
            reply = await _go_on(model, state, tools, wanted)
        else:
            reply = await model.ask(messages, tools=tools, params=wanted)
    except asyncio.CancelledError:
        state.metrics.num_preempted += 1
        raise
    finally:
        state.metrics.generate_s += time.perf_counter() - began
    state.calls.append(reply.call_id)
    if messages is None:
        state.call = ""
        state.messages.append(reply.message)
        state.assistant_turns += 1
        state.tokens = len(reply.prompt_ids) + len(reply.ids)
    return reply


async def _go_on(model: Model, state: LoopState, tools: Schemas, params: Mapping[str, Any]) -> Reply:
    state.call = state.call or _new_name()
    try:
        return await model.ask(state.messages, tools=tools, params=params, name=state.call)
    except SessionError as error:
        if error.kind != "conflict":
            raise
    # Begun behind another prompt than this: there is no going on with that.
    state.call = _new_name()
    return await model.ask(state.messages, tools=tools, params=params, name=state.call)


def _new_name() -> str:
    return "turn-" + secrets.token_hex(12)
