"""The generic codec with real templates."""

from __future__ import annotations

from datetime import datetime
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from branchline import Generation, Message, Request, ToolCall, timelines_of
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Media
from branchline.core.token_arrays import as_ids
from tests.chat.families import FAMILIES, load_codec, load_codec_with_template, load_tokenizer
from tests.chat.harness import TOOLS, SessionDriver, assistant, save_byte_level, user


@pytest.fixture
def qwen() -> SessionDriver:
    return SessionDriver(load_codec("qwen3"))


IM_START, IM_END, ASSISTANT, NEWLINE = 151644, 151645, 77091, 198


@pytest.mark.parametrize(
    ("sampled", "finish", "mask"),
    [
        ([4, 3, 2, IM_END], "stop", [0, 0, 0, 1, 1, 1, 1, 0]),
        ([3, 2, 1], "length", [0, 0, 0, 1, 1, 1, 0, 0]),
    ],
    ids=["stopped", "cut"],
)
def test_a1_masks_of_reply_prefix_and_terminator_with_the_real_tokenizer(
    qwen: SessionDriver, sampled: list[int], finish: str, mask: list[int]
) -> None:
    node = qwen.commit_reply([user("p")], sampled, finish)
    qwen.commit_reply([user("p"), node.message, user("q")], [9, IM_END])
    (line,) = timelines_of(qwen.session.tree)
    start = node.sampled_start - 3
    body = sampled if IM_END in sampled else [*sampled, IM_END]
    assert line.ids[start : start + 8].tolist() == [IM_START, ASSISTANT, NEWLINE, *body, NEWLINE]
    assert line.mask[start : start + 8].tolist() == mask


def test_a7_a_reply_with_unusual_ids_keeps_them(qwen: SessionDriver) -> None:
    node = qwen.commit_reply([user("p")], [71, 4791, IM_END])
    assert node.message.content == "hello"
    assert qwen.encode("hello") == [14990]
    turn = qwen.prepare(user("p"), assistant("hello"), user("q"))
    assert turn.parent is node
    whole = turn.prompt_ids.tolist()
    assert whole[node.sampled_start : node.end] == [71, 4791, IM_END]
    assert 14990 not in whole


