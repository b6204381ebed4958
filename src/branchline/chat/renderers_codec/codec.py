"""The `renderers` codec: families whose models ship no chat template or a broken one, rendered by hand.

The PyPI package `renderers` writes conversations of a named family straight to ids and says whose each id
is; `rendered` puts sampled ids in their places. A family is always named: nothing is detected, nothing is
looked up on a hub, and the package is imported when the first codec is made.

    codec = RenderersCodec(TokenizerDir.open("models/v3"), family="deepseek_v3")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.chat.base import Extension, HistoryPolicy, NewMessage, PathMessage
from branchline.chat.generic.segment_encoder import SegmentEncoder
from branchline.chat.generic.template_traits import (
    MALFORMED_CALL,
    TemplateTraits,
    detect_malformed_arguments_format,
)
from branchline.chat.parsing.base import OutputParser, ParsedOutput
from branchline.chat.parsing.reasoning import REASONING_MARKERS
from branchline.chat.parsing.registry import NO_REASONING, create_text_parser
from branchline.chat.renderers_codec.families import FAMILIES, RendererTokenizer
from branchline.chat.renderers_codec.splice import PromptMessage, RenderedIds, Splicer, TokenReader
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.vision import (
    ImageProcessor,
    ImageSpan,
    VisionConfig,
    check_media,
    find_image_spans,
    reject_media,
)
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids

Tools = Sequence[Mapping[str, Any]]
ChatTemplateKwargs = Mapping[str, Any]

_INSTALL = "pip install 'branchline[renderers]'"
_ROLE_ALIASES = {"developer": "system", "function": "tool"}
"""Roles that renderers leave out without a word."""
_REPLACEMENT = "\ufffd".encode()


class RenderersCodec:
    """Messages ⇄ ids for a named family; options are the fields of the family's config in `renderers`."""

    def __init__(
        self, tokenizer: TokenizerDir, family: str, *, vision: VisionConfig | None = None, **options: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family.lower().replace("-", "_").replace(".", "_")
        if self.family not in FAMILIES:
            raise CodecError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
        self._family_config = FAMILIES[self.family]
        self._options = options
        self._traits = TemplateTraits()
        self.segment_encoder = SegmentEncoder(tokenizer)
        self._renderer_tokenizer = RendererTokenizer(tokenizer, self.segment_encoder)
        markers = self.segment_encoder.control_token_ids
        self._is_control_token = np.zeros(
            max([tokenizer.vocab_size, *(token + 1 for token in markers)]), np.bool_
        )
        self._is_control_token[markers] = True
        self.image_processor: ImageProcessor | None = None
        """What images become; None where the family reads text only."""
        if self._family_config.image_pad_token:
            self.image_processor = ImageProcessor(vision or VisionConfig.from_directory(tokenizer.path))
        self._renderers: dict[bytes, Any] = {}
        self._starts_in_reasoning_cache: dict[bytes, bool] = {}
        self._stop_ids = frozenset(int(token) for token in self._get_renderer({}).get_stop_token_ids())
        self._traits = TemplateTraits(
            malformed_arguments_format=detect_malformed_arguments_format(self._render_malformed_call())
        )

    @classmethod
    def open(cls, path: str | Path, family: str, **options: Any) -> RenderersCodec:
        """The codec of a tokenizer directory and a family."""
        return cls(TokenizerDir.open(path), family, **options)

    @property
    def name(self) -> str:
        return f"renderers:{self.family}:{self.tokenizer.path.name}"

    # -- ids to messages -----------------------------------------------------------------------------

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return self._stop_ids

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> OutputParser:
        """A parser for one output, to be fed as it arrives."""
        return self._create_parser(
            self.tokenizer.token_bytes, self._stop_ids, tools, chat_template_kwargs or {}
        )

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
        return OutputParser(create_text_parser("plain"), self.tokenizer.token_bytes, self._stop_ids)

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

    def _create_parser(
        self, spell: Any, stops: frozenset[int], tools: Tools, values: ChatTemplateKwargs
    ) -> OutputParser:
        family = self._family_config
        text_parser = create_text_parser(
            family.tool_format,
            reasoning_format=family.reasoning_format,
            starts_in_reasoning=self._starts_in_reasoning(values),
            tools=tools,
        )
        return OutputParser(text_parser, spell, stops)

    def _starts_in_reasoning(self, values: ChatTemplateKwargs) -> bool:
        """Whether the generation prompt leaves the model inside its reasoning."""
        if self._family_config.reasoning_format == NO_REASONING:
            return False
        key = _kwargs_key(values)
        if key not in self._starts_in_reasoning_cache:
            opened, closed = REASONING_MARKERS[self._family_config.reasoning_format]
            opening = self.decode(self._render([Message("user", ".")], (), values).generation_prompt_ids)
            self._starts_in_reasoning_cache[key] = opening.rfind(opened) > opening.rfind(closed)
        return self._starts_in_reasoning_cache[key]

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
        values = chat_template_kwargs or {}
        entries: list[PromptMessage] = [*path, *new]
        messages = [entry.message for entry in entries]
        weaver = Splicer(self._render(messages, tools, values), entries, self._token_reader(tools, values))
        if history == "verbatim" and path:
            extension = weaver.build_verbatim(
                len(path), lambda: self._render(messages[: len(path)], tools, values)
            )
            if extension is not None:
                return extension
        return weaver.build_from_template(len(path))

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> int:
        """How many tokens a prompt has."""
        return len(self._render(messages, tools, chat_template_kwargs or {}).ids)

    def image_spans(self, messages: Sequence[Message], prompt_ids: Ids) -> tuple[ImageSpan, ...]:
        """The images of a prompt: where each stands, and its payload; `images.pixels` makes the pixels."""
        if self.image_processor is None:
            return ()
        return find_image_spans(messages, prompt_ids, self._image_pad_id)

    @property
    def _image_pad_id(self) -> int:
        return self.tokenizer.added_tokens[self._family_config.image_pad_token]

    def _token_reader(self, tools: Tools, values: ChatTemplateKwargs) -> TokenReader:
        def meaning(body: bytes, cut: bool, by_name: bool) -> object:
            # Bytes are fed as if each were a token: what is compared is text, whichever ids spell it.
            parser = self._create_parser(_byte_of, frozenset(), tools, values)
            message = parser.parse(body, "length" if cut else "stop").message
            calls = [(call.name, b"" if by_name else call.canonical_arguments) for call in message.tool_calls]
            return message.content.strip(), message.reasoning_content.strip(), calls

        return TokenReader(
            self._decode_bytes, self._control_tokens_in, meaning, self.segment_encoder.encode, self._stop_ids
        )

    def _decode_bytes(self, ids: Ids) -> bytes:
        spelled: list[bytes] = []
        for token in ids.tolist():
            try:
                spelled.append(self.tokenizer.token_bytes(token))
            except CodecError:
                spelled.append(_REPLACEMENT)
        return b"".join(spelled)

    def _control_tokens_in(self, ids: Ids) -> list[int]:
        known = ids[(ids >= 0) & (ids < len(self._is_control_token))]
        found: list[int] = known[self._is_control_token[known]].tolist()
        return found

    # -- the renderer --------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Tools, values: ChatTemplateKwargs) -> RenderedIds:
        if self.image_processor is None:
            reject_media(messages, self.name)
        else:
            check_media(messages, self.name)
        renderer = self._get_renderer(values)
        written = self._to_renderer_messages(messages)
        try:
            made = renderer.render(
                written, tools=[dict(tool) for tool in tools] or None, add_generation_prompt=True
            )
        except CodecError:
            raise
        except Exception as error:
            # Renderers raise what they like, AssertionError and NotImplementedError too.
            raise TemplateError(f"the {self.family} renderer refused the conversation: {error}") from error
        sampled = made.sampled_mask or [False] * len(made.token_ids)
        render = RenderedIds(
            as_ids(made.token_ids),
            np.array(made.message_indices, np.int64),
            np.array(sampled, np.bool_),
            len(messages),
        )
        self._check_all_shown(messages, render)
        return render

    def _render_malformed_call(self) -> str:
        """What the renderer makes of arguments that are no JSON; some leave them out without a word."""
        try:
            return self.decode(self._render([Message("user", "."), MALFORMED_CALL], (), {}).ids)
        except TemplateError:
            return ""

    def _check_all_shown(self, messages: Sequence[Message], render: RenderedIds) -> None:
        """No message may vanish: some renderers skip roles, or images in roles, without a word."""
        shown = np.zeros(len(messages), np.bool_)
        shown[render.message_indices[render.message_indices >= 0]] = True
        for index in np.flatnonzero(~shown).tolist():
            message = messages[index]
            # Several system messages may be written as one.
            if message.content.strip() and message.content.strip() not in self.decode(render.ids):
                raise TemplateError(
                    f"messages[{index}]: the {self.family} renderer shows no {message.role} message here"
                )
        if self.image_processor is not None:
            self._check_images(messages, render, self.image_processor)

    def _check_images(self, messages: Sequence[Message], render: RenderedIds, images: ImageProcessor) -> None:
        """Every image has its places, as many as its size asks for, and no text pretends to be one."""
        padded = set(render.message_indices[render.ids == self._image_pad_id].tolist())
        for index, message in enumerate(messages):
            if not message.media and index not in padded:
                continue
            try:
                places = find_image_spans([message], render.message_ids(index), self._image_pad_id)
            except CodecError as error:
                raise TemplateError(f"messages[{index}], {message.role}: {error}") from error
            for place in places:
                expected = images.config.placeholder_count(*images.image_size(place.media))
                if place.length != expected:
                    got = f"got {place.length} placeholders for an image, expected {expected}"
                    raise TemplateError(f"messages[{index}]: {got}")

    def _to_renderer_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        written = self._traits.to_template_messages(messages)
        for raw, message in zip(written, messages, strict=True):
            raw["role"] = _ROLE_ALIASES.get(message.role, message.role)
            if message.media and self.image_processor is not None:
                raw["content"] = [
                    {"type": "text", "text": part}
                    if isinstance(part, str)
                    else {"type": "image", "image": self.image_processor.placeholder(part)}
                    for part in message.parts
                ]
        return written

    def _get_renderer(self, values: ChatTemplateKwargs) -> Any:
        """The renderer of some template arguments; each set has its own."""
        key = _kwargs_key(values)
        if key not in self._renderers:
            self._renderers[key] = self._create_renderer(values)
        return self._renderers[key]

    def _create_renderer(self, values: ChatTemplateKwargs) -> Any:
        try:
            package = import_module("renderers")
        except ImportError as error:
            raise CodecError(f"{self.name}: needs the renderers package: {_INSTALL} ({error})") from error
        stem = self._family_config.class_prefix
        config_class = getattr(package, f"{stem}RendererConfig")
        unknown = values.keys() - config_class.template_field_names()
        if unknown:
            expected = ", ".join(sorted(config_class.template_field_names())) or "none"
            raise TemplateError(
                f"template arguments: got {', '.join(sorted(unknown))}, but {self.family} has {expected}"
            )
        try:
            config = config_class(**{**self._options, **values})
            options = {"processor": self.image_processor} if self.image_processor is not None else {}
            return getattr(package, f"{stem}Renderer")(self._renderer_tokenizer, config, **options)
        except Exception as error:
            # A field that is none, or a tokenizer without the family's tokens (an AssertionError).
            raise CodecError(f"{self.name}: {error}") from error


def _byte_of(token: int) -> bytes:
    return bytes((token,))


def _kwargs_key(values: ChatTemplateKwargs) -> bytes:
    return msgspec.json.encode(dict(values), order="sorted") if values else b""
