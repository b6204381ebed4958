"""Interactions: what answers the model when it calls no tool, such as a user, an examiner or a simulation.

There is one interaction per name and one state of it per trajectory. `start` creates the state and may return
the first user message, `respond` answers each turn of the model and may score it, `score` scores the whole
conversation, `finalize` frees the state. An `InteractionSession` calls each with a time limit and validates
what it returns: whatever goes wrong is an InteractionError, which ends one trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from branchline.core.errors import InputError, InteractionError
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates
from branchline.loop.persistence import (
    Fault,
    Restorable,
    check_finite,
    copy_containers,
    lost_state,
    save_state,
    to_plain_data,
)
from branchline.loop.state import LoopPhase, LoopState
from branchline.loop.step_recorder import StepRecorder
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import describe_error, finish_despite_cancel, with_timeout

log = logging.getLogger("branchline.loop")
T = TypeVar("T")


@dataclass(frozen=True)
class InteractionResponse:
    """The response to one turn of the model."""

    terminate: bool
    """Whether the conversation ends."""
    content: str = ""
    score: float | None = None
    """The score of the turn that is answered."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """JSON data for the trainer."""


class Interaction(Restorable, Protocol):
    """An interaction. `save` and `restore` get and return its state."""

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        """A state for one trajectory, and the first user message unless the task's prompt contains it.

        The arguments are those of the task. If it is cancelled it cleans up after itself.
        """

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        """The response to a conversation that ends with the model's turn."""

    async def score(self, state: Any) -> float | None:
        """The score of the whole conversation, in addition to the scores of its turns; None for none."""

    async def finalize(self, state: Any) -> None:
        """Frees the state. Called exactly once, however the trajectory ended."""


class BaseInteraction:
    """Defaults for all methods but `respond`: the state is the task's arguments, and there is no score."""

    name: str

    @property
    def is_stateful(self) -> bool:
        """True if a subclass overrides `start`, `score` or `save`."""
        cls, base = type(self), BaseInteraction
        return (cls.start, cls.score, cls.save) != (base.start, base.score, base.save)

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        return arguments, None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        raise NotImplementedError(f"{type(self).__name__}.respond")

    async def score(self, state: Any) -> float | None:
        return None

    async def finalize(self, state: Any) -> None:
        return None

    def save(self, state: Any) -> Any:
        return None

    async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.restore")


@dataclass(frozen=True)
class InteractionConfig:
    """The interaction of one task, and the arguments it starts with."""

    interaction: Interaction
    arguments: Mapping[str, Any] = field(default_factory=dict)


class InteractionSession:
    """One trajectory's interaction, from `start` to `finalize`."""

    def __init__(
        self,
        config: InteractionConfig,
        state: LoopState,
        limits: LoopLimits,
        steps: StepRecorder | None = None,
    ) -> None:
        self._steps = steps or StepRecorder()
        self.first_message: str | None = None
        """The user message that `start` returned."""
        self.name = config.interaction.name
        self._interaction = config.interaction
        self._arguments = config.arguments
        self._state = state
        self._limits = limits
        self._interaction_state: Any = None
        self._is_started = self._is_closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._with_timeout("start", self._start())
        except BaseException:
            self._is_closed = True
            await self._finalize()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        await self._finalize()

    async def _start(self) -> None:
        """Starts the interaction, or restores it unless its first message still has to be added."""
        state, interaction, saved = self._state, self._interaction, self._state.interaction_states
        arguments = copy_containers(self._arguments)
        first_message: object = None
        if state.phase is not LoopPhase.PENDING and self.name in saved:
            restored = copy_containers(saved[self.name])
            self._interaction_state = await interaction.restore(state.trajectory, restored, **arguments)
        else:
            self._interaction_state, first_message = await interaction.start(state.trajectory, **arguments)
        self._is_started = True
        if self._is_closed:
            # It ignored its cancellation for longer than the grace period.
            await self._finalize()
        elif first_message is not None and not isinstance(first_message, str):
            raise InputError(f"got {first_message!r}, expected a text or None")
        else:
            self.first_message = first_message
            if state.turn_records or state.pending_response is not None:
                state.add_fault(lost_state(interaction, saved, state.trajectory))

    async def _finalize(self) -> None:
        """Finalizes the interaction once, if it was started."""
        if not self._is_started:
            return
        self._is_started = False
        work = self._interaction.finalize(self._interaction_state)
        try:
            limit_s, grace_s = self._limits.tool_release_timeout_s, self._limits.cancel_grace_s
            await finish_despite_cancel(with_timeout(work, limit_s, grace_s))
        except Exception as error:
            fault = Fault(self.name, "finalize", describe_error(error))
            log.warning("%s: %s", self._state.trajectory, fault)
            self._state.add_fault(fault)

    async def respond(self, messages: Sequence[Message]) -> InteractionResponse:
        """The response to the model's last turn."""
        work = self._interaction.respond(self._interaction_state, messages)
        response: object = await self._with_timeout("respond", work)
        try:
            return _validated(response)
        except (InputError, TypeError, ValueError) as error:
            raise InteractionError(self.name, "respond", describe_error(error)) from error

    async def score(self) -> float | None:
        """The score of the whole conversation."""
        score = await self._with_timeout("score", self._interaction.score(self._interaction_state))
        try:
            return check_finite(score, "score")
        except (TypeError, ValueError) as error:
            raise InteractionError(self.name, "score", describe_error(error)) from error

    def save(self) -> None:
        """Stores the interaction's state in the LoopState."""
        state = self._state
        if self._is_started:
            state.add_fault(save_state(self._interaction, self._interaction_state, state.interaction_states))

    async def _with_timeout(self, operation: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            limits = self._limits
            with self._steps.record("interaction", self.name, operation):
                return await with_timeout(work, limits.interaction_timeout_s, limits.cancel_grace_s)
        except Exception as error:
            raise InteractionError(self.name, operation, describe_error(error)) from error


def _validated(response: object) -> InteractionResponse:
    """The response with plain values. Raises an error if the loop or the trainer could not use it."""
    if not isinstance(response, InteractionResponse):
        raise TypeError(f"got {type(response).__name__}, expected an InteractionResponse")
    content: Any = response.content
    extras: Any = response.extras or {}
    if not isinstance(content, str):
        raise TypeError(f"content: got {content!r}, expected a text")
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras: got {type(extras).__name__}, expected an object")
    return InteractionResponse(
        bool(response.terminate),
        replace_surrogates(content),
        check_finite(response.score, "score"),
        to_plain_data(extras, "extras"),
    )
