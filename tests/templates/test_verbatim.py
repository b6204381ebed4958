"""`history="verbatim"` with every template of the corpus."""

from __future__ import annotations

from contextlib import suppress

import pytest

from branchline.core.errors import TemplateError
from tests.chat.reply_shapes import REPLY_SHAPES, PlayedTurn, play_shape
from tests.templates.corpus import load_template_codec, template_names

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", template_names())
def test_a_conversation_that_only_grows_never_forks(name: str) -> None:
    codec = load_template_codec(name)
    shows_calls = codec.profile(tools=True).traits.shows_tool_calls
    added: dict[bool, list[PlayedTurn]] = {}
    for shape, reply in REPLY_SHAPES.items():
        try:
            turns = play_shape(codec, shape, "verbatim")
        except TemplateError:
            continue
        for turn in turns:
            assert turn.continues, f"{shape} forks"
            if shows_calls or not reply.tool_calls:
                assert all(message.content in turn.added_text for message in turn.new_messages), shape
        with suppress(TemplateError):
            for verbatim, template in zip(turns, play_shape(codec, shape, "template"), strict=True):
                if template.continues and shows_calls >= bool(reply.tool_calls):
                    assert verbatim.added_text == template.added_text, shape
        if shape in ("text", "reasoning_and_text", "call", "text_and_call", "reasoning_text_and_call"):
            # What the template writes after a reply follows only if it was not sampled.
            for turn, other in zip(turns, added.setdefault(bool(reply.tool_calls), turns), strict=True):
                texts = sorted((turn.added_text.strip(), other.added_text.strip()), key=len)
                assert texts[1].endswith(texts[0]), shape
