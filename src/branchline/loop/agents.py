"""Agents by name: whoever works on a task is named by it, and a task that names nobody is a single turn.

    @agent("critic")
    async def critic(state: LoopState, setting: Setting) -> LoopState: ...

    check(tasks, tools, interactions)                    # unknown names, before anything runs
    state = await run_agent(LoopState.begin(task), setting)

An agent takes a state, new or gone on with, to its end, or to a cancel. `single_turn` and `tool` are there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from branchline.core.errors import InputError

if TYPE_CHECKING:
    # At run time they bring the gateway with them, and whoever only names an agent needs none of it.
    from branchline.loop.cancel import CancelToken
    from branchline.loop.interactions.registry import InteractionRegistry
    from branchline.loop.model import Model
    from branchline.loop.state import LoopLimits, LoopState, Task
    from branchline.loop.tools.registry import ToolRegistry

DEFAULT = "single_turn"
_BUILT_IN = "branchline.loop.builtin"


@dataclass(frozen=True)
class Setting:
    """What agents work with: a session's model, and all tools and interactions there are."""

    model: Model
    tools: ToolRegistry | None = None
    interactions: InteractionRegistry | None = None
    limits: LoopLimits | None = None
    """Of tasks that have none of their own."""
    cancel: CancelToken | None = None


Agent = Callable[["LoopState", Setting], Awaitable["LoopState"]]
_agents: dict[str, Agent] = {}


def agent(name: str) -> Callable[[Agent], Agent]:
    """Registers an agent under a name."""
    if not name or not isinstance(name, str):
        raise InputError(f"agent: got the name {name!r}, expected a text that is not empty")

    def register(function: Agent) -> Agent:
        known = _agents.get(name)
        # The same definition once more is a module read again, as notebooks do.
        if known is not None and _place(known) != _place(function):
            raise InputError(f"agent: {name!r} is {_place(known)} already, expected names that differ")
        _agents[name] = function
        return function

    return register


def find_agent(name: str) -> Agent:
    """The agent of a name; no name is `single_turn`."""
    import_module(_BUILT_IN)
    try:
        return _agents[name or DEFAULT]
    except KeyError:
        raise InputError(f"agent_name: got {name!r}, expected one of {sorted(_agents)}") from None


def check(
    tasks: Iterable[Task],
    tools: ToolRegistry | None = None,
    interactions: InteractionRegistry | None = None,
) -> None:
    """Whether everything that tasks name is there; InputError says which task names what is not."""
    from branchline.loop.builtin import chosen

    for place, task in enumerate(tasks):
        try:
            find_agent(task.agent_name)
            chosen(task, tools, interactions)
        except InputError as error:
            raise InputError(f"tasks[{place}].{error}") from error


async def run_agent(state: LoopState, setting: Setting) -> LoopState:
    """Goes on with a trajectory, by the agent its task names."""
    return await find_agent(state.agent_name)(state, setting)


def _place(function: Agent) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
