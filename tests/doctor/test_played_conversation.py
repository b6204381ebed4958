"""Conversations that the doctor plays: forks are those of the codec, replies are those of the format."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchline.chat.base import RewriteReason
from branchline.chat.generic import template_probe as p
from branchline.chat.generic.codec import GenericCodec
from branchline.doctor.played_conversation import ConversationPlayer
from branchline.doctor.template_audit import audit_template
from tests.chat.families import load_codec
from tests.chat.harness import save_byte_level
from tests.doctor.test_template_audit import CLEAN, CONTENT, LOOP, MOVED, THINKS

OPENS_REASONING = CLEAN.replace(
    CONTENT,
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}" + CONTENT,
).replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think>{% endif %}")


def player_of(path: Path, template: str) -> ConversationPlayer:
    return ConversationPlayer(codec_of(path, template))


def codec_of(path: Path, template: str) -> GenericCodec:
    return GenericCodec.open(save_byte_level(path, chat_template=template, eos_token="<|end|>"))


def test_a_prompt_that_only_grows_does_not_fork(tmp_path: Path) -> None:
    prompt = player_of(tmp_path, CLEAN).play([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT], tools=True)
    assert prompt is not None
    assert not prompt.forks
    assert prompt.text.startswith(prompt.sampled_text)


def test_stripped_thinking_forks_with_its_cause(tmp_path: Path) -> None:
    player = player_of(tmp_path, CLEAN.replace(CONTENT, THINKS + CONTENT))
    prompt = player.play([p.USER, p.ASSISTANT_WITH_REASONING, p.NEXT_USER])
    assert prompt is not None
    assert prompt.rewrite_reason == RewriteReason.THINK_STRIP
    assert p.REASONING_WORD in prompt.sampled_text
    assert p.REASONING_WORD not in prompt.text


def test_verbatim_does_not_fork(tmp_path: Path) -> None:
    player = player_of(tmp_path, CLEAN.replace(CONTENT, THINKS + CONTENT))
    prompt = player.play([p.USER, p.ASSISTANT_WITH_REASONING, p.NEXT_USER], history="verbatim")
    assert prompt is not None
    assert not prompt.forks


def test_replies_have_reasoning_if_the_generation_prompt_opens_it(tmp_path: Path) -> None:
    player = player_of(tmp_path, OPENS_REASONING)
    reply = player.natural_reply(p.ASSISTANT)
    assert reply is not None
    assert reply.reasoning_content == p.REASONING_WORD
    audit = audit_template(codec_of(tmp_path, OPENS_REASONING))
    assert [finding.name for finding in audit.findings if finding.forks_after] == []
    assert audit["parses_text"].ok


def test_a_reply_that_the_format_does_not_have_is_not_played() -> None:
    player = ConversationPlayer(load_codec("gemma3"))
    assert player.natural_reply(p.ASSISTANT_WITH_CALL) is None
    assert player.play([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT], tools=True) is None


def test_a_template_that_drops_the_users_text_is_unsafe(tmp_path: Path) -> None:
    template = CLEAN.replace(CONTENT, "{% if m.role != 'user' %}" + CONTENT + "{% endif %}")
    assert audit_template(codec_of(tmp_path, template))["user_text"].severity == "unsafe"


def test_a_template_that_needs_tools_is_checked_with_tools(tmp_path: Path) -> None:
    needs_tools = "{% if not tools %}{{ raise_exception('Tools!') }}{% endif %}"
    audit = audit_template(codec_of(tmp_path, CLEAN.replace(LOOP, needs_tools + LOOP)))
    assert audit["conversation"].evidence == {"refusal": "Tools!"}
    assert audit["append_only.user_after_assistant"].ok
    moved = CLEAN.replace(LOOP, needs_tools + LOOP + MOVED)
    assert audit_template(codec_of(tmp_path, moved))["append_only.user_after_assistant"].forks_after == {
        "user"
    }


@pytest.mark.parametrize(
    ("name", "roles"), [("qwen3", {"user"}), ("qwen2_5", set()), ("mistral_nemo", {"user", "tool"})]
)
def test_findings_name_the_roles_after_which_prompts_fork(name: str, roles: set[str]) -> None:
    findings = audit_template(load_codec(name)).findings
    found = frozenset[str]().union(*(finding.forks_after for finding in findings))
    assert found & {"user", "tool"} == roles