@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_compact_tool_call_keeps_its_ids_although_the_template_adds_spaces(history: str) -> None:
    driver = SessionDriver(load_codec("qwen3"), history=history)
    text = '<tool_call>\n{"name":"look","arguments":{"at":1,"far":false}}\n</tool_call>'
    node = driver.commit_reply([user("p")], [*driver.encode(text), IM_END], tools=TOOLS)
    (call,) = node.message.tool_calls
    assert (call.name, call.arguments) == ("look", '{"at":1,"far":false}')
    echoed = assistant("", ToolCall("look", '{"far": false, "at": 1}', "renamed"))
    turn = driver.prepare(user("p"), echoed, Message("tool", "seen", tool_call_id="renamed"), tools=TOOLS)
    assert turn.parent is node
    assert not turn.rewrite_reason
    assert '{"name":"look","arguments":{"at":1,"far":false}}' in driver.decode(turn.prompt_ids.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_reply_can_be_continued(family: str) -> None:
    driver = SessionDriver(load_codec(family))
    node = driver.commit_reply([user("p")], [], "length")
    assert node.message.is_empty
    turn = driver.prepare(user("p"), assistant(""), user("go on"))
    assert "go on" in driver.decode(turn.prompt_ids.tolist())
    driver.session.commit(turn, Generation(as_ids(driver.encode("yes"))))
    assert turn.parent is node or family == "qwen3"


def test_a_stop_token_that_the_template_does_not_write_forks(qwen: SessionDriver) -> None:
    end_of_text = qwen.encode("<|endoftext|>")
    qwen = SessionDriver(GenericCodec(qwen.codec.tokenizer, stop_ids=end_of_text))
    node = qwen.commit_reply([user("p")], [*qwen.encode("yes"), *end_of_text])
    assert node.message.content == "yes"
    turn = qwen.prepare(user("p"), node.message, user("q"))
    assert turn.rewrite_reason == "foreign_stop"
    assert turn.parent.message.content == "p"


def test_cut_reasoning_is_closed_by_the_template_as_context(qwen: SessionDriver) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    first = qwen.commit_reply(
        [user("p")], [*qwen.encode("<think>\nhm\n</think>\n\n" + call), IM_END], tools=TOOLS
    )
    result = Message("tool", "seen")
    node = qwen.commit_reply(
        [user("p"), first.message, result], qwen.encode("<think>\nhalf a thou"), "length", tools=TOOLS
    )
    assert node.message.reasoning_content == "half a thou"
    turn = qwen.prepare(user("p"), first.message, result, node.message, result, tools=TOOLS)
    assert turn.parent is node
    follows = qwen.decode(turn.prompt_ids.tolist()[node.end :])
    assert follows.startswith("\n</think>\n\n<|im_end|>\n")


def test_reasoning_is_stripped_under_template_and_kept_under_verbatim(
    qwen: SessionDriver,
) -> None:
    node = qwen.commit_reply([user("p")], [*qwen.encode("<think>\nplan\n</think>\n\nanswer"), IM_END])
    assert (node.message.content, node.message.reasoning_content) == ("answer", "plan")
    turn = qwen.prepare(user("p"), assistant("answer"), user("q"))
    assert turn.rewrite_reason == "think_strip"
    assert "plan" not in qwen.decode(turn.prompt_ids.tolist())
    verbatim = SessionDriver(qwen.codec, history="verbatim")
    node = verbatim.commit_reply([user("p")], [*qwen.encode("<think>\nplan\n</think>\n\nanswer"), IM_END])
    assert verbatim.prepare(user("p"), assistant("answer"), user("q")).parent is node


def test_reasoning_that_a_client_drops_is_restored_only_with_restore_reasoning(qwen: SessionDriver) -> None:
    call = "<think>\nplan\n</think>\n\n" + '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    for restore in (True, False):
        driver = SessionDriver(qwen.codec, restore_reasoning=restore)
        node = driver.commit_reply([user("p")], [*qwen.encode(call), IM_END], tools=TOOLS)
        dropped = assistant("", *node.message.tool_calls)
        turn = driver.prepare(user("p"), dropped, Message("tool", "seen"), tools=TOOLS)
        assert ("plan" in driver.decode(turn.prompt_ids.tolist())) is restore
        assert (turn.parent is node) is restore


@pytest.mark.parametrize("keep", [True, False])
def test_keep_empty_think_keeps_the_empty_block_of_the_generation_prompt(keep: bool) -> None:
    driver = SessionDriver(GenericCodec(load_tokenizer("qwen3"), keep_empty_think=keep))
    off = {"enable_thinking": False}
    history = [user("p")]
    for count in range(3):
        turn = driver.prepare(*history, chat_template_kwargs=off)
        assert driver.decode(turn.generation_prompt_ids.tolist()).endswith("<think>\n\n</think>\n\n")
        assert (turn.parent.depth == len(history) - 1) is (keep or count == 0)
        node = driver.commit_reply(
            history, [*driver.encode(f"answer {count}"), IM_END], chat_template_kwargs=off
        )
        history += [node.message, user(f"and {count}?")]


def test_default_template_arguments_apply_to_every_prompt_and_requests_override_them() -> None:
    plain = SessionDriver(GenericCodec(load_tokenizer("qwen3")))
    codec = GenericCodec(load_tokenizer("qwen3"), default_chat_template_kwargs={"enable_thinking": False})
    driver = SessionDriver(codec)
    on, off = ({"enable_thinking": value} for value in (True, False))
    for one, other in (({}, off), (off, off), (on, on)):
        prompts = [
            each.prepare(user("p"), chat_template_kwargs=kwargs).prompt_ids.tolist()
            for each, kwargs in ((driver, one), (plain, other))
        ]
        assert prompts[0] == prompts[1]
    assert codec.encode_prompt([user("p")]).tolist() == driver.prepare(user("p")).prompt_ids.tolist()
    assert codec.profile().traits.empty_reasoning_block
    assert not plain.codec.profile().traits.empty_reasoning_block


def test_tools_that_the_template_does_not_show_are_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for template, warnings in ((plain, 1), ("{{ tools | tojson }}" + plain, 0)):
        caplog.clear()
        codec = load_codec_with_template(template)
        SessionDriver(codec).prepare(user("p"))
        assert not caplog.records
        for text in ("p", "q"):
            SessionDriver(codec).prepare(user(text), tools=TOOLS)
        assert len(caplog.records) == warnings
        assert all("does not show tools" in record.message for record in caplog.records)


def test_consecutive_tool_results_are_folded_by_the_template(qwen: SessionDriver) -> None:
    text = "\n".join(
        f'<tool_call>\n{{"name": "look", "arguments": {{"at": {n}}}}}\n</tool_call>' for n in (1, 2)
    )
    node = qwen.commit_reply([user("p")], [*qwen.encode(text), IM_END], tools=TOOLS)
    results = [Message("tool", "one"), Message("tool", "two")]
    turn = qwen.prepare(user("p"), node.message, *results, tools=TOOLS)
    assert turn.parent is node
    rest = qwen.decode(turn.prompt_ids.tolist()[node.end :])
    assert rest.count("<|im_start|>user") == 1
    assert len(turn.message_tokens) == 2
    assert "one" in qwen.decode(turn.message_tokens[0].ids.tolist())
    assert "two" in qwen.decode(turn.message_tokens[1].ids.tolist())


def test_b6_assistant_messages_of_the_client_are_context(qwen: SessionDriver) -> None:
    shots = [user("1+1"), assistant("2"), user("2+2"), assistant("4"), user("3+3")]
    node = qwen.commit_reply(shots, [*qwen.encode("6"), IM_END])
    assert [entry.is_sampled for entry in node.path()] == [False] * 5 + [True]
    prefill = qwen.prepare(user("p"), assistant("It starts with"))
    assert "It starts with" in qwen.decode(prefill.prompt_ids.tolist())
    middle = qwen.prepare(*shots, node.message, Message("system", "Be brief."), user("4+4"))
    assert middle.parent is node
    assert "<|im_start|>system\nBe brief.<|im_end|>" in qwen.decode(middle.prompt_ids.tolist())


@pytest.mark.parametrize(
    "text", ["größer 中文 🙂", "e\u0301tude", "a\u200bb", "tab\tand\r\nreturn", "<|im_end|>"]
)
def test_unusual_characters_survive_encoding_and_parsing(qwen: SessionDriver, text: str) -> None:
    node = qwen.commit_reply([user(text)], [*qwen.encode("antwort: größer 🙂"), IM_END])
    assert node.message.content == "antwort: größer 🙂"
    qwen.codec.prompt_cache.clear()
    turn = qwen.prepare(user(text), node.message, user("q"))
    assert turn.parent is node


def test_a_reply_that_contains_the_text_of_a_stop_token_does_not_fork(qwen: SessionDriver) -> None:
    ids = [token for char in "x<|im_end|>y" for token in qwen.encode(char)]
    node = qwen.commit_reply([user("p")], [*ids, IM_END])
    assert node.message.content == "x<|im_end|>y"
    assert qwen.prepare(user("p"), node.message, user("q")).parent is node
    verbatim = SessionDriver(qwen.codec, history="verbatim")
    node = verbatim.commit_reply([user("p")], [*ids, IM_END])
    assert verbatim.prepare(user("p"), node.message, user("q")).parent is node


def test_a_lone_surrogate_in_a_request_does_not_raise(qwen: SessionDriver) -> None:
    request = Request.read({"messages": [{"role": "user", "content": "half \ud83d pair"}]})
    turn = qwen.session.prepare(request)
    assert "half \ufffd pair" in qwen.decode(turn.prompt_ids.tolist())


def test_the_error_message_of_a_template_is_passed_on() -> None:
    driver = SessionDriver(load_codec("mistral_nemo"))
    with pytest.raises(TemplateError, match="conversation roles must alternate"):
        driver.prepare(assistant("a"), user("b"))
    assert len(driver.session.tree.nodes) == 1


def test_call_ids_are_those_the_template_requires_and_results_refer_to_them() -> None:
    driver = SessionDriver(load_codec("mistral_nemo"))
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"at": 1}, "id": "abc123def"}]'
    node = driver.commit_reply([user("p")], [*driver.encode(text), *driver.encode("</s>")], tools=TOOLS)
    assert node.message.tool_calls[0].id == "abc123def"
    shown = assistant("", ToolCall("look", '{"at": 1}', "call_renamed_by_client"))
    turn = driver.prepare(
        user("p"), shown, Message("tool", "7", tool_call_id="call_renamed_by_client"), tools=TOOLS
    )
    assert turn.parent is node
    assert '"call_id": "abc123def"' in driver.decode(turn.prompt_ids.tolist())


