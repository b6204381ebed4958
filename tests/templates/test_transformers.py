"""Every template renders and refuses what transformers renders and refuses with it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from branchline import Message, ToolCall
from branchline.core.errors import TemplateError
from tests.templates.corpus import load_template_codec, played_names
from tests.templates.tool_shapes import COMPLETE

NAMES = played_names()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="needs the templates: make test-templates"),
]
USER = Message("user", "Look.")
CALL = Message("assistant", tool_calls=(ToolCall("look", '{"at": "here"}', "abcdefgh1"),))
RESULT = Message("tool", "seen", tool_call_id="abcdefgh1", name="look")
THOUGHT = Message("assistant", "Done.", reasoning_content="Hm.")
CONVERSATIONS: tuple[tuple[list[Message], list[dict[str, Any]]], ...] = (
    ([Message("system", "Be brief."), USER, THOUGHT, USER], []),
    ([USER, CALL, RESULT], [COMPLETE]),
    ([USER, CALL, RESULT, THOUGHT, USER], [COMPLETE]),
)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_renders_the_same(name: str) -> None:
    reason = "needs transformers: make test-hf installs it"
    transformers = pytest.importorskip("transformers.utils.chat_template_utils", reason=reason)
    codec = load_template_codec(name)
    for messages, tools in CONVERSATIONS:
        profile = codec.profile(tools=bool(tools))
        raw = profile.traits.to_template_messages(messages)
        arguments = {**codec.tokenizer.special_tokens, **profile.chat_template_kwargs}
        try:
            (expected,), _ = transformers.render_jinja_template(
                [raw],
                tools=tools or None,
                chat_template=profile.template.source,
                add_generation_prompt=True,
                **arguments,
            )
        except Exception:
            with pytest.raises(TemplateError):
                profile.template.render(raw, tools, profile.chat_template_kwargs)
            continue
        now = datetime.now()
        assert profile.template.render(raw, tools, profile.chat_template_kwargs, now=now) == expected
