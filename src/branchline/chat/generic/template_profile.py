"""A voice: all that is needed to speak one template under one set of its arguments, found out once.

The arguments of a template (`enable_thinking`) can change what opens a reply, and with it how an output is
parsed; so there is a voice for each set of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.field_markers import FieldMarkers, SpanFinder
from branchline.chat.generic.segment_encoder import SegmentEncoder
from branchline.chat.generic.template_traits import TemplateTraits, probe_template_traits
from branchline.chat.parsing.base import OutputParser
from branchline.chat.parsing.detect import OutputFormat, detect_output_format
from branchline.chat.parsing.registry import create_text_parser
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import TemplateError
from branchline.core.message import Message, canonical_json
from branchline.core.token_arrays import Ids

ChatTemplateKwargs = Mapping[str, Any]

EMPTY_THINK = "<think>\n\n</think>\n\n"
_PROBE_WORD = "zqprobe"
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class RenderedPrompt:
    """What a prompt rendered to: its text with brackets, and where each message ends in it."""

    text: str
    message_ends: tuple[int, ...]
    marked: frozenset[int]
    """Which messages stand in brackets."""
    last_ids: Ids
    """The ids of the last message: kept alive because their identity is the key."""

    @property
    def body_end(self) -> int:
        return self.message_ends[-1]

    @property
    def generation_prompt(self) -> str:
        return self.text[self.body_end :]


@dataclass(frozen=True)
class TemplateProfile:
    """How to speak one template, and how to hear it."""

    template: ChatTemplate
    traits: TemplateTraits
    output_format: OutputFormat
    segment_encoder: SegmentEncoder
    span_finder: SpanFinder
    markers: FieldMarkers
    rendered_prompts: ByteLimitedCache[RenderedPrompt]
    keep_empty_think: bool
    normalizes_nfc: bool
    """The tokenizer composes letters and accents (NFC) before it encodes."""
    tail_is_local: bool
    """What follows a reply does not depend on what stands before it."""
    stop_opens_next_message: bool
    """Replies end in the opener of whatever follows (GLM), so there is more than one way to stop."""


@dataclass
class TemplateProfiles:
    """The voices of one tokenizer."""

    tokenizer: TokenizerDir
    segment_encoder: SegmentEncoder
    markers: FieldMarkers
    rendered_prompts: ByteLimitedCache[RenderedPrompt]
    extra_stop_ids: frozenset[int]
    keep_empty_think: bool
    tool_parser: str | None
    reasoning_parser: str | None
    now: datetime

    def __post_init__(self) -> None:
        self._profiles: dict[tuple[ChatTemplate, bytes], TemplateProfile] = {}
        self._traits: dict[ChatTemplate, TemplateTraits] = {}

    def get(self, *, tools: bool, chat_template_kwargs: ChatTemplateKwargs) -> TemplateProfile:
        """The voice for a conversation with or without tools, under these arguments."""
        template = self.tokenizer.chat_template(tools=tools)
        key = (template, canonical_json(dict(chat_template_kwargs)) if chat_template_kwargs else b"")
        if key not in self._profiles:
            self._profiles[key] = self._build(template, chat_template_kwargs)
        return self._profiles[key]

    def traits(self, template: ChatTemplate) -> TemplateTraits:
        """How a template wants to be spoken to without any arguments."""
        if template not in self._traits:
            self._traits[template] = probe_template_traits(template, now=self.now)
        return self._traits[template]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an output, with tools or without."""
        templates = {self.tokenizer.chat_template(tools=tools) for tools in (False, True)}
        told = {stop for template in templates for stop in self.terminator_ids(template)}
        return self.tokenizer.stop_ids | self.extra_stop_ids | told

    def terminator_ids(self, template: ChatTemplate) -> set[int]:
        """The added tokens that follow an assistant's text, whoever speaks next."""
        dialect = self.traits(template)
        found: set[int] = set()
        for following in (Message("user", "u"), Message("tool", "t")):
            text = self._render_or_empty(
                template, dialect, [Message("user", "u"), Message("assistant", _PROBE_WORD), following]
            )
            place = text.find(_PROBE_WORD)
            stop = self.segment_encoder.find_next_added_token(text, place) if place >= 0 else None
            if stop is not None:
                found.add(stop[2])
        return found

    def _build(self, template: ChatTemplate, values: ChatTemplateKwargs) -> TemplateProfile:
        dialect = probe_template_traits(template, values, self.now) if values else self.traits(template)
        detection = self._detect_output_format(template, dialect)
        finder = SpanFinder(
            self.segment_encoder,
            self.markers,
            self.stop_ids,
            self.tokenizer.vocab_size,
            ReplyNormalizer(detection),
        )
        terminators = self.terminator_ids(template)
        return TemplateProfile(
            template,
            self._with_generation_prompt(template, dialect, finder, values),
            detection,
            self.segment_encoder,
            finder,
            self.markers,
            self.rendered_prompts,
            self.keep_empty_think,
            self.tokenizer.normalizes_nfc,
            self._has_local_tail(template, dialect, values),
            len(terminators) > 1,
        )

    def _with_generation_prompt(
        self, template: ChatTemplate, dialect: TemplateTraits, finder: SpanFinder, values: ChatTemplateKwargs
    ) -> TemplateTraits:
        """The dialect, with the generation prompt of templates that write one whether asked to or not."""
        if not dialect.generation_prompt:
            text = self._render_or_empty(template, dialect, [Message("user", _PROBE_WORD)], values)
            stop = finder.find_next_stop(text, max(0, text.find(_PROBE_WORD)))
            if stop is not None:
                opening = text[stop[1] :].lstrip()
                dialect = replace(dialect, generation_prompt=opening, history_reply_prefix=opening)
        return dialect

    def _has_local_tail(
        self, template: ChatTemplate, dialect: TemplateTraits, values: ChatTemplateKwargs
    ) -> bool:
        """Whether a short conversation without tools goes on behind a reply as a long one with tools does."""
        ask, said, more = Message("user", "u"), Message("assistant", _PROBE_WORD), Message("user", "v")
        tails = []
        for before, tools in (([ask], None), ([ask, Message("assistant", "a"), ask], _TOOLS)):
            text = self._render_or_empty(template, dialect, [*before, said, more], values, tools)
            tails.append(text[text.find(_PROBE_WORD) :])
        return tails[0] == tails[1]

    def _detect_output_format(self, template: ChatTemplate, dialect: TemplateTraits) -> OutputFormat:
        found = detect_output_format(template.source, dialect.generation_prompt, self.tokenizer.added_tokens)
        if self.tool_parser is not None:
            found = replace(found, tool_format=self.tool_parser)
        if self.reasoning_parser is not None:
            return replace(found, reasoning_format=self.reasoning_parser)
        if not dialect.shows_reasoning:
            # Reasoning that is parsed and never shown again would fork every call.
            return replace(found, reasoning_format="none", starts_in_reasoning=False)
        return found

    def _render_or_empty(
        self,
        template: ChatTemplate,
        dialect: TemplateTraits,
        messages: list[Message],
        values: ChatTemplateKwargs | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        try:
            return template.render(dialect.to_template_messages(messages), tools, values, now=self.now)
        except TemplateError:
            return ""


@dataclass(frozen=True)
class ReplyNormalizer:
    """What the bytes of a reply say, read as outputs are: whitespace does not count, everything else does."""

    output_format: OutputFormat

    def __call__(self, body: bytes, cut: bool, inside: bool, by_name: bool) -> object:
        found = self.output_format
        parser = create_text_parser(
            found.tool_format, reasoning_format=found.reasoning_format, starts_in_reasoning=inside
        )
        # The whole reply as if it were one token.
        message = OutputParser(parser, lambda _: body).parse([0], "length" if cut else "stop").message
        calls = [(call.name, b"" if by_name else call.canonical_arguments) for call in message.tool_calls]
        return "".join(message.content.split()), "".join(message.reasoning_content.split()), calls
