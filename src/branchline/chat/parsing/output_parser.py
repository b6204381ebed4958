"""Parses generated ids into an assistant message, as a whole or while they arrive. No ids raise.

`OutputParser` decodes ids to text, `ReasoningParser` separates the reasoning at the start, and the parser of
the tool format reads the rest. `OutputFormat` names the parts of a model's format.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from branchline.chat.parsing.base import (
    REPLACEMENT_CHARACTER,
    Lexeme,
    MarkerSplitter,
    MessageDelta,
    ParseProblem,
    PlainParser,
    TextParser,
    Tools,
)
from branchline.chat.parsing.channel_formats import HarmonyParser, MuseGlimmerParser
from branchline.chat.parsing.json_formats import JSON_FORMATS
from branchline.chat.parsing.literal_formats import LITERAL_FORMATS, Llama4Parser
from branchline.chat.parsing.llama3 import Llama3Parser
from branchline.chat.parsing.mistral import MistralParser
from branchline.chat.parsing.tagged_formats import TAGGED_FORMATS
from branchline.chat.parsing.unclosed_formats import JSON_LIST_FORMATS, FunctionaryV32Parser
from branchline.core.errors import CodecError
from branchline.core.message import Message

NO_REASONING = "none"
REASONING_MARKERS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "hunyuan": ("<think:opensource>", "</think:opensource>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "solar": ("<|think|>", "<|end|>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
}
"""Opener and closer of each reasoning format."""
_REASONING_SPLITTERS = {name: MarkerSplitter(*markers) for name, markers in REASONING_MARKERS.items()}

TOOL_FORMATS: dict[str, Callable[[Tools], TextParser]] = {
    "plain": PlainParser,
    **JSON_FORMATS,
    **TAGGED_FORMATS,
    **LITERAL_FORMATS,
    **JSON_LIST_FORMATS,
    "functionary_v32": FunctionaryV32Parser,
    "harmony": HarmonyParser,
    "muse_glimmer": MuseGlimmerParser,
    "llama3": Llama3Parser,
    "llama4": Llama4Parser,
    "mistral": MistralParser,
}
_FRAMING_TOKENS = {
    "harmony": HarmonyParser.splitter.markers,
    "muse_glimmer": MuseGlimmerParser.splitter.markers,
}
CHANNEL_FORMATS = frozenset(_FRAMING_TOKENS)
"""Formats whose parsers read reasoning from the headers of messages."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the outputs of a model are parsed."""

    tool_format: str = "plain"
    reasoning_format: str = NO_REASONING
    starts_in_reasoning: bool = False
    """The generation prompt opens the reasoning."""

    def __post_init__(self) -> None:
        if self.tool_format not in TOOL_FORMATS:
            expected = ", ".join(TOOL_FORMATS)
            raise CodecError(f"tool format: got {self.tool_format!r}, expected one of {expected}")
        if self.reasoning_format not in (NO_REASONING, *REASONING_MARKERS):
            expected = ", ".join([NO_REASONING, *REASONING_MARKERS])
            raise CodecError(f"reasoning format: got {self.reasoning_format!r}, expected one of {expected}")

    @property
    def framing_tokens(self) -> tuple[str, ...]:
        """The control tokens that only frame the parts of an output; outputs that differ in no more than
        these may mean the same."""
        return _FRAMING_TOKENS.get(self.tool_format, ())

    def create_parser(self, tools: Tools = ()) -> TextParser:
        """Returns a parser for one output. `tools` give the argument types for formats that write arguments
        as bare text."""
        parser = TOOL_FORMATS[self.tool_format](tools)
        if self.reasoning_format == NO_REASONING:
            return parser
        return ReasoningParser(parser, self.reasoning_format, starts_in_reasoning=self.starts_in_reasoning)


# -- reasoning -------------------------------------------------------------------------------------------


class _ReasoningState(Enum):
    START = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    ANSWER = 4


