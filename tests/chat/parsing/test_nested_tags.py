"""Nested tags become JSON; malformed tags stay the generated text."""

from __future__ import annotations

import pytest

from branchline.chat.parsing.nested_tags import parse_nested_tags
from tests.chat.parsing.samples import TOOLS

MARKER = "#"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("#<s>5#</s>", '{"s": "5"}'),
        ("#<n>5#</n>\n#<b>true#</b>\n", '{"n": 5, "b": true}'),
        ("#<k>#<item>1#</item>#<item>v#</item>#</k>", '{"k": [1, "v"]}'),
        ("#<k>#<a>#<b>null#</b>#</a>#</k>", '{"k": {"a": {"b": null}}}'),
        ("#<k>a <b>x</b>\n#</k>", '{"k": "a <b>x</b>\\n"}'),
        ("#<item>1#</item>", '{"item": 1}'),
    ],
)
def test_tags_are_converted(text: str, expected: str) -> None:
    assert parse_nested_tags("f", text, MARKER, TOOLS) == expected


@pytest.mark.parametrize(
    "text",
    ["words", "#<a>1", "#<a>1#</b>", "#<a>x#<b>1#</b>#</a>", "#<a>1#</a>#<a>2#</a>", "#</a>", "#<a>1#</a>x"],
)
def test_malformed_tags_stay_text(text: str) -> None:
    assert parse_nested_tags("f", text, MARKER, TOOLS) == text
