"""The tools of one trajectory at work: made at its start, used when the model asks, put away once.

    async with Workshop(selection.tools, trajectory, selection.arguments) as workshop:
        outcomes = await workshop.run(message.calls)
        rewards = await workshop.calc_rewards()

Every call has an outcome, in the order of the calls: what a tool raises, a call that takes too long and
arguments that cannot be read are told to the model. Every instance that was created is released exactly once,
on cancellation too, and nothing waits longer than the limits say.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from branchline.core.errors import InputError, ToolError
from branchline.core.fields import clean
from branchline.core.message import Media, Message, ToolCall
from branchline.loop.tools.arguments import argument_check, read_arguments
from branchline.loop.tools.base import Tool, ToolResult
from branchline.loop.tools.registry import read_tool_arguments
from branchline.loop.waiting import limited, settle, told

log = logging.getLogger("branchline.tools")


@dataclass(frozen=True)
class ToolLimits:
    """How much may run at once, and how long anything may take."""

    max_parallel_calls: int = 8
    timeout_s: float | None = 60.0
    """For one call, and for judging one instance; waiting for its turn does not count."""
    create_timeout_s: float | None = 120.0
    wind_down_s: float = 10.0
    """For one release, and for a cancelled call to put its things away."""

    def __post_init__(self) -> None:
        if self.max_parallel_calls < 1:
            raise InputError(f"max_parallel_calls: got {self.max_parallel_calls}, expected 1 or more")


@dataclass(frozen=True)
class Outcome:
    """What became of one call."""

    call: ToolCall
    message: Message
    """What the model is shown."""
    reward: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """How long the tool worked on it; waiting for its turn does not count."""
    error: str | None = None
    """What the model is shown, where it says that the call failed."""


@dataclass(frozen=True)
class Fault:
    """Something that failed where no model is there to be told."""

    tool: str
    doing: Literal["calc_reward", "release"]
    error: str


class Workshop:
    """The tool instances of one trajectory."""

    def __init__(
        self,
        tools: Sequence[Tool],
        trajectory: str,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        limits: ToolLimits | None = None,
    ) -> None:
        self.trajectory = trajectory
        self.limits = limits or ToolLimits()
        self.faults: list[Fault] = []
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise InputError(f"tools: got {[tool.name for tool in tools]}, expected names that differ")
        self._checks = {tool.name: argument_check(tool) for tool in tools}
        self._arguments = read_tool_arguments(arguments or {}, list(self._tools))
        self._instances: dict[str, Any] = {}
        self._slots = asyncio.Semaphore(self.limits.max_parallel_calls)
        self._state: Literal["new", "open", "closed"] = "new"

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told of the tools."""
        return tuple(tool.schema for tool in self._tools.values())

    # -- the life of instances -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Creates all instances side by side; if one fails, those of the others are released."""
        self._require("new")
        self._state = "open"
        ready = False
        try:
            async with asyncio.TaskGroup() as group:
                for tool in self._tools.values():
                    group.create_task(self._create(tool))
            ready = True
        except ExceptionGroup as errors:
            first, *others = errors.exceptions
            for other in others:
                first.add_note(f"also: {other}")
            raise first from first.__cause__
        finally:
            if not ready:
                await settle(self._close())
        return self

    async def __aexit__(self, *_: object) -> None:
        await settle(self._close())

    async def _create(self, tool: Tool) -> None:
        limits = self.limits
        try:
            await limited(self._make(tool), limits.create_timeout_s, limits.wind_down_s)
        except Exception as error:
            raise ToolError(tool.name, "create", told(error)) from error

    async def _make(self, tool: Tool) -> None:
        instance = await tool.create(self.trajectory, **self._arguments.get(tool.name, {}))
        if self._state == "closed":
            # It ignored its cancellation for longer than anybody waited.
            await self._release(tool.name, instance)
        else:
            self._instances[tool.name] = instance

    async def _close(self) -> None:
        self._state = "closed"
        # Taken out before anything is awaited: nobody else can release them a second time.
        instances, self._instances = self._instances, {}
        await asyncio.gather(*[self._release(name, instance) for name, instance in instances.items()])

    async def _release(self, name: str, instance: Any) -> None:
        wind_down_s = self.limits.wind_down_s
        try:
            await limited(self._tools[name].release(instance), wind_down_s, wind_down_s)
        except Exception as error:
            self._note(Fault(name, "release", told(error)))

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        log.warning("%s: tool %s: %s: %s", self.trajectory, fault.tool, fault.doing, fault.error)

    def _require(self, state: Literal["new", "open"]) -> None:
        if self._state != state:
            raise RuntimeError(f"workshop of {self.trajectory}: is {self._state}, expected {state}")

    # -- calls ---------------------------------------------------------------------------------------

    async def run(self, calls: Sequence[ToolCall]) -> list[Outcome]:
        """Runs calls, so many at a time, and gives their outcomes in the order of the calls.

        Cancelling it cancels the calls that run, and returns when they have wound down.
        """
        self._require("open")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(call)) for call in calls]
        return [task.result() for task in tasks]

    async def calc_rewards(self) -> dict[str, float | None]:
        """What each instance is worth at the end. One that fails to say is None here and in `faults`."""
        self._require("open")
        names = list(self._instances)
        rewards = await asyncio.gather(*[self._calc_reward(name) for name in names])
        return dict(zip(names, rewards, strict=True))

    async def _run(self, call: ToolCall) -> Outcome:
        async with self._slots:
            began = time.perf_counter()
            try:
                result = await self._answer(call)
            except Exception as error:
                log.debug("%s: tool %s failed", self.trajectory, call.name, exc_info=error)
                result = ToolResult(f"Error executing tool '{call.name}': {told(error)}", is_error=True)
            return _outcome(call, result, time.perf_counter() - began)

    async def _answer(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            known = list(self._tools)
            return ToolResult(f"Unknown function '{call.name}'. Available tools: {known}", is_error=True)
        try:
            arguments = read_arguments(call.arguments)
        except ValueError as error:
            return ToolResult(f"Invalid JSON in arguments for '{call.name}': {error}", is_error=True)
        problems = self._checks[call.name].problems(arguments)
        if problems:
            raise InputError(problems)
        limits = self.limits
        work = tool.execute(self._instances[call.name], arguments)
        result: object = await limited(work, limits.timeout_s, limits.wind_down_s)
        if not isinstance(result, ToolResult):
            raise TypeError(f"the tool returned {type(result).__name__}, expected ToolResult")
        return replace(result, reward=_finite(result.reward))

    async def _calc_reward(self, name: str) -> float | None:
        limits = self.limits
        try:
            work = self._tools[name].calc_reward(self._instances[name])
            return _finite(await limited(work, limits.timeout_s, limits.wind_down_s))
        except Exception as error:
            self._note(Fault(name, "calc_reward", told(error)))
            return None


def _outcome(call: ToolCall, result: ToolResult, seconds: float) -> Outcome:
    text = clean(result.text)
    parts: tuple[str | Media, ...] = ()
    if result.media:
        parts = (text, *result.media) if text else result.media
    message = Message("tool", text, answers=call.id, name=call.name, parts=parts)
    error = text if result.is_error else None
    return Outcome(call, message, result.reward, result.extras, seconds, error)


def _finite(reward: float | None) -> float | None:
    """A reward that can be trained on."""
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"reward: got {reward}, expected a finite number")
    return number