class ReasoningParser:
    """Parses reasoning at the start of an output, then passes the rest on.

    The newlines that templates write around reasoning are framing: after the opener, before the closer and
    after the closer. So is whitespace before the opener. A tool call inside the reasoning is not a call.
    `starts_in_reasoning`: the prompt contains the opener.
    """

    def __init__(
        self, inner: TextParser, reasoning_format: str, *, starts_in_reasoning: bool = False
    ) -> None:
        self._inner = inner
        self._open, self._close = REASONING_MARKERS[reasoning_format]
        self._splitter = _REASONING_SPLITTERS[reasoning_format]
        self._held = ""
        """Text that could become a marker."""
        self._state = _ReasoningState.OPENED if starts_in_reasoning else _ReasoningState.START
        self._may_open_again = starts_in_reasoning
        """Some models repeat the opener that the prompt contains."""
        self._held_newlines = ""
        self._problems: list[ParseProblem] = []

    @property
    def problems(self) -> list[ParseProblem]:
        return [*self._problems, *self._inner.problems]

    def feed(self, text: str) -> list[MessageDelta]:
        if self._state is _ReasoningState.ANSWER:
            return self._inner.feed(text)
        lexemes, self._held = self._splitter.split(self._held + text)
        return self._consume(lexemes)

    def finish(self, cut: bool) -> list[MessageDelta]:
        held, self._held = self._held, ""
        deltas = self._consume([Lexeme(held, False)]) if held else []
        if self._state in (_ReasoningState.OPENED, _ReasoningState.INSIDE):
            self._problems.append(ParseProblem.UNCLOSED_REASONING)
            if self._held_newlines:
                deltas.append(MessageDelta(reasoning_content=self._held_newlines))
        elif self._state is _ReasoningState.START and self._held_newlines:
            deltas += self._inner.feed(self._held_newlines)
        return [*deltas, *self._inner.finish(cut)]

    def _consume(self, lexemes: Sequence[Lexeme]) -> list[MessageDelta]:
        reasoning: list[str] = []
        answer: list[str] = []
        for text, is_marker in lexemes:
            if self._state is _ReasoningState.ANSWER:
                answer.append(text)
            elif self._state is _ReasoningState.START:
                if is_marker and text == self._open:
                    self._held_newlines = ""
                    self._state = _ReasoningState.OPENED
                elif is_marker:
                    # A closer alone is empty reasoning.
                    self._held_newlines = ""
                    self._state = _ReasoningState.CLOSED
                elif text.isspace():
                    self._held_newlines += text
                else:
                    answer.append(self._held_newlines + text)
                    self._state = _ReasoningState.ANSWER
            elif self._state is _ReasoningState.CLOSED:
                text = text.lstrip("\n")
                if text:
                    answer.append(text)
                    self._state = _ReasoningState.ANSWER
            elif is_marker and text == self._close:
                self._held_newlines = ""
                self._state = _ReasoningState.CLOSED
            elif is_marker and self._state is _ReasoningState.OPENED and self._may_open_again:
                self._may_open_again = False
            else:
                if self._state is _ReasoningState.OPENED:
                    text = text.lstrip("\n")
                body = text.rstrip("\n")
                if body:
                    self._state = _ReasoningState.INSIDE
                    reasoning.append(self._held_newlines + body)
                    self._held_newlines = ""
                self._held_newlines += text[len(body) :]
        if self._state is _ReasoningState.ANSWER:
            # Markers, complete or partial, have no meaning in the answer.
            answer.append(self._held)
            self._held = ""
        deltas = [MessageDelta(reasoning_content="".join(reasoning))] if reasoning else []
        return [*deltas, *self._inner.feed("".join(answer))] if answer else deltas


# -- ids -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The message of a complete output, and its defects."""

    message: Message
    problems: tuple[ParseProblem, ...]


