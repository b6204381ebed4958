"""The text of a reply that no template describes."""

from __future__ import annotations

from branchline import Message, ToolCall
from branchline.chat.base import reply_to_text


def test_a_reply_is_its_content_and_one_json_line_per_call() -> None:
    calls = (ToolCall("f", '{"b": 1, "a": "é"}'), ToolCall("g", "not json"), ToolCall("h", ""))
    assert reply_to_text(Message("assistant", "hello", tool_calls=calls)) == (
        'hello\n{"name":"f","arguments":{"b":1,"a":"é"}}\n{"name":"g","arguments":"not json"}\n'
        '{"name":"h","arguments":{}}'
    )
    assert reply_to_text(Message("assistant")) == ""
