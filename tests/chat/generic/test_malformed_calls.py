"""Calls whose arguments are not a JSON object, in the next prompt: no template refuses them or forks.

Sampled calls keep their ids, whatever the template would render. Calls that were not sampled are rendered by
the template, with all of their text.
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
from branchline.chat.template_traits import TemplateTraits
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator, PlannedOutput
from branchline.testing.reply_encoder import TemplateReplyEncoder
from tests.chat.families import FAMILIES, load_codec, load_codec_with_template
from tests.chat.generic.test_contract import verify
from tests.chat.harness import TOOLS, SessionDriver, assistant, save_byte_level, user

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
MALFORMED = [*VALUES, *NO_JSON]
histories = pytest.mark.parametrize("history", ["template", "verbatim"])

FORMATTED_CALLS = {
    "qwen3": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>',
    "qwen2_5": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>',
    "llama3_2": '{{"name": "look", "parameters": {}}}',
    "mistral_nemo": '[TOOL_CALLS][{{"name": "look", "arguments": {}}}]',
}
"""A call in the format of each family."""


@pytest.mark.parametrize(
    ("family", "malformed"),
    [("qwen3", "text"), ("qwen2_5", "value"), ("llama3_2", "value"), ("mistral_nemo", "value")],
)
def test_the_format_that_each_template_accepts_is_probed(family: str, malformed: str) -> None:
    codec = load_codec(family)
    traits = codec.profile(tools=True).traits
    assert (traits.arguments_format, traits.malformed_arguments_format) == ("object", malformed)


def assert_continues(driver: SessionDriver, text: str, finish: str = "stop") -> None:
    """Checks that the next prompt starts with a sampled reply that a client sends back with results."""
    prompt = driver.prepare(user("p"), tools=TOOLS).prompt_ids.tolist()
    sampled = [*driver.encode(text), *[min(driver.codec.profile().terminator_ids)] * (finish == "stop")]
    node = driver.commit_reply([user("p")], sampled, finish, tools=TOOLS)
    assert node.message.tool_calls, node.message
    messages: list[Any] = [{"role": "user", "content": "p"}]
    calls = [
        {
            "id": f"renamed0{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for n, call in enumerate(node.message.tool_calls)
    ]
    messages.append({"role": "assistant", "content": node.message.content or None, "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "Invalid JSON"} for call in calls]
    for _ in range(2):
        request = Request.read({"messages": messages, "tools": [dict(tool) for tool in TOOLS]})
        turn = driver.session.prepare(request)
        assert turn.prompt_ids.tolist()[: len(prompt) + len(sampled)] == prompt + sampled
        assert (turn.parent, turn.rewrite_reason) == (node, "")
        rest = driver.decode(turn.prompt_ids.tolist()[node.end :])
        assert "Invalid JSON" in rest
        if finish == "length":
            assert rest.startswith(driver.decode([min(driver.codec.profile().terminator_ids)])), (
                "and is closed once"
            )
        # Once more without the remembered prompt.
        driver.codec.prompt_cache.clear()


SAMPLED = [
    (family, arguments)
    for family in FORMATTED_CALLS
    # In Llama's format text that is not JSON is not a call.
    for arguments in (VALUES if family == "llama3_2" else MALFORMED)
]


@histories
@pytest.mark.parametrize(("family", "arguments"), SAMPLED)
def test_a_sampled_call_keeps_its_ids(family: str, history: str, arguments: str) -> None:
    assert_continues(
        SessionDriver(load_codec(family), history=history), FORMATTED_CALLS[family].format(arguments)
    )


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
def test_a_call_that_is_malformed_in_other_ways_keeps_its_ids(family: str, history: str, text: str) -> None:
    assert_continues(SessionDriver(load_codec(family), history=history), text)


@histories
def test_a_malformed_call_after_reasoning_keeps_its_ids(history: str) -> None:
    text = "<think>\nwhere?\n</think>\n\n" + FORMATTED_CALLS["qwen3"].format("{at: 1")
    assert_continues(SessionDriver(load_codec("qwen3"), history=history), text)


@histories
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_a_malformed_call_in_a_cut_output_keeps_its_ids(family: str, history: str) -> None:
    for arguments in MALFORMED:
        assert_continues(
            SessionDriver(load_codec(family), history=history),
            FORMATTED_CALLS[family].format(arguments),
            "length",
        )


def test_reasoning_dropped_before_a_malformed_call_still_forks() -> None:
    driver = SessionDriver(load_codec("qwen3"))
    text = "<think>\nwhere?\n</think>\n\n" + FORMATTED_CALLS["qwen3"].format("{at: 1")
    node = driver.commit_reply(
        [user("p")], [*driver.encode(text), min(driver.codec.profile().terminator_ids)], tools=TOOLS
    )
    turn = driver.prepare(
        user("p"), node.message, Message("tool", "r"), assistant("so"), user("q"), tools=TOOLS
    )
    assert turn.rewrite_reason == "think_strip"
    assert "{at: 1" in driver.decode(turn.prompt_ids.tolist())


# -- templates that iterate over arguments -----------------------------------------------------------

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


def codec_with_template(template: str, path: Path) -> GenericCodec:
    if template is not GLM:
        return load_codec_with_template(template)
    # Its tags are added tokens.
    return GenericCodec.open(save_byte_level(path, chat_template=template, special=GLM_TOKENS))


@histories
@pytest.mark.parametrize(("template", "text"), TAGGED)
def test_a_template_that_iterates_over_arguments_gets_an_object(
    template: str, text: str, history: str, tmp_path: Path
) -> None:
    codec = codec_with_template(template, tmp_path)
    traits = codec.profile(tools=True).traits
    assert (traits.arguments_format, traits.malformed_arguments_format) == ("object", "object")
    assert_continues(SessionDriver(codec, history=history), text)
    assert_continues(SessionDriver(codec, history=history), f"Well.\n{text}\n{text}")
    assert_continues(SessionDriver(codec, history=history), text, "length")


def test_an_empty_reasoning_block_before_a_malformed_call_forks() -> None:
    shown = "('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' else '') + (m.content or '')"
    codec = load_codec_with_template(
        QWEN3_CODER.replace("(m.content or '')", shown), reasoning_parser="think"
    )
    for arguments in ("[1]", "<parameter=at>\n1\n</parameter>"):
        driver = SessionDriver(codec)
        text = f"<tool_call>\n<function=look>\n{arguments}\n</function>\n</tool_call>"
        node = driver.commit_reply(
            [user("p")], [*driver.encode(text), min(codec.profile().terminator_ids)], tools=TOOLS
        )
        turn = driver.prepare(user("p"), node.message, Message("tool", "r"), tools=TOOLS)
        assert (len(node.message.tool_calls), turn.rewrite_reason) == (1, "rewritten")


# -- calls that were not sampled ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FORMATTED_CALLS, "deepseek_v3", QWEN3_CODER, MINIMAX])
@pytest.mark.parametrize("arguments", MALFORMED)
def test_a_call_of_the_client_is_shown_with_all_of_its_text(family: str, arguments: str) -> None:
    codec = load_codec(family) if family in FAMILIES else load_codec_with_template(family)
    driver = SessionDriver(codec)
    foreign = assistant("", ToolCall("look", arguments, "abcdefghi"))
    turn = driver.prepare(user("p"), foreign, Message("tool", "r", tool_call_id="abcdefghi"), tools=TOOLS)
    shown = driver.decode(turn.prompt_ids.tolist())
    quoted = json.dumps(arguments, ensure_ascii=False)
    value = arguments in VALUES and json.dumps(json.loads(arguments))
    assert any(spelling and spelling in shown for spelling in (arguments, quoted, value))


@pytest.mark.parametrize("arguments", [*VALUES, "{at: 1"])
@pytest.mark.parametrize("malformed", ["text", "value", "object"])
def test_markers_do_not_change_malformed_arguments(arguments: str, malformed: Any) -> None:
    traits = TemplateTraits(malformed_arguments_format=malformed)
    message = assistant("", ToolCall("look", arguments))
    (plain,) = traits.to_template_messages([message])
    (marked,) = traits.to_template_messages([message], {0: lambda field, text: f"<{field}>{text}</{field}>"})
    written = json.dumps(marked["tool_calls"][0]["function"])
    assert written.count("<2>") == written.count("</2>") == 1
    assert json.loads(written.replace("<2>", "").replace("</2>", "")) == plain["tool_calls"][0]["function"]


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_empty_arguments_are_an_empty_object(arguments: str) -> None:
    (written,) = TemplateTraits().to_template_messages([assistant("", ToolCall("look", arguments))])
    assert written["tool_calls"][0]["function"]["arguments"] == {}


# -- the contract ------------------------------------------------------------------------------------


class MalformedPlanGenerator(PlanGenerator):
    """Plans in which half of the calls have arguments that are not an object."""

    def __init__(self, rng: Random, malformed: list[str], **options: Any) -> None:
        super().__init__(rng, **options)
        self._odd = malformed

    def _reply(self, *, calls: int = 0) -> PlannedOutput:
        planned = super()._reply(calls=calls)
        message = planned.message
        made = tuple(
            ToolCall(call.name, self._rng.choice(self._odd), call.id) if self._rng.random() < 0.5 else call
            for call in message.tool_calls
        )
        reply = Message(
            "assistant", message.content, reasoning_content=message.reasoning_content, tool_calls=made
        )
        return replace(planned, message=reply)


class MalformedReplyEncoder(TemplateReplyEncoder):
    """Writes malformed arguments where the template would write an object."""

    def _render(self, message: Message) -> tuple[str, int | None]:
        placeholders = {
            n: f'{{"placeholder": {n}}}'
            for n, call in enumerate(message.tool_calls)
            if call.arguments in MALFORMED
        }
        calls = [
            ToolCall(call.name, placeholders.get(n, call.arguments), call.id)
            for n, call in enumerate(message.tool_calls)
        ]
        shown = Message(
            "assistant", message.content, reasoning_content=message.reasoning_content, tool_calls=tuple(calls)
        )
        text, terminator = super()._render(shown)
        for n, placeholder in placeholders.items():
            compact = placeholder.replace(" ", "")
            assert placeholder in text or compact in text
            text = text.replace(placeholder, message.tool_calls[n].arguments)
            text = text.replace(compact, message.tool_calls[n].arguments)
        return text, terminator


def run_malformed_plan(family: str, seed: int, count: int, history: Any, malformed: list[str]) -> PlanRunner:
    codec, rng = load_codec(family), Random(seed)
    # Clients that re-serialise echoes do so for objects only.
    style = replace(FAMILIES[family], reserialize_echoes=False)
    generator = MalformedPlanGenerator(Random(seed), malformed, reasoning=family == "qwen3", style=style)
    plan = generator.generate(count)
    runner = PlanRunner(Session("s", codec, history=history), MalformedReplyEncoder(codec, Random(seed)))
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    return runner


@pytest.mark.parametrize(
    ("family", "malformed"),
    [("qwen3", MALFORMED), ("qwen2_5", VALUES), ("llama3_2", VALUES), ("mistral_nemo", VALUES)],
    ids=["qwen3", "qwen2_5", "llama3_2", "mistral_nemo"],
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6), history=st.sampled_from(["template", "verbatim"]))
def test_the_contract_holds_with_malformed_calls(
    family: str, malformed: list[str], seed: int, count: int, history: str
) -> None:
    verify(family, run_malformed_plan(family, seed, count, history, malformed))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6), history=st.sampled_from(["template", "verbatim"]))
def test_malformed_calls_do_not_fork_if_the_template_quotes_them(seed: int, count: int, history: str) -> None:
    runner = run_malformed_plan("qwen2_5", seed, count, history, NO_JSON)
    tree = runner.session.tree
    for one in runner.executed:
        assert one.call.rewrite_reason == ""
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            path = tree.path_ids(tree.nodes[node_id]).tolist()
            assert path == [*one.prompt_ids.tolist(), *ids.tolist()]
    assert timelines_of(tree)
