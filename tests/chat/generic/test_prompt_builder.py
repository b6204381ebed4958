"""Templates that do odd things to what was sampled: each is seen, and no word is lost or written twice."""

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


def commit_text(talk: SessionDriver, messages: list[Message], text: str, **about: Any) -> Any:
    return talk.commit_reply(messages, talk.encode(text), **about)


def verify(talk: SessionDriver, *messages: Message, **about: Any) -> Any:
    """The prompt is what the template writes for this conversation, whitespace aside."""
    turn = talk.prepare(*messages, **about)
    shown = [*(node.message for node in turn.parent.path()), *turn.messages]
    tools, kwargs = about.get("tools", ()), about.get("chat_template_kwargs")
    probe = talk.codec.probe(tools=bool(tools), chat_template_kwargs=kwargs)
    plain = probe.render(shown, tools, now=talk.session.started_at)
    assert without_whitespace(talk.decode(turn.prompt_ids.tolist())) == without_whitespace(plain)
    return turn


@pytest.mark.parametrize(
    "content",
    [
        "'[turn ' ~ loop.index ~ '] ' + m.content",
        "m.content + ' (said at noon)'",
        "m.content|replace('cat','dog')",
        "m.content|upper",
    ],
)
def test_a_template_that_writes_around_or_inside_a_reply_forks(content: str) -> None:
    talk = SessionDriver(load_codec_with_template(chatml(content)))
    node = commit_text(talk, [user("p")], "a cat<|im_end|>")
    turn = verify(talk, user("p"), node.message, user("q"))
    assert turn.rewrite_reason
    verify(talk, user("other"), node.message, user("q"))


def test_a_template_that_only_trims_does_not_fork() -> None:
    talk = SessionDriver(load_codec_with_template(chatml("m.content|trim")))
    node = commit_text(talk, [user("p")], " a cat \n<|im_end|>")
    assert verify(talk, user("p"), node.message, user("q")).parent is node


HYBRID = (
    HEAD + "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)


def test_what_opens_a_reply_depends_on_the_templates_arguments() -> None:
    off = {"enable_thinking": False}
    talk = SessionDriver(load_codec_with_template(HYBRID, reasoning_parser="think"))
    node = commit_text(talk, [user("p")], "hello<|im_end|>", chat_template_kwargs=off)
    assert (node.message.content, node.message.reasoning_content) == ("hello", "")
    turn = verify(
        talk, Message("system", "new"), user("p"), node.message, user("q"), chat_template_kwargs=off
    )
    assert "<|im_start|>assistant\nhello<|im_end|>" in talk.decode(turn.prompt_ids.tolist())
    assert (
        talk.decode(turn.generation_prompt_ids.tolist()) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    thinking = commit_text(talk, [user("p")], "hm\n</think>\n\nhello<|im_end|>")
    assert (thinking.message.content, thinking.message.reasoning_content) == ("hello", "hm")
    assert talk.prepare(user("p"), user("q"), chat_template_kwargs=off).parent.message.content == "p"


CROSSING = (
    HEAD + "{%- if m.role == 'user' %}{{- '\\nUSER: ' + m.content + '\\n' }}{%- else %}"
    "{{- '\\nASSISTANT: ' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\nASSISTANT:' }}{%- endif %}"
)


@pytest.mark.parametrize("forget", [False, True])
def test_a_token_that_crosses_two_messages_is_written_once(forget: bool) -> None:
    talk = SessionDriver(load_codec_with_template(CROSSING, stop_ids=[IM_END]))
    commit_text(talk, [user("p")], " hello<|im_end|>")
    if forget:
        talk.codec.prompt_cache.clear()
    turn = talk.prepare(user("p"), user("q"))
    assert talk.decode(turn.prompt_ids.tolist()) == "\nUSER: p\n\nUSER: q\n\nASSISTANT:"


ARGUMENTS = (
    HEAD + "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + c.function.name }}{%- for k, v in c.function.arguments.items() %}"
    "{{- '\\n<|box_start|>' + k + '<|box_end|>\\n' ~ v }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}" + TAIL
)


@pytest.mark.parametrize("arguments", ["{}", '{"at": "1"}', '{"at": "1", "far": "no"}'])
def test_a_template_that_walks_through_arguments_is_given_no_more_of_them(arguments: str) -> None:
    codec = load_codec_with_template(ARGUMENTS, tool_parser="plain")
    probe = codec.probe(tools=True)
    assert probe.traits.arguments_format == "object"
    talk = SessionDriver(codec)
    call = ToolCall("look", arguments)
    prompt = talk.prepare(user("p"), tools=TOOLS)
    shown = probe.render([user("p"), assistant("", call)], add_generation_prompt=False)
    text = shown.split("<|im_start|>assistant\n")[1].removesuffix("\n")
    ids = as_ids(talk.encode(text))
    node_id = talk.session.commit(prompt, Generation(ids, message=assistant("", call))).call.outputs[0]
    turn = talk.prepare(user("p"), assistant("", call), Message("tool", "seen"), tools=TOOLS)
    assert turn.parent.id == node_id


def test_reasoning_is_put_where_the_template_looks_for_it() -> None:
    template = chatml(
        "(('<think>\\n' + m.thinking + '\\n</think>\\n\\n') if m.thinking is defined else '') + m.content"
    )
    codec = load_codec_with_template(template, reasoning_parser="think")
    assert codec.profile().traits.reasoning_field == "thinking"
    talk = SessionDriver(codec)
    node = commit_text(talk, [user("p")], "<think>\nhm\n</think>\n\nhello<|im_end|>")
    assert verify(talk, user("p"), node.message, user("q")).parent is node


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "deepseek_v3"])
def test_a_developers_words_are_shown_as_the_systems_where_templates_do_not_know_them(family: str) -> None:
    talk = SessionDriver(load_codec(family))
    assert "DEVTXT" in talk.decode(
        talk.prepare(Message("developer", "DEVTXT"), user("y")).prompt_ids.tolist()
    )


