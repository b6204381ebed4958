"""A user simulated by another model, with a persona and a goal.

The other model is any `complete(messages) -> text`. It gets the conversation with the roles swapped: answers
of the assistant are user messages, messages of the user are its own answers. It sees no tool calls, tool
results, reasoning or system prompts.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from branchline.core.errors import InputError
from branchline.core.message import Message, Role
from branchline.loop.interaction import BaseInteraction, InteractionResponse

Complete = Callable[[Sequence[Message]], Awaitable[str]]

STOP_MARKER = "[[DONE]]"
EMPTY_TURN = "(The assistant says nothing.)"
"""Replaces an answer without text: after its own message a model would continue that message."""
GREETING = "Hello, how can I help you?"
"""The first message for the simulating model: most chat templates require a user message first."""

PROMPT_TEMPLATE = """\
You play a person who talks to an assistant. Write only what this person says next, in the first person.
Who you are: {persona}
What you want: {goal}
Say what you want a bit at a time, as people do, and nothing that you do not know.
When you have what you want, or see that you will not get it, write {stop} and nothing else."""


@dataclass(frozen=True)
class SimulatedUserState:
    """One trajectory's simulated user."""

    system_prompt: str


class SimulatedUser(BaseInteraction):
    """A user whose persona and goal are given here, or by each task.

    SimulatedUser(complete, persona="A traveller in a hurry.", goal="A train to Bergen before noon.")
    """

    def __init__(
        self,
        complete: Complete,
        *,
        name: str = "simulated_user",
        persona: str = "An ordinary person.",
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
        """The state, and the user's first message if it `opens` the conversation."""
        if arguments:
            raise InputError(
                f"arguments of {self.name!r}: got {sorted(arguments)}, expected persona, goal, opens"
            )
        goal = self._goal if goal is None else goal
        if not goal:
            raise InputError(f"goal of {self.name!r}: got none, expected what the user wants")
        values = {"persona": self._persona if persona is None else persona, "goal": goal, "stop": self._stop}
        state = SimulatedUserState(_render_prompt(self._prompt_template, values))
        if not (self._opens if opens is None else opens):
            return state, None
        return state, (await self.respond(state, ())).content or None

    async def respond(self, state: SimulatedUserState, messages: Sequence[Message]) -> InteractionResponse:
        text = await self._complete(swap_roles(state.system_prompt, messages))
        content, marker, _ = text.partition(self._stop)
        content = content.strip()
        if not marker and content:
            return InteractionResponse(False, content)
        ended_by: Literal["marker", "silence"] = "marker" if marker else "silence"
        return InteractionResponse(True, content, extras={"ended_by": ended_by})

    def save(self, state: SimulatedUserState) -> str:
        return state.system_prompt

    async def restore(self, trajectory: str, saved: str, **arguments: Any) -> SimulatedUserState:
        return SimulatedUserState(saved)


def swap_roles(system_prompt: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation as the user sees it, for a model whose answers are the user's messages."""
    turns: list[tuple[Role, str]] = []
    for message in messages:
        text = message.content.strip()
        if not text or message.role not in ("user", "assistant"):
            continue
        role: Role = "assistant" if message.role == "user" else "user"
        if turns and turns[-1][0] == role:
            # The user does not see the tool calls between them, so they are one message.
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    if turns and turns[-1][0] == "assistant" and messages[-1].role == "assistant":
        turns.append(("user", EMPTY_TURN))
    if not turns or turns[0][0] == "assistant":
        turns.insert(0, ("user", GREETING))
    return (Message("system", system_prompt), *(Message(role, text) for role, text in turns))


def _render_prompt(template: str, values: Mapping[str, str]) -> str:
    """The template with its three placeholders replaced; other braces stay."""
    return re.sub(r"\{(persona|goal|stop)\}", lambda placeholder: values[placeholder[1]], template)
