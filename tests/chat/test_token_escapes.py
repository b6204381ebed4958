"""Escaped texts contain no token, and unescaping restores them."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.token_escapes import MessageEscapes, TokenEscaper, token_pattern
from branchline.core.call import ToolList
from branchline.core.message import Message, ToolCall

NAMES = ["<a>", "<ab>", "<<a>>", "<a><a>", "[x]", "[xy", "]]", "aa"]
ESCAPER = TokenEscaper([*NAMES, "z"], ["<a>"])
fragments = st.sampled_from([*NAMES, "<", ">", "a", "b", "]", "x", "\\ue000", ESCAPER.mark, ESCAPER.mark[0]])
texts = st.lists(fragments, max_size=8).map("".join)


@settings(deadline=None)
@given(names=st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=8), text=st.text("ab<>", max_size=12))
def test_the_pattern_matches_the_longest_name(names: list[str], text: str) -> None:
    by_length = sorted(names, key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
    assert re.findall(token_pattern(names), text) == plain.findall(text)


@given(text=texts)
def test_pieces_of_an_escaped_text_contain_no_token_and_add_up_to_the_text(text: str) -> None:
    pieces = ESCAPER.split(ESCAPER.escape(text))
    assert "".join(pieces) == ESCAPER.unescape(ESCAPER.escape(text)) == text
    assert not [piece for piece in pieces if ESCAPER.search(piece)]


def test_only_the_named_tokens_are_escaped() -> None:
    assert ESCAPER.unescape(ESCAPER.escape("<a>[x]", {"[x]"})) == "<a>[x]"
    assert ESCAPER.escape("<a>[x]", {"[x]"}) == f"<a>[{ESCAPER.mark}x]"
    assert ESCAPER.special_names == {"<a>"}


def test_a_token_of_one_character_is_text() -> None:
    assert ESCAPER.escape("z") == "z"


def test_all_texts_and_keys_of_a_value_are_escaped() -> None:
    value = {"<a>": ["<a>", 1, None, {"k": "<a>"}]}
    escaped = f"<{ESCAPER.mark}a>"
    assert ESCAPER.escape_value(value) == {escaped: [escaped, 1, None, {"k": escaped}]}


def test_escape_sequences_of_json_hide_no_token() -> None:
    def message(arguments: str) -> Message:
        return Message("assistant", tool_calls=(ToolCall("f", arguments),))

    assert ESCAPER.occurs_in(message('{"k": "\\u003ca>"}'))
    assert not ESCAPER.occurs_in(message('{"k": "a line\\n"}'))
    assert not ESCAPER.occurs_in(message("not JSON \\"))


def test_tools_are_escaped_once() -> None:
    escapes = MessageEscapes(ESCAPER, lambda _: frozenset(), frozenset())
    hostile = ToolList([{"description": "<a>"}, {"description": "a \\ b"}])
    tools = escapes.escape_tools(hostile)
    assert tools == [{"description": f"<{ESCAPER.mark}a>"}, {"description": "a \\ b"}]
    assert escapes.escape_tools(hostile) is tools
    harmless = ToolList([{"description": "a"}])
    assert escapes.escape_tools(harmless)[0] is harmless.cached_json_dicts[0]
