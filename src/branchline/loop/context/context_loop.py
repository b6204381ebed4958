"""The loop of an agent that edits its context.

`state.messages` is the full history, which only grows; the id of a message is its position. The model is
shown a view of it: every tool result with its id, deleted messages as stubs, summarised ones as a summary.
The view follows from the state alone, so a message looks the same when it is first seen and in every later
prompt. A prompt that differs from the last one by an edit is a new branch of the session's tree, and the leaf
it leaves is the snapshot of the context before the edit: nothing that was sampled is lost or trained twice.

Before each answer the prompt and the room for an answer are compared with the model's length. If they do not
fit, a compaction policy shortens the view; without one, or if it cannot, the trajectory ends with a penalty.
A policy that fails ends the trajectory with a fault: that is no failure of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from branchline.core.context_edits import build_view
from branchline.core.errors import CompactionError, ContextLengthError, InputError, SessionError
from branchline.core.message import Message
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.context.context_options import ContextOptions as ContextOptions
from branchline.loop.context.context_state import ContextState, label_result
from branchline.loop.generation import ask_or_resume, effective_sampling
from branchline.loop.model import Model
from branchline.loop.persistence import Fault
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.timeouts import run_in_thread
from branchline.loop.token_budget import reached_limit
from branchline.loop.tools.base import ToolResult
from branchline.runtime.compaction import (
    build_edit,
    plan_edit,
    summary_prompt,
)

CONTEXT_TOOLS = (
    "analyzeText",
    "loadDocument",
    "buildIndex",
    "readChunk",
    "searchEngine",
    "note",
    "readNote",
    "updateNote",
    "checkBudget",
    "deleteContext",
    "undoDelete",
    "redoDelete",
    "finish",
)
"""The names of all tools of the agent `state`, which `tools.py` defines."""


class ContextLoop(AgentLoop):
    """One trajectory whose model is shown a view of its history."""

    def __init__(
        self, model: Model, state: LoopState, *, context_options: ContextOptions | None = None, **options: Any
    ) -> None:
        super().__init__(model, state, **options)
        self._context_options = context_options or ContextOptions()
        if self._context_options.compaction is not None and self.limits.model_length is None:
            raise InputError("limits.model_length: got None with a compaction policy, expected a length")
        length = self.limits.model_length
        if length is not None and self._response_room >= length:
            source = (
                "limits.max_new_tokens" if self._context_options.response_room is None else "response_room"
            )
            raise InputError(
                f"{source}: got {self._response_room} tokens for an answer, expected less than "
                f"limits.model_length, {length}: no prompt fits"
            )
        if state.context is None:
            state.context = ContextState()
        self._context: ContextState = state.context

    def _shown_messages(self, new: Sequence[Message] = ()) -> Sequence[Message]:
        return self._context.view([*self.state.messages, *new]).messages

    def _result_messages(self, results: Sequence[ToolResult]) -> list[Message]:
        first = len(self.state.messages)
        return [label_result(result, first + index, first - 1) for index, result in enumerate(results)]

    def _reached_limit(self) -> tuple[StopReason, str] | None:
        # The tool calls of the last answer may make room, so the model's length is checked after them.
        return reached_limit(msgspec.structs.replace(self.limits, model_length=None), self.state)

    def _append_messages(self, new: Sequence[Message], tokens: int) -> LoopPhase:
        # A prompt that is too long is compacted or ends the trajectory in the next step.
        self.state.messages += new
        self.state.tokens = tokens or self.state.tokens
        self.state.user_turns += 1
        return LoopPhase.GENERATING

    async def _process_tools(self) -> LoopPhase:
        phase = await super()._process_tools()
        if self._context.final_answer is not None and not self.state.is_excluded:
            return self._stop(StopReason.FINISH)
        return phase

    async def _generate(self) -> LoopPhase:
        try:
            await self._compact()
        except CompactionError as error:
            self.state.add_fault(Fault(error.policy, "compact", error.problem))
            return self._stop(StopReason.COMPACTION_FAILED, str(error))
        except ContextLengthError:
            # The conversation is too long even to be summarised.
            pass
        except SessionError as error:
            return self._stop_at_session_limit(error)
        if self._excess_tokens > 0:
            detail = (
                f"a prompt of {self.state.tokens} tokens and {self._response_room} for an answer exceed "
                f"{self.limits.model_length}"
            )
            phase = self._stop(StopReason.MODEL_LENGTH, detail)
        else:
            phase = await super()._generate()
        state = self.state
        if phase is LoopPhase.TERMINATED and state.stop_reason is StopReason.MODEL_LENGTH:
            state.penalty = self._context_options.context_length_penalty
            state.metrics.context_length_exceeded = True
        return phase

    @property
    def _response_room(self) -> int:
        room = self._context_options.response_room
        return room if room is not None else self.limits.max_new_tokens or 1

    @property
    def _excess_tokens(self) -> int:
        """By how much the next prompt with the room for an answer exceeds the model's length."""
        length = self.limits.model_length
        return 0 if length is None else self.state.tokens + self._response_room - length

    async def _compact(self) -> None:
        """Applies the compaction policy until the prompt fits, or until it replaces nothing more."""
        state, context, policy = self.state, self._context, self._context_options.compaction
        while True:
            if context.is_recount_needed:
                state.tokens, context.is_recount_needed = await self._count_tokens(()), False
            if policy is None or self._excess_tokens <= 0:
                return
            assert self.limits.model_length is not None, "the prompt exceeds a length"
            view = context.view(state.messages)
            target = int(self.limits.model_length * self._context_options.compaction_target)
            excess = max(self._excess_tokens, state.tokens - target)
            compaction = await run_in_thread(plan_edit, policy, view, self.model.codec, excess)
            if compaction is None:
                return
            summary = ""
            if compaction.summary_instruction:
                params = effective_sampling(state, self.limits.max_new_tokens)
                prompt = summary_prompt(view, compaction)
                result = await ask_or_resume(self.model, state, prompt, self.resources.schemas, params)
                summary = result.message.content
            # Nothing is awaited after the summary was recorded, so that it is never asked for twice.
            edit = build_edit(view, context.compactions, compaction, summary)
            edits = [*context.edits, edit]
            if build_view(state.messages, edits).messages == view.messages:
                return
            context.compactions.append(edit)
            context.is_recount_needed = True