def test_the_template_clock_is_fixed_for_a_session() -> None:
    driver = SessionDriver(load_codec("llama3_2"), started_at=datetime(2026, 3, 1))
    node = driver.commit_reply([user("p")], [*driver.encode("yes"), *driver.encode("<|eot_id|>")])
    turn = driver.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    assert "01 Mar 2026" in driver.decode(turn.prompt_ids.tolist())


def test_other_template_arguments_start_another_path(qwen: SessionDriver) -> None:
    qwen.commit_reply([user("p")], [*qwen.encode("yes"), IM_END])
    assert (
        qwen.prepare(user("p"), chat_template_kwargs={"enable_thinking": False}).parent
        is qwen.session.tree.root
    )


GLM_LIKE = (
    "{% for m in messages %}{% set r = 'observation' if m.role == 'tool' else m.role %}"
    "<|{{ r }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_stop_token_may_open_the_next_message(tmp_path: Path) -> None:
    added = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    driver = SessionDriver(
        GenericCodec.open(save_byte_level(tmp_path, chat_template=GLM_LIKE, special=added))
    )
    stop = driver.encode("<|user|>")
    assert set(stop) <= driver.codec.stop_ids
    node = driver.commit_reply([user("p")], [*driver.encode("yes"), *stop])
    assert node.message.content == "yes"
    turn = driver.prepare(user("p"), assistant("yes"), user("q"))
    assert turn.parent is node
    assert (
        driver.decode(turn.prompt_ids.tolist()) == "<|user|>\np<|assistant|>\nyes<|user|>\nq<|assistant|>\n"
    )
    other = driver.prepare(user("p"), assistant("yes"), Message("tool", "t"))
    assert other.rewrite_reason
    cut = driver.commit_reply([user("r")], driver.encode("no"), "length")
    turn = driver.prepare(user("r"), assistant("no"), user("s"))
    assert turn.parent is cut


def test_only_new_messages_of_a_long_path_are_encoded(qwen: SessionDriver) -> None:
    history = [user("word " * 3000)]
    node = qwen.commit_reply(history, [*qwen.encode("yes"), IM_END])
    turn = qwen.prepare(*history, node.message, user("q"))
    assert turn.encoded_tokens < 20
    assert len(turn.prompt_ids) > 3000
    assert qwen.codec.count_tokens([*history, node.message, user("q")]) == len(turn.prompt_ids)


def test_system_prompts_are_encoded_once_for_all_sessions(qwen: SessionDriver) -> None:
    system = Message("system", "rule " * 2000 + "é")
    qwen.prepare(system, user("first"))
    before = qwen.codec.segment_encoder.encoded_tokens
    other = SessionDriver(qwen.codec)
    turn = other.prepare(system, user("second"))
    assert qwen.codec.segment_encoder.encoded_tokens - before < 50
    assert len(turn.prompt_ids) > 2000


def test_logprobs_and_masks_of_a_real_conversation_are_aligned(qwen: SessionDriver) -> None:
    ids = [*qwen.encode("yes"), IM_END]
    turn = qwen.prepare(user("p"))
    qwen.session.commit(turn, Generation(as_ids(ids), np.full(len(ids), -1, np.float32)))
    (line,) = timelines_of(qwen.session.tree)
    assert line.logprobs[line.mask == 1].tolist() == [-1] * len(ids)


def test_an_image_for_a_text_model_is_refused(qwen: SessionDriver) -> None:
    picture = Message("user", "look", parts=("look", Media("image", "cat", b"...")))
    with pytest.raises(
        CodecError, match=r"messages\[1\]: carries an image, but generic:qwen3 takes no images"
    ):
        qwen.prepare(user("p"), picture)
    assert len(qwen.session.tree.nodes) == 1


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize("has_nonce", list(product((False, True), repeat=4)))
def test_messages_that_contain_the_nonce_change_nothing(history: str, has_nonce: tuple[bool, ...]) -> None:
    tokenizer = load_codec("qwen3").tokenizer
    codec = GenericCodec(tokenizer)
    driver = SessionDriver(codec, history=history)
    nonce = codec.markers.nonce

    def text(number: int, content: str) -> str:
        return f"{content} {nonce}{number}x0a_ {nonce}1x0b_ end" if has_nonce[number] else content

    messages = [user(text(0, "ask"))]
    for reply, more in ((1, 2), (3, 0)):
        assert driver.prepare(*messages).prompt_ids.tolist() == codec.encode_prompt(messages).tolist()
        node = driver.commit_reply(messages, [*driver.encode(text(reply, "reply")), IM_END])
        messages += [node.message, user(text(more, "more"))]
    assert driver.prepare(*messages).prompt_ids.tolist() == codec.encode_prompt(messages).tolist()
