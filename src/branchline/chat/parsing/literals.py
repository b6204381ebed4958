"""Reads literals that are not JSON, and writes them as JSON: Python's, and Gemma's.

Numbers keep the text in which they were generated. Whatever is not a literal raises ValueError, so that a
malformed argument never becomes a value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\W\d]\w*")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"']+")
_CONSTANTS = {
    "true": "true",
    "True": "true",
    "false": "false",
    "False": "false",
    "null": "null",
    "None": "null",
}
_CLOSERS = {"[": "]", "(": ")"}
_ESCAPE = re.compile(r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\"/"}


@dataclass(frozen=True)
class LiteralSyntax:
    """How literals are written."""

    quotes: tuple[str, ...]
    """The delimiters of strings; longer ones come first."""
    has_escapes: bool
    """A backslash in a string starts an escape sequence."""
    has_bare_keys: bool
    """Keys of objects have no quotes."""

    def read(self, text: str, at: int = 0) -> tuple[str, int]:
        """Returns the literal at an offset as JSON, and the offset after it.

        >>> PYTHON_LITERALS.read("{'a': [1.50, None, 'it\\\\'s']}, b")
        ('{"a": [1.50, null, "it\\'s"]}', 28)
        """
        try:
            return self._read_value(text, skip_space(text, at))
        except RecursionError as error:
            raise ValueError("nested too deep") from error

    def _read_value(self, text: str, at: int) -> tuple[str, int]:
        char = text[at : at + 1]
        if char == "{":
            return self._read_items(text, at, "{", "}", is_object=True)
        if char in _CLOSERS:
            return self._read_items(text, at, "[", _CLOSERS[char], is_object=False)
        if self._quote_at(text, at):
            return self._read_string(text, at)
        if number := _NUMBER.match(text, at):
            return number[0], number.end()
        word = _WORD.match(text, at)
        if word is None or word[0] not in _CONSTANTS:
            raise ValueError("not a literal")
        return _CONSTANTS[word[0]], word.end()

    def _read_items(
        self, text: str, at: int, opener: str, closer: str, *, is_object: bool
    ) -> tuple[str, int]:
        items: list[str] = []
        at = skip_space(text, at + 1)
        while text[at : at + 1] != closer:
            prefix = ""
            if is_object:
                key, at = self._read_key(text, at)
                prefix = f"{key}: "
            value, at = self._read_value(text, skip_space(text, at))
            items.append(prefix + value)
            at = skip_space(text, at)
            if text[at : at + 1] == ",":
                at = skip_space(text, at + 1)
            elif text[at : at + 1] != closer:
                raise ValueError(f"expected a comma or {closer}")
        return opener + ", ".join(items) + ("}" if is_object else "]"), at + 1

    def _read_key(self, text: str, at: int) -> tuple[str, int]:
        if self._quote_at(text, at):
            key, at = self._read_string(text, at)
        elif self.has_bare_keys and (bare := _BARE_KEY.match(text, at)):
            key, at = json.dumps(bare[0], ensure_ascii=False), bare.end()
        else:
            raise ValueError("not a key")
        at = skip_space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a key without a value")
        return key, at + 1

    def _quote_at(self, text: str, at: int) -> str:
        return next((quote for quote in self.quotes if text.startswith(quote, at)), "")

    def _read_string(self, text: str, at: int) -> tuple[str, int]:
        quote = self._quote_at(text, at)
        start = end = at + len(quote)
        while not text.startswith(quote, end):
            end += 2 if self.has_escapes and text.startswith("\\", end) else 1
            if end >= len(text):
                raise ValueError("a string without an end")
        value = text[start:end]
        if self.has_escapes and "\\" in value:
            # A pair of surrogates is one character.
            value = _ESCAPE.sub(_unescape, value)
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return json.dumps(value, ensure_ascii=False), end + len(quote)


PYTHON_LITERALS = LiteralSyntax(("'''", '"""', "'", '"'), has_escapes=True, has_bare_keys=False)
GEMMA_LITERALS = LiteralSyntax(('<|"|>',), has_escapes=False, has_bare_keys=True)


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _unescape(escape: re.Match[str]) -> str:
    if escape[1]:
        return chr(min(int(escape[1][1:], 16), 0x10FFFF))
    # An unknown escape sequence is two characters, as in Python.
    return _ESCAPED.get(escape[2], escape[0])
