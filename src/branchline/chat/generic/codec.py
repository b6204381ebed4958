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

from branchline.chat.base import Extension, HistoryPolicy, NewMessage, PathMessage
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.field_markers import FieldMarkers
from branchline.chat.generic.prompt_builder import PromptBuilder
from branchline.chat.generic.segment_encoder import SegmentEncoder
from branchline.chat.generic.template_profile import RenderedPrompt, TemplateProfiles
from branchline.chat.generic.template_traits import TemplateTraits
from branchline.chat.parsing.base import OutputParser, ParsedOutput
from branchline.chat.parsing.registry import create_text_parser
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.vision import reject_media
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

Tools = Sequence[Mapping[str, Any]]
ChatTemplateKwargs = Mapping[str, Any]

_PROMPT_CACHE_BYTES = 128 * 1024 * 1024


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
        self.segment_encoder = SegmentEncoder(tokenizer)
        self._rendered_prompts: ByteLimitedCache[RenderedPrompt] = ByteLimitedCache(
            _PROMPT_CACHE_BYTES, lambda known: len(known.text) + 2000
        )
        self._markers = FieldMarkers()
        self._profiles = TemplateProfiles(
            tokenizer,
            self.segment_encoder,
            self._markers,
            self._rendered_prompts,
            frozenset(stop_ids),
            keep_empty_think,
            tool_parser,
            reasoning_parser,
            self.now,
        )
        self.output_format = self._profiles.get(tools=True, chat_template_kwargs={}).output_format
        """How outputs are parsed when the template gets no arguments."""
        self.stop_ids = self._profiles.stop_ids
        """Ids that end an output."""

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> GenericCodec:
        """The codec of a tokenizer directory."""
        return cls(TokenizerDir.open(path), **options)

    @property
    def name(self) -> str:
        return f"generic:{self.tokenizer.path.name}"

    def with_clock(self, now: datetime) -> GenericCodec:
        """The same codec with its clock stopped at another moment; caches of text are shared."""
        other = copy(self)
        other.now = now
        return other

    def clear_prompt_cache(self) -> None:
        """Drops what is remembered of earlier prompts; the next ones cost more and are the same."""
        self._rendered_prompts.clear()

    # -- ids to messages -----------------------------------------------------------------------------

    @property
    def terminator_ids(self) -> frozenset[int]:
        """The stop ids that the template itself puts behind a reply."""
        return frozenset(self._profiles.terminator_ids(self.tokenizer.chat_template()))

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> OutputParser:
        """A parser for one output, to be fed as it arrives."""
        found = self._profiles.get(
            tools=bool(tools), chat_template_kwargs=chat_template_kwargs or {}
        ).output_format
        text_parser = create_text_parser(
            found.tool_format,
            reasoning_format=found.reasoning_format,
            starts_in_reasoning=found.starts_in_reasoning,
            tools=tools,
        )
        return OutputParser(text_parser, self.tokenizer.token_bytes, self.stop_ids)

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Message:
        return self.parse_output(ids, finish_reason, tools, chat_template_kwargs).message

    def parse_output(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> ParsedOutput:
        """The message some ids spell, and what was wrong with it."""
        return self.parser(tools, chat_template_kwargs).parse(ids.tolist(), finish_reason)

    def plain_parser(self) -> OutputParser:
        return OutputParser(create_text_parser("plain"), self.tokenizer.token_bytes, self.stop_ids)

    def decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.tokenizer.token_bytes(token)
        except CodecError:
            return b"<%d>" % token

    def encode(self, text: str) -> Ids:
        return self.tokenizer.encode(text)

    def encode_reply(self, message: Message) -> Ids:
        return self.tokenizer.encode_reply(message)

    # -- messages to ids -----------------------------------------------------------------------------

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        history: HistoryPolicy = "template",
    ) -> Extension:
        reject_media([shown.message for shown in new], self.name, first_index=len(path))
        conversation = PromptBuilder(
            self._profiles.get(tools=bool(tools), chat_template_kwargs=chat_template_kwargs or {}),
            [*path, *new],
            len(path),
            tools,
            chat_template_kwargs or {},
            self.now,
        )
        if history == "verbatim" and path:
            return conversation.build_verbatim()
        return conversation.build_from_template()

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> int:
        """How many tokens a prompt has."""
        extension = self.extend(
            (),
            [NewMessage(message) for message in messages],
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return sum(len(piece.ids) for piece in extension.message_tokens) + len(
            extension.generation_prompt_ids
        )

    def template_traits(self, template: ChatTemplate) -> TemplateTraits:
        """How a template wants to be spoken to."""
        return self._profiles.traits(template)
