"""Keeps text of messages from becoming control tokens.

A tokenizer replaces the text `<|im_end|>` by a control token wherever it occurs, also in a web page that a
tool has fetched. Before a conversation is rendered, a mark (a nonce) is inserted after the first character of
every such text in a message. `SegmentEncoder` splits the rendered text at the marks and encodes the pieces
separately: the prompt contains the text, in ordinary tokens, and no mark. A text that contains the mark is
escaped in the same way, so that unescaping always restores it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Container, Iterable
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from branchline.core.call import CachedJsonDict, ToolList
from branchline.core.message import Message, ToolCall

_Value = TypeVar("_Value")
_PRIVATE_USE = range(0xE000, 0xF900)
"""Characters without a meaning, case or composition: no filter of a template changes them."""
Escape = Callable[[Any], Any]
"""Escapes control tokens in a text, or in all texts and keys of a JSON value."""
_MAX_TOOL_LISTS = 256


def token_pattern(names: Iterable[str]) -> str:
    """Returns an expression that matches the longest of some texts. It shares common prefixes, because
    vocabularies have thousands of added tokens that start with the same character."""
    texts = sorted(set(names))
    if not texts:
        return "(?!)"
    if len(texts) == 1:
        return re.escape(texts[0])
    # The first and the last of sorted texts differ where any two do.
    pairs = zip(texts[0], texts[-1], strict=False)
    length = next((n for n, (one, other) in enumerate(pairs) if one != other), len(texts[0]))
    prefix, rests = texts[0][:length], [text[length:] for text in texts]
    branches = [token_pattern(group) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){'' if rests[0] else '?'}"


class TokenEscaper:
    """Escapes the texts of control tokens in messages and tools. Safe to share between threads."""

    def __init__(self, control_tokens: Collection[str], special_tokens: Container[str]) -> None:
        first, *rest = secrets.SystemRandom().sample(_PRIVATE_USE, 4)
        self.mark = "".join(map(chr, (first, *rest)))
        # No mark can overlap another one: its first character does not occur in it again.
        self._mark_pattern = re.compile(f"{self.mark}|{re.escape(json.dumps(self.mark)[1:-1])}")
        # A token of one character cannot be split.
        self.names = frozenset(name for name in control_tokens if len(name) > 1)
        self.special_names = frozenset(name for name in self.names if name in special_tokens)
        """The tokens that the tokenizer marks as special."""
        self._tools: dict[int, tuple[ToolList, list[CachedJsonDict]]] = {}
        """Escaped tools by the identity of their list, which is kept alive here."""
        pattern = token_pattern([*self.names, self.mark])
        self.search = re.compile(pattern).search
        """Finds the first text that can be escaped."""
        self._findall = re.compile(pattern).findall
        self._at_each_start = re.compile(f"(?=({pattern}))(.)", re.DOTALL)

    # -- escaping ------------------------------------------------------------------------------------

    def escape(self, text: str, names: Container[str] | None = None) -> str:
        """Returns the text with the tokens in `names` escaped, all control tokens by default.

        >>> escaper = TokenEscaper(["<|end|>"], [])
        >>> escaper.escape("a <|end|>") == f"a <{escaper.mark}|end|>"
        True
        """
        if self.search(text) is None:
            return text

        def mark(match: re.Match[str]) -> str:
            is_escaped = names is None or match[1] in names or match[1] == self.mark
            return match[2] + self.mark if is_escaped else match[2]

        return self._at_each_start.sub(mark, text)

    def escape_value(self, value: _Value, names: Container[str] | None = None) -> _Value:
        """Returns a JSON value with all its texts and keys escaped."""
        escaped: Any = value
        if isinstance(value, str):
            escaped = self.escape(value, names)
        elif isinstance(value, dict):
            escaped = {
                self.escape_value(key, names): self.escape_value(item, names) for key, item in value.items()
            }
        elif isinstance(value, list | tuple):
            escaped = [self.escape_value(item, names) for item in value]
        return escaped  # type: ignore[no-any-return]

    def escape_tools(self, tools: ToolList) -> list[CachedJsonDict]:
        """Returns tools with all control tokens escaped; the result is cached."""
        cached = self._tools.get(id(tools))
        if cached is None or cached[0] is not tools:
            cached = tools, [self._escape_tool(tool) for tool in tools.cached_json_dicts]
            if len(self._tools) >= _MAX_TOOL_LISTS:
                self._tools.clear()
            self._tools[id(tools)] = cached
        return cached[1]

    def _escape_tool(self, tool: CachedJsonDict) -> CachedJsonDict:
        # JSON spells a character in another way only after a backslash.
        if "\\" not in tool.json_text and self.search(tool.json_text) is None:
            return tool
        return CachedJsonDict(self.escape_value(dict(tool)))

    def occurs_in(self, message: Message) -> bool:
        """Whether a message contains a text that can be escaped."""
        search = self.search
        if search(message.content) or search(message.reasoning_content) or search(message.tool_call_id):
            return True
        if search(message.name):
            return True
        return any(
            search(call.arguments) or search(call.name) or search(call.id) or self._occurs_in_json(call)
            for call in message.tool_calls
        )

    def _occurs_in_json(self, call: ToolCall) -> bool:
        """Whether the arguments of a call spell a token with the escape sequences of JSON."""
        if "\\" not in call.arguments:
            return False
        try:
            value = msgspec.json.decode(call.arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return False
        return bool(self.escape_value(value) != value)

    def count(self, text: str) -> int:
        """Returns how many texts in a text can be escaped."""
        return len(self._findall(text))

    # -- rendered text -------------------------------------------------------------------------------

    def unescape(self, text: str) -> str:
        """Returns the text without marks."""
        return text if text.isascii() and "\\u" not in text else self._mark_pattern.sub("", text)

    def split(self, text: str) -> list[str]:
        """Splits rendered text at its marks."""
        return [text] if text.isascii() and "\\u" not in text else self._mark_pattern.split(text)
