"""The agent loop: a state machine in which each step returns the next phase.

    PENDING ──► GENERATING ──► PROCESSING_TOOLS ──► GENERATING      the model called tools
                    ├────────► INTERACTING ───────► GENERATING      it answered, and the interaction responds
                    └────────► TERMINATED                           it stopped, or a limit is reached

A step first awaits everything it needs and then writes it to the state, without an await in between. So a
loop can be cancelled anywhere and resumed: a cancelled generation continues after the ids that were sampled,
and finished tool calls do not run again.

    async with AgentLoop(model, LoopState.begin(task), tools=registry.select()) as loop:
        state = await loop.run(cancel)

The first run in the block creates the tool instances and the interaction; they live until the block ends, so
a cancelled loop that runs again in the same block finds them unchanged. Another block or process restores
them from the state (`persistence.py`), or creates them again with the same arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

from branchline.core.errors import (
    ContextLengthError,
    InputError,
    InteractionError,
    SessionError,
    ToolUnavailableError,
)
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates
from branchline.loop.generation import append_answer, ask_or_resume, effective_sampling
from branchline.loop.interaction import InteractionConfig
from branchline.loop.model import Model
from branchline.loop.persistence import Fault
from branchline.loop.session_binding import bind_session, report_results
from branchline.loop.state import LoopPhase, LoopState, StopReason, TurnRecord
from branchline.loop.step_recorder import StepRecorder
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import CancelToken
from branchline.loop.token_budget import exhausted_limit, reached_limit, remaining_tokens, truncate_result
from branchline.loop.tools.base import ToolResult, ToolSelection
from branchline.loop.tools.tool_session import filter_media
from branchline.loop.trajectory_resources import TrajectoryResources
from branchline.runtime.call_record import StepObserver

_SESSION_STOP_REASONS = {"out_of_calls": StopReason.SESSION_CALLS, "out_of_tokens": StopReason.SESSION_TOKENS}


class AgentLoop:
    """One trajectory. Its tool instances and its interaction live as long as the block."""

    def __init__(
        self,
        model: Model,
        state: LoopState,
        *,
        tools: ToolSelection | None = None,
        interaction: InteractionConfig | None = None,
        limits: LoopLimits | None = None,
        report: bool = True,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """The default limits are those of the task; `limits` replaces them.

        `report`: at the end the session gets the rewards and is completed; pass False if several trajectories
        share a session. `observers` get a record of each call of a tool or of the interaction.
        """
        self._recorder = StepRecorder(observers)
        self.model = model
        self._is_reporting = report
        self.state = state
        self.limits = limits = limits or state.task.merge_limits(LoopLimits())
        self.resources = TrajectoryResources(
            state, tools or ToolSelection(), interaction, limits, self._recorder
        )
        truncates_tokens = limits.tool_response_length is not None and limits.tool_response_unit == "tokens"
        if truncates_tokens and model.codec is None:
            raise InputError(
                "limits.tool_response_unit: got 'tokens' and a model without a codec, "
                "expected a codec or 'characters'"
            )
        self._steps = {
            LoopPhase.PENDING: self._start,
            LoopPhase.GENERATING: self._generate,
            LoopPhase.PROCESSING_TOOLS: self._process_tools,
            LoopPhase.INTERACTING: self._interact,
        }

    async def __aenter__(self) -> Self:
        self.resources.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.resources.release()

    async def run(self, cancel: CancelToken | None = None) -> LoopState:
        """Runs until the trajectory ends or is cancelled, which sets `is_cancelled`, and returns the state.

        Cancelling the task leaves the same state and raises CancelledError. Errors of the model and of a
        tool's `create` are raised; the state can be resumed after them too. A tool that is not available and
        an interaction that fails end the trajectory with a fault.
        """
        state = self.state
        if state.is_loop_finished:
            await self._report()
            return state
        if not state.is_agent_running:
            await bind_session(state, self.model.session)
        if self._recorder.observers:
            info = await self.model.session.read_session()
            self._recorder.session_id, self._recorder.session_created_at = info.id, info.created_at
        state.is_cancelled = False
        try:
            if cancel is None:
                await self._run()
            else:
                state.is_cancelled = cancel.is_set or not await cancel.run_cancellable(self._run())
        except asyncio.CancelledError:
            state.is_cancelled = True
            raise
        finally:
            self.resources.save()
        await self._report()
        return state

    async def _report(self) -> None:
        if self._is_reporting and self.state.is_finished:
            await report_results(self.state, self.model.session)

    async def _run(self) -> None:
        try:
            await self.resources.acquire()
        except (ToolUnavailableError, InteractionError) as error:
            self.state.phase, self.state.is_scored = self._fail(error), True
            return
        state, started, elapsed_s = self.state, time.perf_counter(), self.state.elapsed_s
        limit_s = self.limits.wall_clock_s
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s - elapsed_s) as clock:
                # A timeout that is due already takes effect at the next await that suspends.
                await asyncio.sleep(0)
                while state.phase is not LoopPhase.TERMINATED:
                    state.phase = await self._steps[state.phase]()
        except TimeoutError:
            if not clock.expired():
                raise
            state.pending_results = await self._truncate_results()
            state.flush_partial()
            state.phase = self._stop(StopReason.WALL_CLOCK, f"more than {limit_s:g} s")
        finally:
            state.elapsed_s = elapsed_s + time.perf_counter() - started
        if state.is_excluded:
            state.is_scored = True
        else:
            await self.resources.compute_rewards()

    # -- steps ---------------------------------------------------------------------------------------

    async def _start(self) -> LoopPhase:
        """Appends the interaction's first message to the task's messages."""
        state, session = self.state, self.resources.interaction_session
        content = None if session is None else session.first_message
        new = [Message("user", replace_surrogates(content))] if content else []
        tokens = await self._count_if_limited(new)
        state.messages += new
        state.first_prompt_tokens = state.tokens = tokens
        return LoopPhase.GENERATING

    async def _generate(self) -> LoopPhase:
        """Asks the model for its next answer."""
        state, limits = self.state, self.limits
        exhausted = exhausted_limit(limits, state.tokens, state.first_prompt_tokens)
        if exhausted is not None:
            return self._stop(*exhausted)
        max_tokens = remaining_tokens(limits, state.tokens, state.first_prompt_tokens)
        params = effective_sampling(state, max_tokens)
        try:
            result = await ask_or_resume(
                self.model, state, self._shown_messages(), self.resources.schemas, params
            )
        except ContextLengthError as error:
            return self._stop(StopReason.MODEL_LENGTH, str(error))
        except SessionError as error:
            return self._stop_at_session_limit(error)
        if result.finish_reason == "length" and not len(result.ids) and result.message.is_empty:
            detail = f"the engine has no room after {len(result.prompt_ids)} tokens"
            return self._stop(StopReason.MODEL_LENGTH, detail)
        append_answer(state, result)
        limit = self._reached_limit()
        if result.message.tool_calls:
            if limit is not None:
                return self._stop(*limit)
            state.pending_calls = list(result.message.tool_calls)
            return LoopPhase.PROCESSING_TOOLS
        if self.resources.interaction_session is not None:
            if limit is not None:
                # The model gets no further turn, but the interaction scores its last answer.
                state.stop_reason, state.stop_detail = limit
            return LoopPhase.INTERACTING
        if result.finish_reason != "length":
            return self._stop(StopReason.STOP)
        exhausted = exhausted_limit(limits, state.tokens, state.first_prompt_tokens)
        return self._stop(*exhausted or (StopReason.LENGTH, ""))

    async def _process_tools(self) -> LoopPhase:
        """Runs all tool calls of the last answer, then appends their results."""
        state = self.state
        errors = await self._run_tools()
        if errors:
            state.pending_results = await self._truncate_results()
            state.flush_partial()
            return self._fail(errors[0])
        truncated = await self._truncate_results()
        results = await filter_media(list(truncated.values()), self._count_tokens)
        new = self._result_messages(results)
        tokens = await self._count_if_limited(new)
        state.tool_results += results
        state.pending_calls, state.pending_results, state.started_calls = [], {}, []
        return self._append_messages(new, tokens)

    async def _interact(self) -> LoopPhase:
        """Appends the interaction's response, or ends the conversation; a last answer is only scored."""
        state = self.state
        if state.pending_response is None:
            try:
                state.pending_response = await self._respond()
            except InteractionError as error:
                return self._fail(error)
        response = state.pending_response
        new = [Message("user", response.content)]
        tokens = 0 if response.is_last else await self._count_if_limited(new)
        state.turn_records.append(response)
        state.pending_response = None
        if state.stop_reason is not None:
            return self._stop(state.stop_reason, state.stop_detail)
        if not response.is_last:
            return self._append_messages(new, tokens)
        if response.content:
            state.messages += new
        return self._stop(StopReason.INTERACTION)

    # -- parts of the steps --------------------------------------------------------------------------

    async def _run_tools(self) -> list[ToolUnavailableError]:
        """Runs the calls that have no result yet; each result is stored as soon as its call returns.

        Returns the errors of tools that are not available.
        A cancelled call runs again when the loop is resumed; unless its tool is repeatable, that is a fault.
        """
        state, started = self.state, time.perf_counter()
        remaining = [index for index in range(len(state.pending_calls)) if index not in state.pending_results]
        for index in state.started_calls:
            name = state.pending_calls[index].name
            state.add_fault(self.resources.tool_session.repeat_fault(name, state.assistant_turns))
        state.started_calls = []
        errors: list[ToolUnavailableError] = []
        try:
            if len(remaining) == 1:
                await self._run_tool(remaining[0], errors)
            else:
                async with asyncio.TaskGroup() as group:
                    for index in remaining:
                        group.create_task(self._run_tool(index, errors))
        finally:
            state.metrics.tool_s += time.perf_counter() - started
        return errors

    async def _run_tool(self, index: int, errors: list[ToolUnavailableError]) -> None:
        """Runs one call. A cancellation leaves its result, or that it was started, or nothing."""
        state, session = self.state, self.resources.tool_session
        try:
            result = await session.run_one(
                state.pending_calls[index],
                state.assistant_turns,
                on_start=lambda: state.started_calls.append(index),
            )
        except ToolUnavailableError as error:
            errors.append(error)
            return
        # Nothing is awaited between the tool's return and these lines, even if the loop was cancelled.
        state.pending_results[index] = result
        if index in state.started_calls:
            state.started_calls.remove(index)

    async def _truncate_results(self) -> dict[int, ToolResult]:
        """The finished results of the pending calls, in the order of the calls, truncated to the limit."""
        return {
            index: await truncate_result(result, self.limits, self.model.codec)
            for index, result in sorted(self.state.pending_results.items())
        }

    async def _respond(self) -> TurnRecord:
        """The interaction's response to the last answer."""
        state, started, session = self.state, time.perf_counter(), self.resources.interaction_session
        assert session is not None, "only a task with an interaction gets here"
        try:
            response = await session.respond(tuple(state.messages))
        finally:
            state.metrics.interact_s += time.perf_counter() - started
        is_last = response.terminate or state.stop_reason is not None
        extras = dict(response.extras)
        return TurnRecord(state.assistant_turns, response.content, is_last, response.score, extras)

    def _shown_messages(self, new: Sequence[Message] = ()) -> Sequence[Message]:
        """What the model is shown: the conversation with these messages appended."""
        return [*self.state.messages, *new]

    def _result_messages(self, results: Sequence[ToolResult]) -> list[Message]:
        """The messages of the results of the last answer's tool calls."""
        return [result.message for result in results]

    def _reached_limit(self) -> tuple[StopReason, str] | None:
        """The limit that makes the last answer the final one, with its figures."""
        return reached_limit(self.limits, self.state)

    async def _count_if_limited(self, new: Sequence[Message]) -> int:
        """The length of the next prompt with these messages appended; 0 if no limit needs it."""
        return await self._count_tokens(new) if self.limits.needs_token_counts else 0

    async def _count_tokens(self, new: Sequence[Message]) -> int:
        """The length of the next prompt; raises if the codec cannot encode these messages."""
        state = self.state
        params = {"chat_template_kwargs": state.task.template} if state.task.template else {}
        messages = self._shown_messages(new)
        return await self.model.count_tokens(messages, tools=self.resources.schemas, params=params)

    def _append_messages(self, new: Sequence[Message], tokens: int) -> LoopPhase:
        """Appends messages as a user turn, or stops if the next prompt would exceed a limit."""
        state = self.state
        exceeded = exhausted_limit(self.limits, tokens, state.first_prompt_tokens, needed=0)
        if exceeded is not None:
            return self._stop(*exceeded)
        state.messages += new
        state.tokens = tokens or state.tokens
        state.user_turns += 1
        return LoopPhase.GENERATING

    def _fail(self, error: ToolUnavailableError | InteractionError) -> LoopPhase:
        """Ends the trajectory because of a failure outside the model, which is recorded as a fault."""
        if isinstance(error, ToolUnavailableError):
            self.state.add_fault(Fault(error.tool, "unavailable", error.problem))
            return self._stop(StopReason.TOOL_UNAVAILABLE, str(error))
        operation: Any = error.action
        self.state.add_fault(Fault(error.interaction, operation, error.problem))
        return self._stop(StopReason.INTERACTION_FAILED, str(error))

    def _stop_at_session_limit(self, error: SessionError) -> LoopPhase:
        """Ends the trajectory if the session has no calls or tokens left; raises any other error."""
        if error.kind not in _SESSION_STOP_REASONS:
            raise error
        return self._stop(_SESSION_STOP_REASONS[error.kind], str(error))

    def _stop(self, reason: StopReason, detail: str = "") -> LoopPhase:
        self.state.stop_reason, self.state.stop_detail = reason, detail
        return LoopPhase.TERMINATED
