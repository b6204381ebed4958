"""The conversation with whoever answers the model: started, answered, judged and put away, with limits.

What an interaction hands over is looked at where it is handed over: a score that cannot be trained on, or
words that are no text, are an error that names it and not a state that cannot be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from branchline.core.errors import InputError
from branchline.core.json_fields import replace_surrogates
from branchline.core.message import Message
from branchline.loop.faults import Fault
from branchline.loop.interactions.base import InteractionResponse
from branchline.loop.interactions.registry import InteractionConfig
from branchline.loop.persistence import Restorable, lost_state, save_state
from branchline.loop.serialization import check_finite, copy_containers, to_plain_data
from branchline.loop.state import LoopLimits, LoopPhase, LoopState
from branchline.loop.timeouts import CANCEL_GRACE_S, describe_error, finish_despite_cancel, with_timeout

log = logging.getLogger("branchline.loop")
T = TypeVar("T")
_STATEFUL_METHODS = ("start", "score")
"""How an interaction has something of its own in its states."""


class InteractionSession:
    """One trajectory's interaction, from `start` to `finalize`."""

    def __init__(self, partner: InteractionConfig, state: LoopState, limits: LoopLimits) -> None:
        self.first_message: str | None = None
        """What is said before the model says anything."""
        self.name = partner.interaction.name
        self._interaction = partner.interaction
        self._arguments = partner.arguments
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
        """Starts the interaction, or goes on with it where it was left."""
        state, interaction, saved = self._state, self._interaction, self._state.interaction_states
        arguments = copy_containers(self._arguments)
        words: object = None
        if (
            isinstance(interaction, Restorable)
            and state.phase is not LoopPhase.PENDING
            and self.name in saved
        ):
            held = await interaction.restore(state.trajectory, copy_containers(saved[self.name]), **arguments)
        else:
            held, words = await interaction.start(state.trajectory, **arguments)
        self._interaction_state, self._is_started = held, True
        if self._is_closed:
            # It ignored its cancellation for longer than anybody waited.
            await self._finalize()
        elif words is not None and not isinstance(words, str):
            raise InputError(f"interaction {self.name!r}: start: got {words!r}, expected a text or None")
        else:
            self.first_message = words
            if state.turn_records or state.pending_response is not None:
                state.add_fault(lost_state(interaction, _STATEFUL_METHODS, saved, state.trajectory))

    async def _finalize(self) -> None:
        """Puts the interaction away, once, if it was there."""
        if not self._is_started:
            return
        self._is_started = False
        limit_s = self._limits.tool_release_timeout_s
        try:
            await finish_despite_cancel(
                with_timeout(self._interaction.finalize(self._interaction_state), limit_s, CANCEL_GRACE_S)
            )
        except Exception as error:
            # The trajectory is what it is; that somebody cannot leave changes nothing about it.
            fault = Fault(self.name, "finalize", describe_error(error))
            log.warning("%s: %s", self._state.trajectory, fault)
            self._state.add_fault(fault)

    async def respond(self, messages: Sequence[Message]) -> InteractionResponse:
        """The answer to the model's last turn."""
        limit_s = self._limits.interaction_timeout_s
        try:
            # In this very task: an answer that is there is heard, and a cancel comes before it or behind it.
            async with asyncio.timeout(limit_s) as clock:
                given: object = await self._interaction.respond(self._interaction_state, messages)
        except TimeoutError as error:
            words = f"timed out after {limit_s:g} s" if clock.expired() else describe_error(error)
            raise TimeoutError(f"interaction {self.name!r}: respond: {words}") from error
        try:
            return _validated(given)
        except (InputError, TypeError, ValueError) as error:
            raise InputError(f"interaction {self.name!r}: respond: {error}") from error

    async def score(self) -> float | None:
        """What the whole conversation is worth."""
        given = await self._with_timeout("score", self._interaction.score(self._interaction_state))
        try:
            return check_finite(given, "score")
        except (TypeError, ValueError) as error:
            raise InputError(f"interaction {self.name!r}: {error}") from error

    def save_state(self) -> None:
        """Leaves what the interaction remembers in the state."""
        if self._is_started:
            self._state.add_fault(
                save_state(self._interaction, self._interaction_state, self._state.interaction_states)
            )

    async def _with_timeout(self, doing: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await with_timeout(work, self._limits.interaction_timeout_s, CANCEL_GRACE_S)
        except TimeoutError as error:
            raise TimeoutError(f"interaction {self.name!r}: {doing}: {describe_error(error)}") from error


def _validated(given: object) -> InteractionResponse:
    if not isinstance(given, InteractionResponse):
        raise TypeError(f"got {type(given).__name__}, expected a Response")
    # Nobody checks what other people's interactions put into their answers.
    content: Any = given.content
    extras: Any = given.extras or {}
    if not isinstance(content, str):
        raise TypeError(f"content: got {content!r}, expected a text")
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras: got {type(extras).__name__}, expected an object")
    return InteractionResponse(
        bool(given.terminate),
        replace_surrogates(content),
        check_finite(given.score, "score"),
        to_plain_data(extras, "extras"),
    )
