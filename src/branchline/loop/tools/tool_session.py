"""The tool instances of one trajectory: created at its start, called by the model, released once.

    async with ToolSession(selection, trajectory, limits) as session:
        results = await asyncio.gather(*[session.run_one(call) for call in message.tool_calls])
        rewards, faults = await session.calc_rewards()

Every call has a result: an exception, a timeout and invalid arguments become a text for the model; only a
ToolUnavailableError ends the trajectory. Every
instance that was created is released exactly once, also after a cancellation, and no step takes longer than
its limit.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from msgspec import structs

from branchline.core.errors import CodecError, InputError, ToolError, ToolUnavailableError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import replace_surrogates
from branchline.loop.persistence import Fault, check_finite, copy_containers, save_state, to_plain_data
from branchline.loop.step_recorder import StepRecorder
from branchline.loop.task import LoopLimits, ToolMethod
from branchline.loop.timeouts import describe_error, finish_despite_cancel, with_timeout
from branchline.loop.tools.arguments import argument_problems, argument_validator, parse_arguments
from branchline.loop.tools.base import Tool, ToolResult, ToolSelection

log = logging.getLogger("branchline.tools")
T = TypeVar("T")
_MESSAGE_INDEX = re.compile(r"^messages\[\d+\]")


class ToolSession:
    """The tool instances of one trajectory."""

    def __init__(
        self,
        selection: ToolSelection,
        trajectory: str,
        limits: LoopLimits,
        saved: dict[str, Any] | None = None,
        steps: StepRecorder | None = None,
    ) -> None:
        """`saved` holds the states to restore instances from, by tool name; `save` writes to it."""
        self._steps = steps or StepRecorder()
        self.trajectory = trajectory
        self.release_faults: list[Fault] = []
        self._limits = limits
        self._saved = {} if saved is None else saved
        self._tools = {tool.name: tool for tool in selection.tools}
        self._validators = {tool.name: argument_validator(tool) for tool in selection.tools}
        self._arguments = selection.arguments
        self._method_arguments = selection.method_arguments
        self._instances: dict[str, Any] = {}
        self._semaphore = asyncio.Semaphore(limits.max_parallel_calls)
        self._state: Literal["new", "open", "closed"] = "new"

    # -- instances -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Creates all instances concurrently; if one fails, the others are released."""
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

    def save(self) -> list[Fault]:
        """Stores the state of every instance; returns the faults of those that could not be saved."""
        faults = [save_state(self._tools[name], one, self._saved) for name, one in self._instances.items()]
        return [fault for fault in faults if fault is not None]

    async def _create(self, tool: Tool) -> None:
        try:
            await self._with_timeout(self._create_instance(tool), self._limits.tool_create_timeout_s)
        except ToolUnavailableError as error:
            raise ToolUnavailableError(tool.name, "create", error.problem) from error
        except Exception as error:
            raise ToolError(tool.name, "create", describe_error(error)) from error

    async def _create_instance(self, tool: Tool) -> None:
        arguments = copy_containers(self._arguments.get(tool.name, {}))
        if tool.name in self._saved:
            saved = copy_containers(self._saved[tool.name])
            instance = await tool.restore(self.trajectory, saved, **arguments)
        else:
            instance = await tool.create(self.trajectory, **arguments)
        if self._state == "closed":
            # It ignored its cancellation for longer than the grace period.
            await self._release(tool.name, instance)
        else:
            self._instances[tool.name] = instance

    async def _close(self) -> None:
        self._state = "closed"
        # Removed before the first await, so that no instance is released twice.
        instances, self._instances = self._instances, {}
        await asyncio.gather(*[self._release(name, instance) for name, instance in instances.items()])

    async def _release(self, name: str, instance: Any) -> None:
        try:
            work = self._tools[name].release(instance, **self._further_arguments(name, "release"))
            await self._with_timeout(work, self._limits.tool_release_timeout_s)
        except Exception as error:
            self.release_faults.append(self._fault(name, "release", error))

    def _fault(self, name: str, operation: Literal["release", "calc_reward"], error: Exception) -> Fault:
        fault = Fault(name, operation, describe_error(error))
        log.warning("%s: tool %s", self.trajectory, fault)
        return fault

    def _further_arguments(self, name: str, method: ToolMethod) -> dict[str, Any]:
        methods = self._method_arguments.get(name)
        return copy_containers(methods.get(method, {})) if methods else {}

    async def _with_timeout(self, work: Coroutine[Any, Any, T], limit_s: float | None) -> T:
        return await with_timeout(work, limit_s, self._limits.cancel_grace_s)

    def _require_state(self, state: Literal["new", "open"]) -> None:
        if self._state != state:
            raise RuntimeError(f"tool session of {self.trajectory}: is {self._state}, expected {state}")

    # -- calls ---------------------------------------------------------------------------------------

    async def run_one(
        self, call: ToolCall, turn: int = 0, on_start: Callable[[], None] = lambda: None
    ) -> ToolResult:
        """Runs one call and returns its result; at most `max_parallel_calls` run at the same time.

        Raises ToolUnavailableError if the tool does: that is no result for the model.
        `on_start` is called when the tool begins. A call that finishes although it was cancelled returns its
        result; the cancellation is raised at the caller's next await.
        """
        self._require_state("open")
        async with self._semaphore:
            started = time.perf_counter()
            try:
                with self._steps.record("tool", call.name, "execute", call.id):
                    result = _validated(await self._execute(call, on_start))
            except ToolUnavailableError:
                raise
            except Exception as error:
                log.debug("%s: tool %s failed", self.trajectory, call.name, exc_info=error)
                result = ToolResult(tool_error_text(call.name, error), is_error=True)
            seconds = time.perf_counter() - started
        return structs.replace(result, tool=call.name, turn=turn, tool_call_id=call.id, seconds=seconds)

    async def _execute(self, call: ToolCall, on_start: Callable[[], None]) -> object:
        tool = self._tools.get(call.name)
        if tool is None:
            known = list(self._tools)
            return ToolResult(f"Unknown function '{call.name}'. Available tools: {known}", is_error=True)
        try:
            arguments = parse_arguments(call.arguments)
        except ValueError as error:
            return ToolResult(f"Invalid JSON in arguments for '{call.name}': {error}", is_error=True)
        problems = argument_problems(self._validators[call.name], arguments)
        if problems:
            raise InputError(problems)
        on_start()
        extra = self._further_arguments(call.name, "execute")
        work = tool.execute(self._instances[call.name], arguments, **extra)
        return await self._with_timeout(work, self._limits.tool_timeout_s)

    def repeat_fault(self, name: str, turn: int) -> Fault | None:
        """The fault of a call that runs again after it was cancelled; None if its tool is repeatable."""
        tool = self._tools.get(name)
        if tool is None or tool.is_repeatable:
            return None
        fault = Fault(name, "repeated", f"a call of turn {turn} was cancelled while it ran, and ran again")
        log.warning("%s: %s", self.trajectory, fault)
        return fault

    async def calc_rewards(self) -> tuple[dict[str, float], list[Fault]]:
        """The final reward of each instance that has one, and the faults of those that failed."""
        self._require_state("open")
        names = list(self._instances)
        outcomes = await asyncio.gather(*[self._calc_reward(name) for name in names])
        rewards = {
            name: value for name, value in zip(names, outcomes, strict=True) if isinstance(value, float)
        }
        return rewards, [value for value in outcomes if isinstance(value, Fault)]

    async def _calc_reward(self, name: str) -> float | Fault | None:
        try:
            extra = self._further_arguments(name, "calc_reward")
            work = self._tools[name].calc_reward(self._instances[name], **extra)
            return check_finite(await self._with_timeout(work, self._limits.tool_timeout_s), "reward")
        except Exception as error:
            return self._fault(name, "calc_reward", error)