class OutputParser:
    """Parses the ids of one output.

    >>> text_parser = OutputFormat("plain", "think").create_parser()
    >>> parser = OutputParser(text_parser, lambda token: bytes([token]), {0})
    >>> parser.feed(b"<think>\\nhm")
    [MessageDelta(content='', reasoning_content='hm', tool_call=None, index=0)]
    >>> parser.feed(b"\\n</think>\\n\\nyes\\0")
    [MessageDelta(content='yes', reasoning_content='', tool_call=None, index=0)]
    >>> parser.finish("stop")
    []
    >>> parser.message.content
    'yes'
    """

    def __init__(
        self, parser: TextParser, token_bytes: Callable[[int], bytes], stop_ids: Collection[int] = ()
    ) -> None:
        self._parser = parser
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._pending_stop: int | None = None
        """A stop id at the end of the ids so far; it becomes text only if more ids follow."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._problems: list[ParseProblem] = []
        self._deltas: list[MessageDelta] = []

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]:
        """Returns what is certain after these ids."""
        ids = ids if isinstance(ids, list) else list(ids)
        if self._pending_stop is not None or not self._stop_ids.isdisjoint(ids[:-1]):
            data = self._decode_tokens_with_stops(ids)
        else:
            # The common case: at most the last id is a stop id.
            if ids and ids[-1] in self._stop_ids:
                self._pending_stop, ids = int(ids[-1]), ids[:-1]
            try:
                data = b"".join(map(self._token_bytes, ids))
            except (CodecError, LookupError, ValueError):
                data = b"".join([self._decode_token(token) for token in ids])
        text = self._decode_utf8(data, final=False)
        deltas = self._parser.feed(text) if text else []
        self._deltas += deltas
        return deltas

    def finish(self, finish_reason: str | None) -> list[MessageDelta]:
        """Returns what was held back. An output counts as cut unless it ends in a stop id or its finish
        reason is a stop."""
        text = self._decode_utf8(b"", final=True)
        deltas = self._parser.feed(text) if text else []
        cut = self._pending_stop is None and finish_reason not in ("stop", "tool_calls")
        deltas += self._parser.finish(cut)
        self._deltas += deltas
        return deltas

    def parse(self, ids: Iterable[int], finish_reason: str | None) -> ParsedOutput:
        """Parses a complete output: feed and finish."""
        self.feed(ids)
        self.finish(finish_reason)
        return ParsedOutput(self.message, self.problems)

    @property
    def message(self) -> Message:
        """The message emitted so far."""
        return Message(
            "assistant",
            "".join([delta.content for delta in self._deltas]),
            reasoning_content="".join([delta.reasoning_content for delta in self._deltas]),
            tool_calls=tuple([delta.tool_call for delta in self._deltas if delta.tool_call is not None]),
        )

    @property
    def problems(self) -> tuple[ParseProblem, ...]:
        """Each problem once: those of the bytes first, then those of the format."""
        return tuple(dict.fromkeys([*sorted(self._problems), *self._parser.problems]))

    def _decode_tokens_with_stops(self, ids: list[int]) -> bytes:
        decoded = []
        for token in ids:
            if self._pending_stop is not None:
                decoded.append(self._decode_token(self._pending_stop))
                self._pending_stop = None
            if token in self._stop_ids:
                self._pending_stop = int(token)
            else:
                decoded.append(self._decode_token(int(token)))
        return b"".join(decoded)

    def _decode_token(self, token: int) -> bytes:
        try:
            return self._token_bytes(token)
        except (CodecError, LookupError, ValueError):
            self._problems.append(ParseProblem.UNKNOWN_ID)
            return REPLACEMENT_CHARACTER

    def _decode_utf8(self, data: bytes, *, final: bool) -> str:
        try:
            return self._decoder.decode(data, final)
        except UnicodeDecodeError:
            # A failed decode keeps the pending bytes, so the same data can be decoded again.
            self._problems.append(ParseProblem.INVALID_UTF8)
            self._decoder.errors = "replace"
            return self._decoder.decode(data, final)


def parse_reply_bytes(
    parser: TextParser,
    reply: bytes,
    *,
    cut: bool,
    ignore_arguments: bool = False,
    join_text_to_reasoning: bool = False,
) -> tuple[str, str, list[tuple[str, bytes]]]:
    """Returns the text, the reasoning and the calls of a reply for comparison with another spelling of it.

    Whitespace is removed. With `ignore_arguments` calls are compared by name only, with
    `join_text_to_reasoning` text next to calls counts as the end of the reasoning.
    """
    # The reply is fed as if it were one token.
    message = OutputParser(parser, lambda _: reply).parse([0], "length" if cut else "stop").message
    calls = [
        (call.name, b"" if ignore_arguments else call.canonical_arguments) for call in message.tool_calls
    ]
    content, reasoning = "".join(message.content.split()), "".join(message.reasoning_content.split())
    if join_text_to_reasoning and calls:
        return "", reasoning + content, calls
    return content, reasoning, calls
