"""The agents that are always there: one answer, or the whole loop with tools and interactions."""

from __future__ import annotations

import msgspec

from branchline.loop.agent_loop import AgentLoop
from branchline.loop.agents import AgentContext, agent
from branchline.loop.interactions.registry import InteractionConfig, InteractionRegistry
from branchline.loop.state import LoopLimits, LoopState, Task
from branchline.loop.tools.registry import ToolRegistry, ToolSelection


@agent("single_turn")
async def single_turn_agent(state: LoopState, setting: AgentContext) -> LoopState:
    """One answer to the prompt, without tools."""
    limits = msgspec.structs.replace(_effective_limits(state, setting), max_assistant_turns=1)
    async with AgentLoop(setting.model, state, limits=limits) as loop:
        return await loop.run(setting.cancel)


@agent("tool")
async def tool_agent(state: LoopState, setting: AgentContext) -> LoopState:
    """Turns until the model is done: it calls the task's tools, and talks to the task's interaction."""
    tools, partner = select(state.task, setting.tools, setting.interactions)
    limits = _effective_limits(state, setting)
    async with AgentLoop(setting.model, state, tools=tools, interaction=partner, limits=limits) as loop:
        return await loop.run(setting.cancel)


def select(
    task: Task, tools: ToolRegistry | None, interactions: InteractionRegistry | None
) -> tuple[ToolSelection, InteractionConfig | None]:
    """What a task names, looked up."""
    selection = (tools or ToolRegistry()).select(task.tools, task.tool_arguments)
    if not task.interaction:
        return selection, None
    return selection, (interactions or InteractionRegistry()).select(
        task.interaction, task.interaction_arguments
    )


def _effective_limits(state: LoopState, setting: AgentContext) -> LoopLimits:
    return state.task.limits or setting.limits or LoopLimits()