def tool_error_text(tool: str, error: BaseException) -> str:
    """The text that the model is shown for a failed call."""
    return replace_surrogates(f"Error executing tool '{tool}': {describe_error(error)}")


def _validated(result: object) -> ToolResult:
    """The result with plain values. Raises an error if a model or a trainer could not use it."""
    if not isinstance(result, ToolResult):
        raise TypeError(f"the tool returned {type(result).__name__}, expected ToolResult")
    # Structs do not check types when they are constructed.
    content: Any = result.content
    media: Any = result.media
    extras: Any = result.extras or {}
    if not isinstance(content, str):
        raise TypeError(f"content: got {content!r}, expected a string")
    if not isinstance(media, list | tuple) or not all(isinstance(item, Media) for item in media):
        raise TypeError(f"media: got {type(media).__name__}, expected a tuple of Media")
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras: got {type(extras).__name__}, expected an object")
    return ToolResult(
        replace_surrogates(content),
        tuple(media),
        check_finite(result.reward, "reward"),
        to_plain_data(extras, "extras") if extras else {},
        bool(result.is_error),
    )


# -- media -------------------------------------------------------------------------------------------


async def filter_media(
    results: Sequence[ToolResult], count_tokens: Callable[[Sequence[Message]], Awaitable[int]]
) -> list[ToolResult]:
    """Results that the model's codec accepts; one whose media it refuses becomes an error with the reason.

    `count_tokens` returns the length of the next prompt with these messages appended, or refuses them. It is
    asked before a result enters the conversation, because no later prompt could be built with refused media.
    """
    accepted = [structs.replace(result, media=()) if result.media else result for result in results]
    for index, result in enumerate(results):
        if not result.media:
            continue
        without_media, accepted[index] = accepted[index], result
        try:
            await count_tokens([one.message for one in accepted])
        # A remote gateway reports a refusal by its codec as bad input.
        except (CodecError, InputError) as error:
            reason = InputError(_MESSAGE_INDEX.sub("its result", str(error)))
            text = tool_error_text(result.tool, reason)
            accepted[index] = structs.replace(without_media, content=text, is_error=True)
    return accepted
