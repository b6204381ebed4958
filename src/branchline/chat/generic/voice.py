"""A voice: all that is needed to speak one template under one set of its arguments, found out once.

The arguments of a template (`enable_thinking`) can change what opens a reply, and with it how an output is
parsed; so there is a voice for each set of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from branchline.chat.generic.dialect import Dialect, probe_dialect
from branchline.chat.generic.segments import SegmentEncoder
from branchline.chat.generic.slots import Brackets, SlotFinder
from branchline.chat.generic.template import ChatTemplate
from branchline.chat.parsing.base import OutputParser
from branchline.chat.parsing.detect import Detection, detect
from branchline.chat.parsing.registry import parser_for
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.arguments import canonical_json
from branchline.core.cache import SizedCache
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.runs import Ids

Values = Mapping[str, Any]

EMPTY_THINK = "<think>\n\n</think>\n\n"
_PROBE = "zqprobe"
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Rendered:
    """What a prompt rendered to: its text with brackets, and where each message ends in it."""

    text: str
    ends: tuple[int, ...]
    slots: frozenset[int]
    """Which messages stand in brackets."""
    last_ids: Ids
    """The ids of the last message: kept alive because their identity is the key."""

    @property
    def body_end(self) -> int:
        return self.ends[-1]

    @property
    def opening(self) -> str:
        return self.text[self.body_end :]


@dataclass(frozen=True)
class Voice:
    """How to speak one template, and how to hear it."""

    template: ChatTemplate
    dialect: Dialect
    detection: Detection
    encoder: SegmentEncoder
    finder: SlotFinder
    brackets: Brackets
    texts: SizedCache[Rendered]
    keep_empty_think: bool
    composes: bool
    """The tokenizer composes letters and accents (NFC) before it encodes."""
    tail_is_local: bool
    """What follows a reply does not depend on what stands before it."""
    stop_opens: bool
    """Replies end in the opener of whatever follows (GLM), so there is more than one way to stop."""


@dataclass
class Voices:
    """The voices of one tokenizer."""

    tokenizer: TokenizerDir
    encoder: SegmentEncoder
    brackets: Brackets
    texts: SizedCache[Rendered]
    more_stops: frozenset[int]
    keep_empty_think: bool
    tool_parser: str | None
    reasoning_parser: str | None
    now: datetime

    def __post_init__(self) -> None:
        self._voices: dict[tuple[ChatTemplate, bytes], Voice] = {}
        self._dialects: dict[ChatTemplate, Dialect] = {}

    def of(self, *, tools: bool, values: Values) -> Voice:
        """The voice for a conversation with or without tools, under these arguments."""
        template = self.tokenizer.template(tools=tools)
        key = (template, canonical_json(dict(values)) if values else b"")
        if key not in self._voices:
            self._voices[key] = self._make(template, values)
        return self._voices[key]

    def dialect(self, template: ChatTemplate) -> Dialect:
        """How a template wants to be spoken to without any arguments."""
        if template not in self._dialects:
            self._dialects[template] = probe_dialect(template, now=self.now)
        return self._dialects[template]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an output, with tools or without."""
        templates = {self.tokenizer.template(tools=tools) for tools in (False, True)}
        told = {stop for template in templates for stop in self.terminators(template)}
        return self.tokenizer.stop_ids | self.more_stops | told

    def terminators(self, template: ChatTemplate) -> set[int]:
        """The added tokens that follow an assistant's text, whoever speaks next."""
        dialect = self.dialect(template)
        found: set[int] = set()
        for following in (Message("user", "u"), Message("tool", "t")):
            text = self._try(
                template, dialect, [Message("user", "u"), Message("assistant", _PROBE), following]
            )
            place = text.find(_PROBE)
            stop = self.encoder.next_added(text, place) if place >= 0 else None
            if stop is not None:
                found.add(stop[2])
        return found

    def _make(self, template: ChatTemplate, values: Values) -> Voice:
        dialect = probe_dialect(template, values, self.now) if values else self.dialect(template)
        detection = self._detect(template, dialect)
        finder = SlotFinder(
            self.encoder, self.brackets, self.stop_ids, self.tokenizer.vocab_size, Meaning(detection)
        )
        terminators = self.terminators(template)
        return Voice(
            template,
            self._with_generation_prompt(template, dialect, finder, values),
            detection,
            self.encoder,
            finder,
            self.brackets,
            self.texts,
            self.keep_empty_think,
            self.tokenizer.composes,
            self._is_local(template, dialect, values),
            len(terminators) > 1,
        )

    def _with_generation_prompt(
        self, template: ChatTemplate, dialect: Dialect, finder: SlotFinder, values: Values
    ) -> Dialect:
        """The dialect, with the generation prompt of templates that write one whether asked to or not."""
        if not dialect.generation_prompt:
            text = self._try(template, dialect, [Message("user", _PROBE)], values)
            stop = finder.next_stop(text, max(0, text.find(_PROBE)))
            if stop is not None:
                opening = text[stop[1] :].lstrip()
                dialect = replace(dialect, generation_prompt=opening, history_prompt=opening)
        return dialect

    def _is_local(self, template: ChatTemplate, dialect: Dialect, values: Values) -> bool:
        """Whether a short conversation without tools goes on behind a reply as a long one with tools does."""
        ask, said, more = Message("user", "u"), Message("assistant", _PROBE), Message("user", "v")
        tails = []
        for before, tools in (([ask], None), ([ask, Message("assistant", "a"), ask], _TOOLS)):
            text = self._try(template, dialect, [*before, said, more], values, tools)
            tails.append(text[text.find(_PROBE) :])
        return tails[0] == tails[1]

    def _detect(self, template: ChatTemplate, dialect: Dialect) -> Detection:
        found = detect(template.source, dialect.generation_prompt, self.tokenizer.added_tokens)
        if self.tool_parser is not None:
            found = replace(found, tool_format=self.tool_parser)
        if self.reasoning_parser is not None:
            return replace(found, reasoning_format=self.reasoning_parser)
        if not dialect.shows_reasoning:
            # Reasoning that is parsed and never shown again would fork every call.
            return replace(found, reasoning_format="none", starts_inside=False)
        return found

    def _try(
        self,
        template: ChatTemplate,
        dialect: Dialect,
        messages: list[Message],
        values: Values | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        try:
            return template.render(dialect.write(messages), tools, values, now=self.now)
        except TemplateError:
            return ""


@dataclass(frozen=True)
class Meaning:
    """What the bytes of a reply say, read as outputs are: whitespace does not count, everything else does."""

    detection: Detection

    def __call__(self, body: bytes, cut: bool, inside: bool, by_name: bool) -> object:
        found = self.detection
        parser = parser_for(found.tool_format, reasoning=found.reasoning_format, starts_inside=inside)
        # The whole reply as if it were one token.
        message = OutputParser(parser, lambda _: body).parse([0], "length" if cut else "stop").message
        calls = [(call.name, b"" if by_name else call.meaning) for call in message.calls]
        return "".join(message.text.split()), "".join(message.reasoning.split()), calls
