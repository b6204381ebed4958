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
from branchline.core.fields import clean
from branchline.core.message import Message
from branchline.loop.asking import go_on, sampling_of
from branchline.loop.cancel import CancelToken
from branchline.loop.company import Company
from branchline.loop.interactions.registry import Partner
from branchline.loop.lengths import fullness, is_long, reached, room, shorten
from branchline.loop.model import Model, Reply
from branchline.loop.showing import showable
from branchline.loop.state import Ending, LoopLimits, LoopState, State, ToolRecord, TurnRecord
from branchline.loop.tools.registry import Selection
from branchline.loop.waiting import settle

_SPENT = {"out_of_calls": Ending.SESSION_CALLS, "out_of_tokens": Ending.SESSION_TOKENS}
"""What a session says when it has given all it may."""

# -- the states --------------------------------------------------------------------------------------


async def pending(loop: AgentLoop) -> State:
    """The prompt: the task's messages, and the first words of whoever the model talks to."""
    state = loop.state
    words = loop.company.first_words
    new = [Message("user", clean(words))] if words else []
    tokens = await loop.measure(new)
    state.messages += new
    state.first_tokens = state.tokens = tokens
    return State.GENERATING


async def generating(loop: AgentLoop) -> State:
    """The model's turn."""
    state = loop.state
    if loop.is_full():
        return loop.end_full(state.tokens)
    try:
        reply = await loop.ask()
    except ContextLengthError as error:
        return loop.end(Ending.MODEL_LENGTH, str(error))
    except SessionError as error:
        if error.kind not in _SPENT:
            raise
        return loop.end(_SPENT[error.kind], str(error))
    state.call = ""
    state.calls.append(reply.call_id)
    if reply.finish == "length" and not len(reply.ids) and reply.message.is_empty:
        return loop.end(Ending.MODEL_LENGTH, f"{len(reply.prompt_ids)} tokens leave the engine room for none")
    state.messages.append(reply.message)
    state.assistant_turns += 1
    state.tokens = len(reply.prompt_ids) + len(reply.ids)
    calls = reply.message.calls
    if not calls and not loop.company.talks:
        if reply.finish != "length":
            return loop.end(Ending.STOP)
        return loop.end_full(state.tokens) if loop.is_full() else loop.end(Ending.LENGTH)
    limit = reached(loop.limits, state)
    if limit is None:
        state.pending = list(calls)
        return State.PROCESSING_TOOLS if calls else State.INTERACTING
    if calls:
        return loop.end(*limit)
    # Nobody answers it any more, but what it is worth is asked all the same.
    state.reason, state.detail = limit
    return State.INTERACTING


async def processing_tools(loop: AgentLoop) -> State:
    """Every call of the last answer has a result before the model is told any."""
    state = loop.state
    await loop.run_tools()
    records = await showable([state.outcomes[place] for place in range(len(state.pending))], loop.count)
    results = [record.message for record in records]
    tokens = await loop.measure(results)
    state.tool_records += records
    state.pending, state.outcomes = [], {}
    return loop.hear(results, tokens)


async def interacting(loop: AgentLoop) -> State:
    """Somebody answers the model, or ends the conversation; a last answer is only judged."""
    state = loop.state
    if state.response is None:
        state.response = await loop.respond()
    response = state.response
    new = [Message("user", response.content)]
    tokens = 0 if response.is_last else await loop.measure(new)
    state.turn_records.append(response)
    state.response = None
    if state.reason is not None:
        return loop.end(state.reason, state.detail)
    if not response.is_last:
        return loop.hear(new, tokens)
    if response.content:
        state.messages += new
    return loop.end(Ending.INTERACTION)


STEPS: dict[State, Callable[[AgentLoop], Awaitable[State]]] = {
    State.PENDING: pending,
    State.GENERATING: generating,
    State.PROCESSING_TOOLS: processing_tools,
    State.INTERACTING: interacting,
}

# -- the machine -------------------------------------------------------------------------------------


