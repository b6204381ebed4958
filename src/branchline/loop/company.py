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
from branchline.core.reader import ToolList
from branchline.loop.interactions.base import Response
from branchline.loop.interactions.registry import Partner
from branchline.loop.keeping import KeptTool, Restorable, forgets
from branchline.loop.state import LoopLimits, LoopState, ToolRecord
from branchline.loop.talk import Talk
from branchline.loop.tools.base import Tool
from branchline.loop.tools.registry import Selection
from branchline.loop.tools.workshop import ToolLimits, Workshop

_WAYS = ("create", "calc_reward")
"""How a tool has something of its own in its instances."""


class Company:
    """The tools and the partner of one trajectory."""

    def __init__(
        self, state: LoopState, tools: Selection, partner: Partner | None, limits: LoopLimits
    ) -> None:
        # One list for the whole trajectory: what identifies it is made once.
        self.schemas = ToolList(msgspec.to_builtins(schema) for schema in tools.schemas)
        self._state = state
        self._tools = tools
        self._partner = partner
        self._limits = limits
        self._kept: list[KeptTool] = []
        self._workshop: Workshop | None = None
        self._talk: Talk | None = None
        self._life = AsyncExitStack()
        self.is_open = False
        """Whether they may be made: somebody is there to put them away."""

    @property
    def talks(self) -> bool:
        """Whether somebody answers the model where it calls no tool."""
        return self._partner is not None

    @property
    def first_words(self) -> str | None:
        """What the partner says before the model says anything."""
        return None if self._talk is None else self._talk.first_words

    async def gather(self) -> None:
        """Makes everybody who is not there yet. If that fails or is cancelled nobody is there."""
        if self._workshop is not None:
            return
        if not self.is_open:
            raise RuntimeError(f"loop of {self._state.trajectory}: runs outside its block, expected inside")
        state, limits = self._state, self._limits
        kept = {
            tool.name: KeptTool(tool, state.tool_states)
            for tool in self._tools.tools
            if isinstance(tool, Restorable)
        }
        workshop = Workshop(
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
            if self._partner is not None:
                talk = await stack.enter_async_context(Talk(self._partner, state, limits))
            self._life = stack.pop_all()
        self._workshop, self._talk, self._kept = workshop, talk, list(kept.values())
        for tool in self._tools.tools:
            if self._was_used(tool):
                state.note(forgets(tool, _WAYS, state.tool_states, state.trajectory))

    def _was_used(self, tool: Tool) -> bool:
        state = self._state
        return any(record.tool == tool.name for record in (*state.tool_records, *state.outcomes.values()))

    async def part(self) -> None:
        """Puts everybody away."""
        self.is_open = False
        workshop, self._workshop, self._talk, self._kept = self._workshop, None, None, []
        try:
            await self._life.aclose()
        finally:
            for fault in workshop.faults if workshop is not None else ():
                if fault.doing == "release":
                    self._state.note(fault)

    async def run(self, call: ToolCall) -> ToolRecord:
        """What a tool makes of a call, whole. Calls may run side by side; so many at once do."""
        assert self._workshop is not None, "nobody is there"
        turn = self._state.assistant_turns
        made = await self._workshop.run_one(call)
        return ToolRecord(
            call.name, turn, made.message, made.reward, dict(made.extras), made.seconds, made.error
        )

    async def respond(self, messages: Sequence[Message]) -> Response:
        """What the partner says to the model's last answer."""
        assert self._talk is not None, "nobody is there to respond"
        return await self._talk.respond(messages)

    async def judge(self) -> None:
        """Writes down what the tools say at the end and what the partner says of the whole."""
        assert self._workshop is not None, "nobody is there"
        state, before = self._state, len(self._workshop.faults)
        rewards = await self._workshop.calc_rewards()
        state.score = None if self._talk is None else await self._talk.score()
        state.final_rewards = {name: reward for name, reward in rewards.items() if reward is not None}
        for fault in self._workshop.faults[before:]:
            state.note(fault)
        state.is_judged = True

    def keep(self) -> None:
        """Leaves what everybody remembers in the state, unless nobody will ask for it any more."""
        state = self._state
        if state.is_ended:
            state.tool_states, state.partner_states = {}, {}
            return
        for tool in self._kept:
            state.note(tool.write(state.tool_states))
        if self._talk is not None:
            self._talk.write()
