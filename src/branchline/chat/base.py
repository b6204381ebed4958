"""What a codec is: messages in, ids out, and never a sampled id encoded again.

A codec is asked to *extend* a path: these recorded messages stand on it with these ids, these new ones
follow; what is the next prompt? It answers how much of the path stays as it is, and the ids of the rest.
Concatenating the kept ids, the pieces and the opening is the prompt, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Runs

HistoryPolicy = Literal["template", "verbatim"]
"""`template`: the prompt shows what the chat template shows. `verbatim`: the path stays as it was sampled."""


class PathMessage(Protocol):
    """A message on a path, as the tree keeps it."""

    @property
    def message(self) -> Message: ...
    @property
    def ids(self) -> Ids:
        """The ids the message added to its path."""

    @property
    def sampled_ids(self) -> Ids | None:
        """Its output as sampled, here or wherever it was first said; None for other people's words."""

    @property
    def ends_sampled(self) -> bool:
        """Whether its ids end in its sampled ids; not so where a template showed the message otherwise."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message that is not on the path: new, or said elsewhere."""

    message: Message
    sampled_ids: Ids | None = None
    """What was sampled for it elsewhere; reused wherever the template shows the message in full."""


@dataclass(frozen=True, slots=True)
class MessageTokens:
    """The ids one message adds, and where each comes from. Reused ids are context here."""

    ids: Ids
    spans: Runs


@dataclass(frozen=True, slots=True)
class Extension:
    """The answer to an extend: path[:kept] as recorded, then pieces, then the opening."""

    kept: int
    message_tokens: tuple[MessageTokens, ...]
    """One for each message from `kept` on: first what is left of the path, then the new ones."""
    generation_prompt_ids: Ids
    """The generation prompt."""
    encoded_tokens: int
    """How many of these ids were made by encoding text."""
    rewrite_reason: str = ""
    """Why less than the whole path was kept."""


class IncrementalParser(Protocol):
    """One output, parsed as it arrives: however it is cut, the deltas add up to the same message."""

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]: ...
    def finish(self, finish_reason: str | None) -> list[MessageDelta]: ...
    @property
    def message(self) -> Message: ...
    @property
    def problems(self) -> tuple[ParseProblem, ...]: ...


class Codec(Protocol):
    """Messages to ids and back, for one model family's way of writing conversations."""

    @property
    def name(self) -> str: ...

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any],
        history: HistoryPolicy,
    ) -> Extension:
        """The next prompt behind a path."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        ...

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> IncrementalParser:
        """A parser for one output of a prompt with these tools and template arguments."""
        ...

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Message:
        """The assistant message that sampled ids spell. Never raises, whatever the ids."""
        ...

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """How many tokens a prompt has."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text for people to read."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token spells, which may be part of a character; an id that is none spells `<id>`."""
        ...

    # What no template frames: bare prompts, and replies of which only the text is known.

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        ...

    def plain_parser(self) -> IncrementalParser:
        """A parser that reads an output as text and nothing else."""
        ...

    def encode_reply(self, message: Message) -> Ids:
        """Ids that say an assistant message; where they were sampled, they need not be the same."""
        ...
