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

from branchline.chat.base import Extension, History, Recorded, Shown
from branchline.chat.generic.dialect import ODD_CALL, Dialect, odd_arguments_in
from branchline.chat.generic.segments import SegmentEncoder
from branchline.chat.handcoded.families import FAMILIES, RendererTokenizer
from branchline.chat.handcoded.rendered import Entry, Reading, Render, Weaver
from branchline.chat.parsing.base import OutputParser, Parsed
from branchline.chat.parsing.reasoning import REASONING
from branchline.chat.parsing.registry import NO_REASONING, parser_for
from branchline.chat.tokenizer import TokenizerDir
from branchline.chat.vision import (
    ImageProcessor,
    Placed,
    VisionConfig,
    check_media,
    place_images,
    refuse_media,
)
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Message
from branchline.core.runs import Ids, as_ids

Tools = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]

_INSTALL = "pip install 'branchline[renderers]'"
_ROLES = {"developer": "system", "function": "tool"}
"""Roles that renderers leave out without a word."""
_UNKNOWN = "\ufffd".encode()


class RenderersCodec:
    """Messages ⇄ ids for a named family; options are the fields of the family's config in `renderers`."""

    def __init__(
        self, tokenizer: TokenizerDir, family: str, *, vision: VisionConfig | None = None, **options: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family.lower().replace("-", "_").replace(".", "_")
        if self.family not in FAMILIES:
            raise CodecError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
        self._family = FAMILIES[self.family]
        self._options = options
        self._dialect = Dialect()
        self.encoder = SegmentEncoder(tokenizer)
        self._adapter = RendererTokenizer(tokenizer, self.encoder)
        markers = self.encoder.marker_ids
        self._is_marker = np.zeros(max([tokenizer.vocab_size, *(token + 1 for token in markers)]), np.bool_)
        self._is_marker[markers] = True
        self.images: ImageProcessor | None = None
        """What images become; None where the family reads text only."""
        if self._family.image_pad:
            self.images = ImageProcessor(vision or VisionConfig.read(tokenizer.path))
        self._renderers: dict[bytes, Any] = {}
        self._insides: dict[bytes, bool] = {}
        self._stops = frozenset(int(token) for token in self._renderer({}).get_stop_token_ids())
        self._dialect = Dialect(odd_arguments=odd_arguments_in(self._shown_oddly()))

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
        return self._stops

    def parser(self, tools: Tools = (), template: Values | None = None) -> OutputParser:
        """A parser for one output, to be fed as it arrives."""
        return self._parser(self.tokenizer.token_bytes, self._stops, tools, template or {})

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
        return OutputParser(parser_for("plain"), self.tokenizer.token_bytes, self._stops)

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

    def _parser(self, spell: Any, stops: frozenset[int], tools: Tools, values: Values) -> OutputParser:
        family = self._family
        text_parser = parser_for(
            family.tool_format,
            reasoning=family.reasoning,
            starts_inside=self._starts_inside(values),
            tools=tools,
        )
        return OutputParser(text_parser, spell, stops)

    def _starts_inside(self, values: Values) -> bool:
        """Whether the generation prompt leaves the model inside its reasoning."""
        if self._family.reasoning == NO_REASONING:
            return False
        key = _key(values)
        if key not in self._insides:
            opened, closed = REASONING[self._family.reasoning]
            opening = self.decode(self._render([Message("user", ".")], (), values).opening)
            self._insides[key] = opening.rfind(opened) > opening.rfind(closed)
        return self._insides[key]

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
        values = template or {}
        entries: list[Entry] = [*path, *new]
        messages = [entry.message for entry in entries]
        weaver = Weaver(self._render(messages, tools, values), entries, self._reading(tools, values))
        if history == "verbatim" and path:
            extension = weaver.verbatim(len(path), lambda: self._render(messages[: len(path)], tools, values))
            if extension is not None:
                return extension
        return weaver.by_template(len(path))

    def count(self, messages: Sequence[Message], tools: Tools = (), template: Values | None = None) -> int:
        """How many tokens a prompt has."""
        return len(self._render(messages, tools, template or {}).ids)

    def placed(self, messages: Sequence[Message], prompt_ids: Ids) -> tuple[Placed, ...]:
        """The images of a prompt: where each stands, and its payload; `images.pixels` makes the pixels."""
        if self.images is None:
            return ()
        return place_images(messages, prompt_ids, self._image_pad)

    @property
    def _image_pad(self) -> int:
        return self.tokenizer.added_tokens[self._family.image_pad]

    def _reading(self, tools: Tools, values: Values) -> Reading:
        def meaning(body: bytes, cut: bool, by_name: bool) -> object:
            # Bytes are fed as if each were a token: what is compared is text, whichever ids spell it.
            parser = self._parser(_one_byte, frozenset(), tools, values)
            message = parser.parse(body, "length" if cut else "stop").message
            calls = [(call.name, b"" if by_name else call.meaning) for call in message.calls]
            return message.text.strip(), message.reasoning.strip(), calls

        return Reading(self._spell, self._markers_of, meaning, self.encoder.encode, self._stops)

    def _spell(self, ids: Ids) -> bytes:
        spelled: list[bytes] = []
        for token in ids.tolist():
            try:
                spelled.append(self.tokenizer.token_bytes(token))
            except CodecError:
                spelled.append(_UNKNOWN)
        return b"".join(spelled)

    def _markers_of(self, ids: Ids) -> list[int]:
        known = ids[(ids >= 0) & (ids < len(self._is_marker))]
        found: list[int] = known[self._is_marker[known]].tolist()
        return found

    # -- the renderer --------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Tools, values: Values) -> Render:
        if self.images is None:
            refuse_media(messages, self.name)
        else:
            check_media(messages, self.name)
        renderer = self._renderer(values)
        written = self._write(messages)
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
        render = Render(
            as_ids(made.token_ids),
            np.array(made.message_indices, np.int64),
            np.array(sampled, np.bool_),
            len(messages),
        )
        self._check_shown(messages, render)
        return render

    def _shown_oddly(self) -> str:
        """What the renderer makes of arguments that are no JSON; some leave them out without a word."""
        try:
            return self.decode(self._render([Message("user", "."), ODD_CALL], (), {}).ids)
        except TemplateError:
            return ""

    def _check_shown(self, messages: Sequence[Message], render: Render) -> None:
        """No message may vanish: some renderers skip roles, or images in roles, without a word."""
        shown = np.zeros(len(messages), np.bool_)
        shown[render.owners[render.owners >= 0]] = True
        for index in np.flatnonzero(~shown).tolist():
            message = messages[index]
            # Several system messages may be written as one.
            if message.text.strip() and message.text.strip() not in self.decode(render.ids):
                raise TemplateError(
                    f"messages[{index}]: the {self.family} renderer shows no {message.role} message here"
                )
        if self.images is not None:
            self._check_images(messages, render, self.images)

    def _check_images(self, messages: Sequence[Message], render: Render, images: ImageProcessor) -> None:
        """Every image has its places, as many as its size asks for, and no text pretends to be one."""
        padded = set(render.owners[render.ids == self._image_pad].tolist())
        for index, message in enumerate(messages):
            if not message.media and index not in padded:
                continue
            try:
                places = place_images([message], render.own(index), self._image_pad)
            except CodecError as error:
                raise TemplateError(f"messages[{index}], {message.role}: {error}") from error
            for place in places:
                expected = images.config.placeholders(*images.size(place.media))
                if place.length != expected:
                    got = f"got {place.length} placeholders for an image, expected {expected}"
                    raise TemplateError(f"messages[{index}]: {got}")

    def _write(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        written = self._dialect.write(messages)
        for raw, message in zip(written, messages, strict=True):
            raw["role"] = _ROLES.get(message.role, message.role)
            if message.media and self.images is not None:
                raw["content"] = [
                    {"type": "text", "text": part}
                    if isinstance(part, str)
                    else {"type": "image", "image": self.images.stand_in(part)}
                    for part in message.parts
                ]
        return written

    def _renderer(self, values: Values) -> Any:
        """The renderer of some template arguments; each set has its own."""
        key = _key(values)
        if key not in self._renderers:
            self._renderers[key] = self._make_renderer(values)
        return self._renderers[key]

    def _make_renderer(self, values: Values) -> Any:
        try:
            package = import_module("renderers")
        except ImportError as error:
            raise CodecError(f"{self.name}: needs the renderers package: {_INSTALL} ({error})") from error
        stem = self._family.stem
        config_class = getattr(package, f"{stem}RendererConfig")
        unknown = values.keys() - config_class.template_field_names()
        if unknown:
            expected = ", ".join(sorted(config_class.template_field_names())) or "none"
            raise TemplateError(
                f"template arguments: got {', '.join(sorted(unknown))}, but {self.family} has {expected}"
            )
        try:
            config = config_class(**{**self._options, **values})
            options = {"processor": self.images} if self.images is not None else {}
            return getattr(package, f"{stem}Renderer")(self._adapter, config, **options)
        except Exception as error:
            # A field that is none, or a tokenizer without the family's tokens (an AssertionError).
            raise CodecError(f"{self.name}: {error}") from error


def _one_byte(token: int) -> bytes:
    return bytes((token,))


def _key(values: Values) -> bytes:
    return msgspec.json.encode(dict(values), order="sorted") if values else b""
