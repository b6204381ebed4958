"""A codec small enough to check by hand: a byte is a token, a message is a header, its bytes and an end.

In its plain style a message renders `role:content\\n` and the generation prompt is `assistant:`. With a
terminator it behaves like ChatML: an output that stopped ends in it, one that was cut gets it as context.
It can strip earlier thinking as real templates do. Tests, demos and the scripted engine use it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from branchline.chat.base import Extension, HistoryPolicy, MessageTokens, NewMessage, PathMessage
from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids, Origin, as_ids, normalize_runs

THINK, END_THINK, CALL, END_CALL = 256, 257, 258, 259
"""Tokens beyond the bytes: they frame thinking and tool calls, and no text can spell them."""
STOP = 260
"""The terminator of `ToyCodec.chatml()`."""
_TOKEN_NAMES = {THINK: "<think>", END_THINK: "</think>", CALL: "<call>", END_CALL: "</call>", STOP: "<end>"}


def _plain_header(role: str) -> Sequence[int]:
    return f"{role}:".encode()


@dataclass(frozen=True)
class ToyCodec:
    """Ids are bytes plus a few frames.

    >>> codec = ToyCodec()
    >>> codec.decode(codec.extend((), [NewMessage(Message("user", "p"))]).message_tokens[0].ids)
    'user:p\\n'
    """

    name: str = "toy"
    header: Callable[[str], Sequence[int]] = _plain_header
    terminator: Sequence[int] = ()
    """What an output that stopped ends in. Empty: outputs end where they end, and nothing is added."""
    separator: Sequence[int] = b"\n"
    """What follows each message; after an output it belongs to the next message."""
    strip_thinking: bool = False
    """Leave reasoning out of every assistant message before the last user message."""

    @classmethod
    def chatml(cls, *, strip_thinking: bool = False) -> ToyCodec:
        """The same with a terminator, so that outputs can stop or be cut."""
        return cls("toy-chatml", terminator=(STOP,), strip_thinking=strip_thinking)

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        history: HistoryPolicy = "template",
    ) -> Extension:
        kept = len(path)
        last_user = -1
        if self.strip_thinking and history == "template":
            last_user = self._last_user_index(path, new)
            for index in range(min(kept, last_user + 1)):
                entry = path[index]
                if entry.message.reasoning_content and _has_thinking(entry.ids):
                    kept = index
                    break
        encoded = 0
        pieces: list[MessageTokens] = []
        rest: list[PathMessage | NewMessage] = [*path[kept:], *new]
        before = path[kept - 1] if kept else None
        unclosed = self._closing_ids(
            before.sampled_ids if before is not None and before.ends_sampled else None
        )
        for index, shown in enumerate(rest, start=kept):
            lead = unclosed
            if index == 0:
                lead = [*self._prompt_config_ids(tools, chat_template_kwargs or {}), *lead]
            body, reused = self._body_ids(shown, strip=index < last_user)
            header = self.header(shown.message.role)
            ids = [*lead, *header, *body]
            spans = [(len(lead) + len(header), Origin.TEMPLATE), (len(body), Origin.CONTEXT)]
            if reused:
                unclosed = self._closing_ids(shown.sampled_ids)
            else:
                ids += [*self.terminator, *self.separator]
                spans.append((len(self.terminator) + len(self.separator), Origin.TEMPLATE))
                unclosed = []
            encoded += len(ids) - (len(body) if reused else 0)
            pieces.append(MessageTokens(as_ids(ids), normalize_runs(spans)))
        opening = as_ids([*unclosed, *self.header("assistant")])
        return Extension(
            kept,
            tuple(pieces),
            opening,
            encoded + len(opening),
            rewrite_reason="think_strip" if kept < len(path) else "",
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.terminator)

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> ToyParser:
        return ToyParser(self.stop_ids)

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Message:
        parser = self.parser()
        parser.feed(ids.tolist())
        parser.finish(finish_reason)
        return parser.message

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        whole = self.extend(
            (),
            [NewMessage(message) for message in messages],
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return sum(len(piece.ids) for piece in whole.message_tokens) + len(whole.generation_prompt_ids)

    def decode(self, ids: Ids) -> str:
        return _decode(ids.tolist())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else _decode([token]).encode()

    def encode(self, text: str) -> Ids:
        return as_ids(list(text.encode()))

    def plain_parser(self) -> ToyParser:
        return ToyParser(self.stop_ids)

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """The ids a model would sample to say this message; what scripted outputs are made of."""
        return as_ids([*_message_body_ids(message, strip=False), *(self.terminator if stop else ())])

    def _prompt_config_ids(
        self, tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
    ) -> list[int]:
        if not (tools or template):
            return []
        shown = json.dumps([list(tools), dict(template)], sort_keys=True, default=dict)
        return list(f"tools:{shown}\n".encode())

    def _body_ids(self, shown: PathMessage | NewMessage, *, strip: bool) -> tuple[Sequence[int], bool]:
        message, sampled = shown.message, shown.sampled_ids
        if sampled is not None and not (strip and message.reasoning_content):
            return sampled.tolist(), True
        return _message_body_ids(message, strip=strip), False

    def _closing_ids(self, sampled: Ids | None) -> list[int]:
        """What the template puts behind an output before the next message."""
        if sampled is None or not self.terminator:
            return []
        end = len(self.terminator)
        stopped = len(sampled) >= end and sampled[-end:].tolist() == list(self.terminator)
        return [*(() if stopped else self.terminator), *self.separator]

    @staticmethod
    def _last_user_index(path: Sequence[PathMessage], new: Sequence[NewMessage]) -> int:
        for index in range(len(new) - 1, -1, -1):
            if new[index].message.role == "user":
                return len(path) + index
        for index in range(len(path) - 1, -1, -1):
            if path[index].message.role == "user":
                return index
        return -1


def _has_thinking(ids: Ids) -> bool:
    return bool((ids == THINK).any())


def _message_body_ids(message: Message, *, strip: bool) -> list[int]:
    body: list[int] = []
    if message.reasoning_content and not strip:
        body += [THINK, *message.reasoning_content.encode("utf-8", "surrogatepass"), END_THINK]
    for part in message.parts or (message.content,):
        shown = part if isinstance(part, str) else f"<{part.kind} {part.digest}>"
        body += shown.encode("utf-8", "surrogatepass")
    for call in message.tool_calls:
        body += [CALL, *f"{call.name} {call.arguments}".encode("utf-8", "surrogatepass"), END_CALL]
    return body


class ToyParser:
    """One toy output, read as it arrives: frames are single tokens, so only a call is held back."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        self._pending_stop: int | None = None
        self._mode = "text"
        self._call_ids: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._deltas: list[MessageDelta] = []
        self.problems: tuple[ParseProblem, ...] = ()

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]:
        deltas: list[MessageDelta] = []
        for token in ids:
            if self._pending_stop is not None:
                # Something follows, so it was no stop after all.
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
            self.problems = (*self.problems, ParseProblem.CUT_CALL)
            deltas += self._emit_text(_decode([CALL, *self._call_ids]))
        return deltas

    @property
    def message(self) -> Message:
        """All that has been said so far."""
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
        flushed = self._flush()
        if token == THINK and self._mode == "text" and not self._deltas and not flushed:
            self._mode = "think"
        elif token == END_THINK and self._mode == "think":
            self._mode = "text"
        elif token == CALL and self._mode == "text":
            self._mode, self._call_ids = "call", []
        else:
            flushed += self._emit_text(_decode([token]))
        return flushed

    def _close_call(self) -> list[MessageDelta]:
        name, space, arguments = _decode(self._call_ids).partition(" ")
        if not space or not name:
            self.problems = (*self.problems, ParseProblem.MALFORMED_CALL)
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
    pieces: list[str] = []
    run = bytearray()
    for token in ids:
        if 0 <= token < 256:
            run.append(token)
            continue
        pieces.append(run.decode("utf-8", "replace"))
        run.clear()
        pieces.append(_TOKEN_NAMES.get(token, f"<{token}>"))
    pieces.append(run.decode("utf-8", "replace"))
    return "".join(pieces)
