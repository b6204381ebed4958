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
from branchline.core.fields import clean
from branchline.core.message import Message
from branchline.loop.faults import Fault
from branchline.loop.interactions.base import Response
from branchline.loop.interactions.registry import Partner
from branchline.loop.keeping import Restorable, forgets, write
from branchline.loop.plain import finite, own_copy, plain
from branchline.loop.state import LoopLimits, LoopState, State
from branchline.loop.waiting import WIND_DOWN_S, limited, settle, told

log = logging.getLogger("branchline.loop")
T = TypeVar("T")
_WAYS = ("start", "score")
"""How an interaction has something of its own in its states."""


class Talk:
    """One trajectory's interaction, from `start` to `finalize`."""

    def __init__(self, partner: Partner, state: LoopState, limits: LoopLimits) -> None:
        self.first_words: str | None = None
        """What is said before the model says anything."""
        self.name = partner.interaction.name
        self._interaction = partner.interaction
        self._arguments = partner.arguments
        self._state = state
        self._limits = limits
        self._held: Any = None
        self._is_here = self._is_left = False

    async def __aenter__(self) -> Self:
        try:
            await self._limited("start", self._start())
        except BaseException:
            self._is_left = True
            await self._part()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_left = True
        await self._part()

    async def _start(self) -> None:
        """Starts the interaction, or goes on with it where it was left."""
        state, interaction, saved = self._state, self._interaction, self._state.partner_states
        arguments = own_copy(self._arguments)
        words: object = None
        if isinstance(interaction, Restorable) and state.state is not State.PENDING and self.name in saved:
            held = await interaction.restore(state.trajectory, own_copy(saved[self.name]), **arguments)
        else:
            held, words = await interaction.start(state.trajectory, **arguments)
        self._held, self._is_here = held, True
        if self._is_left:
            # It ignored its cancellation for longer than anybody waited.
            await self._part()
        elif words is not None and not isinstance(words, str):
            raise InputError(f"interaction {self.name!r}: start: got {words!r}, expected a text or None")
        else:
            self.first_words = words
            if state.turn_records or state.response is not None:
                state.note(forgets(interaction, _WAYS, saved, state.trajectory))

    async def _part(self) -> None:
        """Puts the interaction away, once, if it was there."""
        if not self._is_here:
            return
        self._is_here = False
        limit_s = self._limits.tool_release_timeout_s
        try:
            await settle(limited(self._interaction.finalize(self._held), limit_s, WIND_DOWN_S))
        except Exception as error:
            # The trajectory is what it is; that somebody cannot leave changes nothing about it.
            fault = Fault(self.name, "finalize", told(error))
            log.warning("%s: %s", self._state.trajectory, fault)
            self._state.note(fault)

    async def respond(self, messages: Sequence[Message]) -> Response:
        """The answer to the model's last turn."""
        limit_s = self._limits.interaction_timeout_s
        try:
            # In this very task: an answer that is there is heard, and a cancel comes before it or behind it.
            async with asyncio.timeout(limit_s) as clock:
                given: object = await self._interaction.respond(self._held, messages)
        except TimeoutError as error:
            words = f"timed out after {limit_s:g} s" if clock.expired() else told(error)
            raise TimeoutError(f"interaction {self.name!r}: respond: {words}") from error
        try:
            return _checked(given)
        except (InputError, TypeError, ValueError) as error:
            raise InputError(f"interaction {self.name!r}: respond: {error}") from error

    async def score(self) -> float | None:
        """What the whole conversation is worth."""
        given = await self._limited("score", self._interaction.score(self._held))
        try:
            return finite(given, "score")
        except (TypeError, ValueError) as error:
            raise InputError(f"interaction {self.name!r}: {error}") from error

    def write(self) -> None:
        """Leaves what the interaction remembers in the state."""
        if self._is_here:
            self._state.note(write(self._interaction, self._held, self._state.partner_states))

    async def _limited(self, doing: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await limited(work, self._limits.interaction_timeout_s, WIND_DOWN_S)
        except TimeoutError as error:
            raise TimeoutError(f"interaction {self.name!r}: {doing}: {told(error)}") from error


def _checked(given: object) -> Response:
    if not isinstance(given, Response):
        raise TypeError(f"got {type(given).__name__}, expected a Response")
    # Nobody checks what other people's interactions put into their answers.
    content: Any = given.content
    extras: Any = given.extras or {}
    if not isinstance(content, str):
        raise TypeError(f"content: got {content!r}, expected a text")
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras: got {type(extras).__name__}, expected an object")
    return Response(
        bool(given.terminate), clean(content), finite(given.score, "score"), plain(extras, "extras")
    )