def test_verbatim_keeps_a_reply_that_templates_take_apart() -> None:
    talk = SessionDriver(load_codec("qwen3"), history="verbatim")
    node = commit_text(talk, [user("p")], "a </think> b<|im_end|>")
    turn = talk.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    assert talk.decode(turn.prompt_ids.tolist()).endswith(
        "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen3", "mistral_nemo", "llama3_2"])
def test_verbatim_adds_the_same_words_at_every_turn(family: str) -> None:
    codec = load_codec(family)
    talk = SessionDriver(codec, history="verbatim")
    stop = min(codec.profile().terminator_ids)
    history = [user("q")]
    added = []
    for _ in range(4):
        turn = talk.prepare(*history, tools=TOOLS)
        added.append(talk.decode(turn.prompt_ids.tolist()[turn.parent.end :]))
        node = talk.commit_reply(history, [*talk.encode("yes"), stop], tools=TOOLS)
        history += [node.message, user("q")]
    assert len(set(added[1:])) == 1


def test_a_template_whose_tail_depends_on_its_head_is_rendered_whole_under_verbatim() -> None:
    talk = SessionDriver(
        load_codec_with_template(chatml("'#' ~ loop.index ~ ' ' + m.content")), history="verbatim"
    )
    history = [user("q")]
    for turn_number in range(3):
        turn = talk.prepare(*history)
        assert f"#{2 * turn_number + 1} q" in talk.decode(turn.prompt_ids.tolist())
        node = talk.commit_reply(history, [*talk.encode("yes"), IM_END])
        history += [node.message, user("q")]


def test_half_a_surrogate_in_a_tool_list_changes_nothing_for_others() -> None:
    codec = load_codec("qwen3")
    body = {"messages": [{"role": "user", "content": "x"}]}
    odd = {"type": "function", "function": {"name": "look", "description": "\ud800"}}
    session = Session("s", codec)
    prompts = {
        session.prepare(Request.read({**body, "tools": [odd]})).prompt_ids.tobytes() for _ in range(120)
    }
    assert len(prompts) == 1
    assert codec.profile(tools=True).template.uses_minijinja


def test_arguments_nested_beyond_reason_do_not_raise() -> None:
    talk = SessionDriver(load_codec("qwen3"))
    deep = ToolCall("look", '{"a":' + "[" * 1500 + "]" * 1500 + "}")
    talk.prepare(user("p"), assistant("", deep), Message("tool", "r"), tools=TOOLS)


def test_names_of_ours_are_not_the_clients_to_set() -> None:
    talk = SessionDriver(load_codec("qwen3"))
    turn = talk.prepare(user("p"), chat_template_kwargs={"add_generation_prompt": False, "messages": []})
    assert talk.decode(turn.prompt_ids.tolist()).endswith("<|im_start|>assistant\n")


def test_a_template_that_minijinja_cannot_compile_says_why() -> None:
    template = chatml("m.content").replace(TAIL, "{% generation %}{% endgeneration %}" + TAIL)
    chosen = load_codec_with_template(template).profile().template
    assert not chosen.uses_minijinja
    assert "minijinja" in chosen.fallback_reason


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
