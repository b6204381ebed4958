"""Conversations in the harmony format: sampled headers differ from the template's, and prompts keep them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Message
from branchline.chat.generic.codec import GenericCodec
from tests.chat.harmony import save_harmony
from tests.chat.harness import TOOLS, SessionDriver, user

CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>'
)
TEMPLATE_CALL = '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>'
RESULT = Message("tool", "sunny")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> GenericCodec:
    return GenericCodec.open(save_harmony(tmp_path_factory.mktemp("harmony")))


@pytest.fixture
def driver(codec: GenericCodec) -> SessionDriver:
    return SessionDriver(codec)


def analysis(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def commentary(text: str) -> str:
    return f"<|start|>assistant<|channel|>commentary<|message|>{text}<|end|>"


@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        (CALL, "", ""),
        (analysis("hm") + CALL, "hm", ""),
        (analysis("hm") + analysis("so") + CALL, "hmso", ""),
        (commentary("Let me look.") + CALL, "", "Let me look."),
        (analysis("hm") + commentary("Let me look.") + CALL, "hm", "Let me look."),
        (analysis("a") + commentary("b") + analysis("c") + commentary("d") + CALL, "ac", "bd"),
        (analysis("hm") + CALL.replace(" <|constrain|>json", ""), "hm", ""),
        (TEMPLATE_CALL, "", ""),
    ],
)
def test_a_call_continues_with_its_sampled_ids(
    driver: SessionDriver, output: str, reasoning: str, content: str
) -> None:
    ids = driver.encode(output.removeprefix("<|start|>assistant"))
    node = driver.commit_reply([user("p")], ids, tools=TOOLS)
    assert [call.name for call in node.message.tool_calls] == ["look"]
    assert (node.message.reasoning_content, node.message.content) == (reasoning, content)
    turn = driver.prepare(user("p"), node.message, RESULT, tools=TOOLS)
    assert turn.parent is node
    assert not turn.rewrite_reason
    prompt = turn.prompt_ids.tolist()
    assert prompt[node.sampled_start : node.end] == ids
    assert driver.decode(prompt[node.end :]) == (
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant'
    )


def test_several_calls_of_one_cycle_stay_on_one_path(driver: SessionDriver) -> None:
    conversation: list[Message] = [user("p")]
    nodes = []
    for thought in ("first", "second", "third"):
        ids = driver.encode((analysis(thought) + CALL).removeprefix("<|start|>assistant"))
        nodes.append(driver.commit_reply(conversation, ids, tools=TOOLS))
        conversation += [nodes[-1].message, RESULT]
    turn = driver.prepare(*conversation, tools=TOOLS)
    assert turn.parent is nodes[-1]
    assert all(node in turn.parent.path() for node in nodes)


def test_a_final_message_drops_the_analysis_before_it(driver: SessionDriver) -> None:
    ids = driver.encode((analysis("hm") + CALL).removeprefix("<|start|>assistant"))
    call = driver.commit_reply([user("p")], ids, tools=TOOLS)
    final = (
        "<|channel|>analysis<|message|>ok<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    )
    node = driver.commit_reply([user("p"), call.message, RESULT], driver.encode(final), tools=TOOLS)
    assert (node.message.reasoning_content, node.message.content) == ("ok", "Sunny.")
    turn = driver.prepare(user("p"), call.message, RESULT, node.message, user("q"), tools=TOOLS)
    assert turn.rewrite_reason == "think_strip"
    text = driver.decode(turn.prompt_ids.tolist())
    assert text.endswith(
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|><|start|>user<|message|>q<|end|><|start|>assistant"
    )
    assert "hm" not in text
    assert "<|return|>" not in text


def test_the_template_ends_an_earlier_final_message_with_another_token(driver: SessionDriver) -> None:
    final = driver.encode("<|channel|>final<|message|>Hello.<|return|>")
    node = driver.commit_reply([user("p")], final)
    turn = driver.prepare(user("p"), node.message, user("q"))
    assert turn.rewrite_reason == "foreign_stop"
    assert "Hello.<|end|><|start|>user" in driver.decode(turn.prompt_ids.tolist())


def test_a_final_message_that_was_cut_continues_with_its_sampled_ids(driver: SessionDriver) -> None:
    ids = driver.encode("<|channel|>final<|message|>Hello. And")
    node = driver.commit_reply([user("p")], ids, "length")
    turn = driver.prepare(user("p"), node.message, user("q"))
    assert turn.parent is node
    assert driver.decode(turn.prompt_ids.tolist()[node.end :]).startswith("<|end|><|start|>user")


def test_a_preamble_that_is_not_sampled_here_is_shown_as_the_template_shows_it(driver: SessionDriver) -> None:
    ids = driver.encode((analysis("hm") + commentary("Look.") + CALL).removeprefix("<|start|>assistant"))
    message = driver.codec.parse(driver.codec.tokenizer.encode(driver.decode(ids)), tools=TOOLS)
    text = driver.render(user("p"), message, RESULT, tools=TOOLS)
    assert "<|channel|>analysis<|message|>hm\n\nLook.<|end|><|start|>assistant to=functions.look" in text


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
_PART = st.tuples(st.sampled_from([analysis, commentary]), _TEXT).map(lambda part: part[0](part[1]))


@given(
    cycles=st.lists(
        st.tuples(st.lists(_PART, max_size=3), st.sampled_from([CALL, TEMPLATE_CALL])), min_size=1, max_size=3
    ),
    result=_TEXT,
)
def test_every_prompt_of_a_tool_cycle_continues_what_was_sampled(
    codec: GenericCodec, cycles: list[tuple[list[str], str]], result: str
) -> None:
    driver = SessionDriver(codec)
    conversation: list[Message] = [user("p")]
    expected = driver.prepare(*conversation, tools=TOOLS).prompt_ids.tolist()
    for parts, call in cycles:
        ids = driver.encode("".join([*parts, call]).removeprefix("<|start|>assistant"))
        node = driver.commit_reply(conversation, ids, tools=TOOLS)
        assert len(node.message.tool_calls) == 1
        conversation += [node.message, Message("tool", result)]
        turn = driver.prepare(*conversation, tools=TOOLS)
        prompt = turn.prompt_ids.tolist()
        assert (turn.parent, prompt[: len(expected) + len(ids)]) == (node, expected + ids)
        assert driver.decode(prompt[len(expected) + len(ids) :]).startswith("<|start|>functions.look to=")
        expected = prompt
