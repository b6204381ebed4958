"""The `renderers` codec: for model families that ship no chat template or a broken one.

The PyPI package `renderers` writes the conversations of a named family directly as ids and reports which
message each id belongs to; `splice` puts sampled ids in their places. The family is always named: nothing is
detected or looked up on a hub, and the package is imported when the first codec is created.

    codec = RenderersCodec(TokenizerDir.open("models/v3"), family="deepseek_v3")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    HistoryPolicy,
    NewMessage,
    PathMessage,
    PromptMessage,
    Tools,
)
from branchline.chat.parsing.output_parser import (
    NO_REASONING,
    REASONING_MARKERS,
    OutputFormat,
    OutputParser,
)
from branchline.chat.renderers_codec.families import FAMILIES, RendererTokenizer
from branchline.chat.renderers_codec.splice import RenderedIds, Splicer
from branchline.chat.template_traits import MALFORMED_CALL, TemplateTraits, detect_malformed_arguments_format
from branchline.chat.token_escapes import Escape
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.tokenizer_codec import ReplyReader, TokenizerCodec
from branchline.chat.vision import (
    ImageProcessor,
    VisionConfig,
    check_media,
    find_image_spans,
    reject_media,
)
from branchline.core.call import ToolList
from branchline.core.errors import CodecError, TemplateError
from branchline.core.extras import requires_extra
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids

_ROLE_ALIASES = {"developer": "system", "function": "tool"}
"""Roles that renderers drop silently, and the roles that replace them."""


class RenderersCodec(TokenizerCodec):
    """Messages ⇄ ids for a named family; `options` are fields of the family's config in `renderers`.

    With `allow_special_tokens` the text of a control token in a message becomes that token.
    """

    def __init__(
        self,
        tokenizer: TokenizerDir,
        family: str,
        *,
        vision: VisionConfig | None = None,
        allow_special_tokens: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer)
        if not self.segment_encoder.encodes_by_segment:
            raise CodecError(
                f"{tokenizer.path}: this tokenizer inserts or removes spaces next to added tokens, expected "
                "one that does not, because renderers encode each text on its own: use the generic codec"
            )
        self.family = family.lower().replace("-", "_").replace(".", "_")
        if self.family not in FAMILIES:
            raise CodecError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
        self.name = f"renderers:{self.family}:{tokenizer.name}"
        self._family_config = FAMILIES[self.family]
        self._options = options
        self._renderer_tokenizer = RendererTokenizer(tokenizer, self.segment_encoder)
        if self._family_config.image_pad_token:
            self.image_token = self._family_config.image_pad_token
            self.image_processor = ImageProcessor(vision or VisionConfig.from_directory(tokenizer.path))
        self._renderers: dict[bytes, Any] = {}
        self._output_formats: dict[bytes, OutputFormat] = {}
        self.stop_ids = frozenset(int(token) for token in self._get_renderer({}).get_stop_token_ids())
        self._escapes = self.segment_encoder.message_escapes(self.stop_ids, allow_special_tokens)
        self._traits = TemplateTraits()
        self._traits = TemplateTraits(
            malformed_arguments_format=detect_malformed_arguments_format(self._render_malformed_call())
        )

    @classmethod
    def open(cls, path: str | Path, family: str, **options: Any) -> RenderersCodec:
        """Opens the codec of a tokenizer directory or Hugging Face name, and a family."""
        return cls(TokenizerDir.open(path), family, **options)

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> OutputParser:
        text_parser = self.output_format(chat_template_kwargs or {}).create_parser(tools)
        return OutputParser(text_parser, self.tokenizer.token_bytes, self.stop_ids)

    def output_format(self, chat_template_kwargs: ChatTemplateKwargs) -> OutputFormat:
        """Returns how the outputs of a prompt with these template arguments are parsed."""
        key = _kwargs_key(chat_template_kwargs)
        if key not in self._output_formats:
            self._output_formats[key] = self._probe_output_format(chat_template_kwargs)
        return self._output_formats[key]

    def _probe_output_format(self, kwargs: ChatTemplateKwargs) -> OutputFormat:
        output_format = self._family_config.output_format
        if output_format.reasoning_format == NO_REASONING:
            return output_format
        opener, closer = REASONING_MARKERS[output_format.reasoning_format]
        prompt = self.decode(self._render([Message("user", ".")], (), kwargs).generation_prompt_ids)
        return replace(output_format, starts_in_reasoning=prompt.rfind(opener) > prompt.rfind(closer))

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
        kwargs = chat_template_kwargs or {}
        entries: list[PromptMessage] = [*path, *new]
        messages = [entry.message for entry in entries]
        reader = ReplyReader(self.segment_encoder, self.stop_ids, self.output_format(kwargs), tools)
        sampled = {index for index, entry in enumerate(entries) if entry.sampled_ids is not None}
        escaped = {index for index, message in enumerate(messages) if self._escapes.occurs_in(message)}
        escapes = self._escapes.of_messages(entries, sampled, escaped)
        splicer = Splicer(self._render(messages, tools, kwargs, escapes), entries, reader)
        if history == "verbatim" and path:
            extension = splicer.build_verbatim(
                len(path), lambda: self._render(messages[: len(path)], tools, kwargs, escapes)
            )
            if extension is not None:
                return extension
        return splicer.build_from_template(len(path))

    # -- the renderer --------------------------------------------------------------------------------

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        kwargs: ChatTemplateKwargs,
        escapes: Mapping[int, Escape] | None = None,
    ) -> RenderedIds:
        if self.image_processor is None:
            reject_media(messages, self.name)
        else:
            check_media(messages, self.name)
        renderer = self._get_renderer(kwargs)
        raw = self._to_renderer_messages(messages, escapes or {})
        tool_list = tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))
        shown_tools = [dict(tool) for tool in self._escapes.escape_tools(tool_list)]
        try:
            result = renderer.render(raw, tools=shown_tools or None, add_generation_prompt=True)
        except CodecError:
            raise
        except Exception as error:
            # Renderers raise any exception, including AssertionError and NotImplementedError.
            raise TemplateError(f"the {self.family} renderer refused the conversation: {error}") from error
        sampled = result.sampled_mask or [False] * len(result.token_ids)
        render = RenderedIds(
            as_ids(result.token_ids),
            np.array(result.message_indices, np.int64),
            np.array(sampled, np.bool_),
            len(messages),
        )
        self._check_all_shown(messages, render)
        return render

    def _render_malformed_call(self) -> str:
        """Returns how the renderer shows arguments that are not JSON; some drop them silently."""
        try:
            return self.decode(self._render([Message("user", "."), MALFORMED_CALL], (), {}).ids)
        except TemplateError:
            return ""

    def _check_all_shown(self, messages: Sequence[Message], render: RenderedIds) -> None:
        """Raises TemplateError if a message is missing: some renderers skip roles, or images in roles."""
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

    def _check_images(
        self, messages: Sequence[Message], render: RenderedIds, processor: ImageProcessor
    ) -> None:
        """Raises TemplateError unless each image has as many placeholders as its size requires, and no text
        contains a placeholder."""
        pad = self.tokenizer.added_tokens[self.image_token]
        padded = set(render.message_indices[render.ids == pad].tolist())
        for index, message in enumerate(messages):
            if not message.media and index not in padded:
                continue
            try:
                find_image_spans([message], render.message_ids(index), pad, processor)
            except CodecError as error:
                raise TemplateError(f"messages[{index}], {message.role}: {error}") from error

    def _to_renderer_messages(
        self, messages: Sequence[Message], escapes: Mapping[int, Escape]
    ) -> list[dict[str, Any]]:
        raw_messages = self._traits.to_template_messages(messages, escapes=escapes)
        for index, (raw, message) in enumerate(zip(raw_messages, messages, strict=True)):
            raw["role"] = _ROLE_ALIASES.get(message.role, message.role)
            if message.media and self.image_processor is not None:
                escape = escapes.get(index, str)
                raw["content"] = [
                    {"type": "text", "text": escape(part)}
                    if isinstance(part, str)
                    else {"type": "image", "image": self.image_processor.placeholder(part)}
                    for part in message.parts
                ]
        return raw_messages

    def _get_renderer(self, kwargs: ChatTemplateKwargs) -> Any:
        """Returns the renderer of one set of template arguments."""
        key = _kwargs_key(kwargs)
        if key not in self._renderers:
            self._renderers[key] = self._create_renderer(kwargs)
        return self._renderers[key]

    def _create_renderer(self, kwargs: ChatTemplateKwargs) -> Any:
        with requires_extra():
            package = import_module("renderers")
        prefix = self._family_config.class_prefix
        config_class = getattr(package, f"{prefix}RendererConfig")
        unknown = kwargs.keys() - config_class.template_field_names()
        if unknown:
            expected = ", ".join(sorted(config_class.template_field_names())) or "none"
            raise TemplateError(
                f"template arguments: got {', '.join(sorted(unknown))}, but {self.family} has {expected}"
            )
        try:
            config = config_class(**{**self._options, **kwargs})
            options = {"processor": self.image_processor} if self.image_processor is not None else {}
            return getattr(package, f"{prefix}Renderer")(self._renderer_tokenizer, config, **options)
        except Exception as error:
            # An unknown field, or a tokenizer without the family's tokens (an AssertionError).
            raise CodecError(f"{self.name}: {error}") from error


def _kwargs_key(kwargs: ChatTemplateKwargs) -> bytes:
    return msgspec.json.encode(dict(kwargs), order="sorted") if kwargs else b""
