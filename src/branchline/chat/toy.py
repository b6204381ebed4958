"""A codec for tests and demos: a byte is a token, a message is a header, its bytes and an end.

By default a message renders as `role:content\\n` and the generation prompt is `assistant:`. With a terminator
the codec behaves like ChatML: an output that stopped ends with it, and one that was cut gets it as context.
It can strip earlier reasoning as real templates do. An image is one placeholder token, as it is in the
templates of vision models; other media are one token each, and no engine takes them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    HistoryPolicy,
    MessageTokens,
    NewMessage,
    PathMessage,
    PromptMessage,
    RewriteReason,
    Tools,
)
from branchline.chat.parsing.base import MessageDelta
from branchline.chat.vision import ImageSpan
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids, Origin, as_ids, normalize_runs

THINK, END_THINK, CALL, END_CALL = 256, 257, 258, 259
"""Tokens after the bytes: they delimit reasoning and tool calls, and no text encodes to them."""
STOP = 260
"""The terminator of `ToyCodec.chatml()`."""
IMAGE, OTHER_MEDIA = 261, 262
"""Placeholders: the image itself is in the `ImageSpan` of its place."""
_TOKEN_NAMES = {
    THINK: "<think>",
    END_THINK: "</think>",
    CALL: "<call>",
    END_CALL: "</call>",
    STOP: "<end>",
    IMAGE: "<image>",
    OTHER_MEDIA: "<media>",
}


def _plain_header(role: str) -> Sequence[int]:
    return f"{role}:".encode()


@dataclass(frozen=True)
class ToyCodec:
    """Ids are bytes plus a few delimiters.

    >>> codec = ToyCodec()
    >>> codec.decode(codec.extend((), [NewMessage(Message("user", "p"))]).message_tokens[0].ids)
    'user:p\\n'
    """

    name: str = "toy"
    header: Callable[[str], Sequence[int]] = _plain_header
    terminator: Sequence[int] = ()
    """The end of an output that stopped. Empty: outputs have no terminator."""
    separator: Sequence[int] = b"\n"
    """The end of each message; after an output it belongs to the next message."""
    strip_thinking: bool = False
    """Leaves reasoning out of every assistant message before the last user message."""
    vocab_size: int | None = None

    @classmethod
    def chatml(cls, *, strip_thinking: bool = False) -> ToyCodec:
        """Returns a codec with a terminator, so that outputs can stop or be cut."""
        return cls("toy-chatml", terminator=(STOP,), strip_thinking=strip_thinking)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.terminator)

    def with_clock(self, now: datetime) -> ToyCodec:
        return self

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        history: HistoryPolicy = "template",
    ) -> Extension:
        messages: list[PromptMessage] = [*path, *new]
        kept, last_user = len(path), -1
        if self.strip_thinking and history == "template":
            last_user = max(
                (i for i, entry in enumerate(messages) if entry.message.role == "user"), default=-1
            )
            stripped = (i for i, entry in enumerate(path[: last_user + 1]) if _has_thinking(entry))
            kept = next(stripped, kept)
        encoded = 0
        tokens: list[MessageTokens] = []
        previous = path[kept - 1] if kept else None
        closing = self._closing_ids(previous.sampled_ids if previous and previous.ends_sampled else None)
        for index, entry in enumerate(messages[kept:], start=kept):
            prefix = [*closing, *self.header(entry.message.role)]
            if index == 0:
                prefix = [*_prompt_config_ids(tools, chat_template_kwargs or {}), *prefix]
            strip = index < last_user and bool(entry.message.reasoning_content)
            if entry.sampled_ids is not None and not strip:
                body, suffix = entry.sampled_ids.tolist(), []
                closing = self._closing_ids(entry.sampled_ids)
                encoded += len(prefix)
            else:
                body, suffix = _body_ids(entry.message, strip=strip), [*self.terminator, *self.separator]
                closing = []
                encoded += len(prefix) + len(body) + len(suffix)
            spans = (
                (len(prefix), Origin.TEMPLATE),
                (len(body), Origin.CONTEXT),
                (len(suffix), Origin.TEMPLATE),
            )
            tokens.append(MessageTokens(as_ids([*prefix, *body, *suffix]), normalize_runs(spans)))
        generation_prompt = as_ids([*closing, *self.header("assistant")])
        reason = RewriteReason.THINK_STRIP if kept < len(path) else RewriteReason.NONE
        return Extension(kept, tuple(tokens), generation_prompt, encoded + len(generation_prompt), reason)

    def _closing_ids(self, sampled: Ids | None) -> list[int]:
        """Returns what the template writes between an output and the next message."""
        if sampled is None or not self.terminator:
            return []
        length = len(self.terminator)
        stopped = len(sampled) >= length and sampled[-length:].tolist() == list(self.terminator)
        return [*(() if stopped else self.terminator), *self.separator]

    def image_spans(
        self, messages: Sequence[Message], prompt_ids: Ids, is_sampled: NDArray[np.bool_] | None = None
    ) -> tuple[ImageSpan, ...]:
        """Returns the images of a prompt at their placeholders."""
        images = [media for message in messages for media in message.media if media.kind == "image"]
        is_placeholder = prompt_ids == IMAGE
        if is_sampled is not None:
            is_placeholder &= ~is_sampled
        offsets = np.flatnonzero(is_placeholder).tolist()
        return tuple(ImageSpan(media, offset, 1) for media, offset in zip(images, offsets, strict=True))

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> int:
        new = [NewMessage(message) for message in messages]
        return len(self.extend((), new, tools=tools, chat_template_kwargs=chat_template_kwargs).ids)

    def parser(self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None) -> ToyParser:
        return ToyParser(self.stop_ids)

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Message:
        parser = self.parser()
        parser.feed(ids.tolist())
        parser.finish(finish_reason)
        return parser.message

    def plain_parser(self) -> ToyParser:
        return ToyParser(self.stop_ids)

    def encode(self, text: str) -> Ids:
        return as_ids(list(text.encode()))

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """Returns the ids a model would sample for this message; scripted outputs use them."""
        return as_ids([*_body_ids(message), *(self.terminator if stop else ())])

    def decode(self, ids: Ids) -> str:
        return _decode(ids.tolist())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else _decode([token]).encode()


def _prompt_config_ids(tools: Tools, chat_template_kwargs: ChatTemplateKwargs) -> list[int]:
    if not (tools or chat_template_kwargs):
        return []
    config = json.dumps([list(tools), dict(chat_template_kwargs)], sort_keys=True, default=dict)
    return list(f"tools:{config}\n".encode())


def _has_thinking(entry: PathMessage) -> bool:
    return bool(entry.message.reasoning_content) and bool((entry.ids == THINK).any())


def _body_ids(message: Message, *, strip: bool = False) -> list[int]:
    body: list[int] = []
    if message.reasoning_content and not strip:
        body += [THINK, *message.reasoning_content.encode("utf-8", "surrogatepass"), END_THINK]
    for part in message.parts or (message.content,):
        if isinstance(part, str):
            body += part.encode("utf-8", "surrogatepass")
        else:
            body.append(IMAGE if part.kind == "image" else OTHER_MEDIA)
    for call in message.tool_calls:
        body += [CALL, *f"{call.name} {call.arguments}".encode("utf-8", "surrogatepass"), END_CALL]
    return body


class ToyParser:
    """Parses one output while it arrives. Delimiters are single tokens, so only a call is held back."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        self._pending_stop: int | None = None
        self._mode: Literal["text", "think", "call"] = "text"
        self._call_ids: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._deltas: list[MessageDelta] = []

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]:
        deltas: list[MessageDelta] = []
        for token in ids:
            if self._pending_stop is not None:
                # More ids follow, so it was not a stop.
                deltas += self._consume(self._pending_stop)
                self._pending_stop = None
            if token in self._stop_ids:
                self._pending_stop = token
            else:
                deltas += self._consume(token)
        return deltas

    def finish(self, finish_reason: str | None) -> list[MessageDelta]:
        deltas = self._flush()
        if self._mode == "call":
            deltas += self._emit_text(_decode([CALL, *self._call_ids]))
        return deltas

    @property
    def message(self) -> Message:
        """The message emitted so far."""
        return Message(
            "assistant",
            "".join(delta.content for delta in self._deltas),
            reasoning_content="".join(delta.reasoning_content for delta in self._deltas),
            tool_calls=tuple(delta.tool_call for delta in self._deltas if delta.tool_call is not None),
        )

    def _consume(self, token: int) -> list[MessageDelta]:
        if self._mode == "call":
            if token != END_CALL:
                self._call_ids.append(token)
                return []
            self._mode = "text"
            return self._close_call()
        if 0 <= token < 256:
            return self._emit_text(self._decoder.decode(bytes([token])))
        deltas = self._flush()
        if token == THINK and self._mode == "text" and not self._deltas and not deltas:
            self._mode = "think"
        elif token == END_THINK and self._mode == "think":
            self._mode = "text"
        elif token == CALL and self._mode == "text":
            self._mode, self._call_ids = "call", []
        else:
            deltas += self._emit_text(_decode([token]))
        return deltas

    def _close_call(self) -> list[MessageDelta]:
        name, space, arguments = _decode(self._call_ids).partition(" ")
        if not space or not name:
            return self._emit_text(_decode([CALL, *self._call_ids, END_CALL]))
        index = sum(delta.tool_call is not None for delta in self._deltas)
        return self._emit(MessageDelta(tool_call=ToolCall(name, arguments), index=index))

    def _emit_text(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        return self._emit(
            MessageDelta(reasoning_content=text) if self._mode == "think" else MessageDelta(content=text)
        )

    def _flush(self) -> list[MessageDelta]:
        return self._emit_text(self._decoder.decode(b"", final=True))

    def _emit(self, delta: MessageDelta) -> list[MessageDelta]:
        self._deltas.append(delta)
        return [delta]


def _decode(ids: Sequence[int]) -> str:
    parts: list[str] = []
    pending = bytearray()
    for token in ids:
        if 0 <= token < 256:
            pending.append(token)
            continue
        parts.append(pending.decode("utf-8", "replace"))
        pending.clear()
        parts.append(_TOKEN_NAMES.get(token, f"<{token}>"))
    parts.append(pending.decode("utf-8", "replace"))
    return "".join(parts)
