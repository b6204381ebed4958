"""The generic codec: any tokenizer with a chat template, and no sampled id is ever encoded again.

The conversation is rendered once with brackets around what was sampled (`slots`). What the last prompt of
the path rendered to is remembered, so one comparison of texts says whether all of the path still stands;
where it does not, the first message that changed is where the fork begins. Text between slots is encoded
segment by segment (`segments`), and cut into messages where their text ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from branchline.chat.base import Extension, History, Recorded, Shown
from branchline.chat.generic.conversation import Conversation, Rendered, Voice
from branchline.chat.generic.dialect import Dialect, probe_dialect
from branchline.chat.generic.segments import SegmentEncoder, SizedCache
from branchline.chat.generic.slots import Brackets, SlotFinder
from branchline.chat.generic.template import ChatTemplate
from branchline.chat.parsing.base import OutputParser, Parsed
from branchline.chat.parsing.detect import Detection, detect
from branchline.chat.parsing.registry import parser_for
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.vision import refuse_media
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.runs import Ids

Tools = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]

_TEXT_CACHE_BYTES = 128 * 1024 * 1024
_PROBE = "zqprobe"


class GenericCodec:
    """Messages ⇄ ids for a tokenizer with a Jinja chat template.

    Parsers are detected from the template unless named. `stop_ids` are ids that end an output beside those
    the tokenizer's files and the template tell (an engine may know more).
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
        self._more_stops = frozenset(stop_ids)
        self.keep_empty_think = keep_empty_think
        """Let an empty thinking block of the generation prompt stand, although history does not show it."""
        self.now = now or datetime.now()
        """What the template's clock shows; one moment for a whole session."""
        self.encoder = SegmentEncoder(tokenizer)
        self._texts: SizedCache[Rendered] = SizedCache(
            _TEXT_CACHE_BYTES, lambda known: len(known.text) + 2000
        )
        self._brackets = Brackets()
        self._dialects: dict[ChatTemplate, Dialect] = {}
        self._voices: dict[ChatTemplate, Voice] = {}
        self.detection = self._detect(tool_parser, reasoning_parser)

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
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return self._voice().finder.stops

    @property
    def terminators(self) -> frozenset[int]:
        """The stop ids that the template itself puts behind a reply."""
        return frozenset(self._terminators(self.tokenizer.template()))

    def parser(self, tools: Tools = ()) -> OutputParser:
        """A parser for one output, to be fed as it arrives."""
        text_parser = parser_for(
            self.detection.tool_format,
            reasoning=self.detection.reasoning_format,
            starts_inside=self.detection.starts_inside,
            tools=tools,
        )
        return OutputParser(text_parser, self.tokenizer.token_bytes, self.stop_ids)

    def parse(self, ids: Ids, finish: str = "stop") -> Message:
        return self.parse_whole(ids, finish).message

    def parse_whole(self, ids: Ids, finish: str = "stop", tools: Tools = ()) -> Parsed:
        """The message some ids spell, and what was wrong with it."""
        return self.parser(tools).parse(ids.tolist(), finish)

    def decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids)

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
            self._voice(tools), [*path, *new], len(path), tools, template or {}, self.now
        )
        if history == "verbatim" and path:
            return conversation.verbatim()
        return conversation.by_template()

    def count(self, messages: Sequence[Message], tools: Tools = (), template: Values | None = None) -> int:
        """How many tokens a prompt has."""
        extension = self.extend((), [Shown(message) for message in messages], tools=tools, template=template)
        return sum(len(piece.ids) for piece in extension.pieces) + len(extension.opening)

    def dialect(self, template: ChatTemplate) -> Dialect:
        if template not in self._dialects:
            self._dialects[template] = probe_dialect(template)
        return self._dialects[template]

    def _voice(self, tools: Tools = ()) -> Voice:
        template = self.tokenizer.template(tools=bool(tools))
        if template not in self._voices:
            stops = self.tokenizer.stop_ids | self._more_stops | self._terminators(template)
            finder = SlotFinder(self.encoder, self._brackets, stops, self.tokenizer.vocab_size)
            self._voices[template] = Voice(
                template,
                self._with_generation_prompt(template, finder),
                self.encoder,
                finder,
                self._brackets,
                self._texts,
                self.keep_empty_think,
                self.tokenizer.composes,
            )
        return self._voices[template]

    def _with_generation_prompt(self, template: ChatTemplate, finder: SlotFinder) -> Dialect:
        """The dialect, with the generation prompt of templates that write one whether asked to or not."""
        dialect = self.dialect(template)
        if not dialect.generation_prompt:
            text = template.render(dialect.write([Message("user", _PROBE)]), now=self.now)
            stop = finder.next_stop(text, max(0, text.find(_PROBE)))
            if stop is not None:
                dialect = replace(dialect, generation_prompt=text[stop[1] :].lstrip())
        return dialect

    def _terminators(self, template: ChatTemplate) -> set[int]:
        """The added tokens that follow an assistant's text, whoever speaks next."""
        dialect = self.dialect(template)
        found: set[int] = set()
        said = Message("assistant", _PROBE)
        for following in (Message("user", "u"), Message("tool", "t")):
            try:
                text = template.render(dialect.write([Message("user", "u"), said, following]), now=self.now)
            except TemplateError:
                continue
            place = text.find(_PROBE)
            stop = self.encoder.next_added(text, place) if place >= 0 else None
            if stop is not None:
                found.add(stop[2])
        return found

    def _detect(self, tool_parser: str | None, reasoning_parser: str | None) -> Detection:
        template = self.tokenizer.template(tools=True)
        dialect = self.dialect(template)
        found = detect(template.source, dialect.generation_prompt, self.tokenizer.added_tokens)
        if tool_parser is not None:
            found = replace(found, tool_format=tool_parser)
        if reasoning_parser is not None:
            found = replace(found, reasoning_format=reasoning_parser)
        elif not dialect.shows_reasoning:
            # Reasoning that is parsed and never shown again would fork every call.
            found = replace(found, reasoning_format="none", starts_inside=False)
        return found
