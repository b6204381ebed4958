"""Calls whose arguments are no JSON object, in the next prompt: no template refuses them, and none forks.

What was sampled stands as it was sampled, whatever the template could make of it; only where somebody else
said it does the template show it, and then every word of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Message, Request, Session, ToolCall, timelines_of
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.dialect import Dialect
from branchline.testing.behaviours import Behaviour, PlannedOutput
from branchline.testing.player import Player, causal_order
from branchline.testing.speaker import TemplateSpeaker
from tests.chat.families import FAMILIES, codec_of, codec_speaking
from tests.chat.generic.test_codec import TOOLS, Talk, said, user
from tests.chat.generic.test_contract import verify
from tests.chat.test_tokenizer import save_byte_level

VALUES = ["[1]", '"x"', '"{}"', "null", "3", "[]", '""']
NO_JSON = [
    "{at: 1",
    '{"at": 1,}',
    '{"at": "x}',
    "{'at': True}",
    '{"at": NaN}',
    '{"at": 1}}',
    '{"a": "\n"}',
    "x",
]
ODD = [*VALUES, *NO_JSON]
histories = pytest.mark.parametrize("history", ["template", "verbatim"])

WRITTEN = {
    "qwen3": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>',
    "qwen2_5": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>',
    "llama3_2": '{{"name": "look", "parameters": {}}}',
    "mistral_nemo": '[TOOL_CALLS][{{"name": "look", "arguments": {}}}]',
}
"""A call as each family writes it."""


@pytest.mark.parametrize(
    ("family", "odd"),
    [("qwen3", "text"), ("qwen2_5", "value"), ("llama3_2", "value"), ("mistral_nemo", "value")],
)
def test_each_template_is_asked_how_it_takes_them(family: str, odd: str) -> None:
    codec = codec_of(family)
    dialect = codec.dialect(codec.tokenizer.template(tools=True))
    assert (dialect.arguments, dialect.odd_arguments) == ("object", odd)


def goes_on(talk: Talk, text: str, finish: str = "stop") -> None:
    """A reply is sampled, and a client sends it back with results: the next prompt must begin with it."""
    prompt = talk.look(user("p"), tools=TOOLS).prompt_ids.tolist()
    sampled = [*talk.ids(text), *[min(talk.codec.terminators)] * (finish == "stop")]
    node = talk.say([user("p")], sampled, finish, tools=TOOLS)
    assert node.message.calls, node.message
    messages: list[Any] = [{"role": "user", "content": "p"}]
    calls = [
        {
            "id": f"renamed0{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for n, call in enumerate(node.message.calls)
    ]
    messages.append({"role": "assistant", "content": node.message.text or None, "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "Invalid JSON"} for call in calls]
    for _ in range(2):
        request = Request.read({"messages": messages, "tools": [dict(tool) for tool in TOOLS]})
        turn = talk.session.prepare(request)
        assert turn.prompt_ids.tolist()[: len(prompt) + len(sampled)] == prompt + sampled
        assert (turn.parent, turn.rewritten) == (node, "")
        behind = talk.text(turn.prompt_ids.tolist()[node.end :])
        assert "Invalid JSON" in behind
        if finish == "length":
            assert behind.startswith(talk.text([min(talk.codec.terminators)])), "and is closed once"
        # Once more without what is remembered: found by brackets instead of by comparing.
        talk.codec.forget()


SAMPLED = [
    (family, arguments)
    for family in WRITTEN
    # What is no JSON is no call of Llama's.
    for arguments in (VALUES if family == "llama3_2" else ODD)
]


@histories
@pytest.mark.parametrize(("family", "arguments"), SAMPLED)
def test_a_sampled_one_is_kept_as_it_was_sampled(family: str, history: str, arguments: str) -> None:
    goes_on(Talk(codec_of(family), history=history), WRITTEN[family].format(arguments))


@histories
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "look"}\n</tool_call>',
        '<tool_call>\n{"name": "look", "parameters": {}}\n</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": "x}}</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {"at": "</tool_call>",}}\n</tool_call>',
        'Hm.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {at: 2}}\n</tool_call>',
    ],
)
def test_so_is_one_that_is_malformed_in_other_ways(family: str, history: str, text: str) -> None:
    goes_on(Talk(codec_of(family), history=history), text)


@histories
def test_so_is_one_with_thinking_before_it(history: str) -> None:
    text = "<think>\nwhere?\n</think>\n\n" + WRITTEN["qwen3"].format("{at: 1")
    goes_on(Talk(codec_of("qwen3"), history=history), text)


@histories
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_so_is_one_behind_which_the_output_was_cut(family: str, history: str) -> None:
    for arguments in ODD:
        goes_on(Talk(codec_of(family), history=history), WRITTEN[family].format(arguments), "length")


def test_what_the_template_drops_beside_one_still_forks() -> None:
    talk = Talk(codec_of("qwen3"))
    text = "<think>\nwhere?\n</think>\n\n" + WRITTEN["qwen3"].format("{at: 1")
    node = talk.say([user("p")], [*talk.ids(text), min(talk.codec.terminators)], tools=TOOLS)
    turn = talk.look(user("p"), node.message, Message("tool", "r"), said("so"), user("q"), tools=TOOLS)
    assert turn.rewritten == "think_strip"
    assert "{at: 1" in talk.text(turn.prompt_ids.tolist())


# -- templates that walk through arguments -----------------------------------------------------------

OPENING = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
CLOSING = (
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3_CODER = (
    OPENING + "{%- for c in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{%- for k, v in c.function.arguments|items %}"
    "{{- '<parameter=' + k + '>\\n' ~ v ~ '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}" + CLOSING
)
MINIMAX = (
    OPENING + "{%- for c in m.tool_calls or [] %}"
    "{{- '\\n<minimax:tool_call>\\n<invoke name=\"' + c.function.name + '\">\\n' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<parameter name=\"' + k + '\">' ~ v ~ '</parameter>\\n' }}{%- endfor %}"
    "{{- '</invoke>\\n</minimax:tool_call>' }}{%- endfor %}" + CLOSING
)
GLM = (
    OPENING + "{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + c.function.name + '\\n' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' ~ v ~ '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}" + CLOSING
)
GLM_TOKENS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
              "<arg_value>", "</arg_value>"]  # fmt: skip
TAGGED = [
    (QWEN3_CODER, "<tool_call>\n<function=look>\n<parameter=at>\n1\n</function>\n</tool_call>"),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\nso\n</function>\n</tool_call>",
    ),
    (QWEN3_CODER, "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</tool_call>"),
    (QWEN3_CODER, "<tool_call>\n<function=look>\n[1]\n</function>\n</tool_call>"),
    (QWEN3_CODER, '<tool_call>\n<function=look>\n{"at": "there"}\n</function>\n</tool_call>'),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="look">\nsomewhere\n</invoke>\n</minimax:tool_call>'),
    (GLM, "<tool_call>look\n<arg_key>at</arg_key>\n</tool_call>"),
    (GLM, "<tool_call>look\n<arg_value>1</arg_value>\n<arg_key>at</arg_key>\n</tool_call>"),
    (GLM, "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>1</arg_value>so\n</tool_call>"),
]


def speaking(template: str, path: Path) -> GenericCodec:
    if template is not GLM:
        return codec_speaking(template)
    # Its tags are tokens of their own.
    return GenericCodec.open(save_byte_level(path, chat_template=template, added=GLM_TOKENS))


@histories
@pytest.mark.parametrize(("template", "text"), TAGGED)
def test_a_template_that_walks_through_arguments_is_given_an_object(
    template: str, text: str, history: str, tmp_path: Path
) -> None:
    codec = speaking(template, tmp_path)
    dialect = codec.dialect(codec.tokenizer.template(tools=True))
    assert (dialect.arguments, dialect.odd_arguments) == ("object", "object")
    goes_on(Talk(codec, history=history), text)
    goes_on(Talk(codec, history=history), f"Well.\n{text}\n{text}")
    goes_on(Talk(codec, history=history), text, "length")


def test_an_empty_thought_that_the_template_puts_before_one_forks_as_before_any_other() -> None:
    shown = "('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' else '') + (m.content or '')"
    codec = codec_speaking(QWEN3_CODER.replace("(m.content or '')", shown), reasoning_parser="think")
    for arguments in ("[1]", "<parameter=at>\n1\n</parameter>"):
        talk = Talk(codec)
        text = f"<tool_call>\n<function=look>\n{arguments}\n</function>\n</tool_call>"
        node = talk.say([user("p")], [*talk.ids(text), min(codec.terminators)], tools=TOOLS)
        turn = talk.look(user("p"), node.message, Message("tool", "r"), tools=TOOLS)
        assert (len(node.message.calls), turn.rewritten) == (1, "rewritten")


# -- said by somebody else ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*WRITTEN, "deepseek_v3", QWEN3_CODER, MINIMAX])
@pytest.mark.parametrize("arguments", ODD)
def test_a_foreign_one_is_shown_with_every_word(family: str, arguments: str) -> None:
    codec = codec_of(family) if family in FAMILIES else codec_speaking(family)
    talk = Talk(codec)
    foreign = said("", ToolCall("look", arguments, "abcdefghi"))
    turn = talk.look(user("p"), foreign, Message("tool", "r", answers="abcdefghi"), tools=TOOLS)
    shown = talk.text(turn.prompt_ids.tolist())
    quoted = json.dumps(arguments, ensure_ascii=False)
    value = arguments in VALUES and json.dumps(json.loads(arguments))
    assert any(spelling and spelling in shown for spelling in (arguments, quoted, value))


@pytest.mark.parametrize("arguments", [*VALUES, "{at: 1"])
@pytest.mark.parametrize("odd", ["text", "value", "object"])
def test_marks_stand_around_one_and_do_not_change_it(arguments: str, odd: Any) -> None:
    dialect = Dialect(odd_arguments=odd)
    message = said("", ToolCall("look", arguments))
    (plain,) = dialect.write([message])
    (marked,) = dialect.write([message], {0: lambda field, text: f"<{field}>{text}</{field}>"})
    written = json.dumps(marked["tool_calls"][0]["function"])
    assert written.count("<2>") == written.count("</2>") == 1
    assert json.loads(written.replace("<2>", "").replace("</2>", "")) == plain["tool_calls"][0]["function"]


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_arguments_that_are_nothing_are_an_empty_object(arguments: str) -> None:
    (written,) = Dialect().write([said("", ToolCall("look", arguments))])
    assert written["tool_calls"][0]["function"]["arguments"] == {}


# -- the contract ------------------------------------------------------------------------------------


class Slipping(Behaviour):
    """A model that slips: half of its calls have arguments that are no object."""

    def __init__(self, rng: Random, odd: list[str], **options: Any) -> None:
        super().__init__(rng, **options)
        self._odd = odd

    def _reply(self, *, calls: int = 0) -> PlannedOutput:
        planned = super()._reply(calls=calls)
        message = planned.message
        made = tuple(
            ToolCall(call.name, self._rng.choice(self._odd), call.id) if self._rng.random() < 0.5 else call
            for call in message.calls
        )
        said = Message("assistant", message.text, reasoning=message.reasoning, calls=made)
        return replace(planned, message=said)


class SlippingSpeaker(TemplateSpeaker):
    """Writes what is no JSON where its template would have written an object."""

    def _text(self, message: Message) -> str:
        stand_ins = {
            n: f'{{"stand_in": {n}}}' for n, call in enumerate(message.calls) if call.arguments in ODD
        }
        calls = [
            ToolCall(call.name, stand_ins.get(n, call.arguments), call.id)
            for n, call in enumerate(message.calls)
        ]
        shown = Message("assistant", message.text, reasoning=message.reasoning, calls=tuple(calls))
        text = super()._text(shown)
        for n, stand_in in stand_ins.items():
            compact = stand_in.replace(" ", "")
            assert stand_in in text or compact in text
            text = text.replace(stand_in, message.calls[n].arguments)
            text = text.replace(compact, message.calls[n].arguments)
        return text


def play_slipping(family: str, seed: int, count: int, history: Any, odd: list[str]) -> Player:
    codec, rng = codec_of(family), Random(seed)
    # Clients that send everything back in their own spelling have theirs for objects only.
    manners = replace(FAMILIES[family], mangle=False)
    behaviour = Slipping(Random(seed), odd, reasoning=family == "qwen3", manners=manners)
    plan = behaviour.plan(count)
    player = Player(Session("s", codec, history=history), SlippingSpeaker(codec, Random(seed)))
    player.play(plan, causal_order(plan, rng), overlap=rng)
    return player


@pytest.mark.parametrize(
    ("family", "odd"),
    [("qwen3", ODD), ("qwen2_5", VALUES), ("llama3_2", VALUES), ("mistral_nemo", VALUES)],
    ids=["qwen3", "qwen2_5", "llama3_2", "mistral_nemo"],
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6), history=st.sampled_from(["template", "verbatim"]))
def test_the_contract_holds_for_models_that_slip(
    family: str, odd: list[str], seed: int, count: int, history: str
) -> None:
    verify(family, play_slipping(family, seed, count, history, odd))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6), history=st.sampled_from(["template", "verbatim"]))
def test_no_slip_forks_where_the_template_would_quote_it(seed: int, count: int, history: str) -> None:
    player = play_slipping("qwen2_5", seed, count, history, NO_JSON)
    tree = player.session.tree
    for one in player.played:
        assert one.call.rewritten == ""
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            path = tree.path_ids(tree.nodes[node_id]).tolist()
            assert path == [*one.prompt_ids.tolist(), *ids.tolist()]
    assert timelines_of(tree)
