"""Prompts of artificial templates that change what was sampled: every change forks, and no text is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from branchline import Generation, Journal, Message, Request, Session, ToolCall
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import as_ids
from tests.chat.families import load_codec, load_codec_with_template
from tests.chat.harness import TOOLS, SessionDriver, assistant, user, without_whitespace

HEAD = "{%- for m in messages %}"
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
IM_END = 151645


def chatml(content: str) -> str:
    return f"{HEAD}{{{{- '<|im_start|>' + m.role + '\\n' + {content} + '<|im_end|>\\n' }}}}{TAIL}"


def commit_text(driver: SessionDriver, messages: list[Message], text: str, **fields: Any) -> Any:
    return driver.commit_reply(messages, driver.encode(text), **fields)


def verify(driver: SessionDriver, *messages: Message, **fields: Any) -> Any:
    """Checks that the prompt is what the template renders for this conversation, apart from whitespace."""
    turn = driver.prepare(*messages, **fields)
    shown = [*(node.message for node in turn.parent.path()), *turn.messages]
    tools, kwargs = fields.get("tools", ()), fields.get("chat_template_kwargs")
    probe = driver.codec.probe(tools=bool(tools), chat_template_kwargs=kwargs)
    plain = probe.render(shown, tools, now=driver.session.started_at)
    assert without_whitespace(driver.decode(turn.prompt_ids.tolist())) == without_whitespace(plain)
    return turn


@pytest.mark.parametrize(
    "content",
    [
        "'[turn ' ~ loop.index ~ '] ' + m.content",
        "m.content + ' (at noon)'",
        "m.content|replace('cat','dog')",
        "m.content|upper",
    ],
)
def test_a_template_that_writes_around_or_inside_a_reply_forks(content: str) -> None:
    driver = SessionDriver(load_codec_with_template(chatml(content)))
    node = commit_text(driver, [user("p")], "a cat<|im_end|>")
    turn = verify(driver, user("p"), node.message, user("q"))
    assert turn.rewrite_reason
    verify(driver, user("other"), node.message, user("q"))


def test_a_template_that_only_trims_does_not_fork() -> None:
    driver = SessionDriver(load_codec_with_template(chatml("m.content|trim")))
    node = commit_text(driver, [user("p")], " a cat \n<|im_end|>")
    assert verify(driver, user("p"), node.message, user("q")).parent is node


HYBRID = (
    HEAD + "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)


def test_the_generation_prompt_depends_on_template_arguments() -> None:
    off = {"enable_thinking": False}
    driver = SessionDriver(load_codec_with_template(HYBRID, reasoning_parser="think"))
    node = commit_text(driver, [user("p")], "hello<|im_end|>", chat_template_kwargs=off)
    assert (node.message.content, node.message.reasoning_content) == ("hello", "")
    turn = verify(
        driver, Message("system", "new"), user("p"), node.message, user("q"), chat_template_kwargs=off
    )
    assert "<|im_start|>assistant\nhello<|im_end|>" in driver.decode(turn.prompt_ids.tolist())
    assert (
        driver.decode(turn.generation_prompt_ids.tolist()) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    thinking = commit_text(driver, [user("p")], "hm\n</think>\n\nhello<|im_end|>")
    assert (thinking.message.content, thinking.message.reasoning_content) == ("hello", "hm")
    assert driver.prepare(user("p"), user("q"), chat_template_kwargs=off).parent.message.content == "p"


CROSSING = (
    HEAD + "{%- if m.role == 'user' %}{{- '\\nUSER: ' + m.content + '\\n' }}{%- else %}"
    "{{- '\\nASSISTANT: ' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\nASSISTANT:' }}{%- endif %}"
)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_token_that_crosses_two_messages_is_encoded_once(clear_cache: bool) -> None:
    driver = SessionDriver(load_codec_with_template(CROSSING, stop_ids=[IM_END]))
    commit_text(driver, [user("p")], " hello<|im_end|>")
    if clear_cache:
        driver.codec.prompt_cache.clear()
    turn = driver.prepare(user("p"), user("q"))
    assert driver.decode(turn.prompt_ids.tolist()) == "\nUSER: p\n\nUSER: q\n\nASSISTANT:"


ARGUMENTS = (
    HEAD + "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + c.function.name }}{%- for k, v in c.function.arguments.items() %}"
    "{{- '\\n<|box_start|>' + k + '<|box_end|>\\n' ~ v }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}" + TAIL
)


@pytest.mark.parametrize("arguments", ["{}", '{"at": "1"}', '{"at": "1", "far": "no"}'])
def test_markers_add_no_arguments_for_a_template_that_iterates_over_them(arguments: str) -> None:
    codec = load_codec_with_template(ARGUMENTS, tool_parser="plain")
    probe = codec.probe(tools=True)
    assert probe.traits.arguments_format == "object"
    driver = SessionDriver(codec)
    call = ToolCall("look", arguments)
    prompt = driver.prepare(user("p"), tools=TOOLS)
    shown = probe.render([user("p"), assistant("", call)], add_generation_prompt=False)
    text = shown.split("<|im_start|>assistant\n")[1].removesuffix("\n")
    ids = as_ids(driver.encode(text))
    node_id = driver.session.commit(prompt, Generation(ids, message=assistant("", call))).call.outputs[0]
    turn = driver.prepare(user("p"), assistant("", call), Message("tool", "seen"), tools=TOOLS)
    assert turn.parent.id == node_id


def test_reasoning_is_passed_in_the_field_that_the_template_reads() -> None:
    template = chatml(
        "(('<think>\\n' + m.thinking + '\\n</think>\\n\\n') if m.thinking is defined else '') + m.content"
    )
    codec = load_codec_with_template(template, reasoning_parser="think")
    assert codec.profile().traits.reasoning_field == "thinking"
    driver = SessionDriver(codec)
    node = commit_text(driver, [user("p")], "<think>\nhm\n</think>\n\nhello<|im_end|>")
    assert verify(driver, user("p"), node.message, user("q")).parent is node


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "deepseek_v3"])
def test_a_developer_message_is_a_system_message_for_templates_that_do_not_know_the_role(family: str) -> None:
    driver = SessionDriver(load_codec(family))
    assert "DEVTXT" in driver.decode(
        driver.prepare(Message("developer", "DEVTXT"), user("y")).prompt_ids.tolist()
    )


def test_verbatim_keeps_a_reply_that_the_template_takes_apart() -> None:
    driver = SessionDriver(load_codec("qwen3"), history="verbatim")
    node = commit_text(driver, [user("p")], "a </think> b<|im_end|>")
    turn = driver.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    assert driver.decode(turn.prompt_ids.tolist()).endswith(
        "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen3", "mistral_nemo", "llama3_2"])
def test_verbatim_adds_the_same_text_at_every_turn(family: str) -> None:
    codec = load_codec(family)
    driver = SessionDriver(codec, history="verbatim")
    stop = min(codec.profile().terminator_ids)
    history = [user("q")]
    added = []
    for _ in range(4):
        turn = driver.prepare(*history, tools=TOOLS)
        added.append(driver.decode(turn.prompt_ids.tolist()[turn.parent.end :]))
        node = driver.commit_reply(history, [*driver.encode("yes"), stop], tools=TOOLS)
        history += [node.message, user("q")]
    assert len(set(added[1:])) == 1


def test_a_template_without_a_local_tail_is_rendered_whole_under_verbatim() -> None:
    driver = SessionDriver(
        load_codec_with_template(chatml("'#' ~ loop.index ~ ' ' + m.content")), history="verbatim"
    )
    history = [user("q")]
    for turn_number in range(3):
        turn = driver.prepare(*history)
        assert f"#{2 * turn_number + 1} q" in driver.decode(turn.prompt_ids.tolist())
        node = driver.commit_reply(history, [*driver.encode("yes"), IM_END])
        history += [node.message, user("q")]


def test_a_lone_surrogate_in_a_tool_list_does_not_disable_minijinja() -> None:
    codec = load_codec("qwen3")
    body = {"messages": [{"role": "user", "content": "x"}]}
    tool = {"type": "function", "function": {"name": "look", "description": "\ud800"}}
    session = Session("s", codec)
    prompts = {
        session.prepare(Request.read({**body, "tools": [tool]})).prompt_ids.tobytes() for _ in range(120)
    }
    assert len(prompts) == 1
    assert codec.profile(tools=True).template.uses_minijinja


def test_deeply_nested_arguments_do_not_raise() -> None:
    driver = SessionDriver(load_codec("qwen3"))
    deep = ToolCall("look", '{"a":' + "[" * 1500 + "]" * 1500 + "}")
    driver.prepare(user("p"), assistant("", deep), Message("tool", "r"), tools=TOOLS)


def test_template_arguments_cannot_override_our_variables() -> None:
    driver = SessionDriver(load_codec("qwen3"))
    turn = driver.prepare(user("p"), chat_template_kwargs={"add_generation_prompt": False, "messages": []})
    assert driver.decode(turn.prompt_ids.tolist()).endswith("<|im_start|>assistant\n")


def test_a_restarted_session_keeps_the_date_its_template_printed(tmp_path: Path) -> None:
    codec = load_codec("llama3_2")
    with Journal(tmp_path / "j") as journal:
        session = Session("s", codec, journal=journal)
        turn = session.prepare(Request((user("p"),)))
        stop = min(codec.profile().terminator_ids)
        node = session.commit(
            turn, Generation(as_ids([*codec.tokenizer.encode("yes").tolist(), stop]))
        ).call.outputs[0]
        journal.flush()
        again = Session.reopen("s", GenericCodec(codec.tokenizer), journal)
        assert again.started_at == session.started_at
        assert again.prepare(Request((user("p"), assistant("yes"), user("q")))).parent.id == node
