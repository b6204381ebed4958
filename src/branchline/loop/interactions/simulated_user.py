"""A user played by another model: it knows who it is and what it wants, and says when it is done.

The other model is any `complete(messages) -> text`. It sees the conversation from the user's chair: what the
assistant said arrives as a user's words, what the user said as its own; tool calls, tool results, reasoning
and system prompts are not for its eyes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from branchline.core.errors import InputError
from branchline.core.message import Message, Role
from branchline.loop.interactions.base import BaseInteraction, InteractionResponse

Complete = Callable[[Sequence[Message]], Awaitable[str]]

STOP_MARKER = "[[DONE]]"
EMPTY_TURN = "(The assistant says nothing.)"
"""Stands for an answer without words: a model behind its own words would go on with them."""
GREETING = "Hello, how can I help you?"
"""Opens the conversation for the one who plays the user: most chat templates want a user to speak first."""

PROMPT_TEMPLATE = """\
You play a person who talks to an assistant. Write only what this person says next, in the first person.
Who you are: {persona}
What you want: {goal}
Say what you want a bit at a time, as people do, and nothing that you do not know.
When you have what you want, or see that you will not get it, write {stop} and nothing else."""


@dataclass(frozen=True)
class SimulatedUserState:
    """What one simulated user plays."""

    system_prompt: str


class SimulatedUser(BaseInteraction):
    """A user whose persona and goal are given here, or by each sample.

    SimulatedUser(complete, persona="A traveller in a hurry.", goal="A train to Bergen before noon.")
    """

    def __init__(
        self,
        complete: Complete,
        *,
        name: str = "simulated_user",
        persona: str = "Somebody like anybody.",
        goal: str = "",
        prompt_template: str = PROMPT_TEMPLATE,
        stop: str = STOP_MARKER,
        opens: bool = False,
    ) -> None:
        if not stop:
            raise InputError(f"stop: got {stop!r}, expected a text that ends the conversation")
        self.name = name
        self._complete = complete
        self._persona = persona
        self._goal = goal
        self._prompt_template = prompt_template
        self._stop = stop
        self._opens = opens

    async def start(
        self,
        trajectory: str,
        *,
        persona: str | None = None,
        goal: str | None = None,
        opens: bool | None = None,
        **arguments: Any,
    ) -> tuple[SimulatedUserState, str | None]:
        """A user with a persona and a goal; one that `opens` speaks first."""
        if arguments:
            raise InputError(
                f"arguments of {self.name!r}: got {sorted(arguments)}, expected persona, goal, opens"
            )
        goal = self._goal if goal is None else goal
        if not goal:
            raise InputError(f"goal of {self.name!r}: got none, expected what the user wants")
        persona = self._persona if persona is None else persona
        part = SimulatedUserState(
            _render_prompt(self._prompt_template, {"persona": persona, "goal": goal, "stop": self._stop})
        )
        if not (self._opens if opens is None else opens):
            return part, None
        said = await self._next_message(part, ())
        return part, said.content or None

    async def respond(self, state: SimulatedUserState, messages: Sequence[Message]) -> InteractionResponse:
        return await self._next_message(state, messages)

    def save(self, state: SimulatedUserState) -> str:
        return state.system_prompt

    async def restore(self, trajectory: str, saved: str, **arguments: Any) -> SimulatedUserState:
        """Goes on as who it was; the first words were said already."""
        return SimulatedUserState(saved)

    async def _next_message(
        self, part: SimulatedUserState, messages: Sequence[Message]
    ) -> InteractionResponse:
        text = await self._complete(swap_roles(part.system_prompt, messages))
        said, marker, _ = text.partition(self._stop)
        said = said.strip()
        # Somebody who says nothing has left.
        ended_by: Literal["marker", "silence"] | None = "marker" if marker else None if said else "silence"
        return InteractionResponse(
            ended_by is not None, said, extras={"ended_by": ended_by} if ended_by else {}
        )


def swap_roles(briefing: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation as the user sees it, turned round for a model that plays the user."""
    turns: list[tuple[Role, str]] = []
    for message in messages:
        text = message.content.strip()
        if not text or message.role not in ("user", "assistant"):
            continue
        role: Role = "assistant" if message.role == "user" else "user"
        if turns and turns[-1][0] == role:
            # Tool calls stood between: to the user it is one speech.
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    if turns and turns[-1][0] == "assistant" and messages[-1].role == "assistant":
        turns.append(("user", EMPTY_TURN))
    if not turns or turns[0][0] == "assistant":
        turns.insert(0, ("user", GREETING))
    return (Message("system", briefing), *(Message(role, text) for role, text in turns))


def _render_prompt(briefing: str, words: Mapping[str, str]) -> str:
    """A briefing with its blanks filled in; all other braces are its own."""
    return re.sub(r"\{(persona|goal|stop)\}", lambda blank: words[blank[1]], briefing)
