"""Agents by name. A task names the agent that works on it; the default is `single_turn`.

    @agent("twice")
    async def twice(state: LoopState, context: AgentContext) -> LoopState:
        await context.ask(state)                         # appends the answer to state.messages
        state.messages.append(Message("user", "Are you sure?"))
        await context.ask(state)
        return state

    check_tasks(tasks, tools, interactions)              # raises for unknown names before anything runs
    state = await run_agent(LoopState.begin(task), context)

An agent takes a new or resumed state to its end, or until it is cancelled. `single_turn`, `tool` and `state`
are built in. Every call an agent makes is listed in `state.call_ids`: only listed calls are trained.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.sample import Sample
from branchline.export.samples import Export
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.context.context_loop import CONTEXT_TOOLS, ContextLoop, ContextOptions
from branchline.loop.generation import (
    add_call,
    append_answer,
    ask_or_resume,
    effective_sampling,
    timed_generation,
)
from branchline.loop.interaction import InteractionConfig
from branchline.loop.model import Model, SessionControl, ToolSchemas
from branchline.loop.registry import InteractionRegistry, ToolRegistry, is_async_callable
from branchline.loop.session_binding import bind_session, report_results
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import ToolSelection
from branchline.runtime.call_record import CallResult, StepObserver

DEFAULT_AGENT_NAME = "single_turn"
STATE_AGENT_NAME = "state"


@dataclass(frozen=True)
class AgentContext:
    """What agents work with: the model of a session, and all registered tools and interactions."""

    model: Model
    tools: ToolRegistry | None = None
    interactions: InteractionRegistry | None = None
    limits: LoopLimits | None = None
    """The limits of all tasks; a task overrides them field by field."""
    cancel: CancelToken | None = None
    report: bool = True
    """Whether the session gets the rewards and is completed at the end of a trajectory; pass False if several
    trajectories share a session."""
    observers: tuple[StepObserver, ...] = ()
    """Get a record of each call of a tool or an interaction, for example `Tracing.record_step`."""
    context_options: ContextOptions | None = None
    """How the agent `state` treats a context that becomes too long; None is the defaults."""

    def limits_for(self, task: Task) -> LoopLimits:
        return task.merge_limits(self.limits or LoopLimits())

    async def ask(
        self,
        state: LoopState,
        messages: Sequence[Message] | None = None,
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
    ) -> CallResult:
        """Asks the model for one answer and appends it to the state's conversation.

        With `messages` another conversation is sent, and the state's conversation does not change; such
        calls may run concurrently, and a cancelled one is not resumed. `params` override the task's sampling;
        of the limits only `max_new_tokens` applies. Raises ContextLengthError or SessionError where AgentLoop
        would end the trajectory: the model's context or the session has no room left.
        """
        sampling = effective_sampling(state, self.limits_for(state.task).max_new_tokens, params)
        if messages is None:
            result = await ask_or_resume(self.model, state, state.messages, tools, sampling)
            append_answer(state, result)
            return result
        with timed_generation(state):
            result = await self.model.ask(messages, tools=tools, params=sampling)
        add_call(state, result)
        return result


Agent = Callable[[LoopState, AgentContext], Awaitable[LoopState]]


async def single_turn_agent(state: LoopState, context: AgentContext) -> LoopState:
    """One answer to the prompt, without tools."""
    limits = msgspec.structs.replace(context.limits_for(state.task), max_assistant_turns=1)
    async with AgentLoop(
        context.model, state, limits=limits, report=context.report, observers=context.observers
    ) as loop:
        return await loop.run(context.cancel)


async def tool_agent(state: LoopState, context: AgentContext) -> LoopState:
    """The whole loop, with the task's tools and its interaction."""
    tools, interaction = select(state.task, context.tools, context.interactions)
    limits = context.limits_for(state.task)
    async with AgentLoop(
        context.model,
        state,
        tools=tools,
        interaction=interaction,
        limits=limits,
        report=context.report,
        observers=context.observers,
    ) as loop:
        return await loop.run(context.cancel)


async def state_agent(state: LoopState, context: AgentContext) -> LoopState:
    """The whole loop with tools that edit the context, read the task's documents and keep notes.

    Without these tools and without `context_options` it is the agent `tool`.
    """
    names = context_tool_names(state.task)
    if not names and context.context_options is None:
        return await tool_agent(state, context)
    tools, interaction = select(state.task, context.tools, context.interactions)
    limits = context.limits_for(state.task)
    if names:
        # Only this agent needs the packages that the tools need.
        from branchline.loop.context.tools import ContextWorkspace, build_context_tools

        workspace = ContextWorkspace(state, context.model, limits)
        tools = replace(tools, tools=(*tools.tools, *build_context_tools(workspace, names)))
    async with ContextLoop(
        context.model,
        state,
        context_options=context.context_options,
        tools=tools,
        interaction=interaction,
        limits=limits,
        report=context.report,
        observers=context.observers,
    ) as loop:
        return await loop.run(context.cancel)


BUILTIN_AGENTS: dict[str, Agent] = {
    DEFAULT_AGENT_NAME: single_turn_agent,
    "tool": tool_agent,
    STATE_AGENT_NAME: state_agent,
    # The names in verl's datasets.
    "single_turn_agent": single_turn_agent,
    "tool_agent": tool_agent,
    "tool_agent_loop": tool_agent,
}
_custom_agents: dict[str, Agent] = {}


