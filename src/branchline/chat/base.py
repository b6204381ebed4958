"""The codec protocol: messages to ids and back, without ever encoding a sampled id again.

A codec *extends* a path: given the recorded messages with their ids and the new messages, it returns how
much of the path stays as recorded and the ids of everything after it. The kept ids, the message ids and the
generation prompt ids, concatenated, are exactly the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from branchline.chat.parsing.base import MessageDelta
from branchline.chat.vision import ImageSpan
from branchline.core.choices import HistoryPolicy as HistoryPolicy
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Runs, as_ids

Tools = Sequence[Mapping[str, Any]]
ChatTemplateKwargs = Mapping[str, Any]


class RewriteReason(StrEnum):
    """Why a prompt does not keep the whole path. Journals store these values."""

    NONE = ""
    THINK_STRIP = "think_strip"
    """The template leaves out reasoning that was sampled."""
    REWRITTEN = "rewritten"
    """The template renders earlier text differently."""
    DROPPED = "dropped"
    """The template leaves out something that was sampled, other than reasoning."""
    NO_TERMINATOR = "no_terminator"
    """The template writes no stop token after the message."""
    FOREIGN_STOP = "foreign_stop"
    """The message was sampled with another stop token than the template writes."""


class PathMessage(Protocol):
    """A message on a path, as the tree stores it."""

    @property
    def message(self) -> Message: ...
    @property
    def ids(self) -> Ids:
        """The ids the message added to its path."""

    @property
    def sampled_ids(self) -> Ids | None:
        """The ids sampled for this message, on this path or another; None if it was not sampled."""

    @property
    def ends_sampled(self) -> bool:
        """Whether `ids` ends with `sampled_ids`; False if a template rendered the message differently."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message that is not on the path."""

    message: Message
    sampled_ids: Ids | None = None
    """The ids sampled for it on another path; reused if the template shows the message in full."""


PromptMessage = PathMessage | NewMessage


@dataclass(frozen=True, slots=True)
class MessageTokens:
    """The ids one message adds, and the origin of each. Reused ids are context."""

    ids: Ids
    spans: Runs


@dataclass(frozen=True, slots=True)
class Extension:
    """The next prompt: path[:kept] as recorded, then the message tokens, then the generation prompt."""

    kept: int
    message_tokens: tuple[MessageTokens, ...]
    """One entry per message from `kept` on: the rest of the path, then the new messages."""
    generation_prompt_ids: Ids
    encoded_tokens: int
    """How many of these ids were encoded from text."""
    rewrite_reason: RewriteReason = RewriteReason.NONE

    @property
    def ids(self) -> Ids:
        """All ids after the kept part of the path."""
        return as_ids(
            np.concatenate([*(tokens.ids for tokens in self.message_tokens), self.generation_prompt_ids])
        )


class IncrementalParser(Protocol):
    """Parses one output while it arrives. The deltas add up to the same message for every chunking."""

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]: ...
    def finish(self, finish_reason: str | None) -> list[MessageDelta]: ...
    @property
    def message(self) -> Message: ...


class Codec(Protocol):
    """Messages to ids and back, for the prompt format of one model family."""

    @property
    def name(self) -> str: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an output."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Ids of an output are below it; None if it is not known."""
        ...

    def with_clock(self, now: datetime) -> Codec:
        """Returns this codec with the template clock fixed at `now`, so that a session's prompts agree."""
        ...

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Tools,
        chat_template_kwargs: ChatTemplateKwargs,
        history: HistoryPolicy,
    ) -> Extension:
        """Returns the next prompt of a path. Raises CodecError if the conversation cannot be rendered."""
        ...

    def image_spans(
        self, messages: Sequence[Message], prompt_ids: Ids, is_sampled: NDArray[np.bool_] | None = None
    ) -> tuple[ImageSpan, ...]:
        """Returns the images of a prompt and where their placeholders stand. Raises CodecError if the
        placeholders, apart from sampled ids, are not those of the images."""
        ...

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> int:
        """Returns the length of a prompt."""
        ...

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> IncrementalParser:
        """Returns a parser for one output of a prompt with these tools and template arguments."""
        ...

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Message:
        """Returns the assistant message of a complete output. Never raises."""
        ...

    def plain_parser(self) -> IncrementalParser:
        """Returns a parser that reads an output as text only, for bare prompts."""
        ...

    def encode(self, text: str) -> Ids:
        """Returns the ids of a text."""
        ...

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """Returns ids for an assistant message of which only the text is known, with its terminator unless
        `stop` is False. A model may have sampled other ids."""
        ...

    def decode(self, ids: Ids) -> str:
        """Returns readable text; never raises."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token, possibly part of a character; `<id>` for an unknown id."""
        ...


def reply_to_text(message: Message) -> str:
    """Returns the content of a reply, then each tool call as a line of compact JSON.

    This is the text of a reply if no template describes the model's own format.
    """
    lines = [message.content] if message.content else []
    for call in message.tool_calls:
        arguments: Any = call.arguments
        try:
            # Keys stay in the order in which the model wrote them.
            value = msgspec.json.decode(call.arguments or "{}")
            arguments = value if isinstance(value, dict) else arguments
        except ValueError:
            pass
        call_json = {"name": call.name, "arguments": arguments}
        lines.append(json.dumps(call_json, ensure_ascii=False, separators=(",", ":")))
    return "\n".join(lines)
