"""The generic codec: any tokenizer with a chat template, and no sampled id is ever encoded again.

The conversation is rendered once with brackets around what was sampled (`slots`). What the last prompt of
the path rendered to is remembered, so one comparison of texts says whether all of the path still stands;
where it does not, the first message that changed is where the fork begins. Text between slots is encoded
segment by segment (`segments`), and cut into messages where their text ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any

from branchline.chat.base import Extension, History, Recorded, Shown
from branchline.chat.generic.conversation import Conversation
from branchline.chat.generic.dialect import Dialect
from branchline.chat.generic.segments import SegmentEncoder
from branchline.chat.generic.slots import Brackets
from branchline.chat.generic.template import ChatTemplate
from branchline.chat.generic.voice import Rendered, Voices
from branchline.chat.parsing.base import OutputParser, Parsed
from branchline.chat.parsing.registry import parser_for
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.vision import refuse_media
from branchline.core.cache import SizedCache
from branchline.core.errors import CodecError
from branchline.core.message import Message
from branchline.core.runs import Ids

Tools = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]

_TEXT_CACHE_BYTES = 128 * 1024 * 1024


class GenericCodec:
    """Messages ⇄ ids for a tokenizer with a Jinja chat template.

    Parsers are detected from the template unless named. `keep_empty_think` lets an empty thinking block of
    the generation prompt stand, although history does not show it. `stop_ids` are ids that end an output
    beside those the tokenizer's files and the template tell (an engine may know more).
    """

    def __init__(
        self,
        tokenizer: TokenizerDir,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        keep_empty_think: bool = True,
        stop_ids: Iterable[int] = (),
        now: datetime | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.now = now or datetime.now()
        """What the template's clock shows; one moment for a whole session."""
        self.encoder = SegmentEncoder(tokenizer)
        self._texts: SizedCache[Rendered] = SizedCache(
            _TEXT_CACHE_BYTES, lambda known: len(known.text) + 2000
        )
        self._brackets = Brackets()
        self._voices = Voices(
            tokenizer,
            self.encoder,
            self._brackets,
            self._texts,
            frozenset(stop_ids),
            keep_empty_think,
            tool_parser,
            reasoning_parser,
            self.now,
        )
        self.detection = self._voices.of(tools=True, values={}).detection
        """How outputs are parsed when the template gets no arguments."""
        self.stop_ids = self._voices.stop_ids
        """Ids that end an output."""

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> GenericCodec:
        """The codec of a tokenizer directory."""
        return cls(TokenizerDir.open(path), **options)

    @property
    def name(self) -> str:
        return f"generic:{self.tokenizer.path.name}"

    def at(self, now: datetime) -> GenericCodec:
        """The same codec with its clock stopped at another moment; caches of text are shared."""
        other = copy(self)
        other.now = now
        return other

    def forget(self) -> None:
        """Drops what is remembered of earlier prompts; the next ones cost more and are the same."""
        self._texts.clear()

    # -- ids to messages -----------------------------------------------------------------------------

    @property
    def terminators(self) -> frozenset[int]:
        """The stop ids that the template itself puts behind a reply."""
        return frozenset(self._voices.terminators(self.tokenizer.template()))

    def parser(self, tools: Tools = (), template: Values | None = None) -> OutputParser:
        """A parser for one output, to be fed as it arrives."""
        found = self._voices.of(tools=bool(tools), values=template or {}).detection
        text_parser = parser_for(
            found.tool_format,
            reasoning=found.reasoning_format,
            starts_inside=found.starts_inside,
            tools=tools,
        )
        return OutputParser(text_parser, self.tokenizer.token_bytes, self.stop_ids)

    def parse(
        self, ids: Ids, finish: str = "stop", tools: Tools = (), template: Values | None = None
    ) -> Message:
        return self.parse_whole(ids, finish, tools, template).message

    def parse_whole(
        self, ids: Ids, finish: str = "stop", tools: Tools = (), template: Values | None = None
    ) -> Parsed:
        """The message some ids spell, and what was wrong with it."""
        return self.parser(tools, template).parse(ids.tolist(), finish)

    def plain_parser(self) -> OutputParser:
        return OutputParser(parser_for("plain"), self.tokenizer.token_bytes, self.stop_ids)

    def decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.tokenizer.token_bytes(token)
        except CodecError:
            return b"<%d>" % token

    def encode(self, text: str) -> Ids:
        return self.tokenizer.encode(text)

    def spell(self, message: Message) -> Ids:
        return self.tokenizer.encode_output(message)

    # -- messages to ids -----------------------------------------------------------------------------

    def extend(
        self,
        path: Sequence[Recorded],
        new: Sequence[Shown],
        *,
        tools: Tools = (),
        template: Values | None = None,
        history: History = "template",
    ) -> Extension:
        refuse_media([shown.message for shown in new], self.name, first=len(path))
        conversation = Conversation(
            self._voices.of(tools=bool(tools), values=template or {}),
            [*path, *new],
            len(path),
            tools,
            template or {},
            self.now,
        )
        if history == "verbatim" and path:
            return conversation.verbatim()
        return conversation.by_template()

    def count(self, messages: Sequence[Message], tools: Tools = (), template: Values | None = None) -> int:
        """How many tokens a prompt has."""
        extension = self.extend((), [Shown(message) for message in messages], tools=tools, template=template)
        return sum(len(piece.ids) for piece in extension.pieces) + len(extension.opening)

    def dialect(self, template: ChatTemplate) -> Dialect:
        """How a template wants to be spoken to."""
        return self._voices.dialect(template)