def agent(name: str) -> Callable[[Agent], Agent]:
    """Registers an agent under a name."""
    if not name or not isinstance(name, str):
        raise InputError(f"agent: got the name {name!r}, expected a non-empty text: @agent('critic')")

    def register(function: Agent) -> Agent:
        _check_agent(name, function)
        known = BUILTIN_AGENTS.get(name) or _custom_agents.get(name)
        # Registering the same definition again is allowed: notebooks and reloads do.
        if known is not None and _qualified_name(known) != _qualified_name(function):
            raise InputError(
                f"agent: {name!r} is {_qualified_name(known)} already, expected names that differ"
            )
        _custom_agents[name] = function
        return function

    return register


def agent_names() -> list[str]:
    """The names of all agents."""
    return sorted({**_custom_agents, **BUILTIN_AGENTS})


def find_agent(name: str) -> Agent:
    """The agent of a name; the empty name is `single_turn`. Raises InputError for an unknown name."""
    agents = {**_custom_agents, **BUILTIN_AGENTS}
    try:
        return agents[name or DEFAULT_AGENT_NAME]
    except KeyError:
        raise InputError(f"agent_name: got {name!r}, expected one of {sorted(agents)}") from None


def select(
    task: Task, tools: ToolRegistry | None, interactions: InteractionRegistry | None
) -> tuple[ToolSelection, InteractionConfig | None]:
    """The tools and the interaction that a task names, without those of the agent `state`.

    Raises InputError for an unknown name.
    """
    registry, names = tools or ToolRegistry(), task.tools
    if names is not None:
        own = context_tool_names(task)
        names = tuple([name for name in names if name not in own])
    selection = registry.select(names, task.tool_arguments, task.tool_method_arguments)
    if not task.interaction:
        return selection, None
    named = (interactions or InteractionRegistry()).select(task.interaction, task.interaction_arguments)
    return selection, named


def context_tool_names(task: Task) -> tuple[str, ...]:
    """The tools of the agent `state` that a task uses; all of them if it names no tools."""
    if task.agent_name != STATE_AGENT_NAME:
        return ()
    return tuple([name for name in CONTEXT_TOOLS if task.tools is None or name in task.tools])


def check_tasks(
    tasks: Iterable[Task],
    tools: ToolRegistry | None = None,
    interactions: InteractionRegistry | None = None,
) -> None:
    """Raises InputError, with the task's index, if a task names something that is not registered."""
    for index, task in enumerate(tasks):
        try:
            find_agent(task.agent_name)
            select(task, tools, interactions)
            if not task.agent_name and (task.tools or task.tool_arguments or task.interaction):
                raise InputError(
                    f"agent_name: got none with tools {task.tools!r} and interaction {task.interaction!r}, "
                    f"expected one: {DEFAULT_AGENT_NAME!r} uses neither, 'tool' uses both"
                )
        except InputError as error:
            raise InputError(f"tasks[{index}].{error}") from error


async def run_agent(state: LoopState, context: AgentContext) -> LoopState:
    """Runs the agent that the state's task names until the trajectory ends or is cancelled.

    A trajectory ends when its agent returns. If it is cancelled, by the context's token or as a task, the
    state says so; running it again calls the agent with the state as it was.
    """
    function = find_agent(state.task.agent_name)
    if not state.is_finished:
        if function in BUILTIN_AGENTS.values():
            return await function(state, context)
        await bind_session(state, context.model.session)
        await _run_custom_agent(function, state, context)
    if context.report and state.is_finished:
        await report_results(state, context.model.session)
    return state


async def _run_custom_agent(function: Agent, state: LoopState, context: AgentContext) -> None:
    cancel, model = context.cancel, RecordingModel(context.model)

    async def work() -> None:
        returned: object = await function(state, replace(context, model=model))
        if returned is not state:
            # Calls and cancellations are recorded in the state that was passed in.
            what = "another LoopState" if isinstance(returned, LoopState) else repr(returned)
            raise InputError(
                f"agent {state.task.agent_name!r}: returned {what}, expected the LoopState it was given"
            )

    state.is_cancelled, state.is_agent_running = False, True
    try:
        if cancel is None:
            await work()
        elif cancel.is_set or not await cancel.run_cancellable(work()):
            state.is_cancelled = True
    except asyncio.CancelledError:
        state.is_cancelled = True
        raise
    finally:
        state.call_ids += [call_id for call_id in model.call_ids if call_id not in state.call_ids]
    if not state.is_cancelled:
        state.is_agent_running = False
        state.phase, state.is_scored = LoopPhase.TERMINATED, True
        state.stop_reason = state.stop_reason or StopReason.STOP


class RecordingModel:
    """A model that records the ids of the calls it answered."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.call_ids: list[str] = []

    @property
    def codec(self) -> Codec | None:
        return self._model.codec

    @property
    def session(self) -> SessionControl:
        return self._model.session

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
        call_name: str = "",
    ) -> CallResult:
        result = await self._model.ask(messages, tools=tools, params=params, call_name=call_name)
        self.call_ids.append(result.call_id)
        return result

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        return await self._model.count_tokens(messages, tools=tools, params=params)

    async def samples(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        return await self._model.samples(
            include_aborted=include_aborted, keep_calls=keep_calls, policy=policy
        )

    async def export(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> Export:
        return await self._model.export(include_aborted=include_aborted, keep_calls=keep_calls, policy=policy)


def _check_agent(name: str, function: Any) -> None:
    """Raises InputError if the function cannot be run as an agent."""
    if not is_async_callable(function):
        raise InputError(f"agent {name!r}: got {function!r}, expected an `async def`")
    try:
        inspect.signature(function).bind("state", "context")
    except TypeError as error:
        raise InputError(
            f"agent {name!r}: expected to be called with (state, context), but {error}"
        ) from error


def _qualified_name(function: Agent) -> str:
    """The definition's module and name; for a callable object those of its class."""
    definition = function if hasattr(function, "__qualname__") else type(function)
    return f"{definition.__module__}.{definition.__qualname__}"
