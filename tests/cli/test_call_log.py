"""Encoding calls that were logged without ids."""

from __future__ import annotations

from pathlib import Path

from branchline import Message, Request, ToolCall
from branchline.chat.tokenizer import TokenizerDir
from branchline.cli.call_log import _LogEncoder
from tests.chat.harness import save_byte_level

REQUEST = Request((Message("user", "hi"),))


def test_a_prompt_is_rendered_by_the_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path, chat_template=template))
    ids = _LogEncoder(tokenizer).encode_prompt(REQUEST)
    assert tokenizer.decode(ids) == "<|start|>hi<|end|>"
    assert len(ids) == 4


def test_without_a_template_a_prompt_is_one_line_per_message(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path))
    encoder = _LogEncoder(tokenizer)
    assert tokenizer.decode(encoder.encode_prompt(REQUEST)) == "user: hi\nassistant: "
    output = Message("assistant", "so", tool_calls=(ToolCall("f", "{}"),))
    assert tokenizer.decode(encoder.encode_output(output)) == 'so\n{"name":"f","arguments":{}}'
