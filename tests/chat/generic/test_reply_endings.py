"""Stop ids: those that a model's files declare, and those found in its template where the files lack them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import CodecError
from tests.chat.harmony import save_harmony
from tests.chat.harness import SessionDriver, save_byte_level, user

CHATML = """\
{%- for m in messages %}
{{- '<im_start>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls %}
{{- '<call>' + c.function|tojson + '</call>' }}
{%- endfor %}
{{- '<im_end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<im_start>assistant\n' }}
{%- endif %}"""
COHERE = """\
{%- for m in messages %}
{{- '<turn><' + m.role + '>' }}
{%- if m.tool_calls %}
{{- '<action>' + m.tool_calls[0].function|tojson + '</action>' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}
{{- '<thinking>' + m.reasoning_content + '</thinking>' }}
{%- endif %}
{{- '<response>' + m.content + '</response>' }}
{%- else %}
{{- m.content }}
{%- endif %}
{{- '</turn>' }}
{%- endfor %}"""
COHERE_PROMPT = "{% if add_generation_prompt %}{{- '<turn><assistant>' }}{% endif %}"
COHERE_ALWAYS_PROMPT = "{{- '<turn><assistant>' }}"
KIMI3 = """\
{%- for m in messages %}
{{- '<open>' + m.role + '<sep>' }}
{%- if m.reasoning_content %}
{{- '<open>think<sep>' + m.reasoning_content + '<close>think<sep>' }}
{%- endif %}
{%- if m.role == 'assistant' %}
{{- '<open>response<sep>' + m.content + '<close>response<sep>' }}
{%- for c in m.tool_calls %}
{{- '<open>call<sep>' + c.function|tojson + '<close>call<sep>' }}
{%- endfor %}
{%- else %}
{{- m.content }}
{%- endif %}
{{- '<close>message<sep><end_of_msg>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<open>assistant<sep>' }}
{%- endif %}"""
GLM = """\
{%- for m in messages %}
{{- '<observation>' if m.role == 'tool' else '<' + m.role + '>' }}
{{- '\n' + m.content }}
{%- for c in m.tool_calls %}
{{- '\n<call>' + c.function|tojson + '</call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>' }}
{%- endif %}"""
APERTUS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<assistant>' }}{{- m.content }}
{%- if m.tool_calls %}
{{- '<tools_prefix>' + m.tool_calls[0].function|tojson + '<tools_suffix>' }}
{%- elif not loop.last %}
{{- '<assistant_end>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '[' + m.content + ']' }}
{%- else %}
{{- '<' + m.role + '>' + m.content + '<user_end>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<assistant>' }}
{%- endif %}"""
TEXT_TAGS = """\
{%- for m in messages %}
{{- '[' + m.role + ']' }}
{%- if m.role == 'tool' %}
{{- '<tool_response>' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls %}
{{- '<call>' + c.function|tojson + '</call>' }}
{%- endfor %}
{{- '[/' + m.role + ']\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[assistant]<think>' }}
{%- endif %}"""

TOKENS = (
    *("<im_start>", "<im_end>", "<call>", "</call>", "<eos>", "<other>", "<think>", "<tool_response>"),
    *("<turn>", "</turn>", "<system>", "<user>", "<assistant>", "<tool>", "<thinking>", "</thinking>"),
    *("<response>", "</response>", "<action>", "</action>", "<open>", "<sep>", "<close>", "<end_of_msg>"),
    *("<observation>", "<assistant_end>", "<user_end>", "<tools_prefix>", "<tools_suffix>"),
)


def open_codec(path: Path, template: str, eos_token: str = "<eos>", **options: Any) -> GenericCodec:
    save_byte_level(path, special=TOKENS, eos_token=eos_token, chat_template=template)
    return GenericCodec.open(path, **options)


def stop_tokens(codec: GenericCodec) -> set[str]:
    return {codec.token_bytes(token).decode() for token in codec.stop_ids}


def test_a_token_that_ends_every_reply_is_a_stop(tmp_path: Path) -> None:
    assert stop_tokens(open_codec(tmp_path, CHATML)) == {"<eos>", "<im_end>"}


def test_the_template_adds_no_stop_if_a_declared_one_ends_every_reply(tmp_path: Path) -> None:
    assert stop_tokens(open_codec(tmp_path, GLM + "{# #}", "<im_end>")) >= {"<im_end>"}
    assert stop_tokens(open_codec(tmp_path, CHATML, "<im_end>")) == {"<im_end>"}
    assert stop_tokens(open_codec(tmp_path, COHERE + COHERE_PROMPT, "</turn>")) == {"</turn>"}


@pytest.mark.parametrize("prompt", [COHERE_PROMPT, COHERE_ALWAYS_PROMPT])
def test_the_stop_is_the_last_token_of_a_reply_and_not_the_closer_of_its_text(
    tmp_path: Path, prompt: str
) -> None:
    assert stop_tokens(open_codec(tmp_path, COHERE + prompt)) == {"<eos>", "</turn>"}


def test_a_template_that_writes_a_part_of_its_prompt_unrequested_shows_the_end_of_a_turn(
    tmp_path: Path,
) -> None:
    """Command A writes the role of the next reply always, and the opener of its text on request."""
    template = COHERE.replace("{%- if m.tool_calls %}\n", "{%- if false %}\n") + COHERE_ALWAYS_PROMPT
    template += "{% if add_generation_prompt %}{{- '<response>' }}{% endif %}"
    assert stop_tokens(open_codec(tmp_path, template)) == {"<eos>", "</turn>"}


def test_a_token_after_which_replies_continue_is_no_stop(tmp_path: Path) -> None:
    assert stop_tokens(open_codec(tmp_path, KIMI3)) == {"<eos>", "<end_of_msg>"}


def test_replies_that_end_by_opening_the_next_message_stop_at_its_opener(tmp_path: Path) -> None:
    codec = open_codec(tmp_path, GLM)
    assert stop_tokens(codec) == {"<eos>", "<user>", "<observation>"}
    assert codec.profile().endings.stop_opens_next_message


def test_each_shape_of_a_reply_may_have_its_own_stop(tmp_path: Path) -> None:
    assert stop_tokens(open_codec(tmp_path, APERTUS)) == {"<eos>", "<assistant_end>", "<tools_suffix>"}


def test_tokens_that_open_something_inside_the_next_message_are_no_stops(tmp_path: Path) -> None:
    assert stop_tokens(open_codec(tmp_path, TEXT_TAGS)) == {"<eos>"}


@pytest.mark.parametrize("declares_stops", [True, False])
def test_harmony_stops_at_return_and_call_and_never_at_end(tmp_path: Path, declares_stops: bool) -> None:
    codec = GenericCodec.open(save_harmony(tmp_path, declares_stops=declares_stops))
    assert stop_tokens(codec) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    terminators = codec.profile().terminator_ids
    assert {codec.token_bytes(token) for token in terminators} == {b"<|end|>", b"<|call|>"}
    assert not codec.profile().endings.stop_opens_next_message


# -- stop ids of the user ---------------------------------------------------------------------------------


def test_stop_ids_are_added_and_removed_by_id_or_by_token(tmp_path: Path) -> None:
    other = open_codec(tmp_path, CHATML).tokenizer.added_tokens["<other>"]
    for value in (other, str(other), "<other>"):
        codec = open_codec(tmp_path, CHATML, stop_ids=[value], no_stop_ids=["<eos>"])
        assert stop_tokens(codec) == {"<other>", "<im_end>"}


def test_a_removed_stop_still_ends_a_reply_in_a_prompt(tmp_path: Path) -> None:
    driver = SessionDriver(open_codec(tmp_path, CHATML, no_stop_ids=["<im_end>"]))
    node = driver.commit_reply([user("p")], driver.encode("yes"), "length")
    turn = driver.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    assert driver.decode(turn.prompt_ids.tolist()).endswith(
        "yes<im_end>\n<im_start>user\nq<im_end>\n<im_start>assistant\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_ids": ["<none>"]}, "stop_ids: got '<none>', expected an id from 0 to "),
        ({"stop_ids": [-1]}, "stop_ids: got -1, expected an id from 0 to "),
        ({"stop_ids": ["999999"]}, "stop_ids: got '999999', expected an id from 0 to "),
        ({"no_stop_ids": ["ab"]}, "no_stop_ids: got 'ab', expected an id from 0 to "),
        ({"no_stop_ids": ["<call>"]}, "no_stop_ids: got '<call>', expected one of the stop ids "),
    ],
)
def test_a_stop_id_that_does_not_exist_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CodecError) as caught:
        open_codec(tmp_path, CHATML, **options)
    assert message in str(caught.value)
    if "<call>" in message:
        assert "'<im_end>'" in str(caught.value)
