"""The tool session and the interaction session of one trajectory, from its first run to the end of its block.

Both are created when the trajectory first runs and released once when its block ends, whatever happens in it.
`save` stores their state in the LoopState, from which a later block restores them. A failure outside the
conversation is recorded in the LoopState and ends nothing.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from branchline.core.call import ToolList
from branchline.core.errors import InteractionError
from branchline.loop.interaction import InteractionConfig, InteractionSession
from branchline.loop.persistence import Fault, lost_state
from branchline.loop.state import LoopState
from branchline.loop.step_recorder import StepRecorder
from branchline.loop.task import LoopLimits
from branchline.loop.tools.base import ToolSelection
from branchline.loop.tools.tool_session import ToolSession


class TrajectoryResources:
    """The tools and the interaction of one trajectory."""

    def __init__(
        self,
        state: LoopState,
        tools: ToolSelection,
        interaction: InteractionConfig | None,
        limits: LoopLimits,
        steps: StepRecorder | None = None,
    ) -> None:
        self._steps = steps
        # One ToolList for the whole trajectory, so that its digest is computed once.
        self.schemas = ToolList(msgspec.to_builtins(tool.schema) for tool in tools.tools)
        self.is_open = False
        """Whether the block has been entered and not left."""
        self.interaction_session: InteractionSession | None = None
        """None before `acquire`, or if the task has no interaction."""
        self._state = state
        self._tools = tools
        self._interaction = interaction
        self._limits = limits
        self._tool_session: ToolSession | None = None
        self._exit_stack = AsyncExitStack()

    @property
    def tool_session(self) -> ToolSession:
        assert self._tool_session is not None, "acquire was not called"
        return self._tool_session

    async def acquire(self) -> None:
        """Creates both sessions unless they exist. If that fails or is cancelled, neither exists."""
        if self._tool_session is not None:
            return
        state = self._state
        if not self.is_open:
            raise RuntimeError(f"loop of {state.trajectory}: runs outside its block, expected inside")
        async with AsyncExitStack() as stack:
            tool_session = ToolSession(
                self._tools, state.trajectory, self._limits, state.tool_states, self._steps
            )
            await stack.enter_async_context(tool_session)
            if self._interaction is not None:
                session = InteractionSession(self._interaction, state, self._limits, self._steps)
                self.interaction_session = await stack.enter_async_context(session)
            self._tool_session, self._exit_stack = tool_session, stack.pop_all()
        used = {result.tool for result in (*state.tool_results, *state.pending_results.values())}
        for tool in self._tools.tools:
            if tool.name in used:
                state.add_fault(lost_state(tool, state.tool_states, state.trajectory))

    async def release(self) -> None:
        """Releases both sessions."""
        self.is_open = False
        tool_session, self._tool_session, self.interaction_session = self._tool_session, None, None
        try:
            await self._exit_stack.aclose()
        finally:
            for fault in tool_session.release_faults if tool_session is not None else ():
                self._state.add_fault(fault)

    async def compute_rewards(self) -> None:
        """Writes the final tool rewards and the interaction's score to the state, both or neither."""
        rewards, faults = await self.tool_session.calc_rewards()
        session, score = self.interaction_session, None
        if session is not None:
            try:
                score = await session.score()
            except InteractionError as error:
                faults.append(Fault(session.name, "score", error.problem))
        state = self._state
        state.final_rewards, state.score, state.is_scored = rewards, score, True
        for fault in faults:
            state.add_fault(fault)

    def save(self) -> None:
        """Stores the state of both sessions in the LoopState, or clears it if the loop has finished."""
        state = self._state
        if state.is_loop_finished:
            # In place: the tool session holds the same dict.
            state.tool_states.clear()
            state.interaction_states.clear()
            return
        if self._tool_session is not None:
            for fault in self._tool_session.save():
                state.add_fault(fault)
        if self.interaction_session is not None:
            self.interaction_session.save()
