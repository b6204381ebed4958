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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from branchline.core.errors import InputError, ToolError
from branchline.core.json_fields import replace_surrogates
from branchline.core.message import Media, Message, ToolCall
from branchline.loop.faults import Fault
from branchline.loop.serialization import check_finite, copy_containers, to_plain_data
from branchline.loop.timeouts import CANCEL_GRACE_S, describe_error, finish_despite_cancel, with_timeout
from branchline.loop.tools.arguments import argument_validator, parse_arguments
from branchline.loop.tools.base import Tool, ToolResult
from branchline.loop.tools.registry import check_tool_arguments

log = logging.getLogger("branchline.tools")


@dataclass(frozen=True)
class ToolLimits:
    """How much may run at once, and how long anything may take."""

    max_parallel_calls: int = 8
    timeout_s: float | None = 60.0
    """For one call, and for judging one instance; waiting for its turn does not count."""
    create_timeout_s: float | None = 120.0
    release_timeout_s: float | None = 30.0
    cancel_grace_s: float = CANCEL_GRACE_S
    """For whatever is cancelled to put its things away."""

    def __post_init__(self) -> None:
        if self.max_parallel_calls < 1:
            raise InputError(f"max_parallel_calls: got {self.max_parallel_calls}, expected 1 or more")


@dataclass(frozen=True)
class ToolOutcome:
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


class ToolSession:
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
        self._validators = {tool.name: argument_validator(tool) for tool in tools}
        self._arguments = check_tool_arguments(arguments or {}, list(self._tools))
        self._instances: dict[str, Any] = {}
        self._semaphore = asyncio.Semaphore(self.limits.max_parallel_calls)
        self._state: Literal["new", "open", "closed"] = "new"

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told of the tools."""
        return tuple(tool.schema for tool in self._tools.values())

    # -- the life of instances -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Creates all instances side by side; if one fails, those of the others are released."""
        self._require_state("new")
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
                await finish_despite_cancel(self._close())
        return self

    async def __aexit__(self, *_: object) -> None:
        await finish_despite_cancel(self._close())

    async def _create(self, tool: Tool) -> None:
        limits = self.limits
        try:
            await with_timeout(self._create_instance(tool), limits.create_timeout_s, limits.cancel_grace_s)
        except Exception as error:
            raise ToolError(tool.name, "create", describe_error(error)) from error

    async def _create_instance(self, tool: Tool) -> None:
        arguments = copy_containers(self._arguments.get(tool.name, {}))
        instance = await tool.create(self.trajectory, **arguments)
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
        limits = self.limits
        try:
            work = self._tools[name].release(instance)
            await with_timeout(work, limits.release_timeout_s, limits.cancel_grace_s)
        except Exception as error:
            self._add_fault(Fault(name, "release", describe_error(error)))

    def _add_fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        log.warning("%s: tool %s", self.trajectory, fault)

    def _require_state(self, state: Literal["new", "open"]) -> None:
        if self._state != state:
            raise RuntimeError(f"workshop of {self.trajectory}: is {self._state}, expected {state}")

    # -- calls ---------------------------------------------------------------------------------------

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Runs calls, so many at a time, and gives their outcomes in the order of the calls.

        Cancelling it cancels the calls that run, and returns when they have wound down.
        """
        self._require_state("open")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run_one(call)) for call in calls]
        return [task.result() for task in tasks]

    async def calc_rewards(self) -> dict[str, float | None]:
        """What each instance is worth at the end. One that fails to say is None here and in `faults`."""
        self._require_state("open")
        names = list(self._instances)
        rewards = await asyncio.gather(*[self._calc_reward(name) for name in names])
        return dict(zip(names, rewards, strict=True))

    async def run_one(self, call: ToolCall) -> ToolOutcome:
        """The same for one call; several may run side by side, and so many at a time do."""
        self._require_state("open")
        async with self._semaphore:
            began = time.perf_counter()
            try:
                result: object = await self._execute(call)
                return _to_outcome(call, result, time.perf_counter() - began)
            except Exception as error:
                log.debug("%s: tool %s failed", self.trajectory, call.name, exc_info=error)
                failed = ToolResult(tool_error_text(call.name, error), is_error=True)
                return _to_outcome(call, failed, time.perf_counter() - began)

    async def _execute(self, call: ToolCall) -> object:
        tool = self._tools.get(call.name)
        if tool is None:
            known = list(self._tools)
            return ToolResult(f"Unknown function '{call.name}'. Available tools: {known}", is_error=True)
        try:
            arguments = parse_arguments(call.arguments)
        except ValueError as error:
            return ToolResult(f"Invalid JSON in arguments for '{call.name}': {error}", is_error=True)
        problems = self._validators[call.name].problems(arguments)
        if problems:
            raise InputError(problems)
        limits = self.limits
        work = tool.execute(self._instances[call.name], arguments)
        return await with_timeout(work, limits.timeout_s, limits.cancel_grace_s)

    async def _calc_reward(self, name: str) -> float | None:
        limits = self.limits
        try:
            work = self._tools[name].calc_reward(self._instances[name])
            return check_finite(await with_timeout(work, limits.timeout_s, limits.cancel_grace_s), "reward")
        except Exception as error:
            self._add_fault(Fault(name, "calc_reward", describe_error(error)))
            return None


def tool_error_text(tool: str, error: BaseException) -> str:
    """What the model is told of a call that came to nothing."""
    return f"Error executing tool '{tool}': {describe_error(error)}"


def _to_outcome(call: ToolCall, result: object, seconds: float) -> ToolOutcome:
    """The outcome of a call; raises where a result is none that a model or a trainer could use."""
    if not isinstance(result, ToolResult):
        raise TypeError(f"the tool returned {type(result).__name__}, expected ToolResult")
    # Nobody checks what other people's tools put into their results.
    text: Any = result.content
    media: Any = result.media
    extras: Any = result.extras or {}
    if not isinstance(text, str):
        raise TypeError(f"text: got {text!r}, expected a string")
    if not isinstance(media, list | tuple) or not all(isinstance(item, Media) for item in media):
        raise TypeError(f"media: got {type(media).__name__}, expected a tuple of Media")
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras: got {type(extras).__name__}, expected an object")
    text = replace_surrogates(text)
    parts: tuple[str | Media, ...] = ()
    if media:
        parts = (text, *media) if text else tuple(media)
    message = Message("tool", text, tool_call_id=call.id, name=call.name, parts=parts)
    error = text if result.is_error else None
    kept = to_plain_data(extras, "extras") if extras else {}
    return ToolOutcome(call, message, check_finite(result.reward, "reward"), kept, seconds, error)
