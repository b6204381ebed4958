"""What an interaction is: whoever answers the model when it calls no tool. A user, an examiner, a world.

There is one interaction per name and one state of it per trajectory: `start` makes it and may speak first,
`respond` answers each turn of the model and may score it, `score` judges the whole, `finalize` puts it away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from branchline.core.message import Message


@dataclass(frozen=True)
class InteractionResponse:
    """The answer to one turn of the model."""

    terminate: bool
    """The conversation is over."""
    content: str = ""
    score: float | None = None
    """Of the turn that is answered."""
    extras: Mapping[str, Any] = field(default_factory=dict)


class Interaction(Protocol):
    """One interaction."""

    @property
    def name(self) -> str: ...

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        """A state for one trajectory, and the first user message, if the sample's prompt does not hold it.

        The arguments are those of the sample. If it is cancelled it puts away what it had begun.
        """

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        """The answer to a conversation that ends with the model's turn."""

    async def score(self, state: Any) -> float | None:
        """What the whole conversation is worth, beyond the scores of its turns; None for nothing."""

    async def finalize(self, state: Any) -> None:
        """The end of a state, whatever became of its trajectory. Called once."""


class BaseInteraction:
    """Everything but `respond`: a state is its sample's arguments, says nothing first, is worth nothing."""

    name: str

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        return arguments, None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        raise NotImplementedError(f"{type(self).__name__}.respond")

    async def score(self, state: Any) -> float | None:
        return None

    async def finalize(self, state: Any) -> None:
        return None
