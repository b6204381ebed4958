"""The agents that are always there: one answer, or the whole loop with tools and interactions."""

from __future__ import annotations

import msgspec

from branchline.loop.agents import Setting, agent
from branchline.loop.interactions.registry import InteractionRegistry, Partner
from branchline.loop.machine import AgentLoop
from branchline.loop.state import LoopLimits, LoopState, Task
from branchline.loop.tools.registry import Selection, ToolRegistry


@agent("single_turn")
async def single_turn(state: LoopState, setting: Setting) -> LoopState:
    """One answer to the prompt, without tools."""
    limits = msgspec.structs.replace(_limits(state, setting), max_assistant_turns=1)
    async with AgentLoop(setting.model, state, limits=limits) as loop:
        return await loop.run(setting.cancel)


@agent("tool")
async def tool(state: LoopState, setting: Setting) -> LoopState:
    """Turns until the model is done: it calls the task's tools, and talks to the task's interaction."""
    tools, partner = chosen(state.task, setting.tools, setting.interactions)
    limits = _limits(state, setting)
    async with AgentLoop(setting.model, state, tools=tools, partner=partner, limits=limits) as loop:
        return await loop.run(setting.cancel)


def chosen(
    task: Task, tools: ToolRegistry | None, interactions: InteractionRegistry | None
) -> tuple[Selection, Partner | None]:
    """What a task names, looked up."""
    selection = (tools or ToolRegistry()).select(task.tools, task.tool_arguments)
    if not task.interaction:
        return selection, None
    return selection, (interactions or InteractionRegistry()).select(
        task.interaction, task.interaction_arguments
    )


def _limits(state: LoopState, setting: Setting) -> LoopLimits:
    return state.task.limits or setting.limits or LoopLimits()
