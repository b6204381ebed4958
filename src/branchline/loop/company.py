"""Who a model works with on one trajectory: its tools' instances and whoever it talks to, from start to end.

All of them are made when the block begins and put away once when it ends, whatever happens in it. What they
remember can be left in the state (`keep`), and is given back where the trajectory goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from branchline.core.message import Message, ToolCall
from branchline.loop.interactions.base import Response
from branchline.loop.interactions.registry import Partner
from branchline.loop.keeping import KeptTool, Restorable, write
from branchline.loop.state import LoopLimits, LoopState, State
from branchline.loop.tools.registry import Selection
from branchline.loop.tools.workshop import Outcome, ToolLimits, Workshop
from branchline.loop.waiting import limited, settle


class Company:
    """The tools and the partner of one trajectory."""

    def __init__(
        self, state: LoopState, tools: Selection, partner: Partner | None, limits: LoopLimits
    ) -> None:
        self.schemas = tuple(msgspec.to_builtins(schema) for schema in tools.schemas)
        self.first_words: str | None = None
        """What the partner says before the model says anything."""
        self._state = state
        self._partner = partner
        self._partner_state: Any = None
        self._kept = {
            tool.name: KeptTool(tool, state.tool_states)
            for tool in tools.tools
            if isinstance(tool, Restorable)
        }
        self._workshop = Workshop(
            [self._kept.get(tool.name, tool) for tool in tools.tools],
            state.trajectory,
            tools.arguments,
            ToolLimits(limits.max_parallel_calls, limits.tool_timeout_s),
        )
        self._life = AsyncExitStack()

    @property
    def talks(self) -> bool:
        """Whether somebody answers the model where it calls no tool."""
        return self._partner is not None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._workshop)
            if self._partner is not None:
                await self._meet(self._partner)
                stack.push_async_callback(self._part, self._partner)
            self._life = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._life.aclose()

    async def _meet(self, partner: Partner) -> None:
        """Starts the interaction, or goes on with it where it was left."""
        state, interaction = self._state, partner.interaction
        has_met = state.state is not State.PENDING and interaction.name in state.partner_states
        if isinstance(interaction, Restorable) and has_met:
            saved = state.partner_states[interaction.name]
            self._partner_state = await interaction.restore(state.trajectory, saved, **partner.arguments)
        else:
            started = await interaction.start(state.trajectory, **partner.arguments)
            self._partner_state, self.first_words = started

    async def _part(self, partner: Partner) -> None:
        limit_s = self._workshop.limits.wind_down_s
        await settle(limited(partner.interaction.finalize(self._partner_state), limit_s, limit_s))

    async def run(self, call: ToolCall) -> Outcome:
        """What a tool makes of a call. Calls may run side by side; so many at once do."""
        (outcome,) = await self._workshop.run([call])
        return outcome

    async def respond(self, messages: Sequence[Message]) -> Response:
        """What the partner says to the model's last answer."""
        assert self._partner is not None, "nobody is there to respond"
        return await self._partner.interaction.respond(self._partner_state, messages)

    async def judge(self) -> tuple[dict[str, float], float | None]:
        """What the tools say at the end, by name, and what the partner says of the whole."""
        rewards = await self._workshop.calc_rewards()
        score = None
        if self._partner is not None:
            score = await self._partner.interaction.score(self._partner_state)
        return {name: reward for name, reward in rewards.items() if reward is not None}, score

    def keep(self) -> None:
        """Leaves what everybody remembers in the state, unless nobody will ask for it any more."""
        state = self._state
        if state.is_over:
            state.tool_states, state.partner_states = {}, {}
            return
        for tool in self._kept.values():
            tool.write(state.tool_states)
        if self._partner is not None:
            write(self._partner.interaction, self._partner_state, state.partner_states)
