"""Keeps text of messages from becoming control tokens.

`MessageEscapes` decides which texts are escaped. Text of users and tools never becomes a control token. In
the other messages only special tokens are escaped, because templates take replies apart at tokens such as
`</think>`. A text that was sampled in ordinary tokens never becomes a control token, whatever the options.

`TokenEscaper` escapes them. A tokenizer replaces the text `<|im_end|>` by a control token wherever it occurs,
also in a web page that a tool has fetched. Before a conversation is rendered, a mark (a nonce) is inserted
after the first character of every such text in a message. `SegmentEncoder` splits the rendered text at the
marks and encodes the pieces separately: the prompt contains the text, in ordinary tokens, and no mark. A text
that contains the mark is escaped in the same way, so that unescaping always restores it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from branchline.chat.base import PromptMessage
from branchline.core.call import CachedJsonDict, ToolList
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

_Value = TypeVar("_Value")
_PRIVATE_USE = range(0xE000, 0xF900)
"""Characters without a meaning, case or composition: no filter of a template changes them."""
Escape = Callable[[Any], Any]
"""Escapes control tokens in a text, or in all texts and keys of a JSON value."""
_MAX_TOOL_LISTS = 256
_FULLY_ESCAPED_ROLES = frozenset({"user", "tool", "function"})
"""Roles whose text may come from anywhere."""


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

    def escape_tool(self, tool: CachedJsonDict) -> CachedJsonDict:
        """Returns a tool with all control tokens escaped."""
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
            search(call.arguments)
            or search(call.name)
            or search(call.id)
            or ("\\" in call.arguments and self._occurs_in_json(call.arguments))
            for call in message.tool_calls
        )

    def _occurs_in_json(self, arguments: str) -> bool:
        """Whether arguments spell a token with the escape sequences of JSON."""
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return False
        return bool(self.escape_value(value) != value)

    def count(self, text: str) -> int:
        """Returns how many texts in a text can be escaped."""
        return len(self._findall(text))

    # -- rendered text -------------------------------------------------------------------------------

    def unescape(self, text: str) -> str:
        """Returns the text without marks."""
        return self._mark_pattern.sub("", text) if self.mark in text or "\\u" in text else text

    def split(self, text: str) -> list[str]:
        """Splits rendered text at its marks."""
        # A template may write the mark as JSON does. Two plain searches are faster than a regular expression.
        return self._mark_pattern.split(text) if self.mark in text or "\\u" in text else [text]


class MessageEscapes:
    """Escapes the control tokens in the texts of messages and tools. `end_ids` are the tokens that end a
    reply; they are no part of its text. `control_names_in` returns the texts of the control tokens among
    ids."""

    def __init__(
        self,
        escaper: TokenEscaper,
        control_names_in: Callable[[Ids], frozenset[str]],
        end_ids: frozenset[int],
        allow_special_tokens: bool = False,
    ) -> None:
        self.occurs_in = escaper.occurs_in
        """Whether a message contains the text of a control token."""
        self._escaper = escaper
        self._control_names_in = control_names_in
        self._end_ids = end_ids
        self._allow_special_tokens = allow_special_tokens
        self._tools: dict[int, tuple[ToolList, Sequence[CachedJsonDict]]] = {}
        """Escaped tools by the identity of their list, which is kept alive here."""

    def of_messages(
        self, messages: Sequence[PromptMessage], marked: Collection[int], escaped: Collection[int]
    ) -> dict[int, Escape]:
        """Returns how the texts of the messages in `escaped` are escaped. Sampled ids will replace the texts
        of those in `marked`, so the control tokens among these ids are shown as such."""
        return {index: self._of_message(messages[index], index in marked) for index in escaped}

    def of_context(self, message: Message) -> Escape:
        """Returns how the texts of a message that was not sampled are escaped."""
        return partial(self._escaper.escape_value, names=self._context_names(message))

    def escape_tools(self, tools: ToolList) -> Sequence[CachedJsonDict]:
        """Returns tools for a chat template; cached. Their descriptions may come from anywhere."""
        if self._allow_special_tokens:
            return tools.cached_json_dicts
        cached = self._tools.get(id(tools))
        if cached is None or cached[0] is not tools:
            cached = tools, [self._escaper.escape_tool(tool) for tool in tools.cached_json_dicts]
            if len(self._tools) >= _MAX_TOOL_LISTS:
                self._tools.clear()
            self._tools[id(tools)] = cached
        return cached[1]

    def _of_message(self, entry: PromptMessage, is_marked: bool) -> Escape:
        names = frozenset() if is_marked else self._context_names(entry.message)
        if entry.sampled_ids is not None:
            has_end = len(entry.sampled_ids) > 0 and int(entry.sampled_ids[-1]) in self._end_ids
            body = entry.sampled_ids[:-1] if has_end else entry.sampled_ids
            names |= self._escaper.names - self._control_names_in(body)
        return partial(self._escaper.escape_value, names=names)

    def _context_names(self, message: Message) -> frozenset[str]:
        if self._allow_special_tokens:
            return frozenset()
        return self._escaper.names if message.role in _FULLY_ESCAPED_ROLES else self._escaper.special_names