class AgentLoop:
    """One trajectory at work. Tools and partners live as long as the block around it."""

    def __init__(
        self,
        model: Model,
        state: LoopState,
        *,
        tools: Selection | None = None,
        partner: Partner | None = None,
        limits: LoopLimits | None = None,
    ) -> None:
        """Without limits, those of the task."""
        self.model = model
        self.state = state
        self.limits = limits = limits or state.task.limits or LoopLimits()
        self.company = Company(state, tools or Selection(), partner, limits)
        cuts_tokens = limits.tool_response_length is not None and limits.tool_response_unit == "tokens"
        if cuts_tokens and model.codec is None:
            raise InputError(
                "limits.tool_response_unit: got 'tokens' and a model whose tokens are not known here, "
                "expected a codec or 'characters'"
            )

    async def __aenter__(self) -> Self:
        self.company.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.company.part()

    async def run(self, cancel: CancelToken | None = None) -> LoopState:
        """Goes on from the state until it is over, or cancelled; then `is_cancel` says so.

        A cancelled task leaves the state as a token does, and is cancelled all the same. An error of the
        model or of an interaction, and a tool that cannot be made, is raised, and leaves a state that can be
        gone on from too.
        """
        state = self.state
        if state.is_ended:
            return state
        state.is_cancel = False
        try:
            if cancel is None:
                await self._run()
            else:
                state.is_cancel = cancel.is_set or not await cancel.guard(self._run())
        except asyncio.CancelledError:
            state.is_cancel = True
            raise
        finally:
            self.company.keep()
        return state

    async def _run(self) -> None:
        await self.company.gather()
        state, began, spent_s = self.state, time.perf_counter(), self.state.spent_s
        limit_s = self.limits.wall_clock_s
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s - spent_s) as clock:
                # A timer that is due already goes off when something is waited for, and not before.
                await asyncio.sleep(0)
                while state.state is not State.TERMINATED:
                    state.state = await STEPS[state.state](self)
        except TimeoutError:
            if not clock.expired():
                raise
            state.take_in()
            state.state = self.end(Ending.WALL_CLOCK, f"more than {limit_s:g} s")
        finally:
            state.spent_s = spent_s + time.perf_counter() - began
        await self.company.judge()

    # -- what the states are made of -----------------------------------------------------------------

    async def ask(self) -> Reply:
        """The model's answer, from where it was left if it was begun before."""
        state = self.state
        params = sampling_of(state, self.room(state.tokens))
        return await go_on(self.model, state, self.company.schemas, params)

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
        record = await self.company.run(self.state.pending[place])
        if is_long(record.message, self.limits):
            # The call is over: a cancel that comes while its result is cut must not make it run again.
            await settle(self._cut(place, record))
        else:
            self._take(place, record, shorten(record.message, self.limits, self.model.codec))

    async def _cut(self, place: int, record: ToolRecord) -> None:
        cut = await asyncio.to_thread(shorten, record.message, self.limits, self.model.codec)
        self._take(place, record, cut)

    def _take(self, place: int, record: ToolRecord, shown: Message) -> None:
        is_whole = shown is record.message
        self.state.outcomes[place] = record if is_whole else structs.replace(record, message=shown)

    async def respond(self) -> TurnRecord:
        """What the partner says to the last answer."""
        state, began = self.state, time.perf_counter()
        try:
            response = await self.company.respond(tuple(state.messages))
        finally:
            state.metrics.interact_s += time.perf_counter() - began
        is_last = response.terminate or state.reason is not None
        extras = dict(response.extras)
        return TurnRecord(state.assistant_turns, response.content, is_last, response.score, extras)

    # -- lengths -------------------------------------------------------------------------------------

    async def measure(self, new: Sequence[Message]) -> int:
        """How long the next prompt is with these messages behind it; 0 where no limit asks."""
        return await self.count(new) if self.limits.has_length else 0

    async def count(self, new: Sequence[Message]) -> int:
        """The same, whether a limit asks or not; raises where the codec cannot show a model such messages."""
        state = self.state
        params = {"chat_template_kwargs": state.task.template} if state.task.template else {}
        return await self.model.count([*state.messages, *new], tools=self.company.schemas, params=params)

    def room(self, tokens: int) -> int | None:
        """How many tokens an answer may have behind so many; None for any number."""
        return room(self.limits, tokens, self.state.first_tokens)

    def is_full(self) -> bool:
        left = self.room(self.state.tokens)
        return left is not None and left <= 0

    def hear(self, new: Sequence[Message], tokens: int) -> State:
        """Tells the model what was said to it, if that fits; a prompt that fills all there is fits."""
        state, left = self.state, self.room(tokens)
        if left is not None and left < 0:
            return self.end_full(tokens)
        state.messages += new
        state.tokens = tokens or state.tokens
        state.user_turns += 1
        return State.GENERATING

    def end_full(self, tokens: int) -> State:
        """The end of a trajectory that has no room behind so many tokens."""
        return self.end(*fullness(self.limits, tokens, self.state.first_tokens))

    def end(self, reason: Ending, detail: str = "") -> State:
        self.state.reason, self.state.detail = reason, detail
        return State.TERMINATED
