"""The agent loop: a state machine, each state a function that says which comes next.

    PENDING ──► GENERATING ──► PROCESSING_TOOLS ──► GENERATING      the model called tools
                    ├────────► INTERACTING ───────► GENERATING      it spoke, and somebody answers
                    └────────► TERMINATED                           it is done, or a limit is reached

A step first waits for what it needs and then writes all of it into the state, without waiting in between.
So a loop can be cancelled anywhere and gone on with: an answer goes on behind the ids that were sampled,
tool calls that are over do not run again, those that were not do.

    async with AgentLoop(model, LoopState.begin(task), tools=registry.select()) as loop:
        state = await loop.run(cancel)

The block is the life of the trajectory's tool instances and of whoever the model talks to: the first run in
it makes them, and run again inside it a cancelled loop finds them as they were. In another block or process
there are new ones, made of what the old ones saved (`keeping.py`) or with the same arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from msgspec import structs

from branchline.core.errors import ContextLengthError, InputError, SessionError
from branchline.core.json_fields import replace_surrogates
from branchline.core.message import Message
from branchline.loop.cancel import CancelToken
from branchline.loop.generation import ask_or_resume, effective_sampling
from branchline.loop.interactions.registry import InteractionConfig
from branchline.loop.media_filter import filter_media
from branchline.loop.model import Model
from branchline.loop.state import LoopLimits, LoopPhase, LoopState, StopReason, ToolRecord, TurnRecord
from branchline.loop.timeouts import finish_despite_cancel
from branchline.loop.token_budget import (
    exhausted_limit,
    is_slow_to_truncate,
    reached_limit,
    remaining_tokens,
    truncate_result,
)
from branchline.loop.tools.registry import ToolSelection
from branchline.loop.trajectory_resources import TrajectoryResources
from branchline.runtime.call_record import CallResult

_SESSION_STOP_REASONS = {"out_of_calls": StopReason.SESSION_CALLS, "out_of_tokens": StopReason.SESSION_TOKENS}
"""What a session says when it has given all it may."""

# -- the states --------------------------------------------------------------------------------------


async def pending(loop: AgentLoop) -> LoopPhase:
    """The prompt: the task's messages, and the first words of whoever the model talks to."""
    state = loop.state
    words = loop.resources.first_message
    new = [Message("user", replace_surrogates(words))] if words else []
    tokens = await loop.count_if_limited(new)
    state.messages += new
    state.first_tokens = state.tokens = tokens
    return LoopPhase.GENERATING


async def generating(loop: AgentLoop) -> LoopPhase:
    """The model's turn."""
    state = loop.state
    if loop.is_out_of_tokens():
        return loop.stop_out_of_tokens(state.tokens)
    try:
        reply = await loop.ask()
    except ContextLengthError as error:
        return loop.stop(StopReason.MODEL_LENGTH, str(error))
    except SessionError as error:
        if error.kind not in _SESSION_STOP_REASONS:
            raise
        return loop.stop(_SESSION_STOP_REASONS[error.kind], str(error))
    state.call = ""
    state.calls.append(reply.call_id)
    if reply.finish_reason == "length" and not len(reply.ids) and reply.message.is_empty:
        return loop.stop(
            StopReason.MODEL_LENGTH, f"{len(reply.prompt_ids)} tokens leave the engine room for none"
        )
    state.messages.append(reply.message)
    state.assistant_turns += 1
    state.tokens = len(reply.prompt_ids) + len(reply.ids)
    calls = reply.message.tool_calls
    if not calls and not loop.resources.has_interaction:
        if reply.finish_reason != "length":
            return loop.stop(StopReason.STOP)
        return (
            loop.stop_out_of_tokens(state.tokens) if loop.is_out_of_tokens() else loop.stop(StopReason.LENGTH)
        )
    limit = reached_limit(loop.limits, state)
    if limit is None:
        state.pending = list(calls)
        return LoopPhase.PROCESSING_TOOLS if calls else LoopPhase.INTERACTING
    if calls:
        return loop.stop(*limit)
    # Nobody answers it any more, but what it is worth is asked all the same.
    state.reason, state.detail = limit
    return LoopPhase.INTERACTING


