"""Who a model works with on one trajectory: its tools' instances and whoever it talks to, from start to end.

All of them are made when the trajectory first runs and put away once when its block ends, whatever happens in
it. What they remember can be left in the state (`keep`), and is given back where the trajectory goes on. What
fails beside the conversation is noted in the state and ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from branchline.core.message import Message, ToolCall
from branchline.core.tools import ToolList
from branchline.loop.interaction_session import InteractionSession
from branchline.loop.interactions.base import InteractionResponse
from branchline.loop.interactions.registry import InteractionConfig
from branchline.loop.persistence import PersistentTool, Restorable, lost_state
from branchline.loop.state import LoopLimits, LoopState, ToolRecord
from branchline.loop.tools.base import Tool
from branchline.loop.tools.registry import ToolSelection
from branchline.loop.tools.tool_session import ToolLimits, ToolSession

_STATEFUL_METHODS = ("create", "calc_reward")
"""How a tool has something of its own in its instances."""


class TrajectoryResources:
    """The tools and the partner of one trajectory."""

    def __init__(
        self, state: LoopState, tools: ToolSelection, partner: InteractionConfig | None, limits: LoopLimits
    ) -> None:
        # One list for the whole trajectory: what identifies it is made once.
        self.schemas = ToolList(msgspec.to_builtins(schema) for schema in tools.schemas)
        self._state = state
        self._tools = tools
        self._interaction = partner
        self._limits = limits
        self._persistent_tools: list[PersistentTool] = []
        self._tool_session: ToolSession | None = None
        self._interaction_session: InteractionSession | None = None
        self._exit_stack = AsyncExitStack()
        self.is_open = False
        """Whether they may be made: somebody is there to put them away."""

    @property
    def has_interaction(self) -> bool:
        """Whether somebody answers the model where it calls no tool."""
        return self._interaction is not None

    @property
    def first_message(self) -> str | None:
        """What the partner says before the model says anything."""
        return None if self._interaction_session is None else self._interaction_session.first_message

    async def acquire(self) -> None:
        """Makes everybody who is not there yet. If that fails or is cancelled nobody is there."""
        if self._tool_session is not None:
            return
        if not self.is_open:
            raise RuntimeError(f"loop of {self._state.trajectory}: runs outside its block, expected inside")
        state, limits = self._state, self._limits
        kept = {
            tool.name: PersistentTool(tool, state.tool_states)
            for tool in self._tools.tools
            if isinstance(tool, Restorable)
        }
        workshop = ToolSession(
            [kept.get(tool.name, tool) for tool in self._tools.tools],
            state.trajectory,
            self._tools.arguments,
            ToolLimits(
                max_parallel_calls=limits.max_parallel_calls,
                timeout_s=limits.tool_timeout_s,
                create_timeout_s=limits.tool_create_timeout_s,
                release_timeout_s=limits.tool_release_timeout_s,
            ),
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(workshop)
            talk = None
            if self._interaction is not None:
                talk = await stack.enter_async_context(InteractionSession(self._interaction, state, limits))
            self._exit_stack = stack.pop_all()
        self._tool_session, self._interaction_session, self._persistent_tools = (
            workshop,
            talk,
            list(kept.values()),
        )
        for tool in self._tools.tools:
            if self._was_used(tool):
                state.add_fault(lost_state(tool, _STATEFUL_METHODS, state.tool_states, state.trajectory))

    def _was_used(self, tool: Tool) -> bool:
        state = self._state
        return any(record.tool == tool.name for record in (*state.tool_records, *state.outcomes.values()))

    async def release(self) -> None:
        """Puts everybody away."""
        self.is_open = False
        workshop, self._tool_session, self._interaction_session, self._persistent_tools = (
            self._tool_session,
            None,
            None,
            [],
        )
        try:
            await self._exit_stack.aclose()
        finally:
            for fault in workshop.faults if workshop is not None else ():
                if fault.doing == "release":
                    self._state.add_fault(fault)

    async def run_tool(self, call: ToolCall) -> ToolRecord:
        """What a tool makes of a call, whole. Calls may run side by side; so many at once do."""
        assert self._tool_session is not None, "nobody is there"
        turn = self._state.assistant_turns
        made = await self._tool_session.run_one(call)
        return ToolRecord(
            call.name, turn, made.message, made.reward, dict(made.extras), made.seconds, made.error
        )

    async def respond(self, messages: Sequence[Message]) -> InteractionResponse:
        """What the partner says to the model's last answer."""
        assert self._interaction_session is not None, "nobody is there to respond"
        return await self._interaction_session.respond(messages)

    async def compute_rewards(self) -> None:
        """Writes down what the tools say at the end and what the partner says of the whole."""
        assert self._tool_session is not None, "nobody is there"
        state, before = self._state, len(self._tool_session.faults)
        rewards = await self._tool_session.calc_rewards()
        state.score = None if self._interaction_session is None else await self._interaction_session.score()
        state.final_rewards = {name: reward for name, reward in rewards.items() if reward is not None}
        for fault in self._tool_session.faults[before:]:
            state.add_fault(fault)
        state.is_judged = True

    def save(self) -> None:
        """Leaves what everybody remembers in the state, unless nobody will ask for it any more."""
        state = self._state
        if state.is_loop_finished:
            state.tool_states, state.partner_states = {}, {}
            return
        for tool in self._persistent_tools:
            state.add_fault(tool.save_state(state.tool_states))
        if self._interaction_session is not None:
            self._interaction_session.save_state()
