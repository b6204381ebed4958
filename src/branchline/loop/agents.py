"""Agents by name: whoever works on a task is named by it, and a task that names nobody is a single turn.

    @agent("twice")
    async def twice(state: LoopState, setting: Setting) -> LoopState:
        await setting.ask(state)                         # the answer is in state.messages
        state.messages.append(Message("user", "Are you sure?"))
        await setting.ask(state)
        return state

    check_tasks(tasks, tools, interactions)              # unknown names, before anything runs
    state = await run_agent(LoopState.begin(task), setting)

An agent takes a state, new or gone on with, to its end, or to a cancel. `single_turn` and `tool` are there.
Every call it makes is in `state.calls`, however it was asked: what is not there would not be trained.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from branchline.core.errors import InputError
from branchline.loop.registry import is_async_callable

if TYPE_CHECKING:
    # At run time they bring the gateway with them, and whoever only names an agent needs none of it.
    from branchline.core.message import Message
    from branchline.loop.cancel import CancelToken
    from branchline.loop.interactions.registry import InteractionRegistry
    from branchline.loop.model import Model, ToolSchemas
    from branchline.loop.state import LoopLimits, LoopState, Task
    from branchline.loop.tools.registry import ToolRegistry
    from branchline.runtime.call_record import CallResult

DEFAULT_AGENT_NAME = "single_turn"
_BUILTIN_MODULE = "branchline.loop.builtin_agents"


@dataclass(frozen=True)
class AgentContext:
    """What agents work with: a session's model, and all tools and interactions there are."""

    model: Model
    tools: ToolRegistry | None = None
    interactions: InteractionRegistry | None = None
    limits: LoopLimits | None = None
    """Of tasks that have none of their own."""
    cancel: CancelToken | None = None

    async def ask(
        self,
        state: LoopState,
        messages: Sequence[Message] | None = None,
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
    ) -> CallResult:
        """A turn of the model: the state's conversation is asked and grows by the answer.

        With messages another conversation is asked, and what becomes of the answer is up to the agent.
        `params` go before the task's sampling; of the limits, `max_new_tokens` is kept to. Where a whole loop
        ends because there is no room left, this raises: ContextLengthError for the model's, SessionError for
        the session's.
        """
        from branchline.loop.generation import ask
        from branchline.loop.limits import LoopLimits

        limits = state.task.limits or self.limits or LoopLimits()
        return await ask(self.model, state, messages, tools, params or {}, limits)


Agent = Callable[["LoopState", AgentContext], Awaitable["LoopState"]]
_agents: dict[str, Agent] = {}


def agent(name: str) -> Callable[[Agent], Agent]:
    """Registers an agent under a name."""
    if not name or not isinstance(name, str):
        raise InputError(f"agent: got the name {name!r}, expected a text that is not empty: @agent('critic')")

    def register(function: Agent) -> Agent:
        _check_agent(name, function)
        known = _agents.get(name)
        # The same definition once more is a module read again, as notebooks do.
        if known is not None and _qualified_name(known) != _qualified_name(function):
            raise InputError(
                f"agent: {name!r} is {_qualified_name(known)} already, expected names that differ"
            )
        _agents[name] = function
        return function

    return register


def find_agent(name: str) -> Agent:
    """The agent of a name; no name is `single_turn`."""
    import_module(_BUILTIN_MODULE)
    try:
        return _agents[name or DEFAULT_AGENT_NAME]
    except KeyError:
        raise InputError(f"agent_name: got {name!r}, expected one of {sorted(_agents)}") from None


def check_tasks(
    tasks: Iterable[Task],
    tools: ToolRegistry | None = None,
    interactions: InteractionRegistry | None = None,
) -> None:
    """Whether everything that tasks name is there; InputError says which task names what is not."""
    from branchline.loop.builtin_agents import select

    for place, task in enumerate(tasks):
        try:
            find_agent(task.agent_name)
            select(task, tools, interactions)
            if not task.agent_name and (task.tools or task.tool_arguments or task.interaction):
                raise InputError(
                    f"agent_name: got none, beside tools {task.tools!r} and interaction "
                    f"{task.interaction!r}, expected one: {DEFAULT_AGENT_NAME!r} has neither, 'tool' has both"
                )
        except InputError as error:
            raise InputError(f"tasks[{place}].{error}") from error


async def run_agent(state: LoopState, setting: AgentContext) -> LoopState:
    """Goes on with a trajectory, by the agent its task names, until it is over or cancelled.

    A trajectory whose agent returns is over. If it is cancelled, by the setting's token or as a task, its
    state says so, and going on means running the agent again on what stands there.
    """
    function = find_agent(state.agent_name)
    if state.is_finished:
        return state
    if getattr(function, "__module__", "") == _BUILTIN_MODULE:
        return await function(state, setting)
    return await _run_custom_agent(function, state, setting)


async def _run_custom_agent(function: Agent, state: LoopState, setting: AgentContext) -> LoopState:
    from branchline.loop.state import LoopPhase, StopReason

    cancel, noted = setting.cancel, RecordingModel(setting.model)

    async def work() -> None:
        ended: object = await function(state, replace(setting, model=cast("Model", noted)))
        if ended is not state:
            # What a cancel leaves and the calls that are noted stand in the one that was given.
            what = "another LoopState" if isinstance(ended, type(state)) else repr(ended)
            raise InputError(
                f"agent {state.agent_name!r}: returned {what}, expected the LoopState it was given"
            )

    state.is_cancel, state.is_with_agent = False, True
    try:
        if cancel is None:
            await work()
        elif cancel.is_set or not await cancel.run_cancellable(work()):
            state.is_cancel = True
    except asyncio.CancelledError:
        state.is_cancel = True
        raise
    finally:
        state.calls += [call for call in noted.call_ids if call not in state.calls]
    if not state.is_cancel:
        state.is_with_agent = False
        state.state, state.is_judged = LoopPhase.TERMINATED, True
        state.reason = state.reason or StopReason.STOP
    return state


class RecordingModel:
    """A model that keeps the names of the calls it answered."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.call_ids: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def ask(self, messages: Sequence[Message], **options: Any) -> CallResult:
        reply = await self._model.ask(messages, **options)
        self.call_ids.append(reply.call_id)
        return reply


def _check_agent(name: str, function: Any) -> None:
    """Whether something can be run as an agent."""
    if not is_async_callable(function):
        raise InputError(f"agent {name!r}: got {function!r}, expected an `async def`")
    try:
        inspect.signature(function).bind("state", "setting")
    except TypeError as error:
        raise InputError(
            f"agent {name!r}: expected to be called with (state, setting), but {error}"
        ) from error


def _qualified_name(function: Agent) -> str:
    """Where it is defined; an object that is called is where its class is."""
    definition = function if hasattr(function, "__qualname__") else type(function)
    return f"{definition.__module__}.{definition.__qualname__}"