async def processing_tools(loop: AgentLoop) -> LoopPhase:
    """Every call of the last answer has a result before the model is told any."""
    state = loop.state
    await loop.run_tools()
    records = await filter_media(
        [state.outcomes[place] for place in range(len(state.pending))], loop.count_prompt_tokens
    )
    results = [record.message for record in records]
    tokens = await loop.count_if_limited(results)
    state.tool_records += records
    state.pending, state.outcomes = [], {}
    return loop.append_messages(results, tokens)


async def interacting(loop: AgentLoop) -> LoopPhase:
    """Somebody answers the model, or ends the conversation; a last answer is only judged."""
    state = loop.state
    if state.response is None:
        state.response = await loop.respond()
    response = state.response
    new = [Message("user", response.content)]
    tokens = 0 if response.is_last else await loop.count_if_limited(new)
    state.turn_records.append(response)
    state.response = None
    if state.reason is not None:
        return loop.stop(state.reason, state.detail)
    if not response.is_last:
        return loop.append_messages(new, tokens)
    if response.content:
        state.messages += new
    return loop.stop(StopReason.INTERACTION)


STEPS: dict[LoopPhase, Callable[[AgentLoop], Awaitable[LoopPhase]]] = {
    LoopPhase.PENDING: pending,
    LoopPhase.GENERATING: generating,
    LoopPhase.PROCESSING_TOOLS: processing_tools,
    LoopPhase.INTERACTING: interacting,
}

# -- the machine -------------------------------------------------------------------------------------


