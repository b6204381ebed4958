"""The generic codec: any tokenizer with a chat template. Sampled ids are never encoded again.

The conversation is rendered once, with markers around what was sampled (`span_finder`). The sampled ids
replace the marked text (`prompt_builder`); the text between is encoded segment by segment
(`segment_encoder`). What the template accepts and shows was found by probing it (`template_probe`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    HistoryPolicy,
    NewMessage,
    PathMessage,
    Tools,
)
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.prompt_builder import TemplateProfile, create_prompt_cache
from branchline.chat.generic.reply_endings import probe_reply_endings
from branchline.chat.generic.span_finder import FieldMarkers, SpanFinder
from branchline.chat.generic.template_probe import (
    ARGUMENT_WORD,
    ASSISTANT_WITH_REASONING,
    TOOL_CALL,
    TOOLS,
    USER,
    TemplateProbe,
    probe_template_traits,
)
from branchline.chat.generic.verbatim_builder import VerbatimBuilder
from branchline.chat.generic.whole_reply import find_whole_reply
from branchline.chat.parsing.detection import RenderedCall, closes_reasoning, detect_output_format
from branchline.chat.parsing.output_parser import NO_REASONING, OutputFormat, OutputParser
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer import ORDINARY, TokenizerDir
from branchline.chat.tokenizer_codec import ReplyReader, TokenizerCodec
from branchline.chat.vision import (
    ImageExpander,
    ImageProcessor,
    VisionConfig,
    check_media,
    find_image_token,
    reject_media,
)
from branchline.core.call import ToolList
from branchline.core.errors import CodecError
from branchline.core.message import Message, canonical_json
from branchline.core.token_arrays import Ids, as_ids

log = logging.getLogger("branchline.chat")
UNREAD_CALL = (
    "%s: the chat template shows tool calls in a form that no parser reads: %r. Calls in outputs stay text; "
    "--tool-parser NAME selects a parser"
)
TOOLS_NOT_SHOWN = (
    "%s: the chat template does not show tools, so the model does not see those that a request has; "
    "`branchline doctor` says what becomes of calls and results"
)


class GenericCodec(TokenizerCodec):
    """Messages ⇄ ids for a tokenizer with a Jinja chat template.

    Parsers are detected from the template unless named. `chat_template` replaces the tokenizer's own
    templates. `keep_empty_think` keeps an empty reasoning block of the generation prompt, although history
    does not show it. `stop_ids` and `no_stop_ids` add to and remove from the ids that end an output, which
    are found in the tokenizer's files and in the template (`reply_endings`); each is an id or the text of a
    token. With `allow_special_tokens` the text of a control token (`<|im_end|>`) in a message becomes that
    token; by default it stays text. `vision` and `image_token` replace the settings of the image processor
    and the placeholder token that the tokenizer directory names. Template arguments of a request override
    `default_chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: TokenizerDir,
        *,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        keep_empty_think: bool = True,
        allow_special_tokens: bool = False,
        stop_ids: Iterable[int | str] = (),
        no_stop_ids: Iterable[int | str] = (),
        vision: VisionConfig | None = None,
        image_token: str = "",
        default_chat_template_kwargs: ChatTemplateKwargs | None = None,
        now: datetime | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.now = now or datetime.now()
        """The time that template clocks show; one time for a whole session."""
        self.name = f"generic:{tokenizer.name}"
        self.markers = FieldMarkers()
        self.prompt_cache = create_prompt_cache()
        self._tool_parser = tool_parser
        self.unread_calls: list[str] = []
        """Calls as the templates show them, if no parser reads them."""
        self.logged_warnings: set[str] = set()
        """The warnings that were logged, each once for all sessions."""
        self._reasoning_parser = reasoning_parser
        self._keep_empty_think = keep_empty_think
        self._allow_special_tokens = allow_special_tokens
        self._open_image_processor(vision, image_token)
        self.default_chat_template_kwargs = dict(default_chat_template_kwargs or {})
        sources = {tools: chat_template or tokenizer.template_source(tools=tools) for tools in (False, True)}
        compiled = {source: self._compile(source) for source in sources.values()}
        self._templates = {tools: compiled[source] for tools, source in sources.items()}
        self._traits = {
            template: probe_template_traits(template, self.default_chat_template_kwargs, self.now)
            for template in compiled.values()
        }
        probes = {
            template: TemplateProbe(template, traits, self.default_chat_template_kwargs, self.now)
            for template, traits in self._traits.items()
        }
        for probe in probes.values():
            self.segment_encoder.verify(probe.render_examples())
        declared = tokenizer.stop_ids.union(tokenizer.find_id(value, "stop_ids") for value in stop_ids)
        self._endings = {
            template: probe_reply_endings(probe, self.segment_encoder, declared)
            for template, probe in probes.items()
        }
        found = declared.union(*(endings.stop_ids for endings in self._endings.values()))
        self.stop_ids = found - self._find_removed_stops(no_stop_ids, found)
        self._escapes = self.segment_encoder.message_escapes(self.stop_ids, allow_special_tokens)
        self._profiles: dict[tuple[ChatTemplate, bytes], TemplateProfile] = {}

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> GenericCodec:
        """Opens the codec of a tokenizer directory or of a Hugging Face name such as `Qwen/Qwen3-8B`."""
        return cls(TokenizerDir.open(path), **options)

    def _open_image_processor(self, vision: VisionConfig | None, image_token: str) -> None:
        """A directory with an image processor of another kind is that of a text model, with a reason."""
        self._image_expander: ImageExpander | None = None
        self._no_images_reason = ""
        try:
            vision = vision or VisionConfig.find(self.tokenizer.path)
        except CodecError as error:
            self._no_images_reason = str(error)
        added_tokens = self.tokenizer.added_tokens
        if vision is None:
            return
        self.image_token = image_token or find_image_token(self.tokenizer.path, added_tokens)
        if self.image_token not in added_tokens:
            expected = "an added token of the tokenizer"
            self._no_images_reason = f"image_token: got {self.image_token!r}, expected {expected}"
            return
        self.image_processor = ImageProcessor(vision)
        self._image_expander = ImageExpander(self.image_processor, self.image_token)

    def with_clock(self, now: datetime) -> GenericCodec:
        """Returns the same codec with another time; both share all caches."""
        other = copy(self)
        other.now = now
        return other

    # -- the template --------------------------------------------------------------------------------

    def profile(
        self, *, tools: bool = False, chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> TemplateProfile:
        """Returns what is known about the template for prompts with or without tools."""
        template = self._templates[tools]
        kwargs = {**self.default_chat_template_kwargs, **(chat_template_kwargs or {})}
        key = (template, canonical_json(kwargs) if kwargs else b"")
        if key not in self._profiles:
            self._profiles[key] = self._build_profile(template, kwargs)
        return self._profiles[key]

    def probe(
        self, *, tools: bool = False, chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> TemplateProbe:
        """Returns a probe of the template for prompts with or without tools."""
        profile = self.profile(tools=tools, chat_template_kwargs=chat_template_kwargs)
        return TemplateProbe(profile.template, profile.traits, profile.chat_template_kwargs, self.now)

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self.tokenizer.special_tokens)
        except CodecError as error:
            raise CodecError(f"{self.tokenizer.path}: {error}") from error

    def _build_profile(self, template: ChatTemplate, kwargs: ChatTemplateKwargs) -> TemplateProfile:
        traits = self._traits[template]
        if kwargs != self.default_chat_template_kwargs:
            traits = probe_template_traits(template, kwargs, self.now)
        traits = self._with_generation_prompt(template, traits, kwargs)
        output_format = self._detect_output_format(template, traits, kwargs)
        endings = self._endings[template]
        reader = ReplyReader(
            self.segment_encoder,
            self.stop_ids,
            output_format,
            joins_text_to_reasoning=traits.joins_text_to_reasoning,
            framing_ids=self.segment_encoder.find_ids(output_format.framing_tokens),
        )
        prefixes = (traits.generation_prompt, traits.history_reply_prefix)
        return TemplateProfile(
            template,
            traits,
            kwargs,
            reader,
            endings,
            SpanFinder(reader, self.markers, prefixes, endings.terminator_ids),
            TemplateProbe(template, traits, kwargs, self.now).has_local_tail(),
            self._keep_empty_think,
            self.segment_encoder.message_escapes(
                self.stop_ids | endings.terminator_ids, self._allow_special_tokens
            ),
            self._image_expander,
        )

    def _find_removed_stops(self, values: Iterable[int | str], stop_ids: frozenset[int]) -> frozenset[int]:
        """Returns the ids of stops to remove. Raises CodecError for a value that is no stop id."""
        removed = {value: self.tokenizer.find_id(value, "no_stop_ids") for value in values}
        for value, token in removed.items():
            if token not in stop_ids:
                names = ", ".join(f"{stop} {self.decode(as_ids([stop]))!r}" for stop in sorted(stop_ids))
                raise CodecError(f"no_stop_ids: got {value!r}, expected one of the stop ids {names}")
        return frozenset(removed.values())

    def _with_generation_prompt(
        self, template: ChatTemplate, traits: TemplateTraits, kwargs: ChatTemplateKwargs
    ) -> TemplateTraits:
        """Adds the generation prompt of a template that always writes one, requested or not."""
        if traits.generation_prompt:
            return traits
        text = TemplateProbe(template, traits, kwargs, self.now).render_or_empty([USER])
        for _, end, token in self.segment_encoder.find_added_tokens(text, max(0, text.find(USER.content))):
            if token in self.stop_ids:
                prompt = text[end:].lstrip()
                return replace(traits, generation_prompt=prompt, history_reply_prefix=prompt)
        return traits

    def _detect_output_format(
        self, template: ChatTemplate, traits: TemplateTraits, kwargs: ChatTemplateKwargs
    ) -> OutputFormat:
        probe = TemplateProbe(template, traits, kwargs, self.now)
        rendered_call = self._render_call(probe)
        detected = detect_output_format(
            template.source,
            traits.generation_prompt,
            self.tokenizer.added_tokens,
            rendered_call,
            probe.render_or_empty([USER, ASSISTANT_WITH_REASONING]) if traits.shows_reasoning else "",
        )
        output_format = detected.output_format
        if self._tool_parser is not None:
            output_format = replace(output_format, tool_format=self._tool_parser)
        elif detected.unread_call and detected.unread_call not in self.unread_calls:
            self.unread_calls.append(detected.unread_call)
            log.warning(UNREAD_CALL, self.tokenizer.path, detected.unread_call)
        if self._reasoning_parser is not None:
            return replace(output_format, reasoning_format=self._reasoning_parser)
        shown = traits.history_reply_prefix + (rendered_call.text if rendered_call is not None else "")
        if (
            traits.shows_reasoning
            or output_format.starts_in_reasoning
            or closes_reasoning(shown, output_format.reasoning_format)
            or probe.strips_reasoning(output_format.reasoning_format)
        ):
            return output_format
        # History shows reasoning as part of the text. Parsed out, it would be lost there.
        return replace(output_format, reasoning_format=NO_REASONING)

    def _render_call(self, probe: TemplateProbe) -> RenderedCall | None:
        """Returns a reply with one call as the template shows it, or None if the template shows no calls."""
        text = probe.render_call()
        if not text:
            return None
        added = self.segment_encoder.find_added_tokens(text, text.rfind(ARGUMENT_WORD))
        stops = [start for start, _, token in added if token in self.stop_ids]
        return RenderedCall(text[: stops[-1]] if stops else text, TOOL_CALL, TOOLS)

    # -- ids to messages -----------------------------------------------------------------------------

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> OutputParser:
        profile = self.profile(tools=bool(tools), chat_template_kwargs=chat_template_kwargs)
        text_parser = profile.reader.output_format.create_parser(tools)
        return OutputParser(text_parser, self.tokenizer.token_bytes, self.stop_ids)

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
        if any(entry.message.parts for entry in new):
            messages = [entry.message for entry in new]
            if self.image_processor is None:
                reject_media(messages, self.name, len(path), self._no_images_reason)
            check_media(messages, self.name, len(path))
        profile = self.profile(tools=bool(tools), chat_template_kwargs=chat_template_kwargs)
        if tools and not profile.traits.shows_tools and TOOLS_NOT_SHOWN not in self.logged_warnings:
            self.logged_warnings.add(TOOLS_NOT_SHOWN)
            log.warning(TOOLS_NOT_SHOWN, self.tokenizer.path)
        builder = VerbatimBuilder(profile, self.prompt_cache, path, new, tools, self.now)
        if history == "verbatim" and path:
            return builder.build_verbatim()
        return builder.build_from_template()

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Ids:
        """Returns the ids of a prompt as the template renders it. Unlike `extend`, this reuses no sampled ids
        and accepts media, which appear as the template prints them."""
        profile = self.profile(tools=bool(tools), chat_template_kwargs=chat_template_kwargs)
        escapes = {index: self._escapes.of_context(message) for index, message in enumerate(messages)}
        raw = profile.traits.to_template_messages(messages, escapes=escapes)
        tools = self._escapes.escape_tools(ToolList(map(dict, tools)))
        text = profile.template.render(raw, tools, profile.chat_template_kwargs, now=self.now)
        return self.segment_encoder.encode(text)

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """Returns the ids of a reply as the template shows it, or as plain text if the template does not
        show it after its own generation prompt."""
        reply = self.render_reply(message)
        if reply is None:
            return super().encode_reply(message)
        text, terminator = reply
        return self._encode_rendered(message, text, terminator if stop else None)

    def encode_whole_reply(self, message: Message, *, stop: bool = True) -> Ids | None:
        """Returns the ids of a reply if the template shows all of it after its own generation prompt, else
        None. White space that the template writes after a reply without a terminator is no part of it, and
        without `stop` nothing that follows the content is."""
        reply = self.render_reply(message)
        if reply is None:
            return None
        text, terminator = reply
        escape = self._escapes.of_context(message)
        whole = find_whole_reply(message, text, self._render_reply_text, escape)
        if whole is None or (not stop and not whole.ends_with_content):
            return None
        shown, after = text[: whole.parts_end], text[whole.parts_end :]
        if not stop:
            return self._encode_rendered(message, shown, None)
        after = after if terminator is not None else after.rstrip()
        return self._encode_rendered(message, shown + after, terminator)

    def _render_reply_text(self, message: Message) -> str | None:
        reply = self.render_reply(message)
        return None if reply is None else reply[0]

    def _encode_rendered(self, message: Message, text: str, terminator: int | None) -> Ids:
        ids = self.segment_encoder.encode(text, self.last_prompt_id(tools=bool(message.tool_calls)))
        return as_ids([*ids.tolist(), terminator]) if terminator is not None else ids

    def last_prompt_id(self, *, tools: bool) -> int:
        """Returns the last id of a prompt, after which a reply is sampled."""
        ids = self.segment_encoder.encode(
            self.probe(tools=tools).render_or_empty([USER], TOOLS if tools else ())
        )
        return int(ids[-1]) if len(ids) else ORDINARY

    def render_reply(self, message: Message) -> tuple[str, int | None] | None:
        """Returns the text of a reply as the template shows it, with control tokens in its fields escaped,
        and the id of its terminator; None if the template does not show the reply after its own generation
        prompt."""
        tools = bool(message.tool_calls)
        escape = self._escapes.of_context(message)
        text = self.probe(tools=tools).render_reply(message, TOOLS if tools else (), escape)
        if text is None:
            return None
        endings = self.profile(tools=tools).endings
        ends = [
            (start, token)
            for start, _, token in self.segment_encoder.find_added_tokens(text)
            if token in self.stop_ids or token in endings.terminator_ids
        ]
        if ends:
            return text[: ends[-1][0]], ends[-1][1]
        return text, min(endings.call_terminator_ids if tools else endings.text_terminator_ids, default=None)