class AgentLoop:
    """One trajectory at work. Tools and partners live as long as the block around it."""

    def __init__(
        self,
        model: Model,
        state: LoopState,
        *,
        tools: ToolSelection | None = None,
        interaction: InteractionConfig | None = None,
        limits: LoopLimits | None = None,
    ) -> None:
        """Without limits, those of the task."""
        self.model = model
        self.state = state
        self.limits = limits = limits or state.task.limits or LoopLimits()
        self.resources = TrajectoryResources(state, tools or ToolSelection(), interaction, limits)
        cuts_tokens = limits.tool_response_length is not None and limits.tool_response_unit == "tokens"
        if cuts_tokens and model.codec is None:
            raise InputError(
                "limits.tool_response_unit: got 'tokens' and a model whose tokens are not known here, "
                "expected a codec or 'characters'"
            )

    async def __aenter__(self) -> Self:
        self.resources.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.resources.release()

    async def run(self, cancel: CancelToken | None = None) -> LoopState:
        """Goes on from the state until it is over, or cancelled; then `is_cancel` says so.

        A cancelled task leaves the state as a token does, and is cancelled all the same. An error of the
        model or of an interaction, and a tool that cannot be made, is raised, and leaves a state that can be
        gone on from too.
        """
        state = self.state
        if state.is_loop_finished:
            return state
        state.is_cancel = False
        try:
            if cancel is None:
                await self._run()
            else:
                state.is_cancel = cancel.is_set or not await cancel.run_cancellable(self._run())
        except asyncio.CancelledError:
            state.is_cancel = True
            raise
        finally:
            self.resources.save()
        return state

    async def _run(self) -> None:
        await self.resources.acquire()
        state, began, spent_s = self.state, time.perf_counter(), self.state.spent_s
        limit_s = self.limits.wall_clock_s
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s - spent_s) as clock:
                # A timer that is due already goes off when something is waited for, and not before.
                await asyncio.sleep(0)
                while state.state is not LoopPhase.TERMINATED:
                    state.state = await STEPS[state.state](self)
        except TimeoutError:
            if not clock.expired():
                raise
            state.flush_partial()
            state.state = self.stop(StopReason.WALL_CLOCK, f"more than {limit_s:g} s")
        finally:
            state.spent_s = spent_s + time.perf_counter() - began
        await self.resources.compute_rewards()

    # -- what the states are made of -----------------------------------------------------------------

    async def ask(self) -> CallResult:
        """The model's answer, from where it was left if it was begun before."""
        state = self.state
        params = effective_sampling(state, self.remaining_tokens(state.tokens))
        return await ask_or_resume(self.model, state, self.resources.schemas, params)

    async def run_tools(self) -> None:
        """Runs the calls that have no outcome yet; each is kept as soon as it is there.

        One that is cancelled runs again, also if the cancel comes in the moment it ends.
        """
        state, began = self.state, time.perf_counter()
        left = [place for place in range(len(state.pending)) if place not in state.outcomes]
        try:
            if len(left) == 1:
                await self._run_tool(left[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for place in left:
                        group.create_task(self._run_tool(place))
        finally:
            state.metrics.tool_s += time.perf_counter() - began

    async def _run_tool(self, place: int) -> None:
        record = await self.resources.run_tool(self.state.pending[place])
        if is_slow_to_truncate(record.message, self.limits):
            # The call is over: a cancel that comes while its result is cut must not make it run again.
            await finish_despite_cancel(self._truncate_outcome(place, record))
        else:
            self._store_outcome(place, record, truncate_result(record.message, self.limits, self.model.codec))

    async def _truncate_outcome(self, place: int, record: ToolRecord) -> None:
        cut = await asyncio.to_thread(truncate_result, record.message, self.limits, self.model.codec)
        self._store_outcome(place, record, cut)

    def _store_outcome(self, place: int, record: ToolRecord, shown: Message) -> None:
        is_whole = shown is record.message
        self.state.outcomes[place] = record if is_whole else structs.replace(record, message=shown)

    async def respond(self) -> TurnRecord:
        """What the partner says to the last answer."""
        state, began = self.state, time.perf_counter()
        try:
            response = await self.resources.respond(tuple(state.messages))
        finally:
            state.metrics.interact_s += time.perf_counter() - began
        is_last = response.terminate or state.reason is not None
        extras = dict(response.extras)
        return TurnRecord(state.assistant_turns, response.content, is_last, response.score, extras)

    # -- lengths -------------------------------------------------------------------------------------

    async def count_if_limited(self, new: Sequence[Message]) -> int:
        """How long the next prompt is with these messages behind it; 0 where no limit asks."""
        return await self.count_prompt_tokens(new) if self.limits.needs_token_counts else 0

    async def count_prompt_tokens(self, new: Sequence[Message]) -> int:
        """The same, whether a limit asks or not; raises where the codec cannot show a model such messages."""
        state = self.state
        params = {"chat_template_kwargs": state.task.template} if state.task.template else {}
        return await self.model.count_tokens(
            [*state.messages, *new], tools=self.resources.schemas, params=params
        )

    def remaining_tokens(self, tokens: int) -> int | None:
        """How many tokens an answer may have behind so many; None for any number."""
        return remaining_tokens(self.limits, tokens, self.state.first_tokens)

    def is_out_of_tokens(self) -> bool:
        left = self.remaining_tokens(self.state.tokens)
        return left is not None and left <= 0

    def append_messages(self, new: Sequence[Message], tokens: int) -> LoopPhase:
        """Tells the model what was said to it, if that fits; a prompt that fills all there is fits."""
        state, left = self.state, self.remaining_tokens(tokens)
        if left is not None and left < 0:
            return self.stop_out_of_tokens(tokens)
        state.messages += new
        state.tokens = tokens or state.tokens
        state.user_turns += 1
        return LoopPhase.GENERATING

    def stop_out_of_tokens(self, tokens: int) -> LoopPhase:
        """The end of a trajectory that has no room behind so many tokens."""
        return self.stop(*exhausted_limit(self.limits, tokens, self.state.first_tokens))

    def stop(self, reason: StopReason, detail: str = "") -> LoopPhase:
        self.state.reason, self.state.detail = reason, detail
        return LoopPhase.TERMINATED
