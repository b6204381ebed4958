"""Role rules: messages in an order that a template refuses are shown in one that it accepts, without loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Message, ToolCall
from branchline.chat.generic.template_probe import TemplateProbe
from branchline.chat.template_traits import UNRESTRICTED_ROLES, RoleRules, TemplateTraits
from branchline.core.errors import TemplateError
from branchline.core.message import Media
from tests.chat.families import FAMILIES, load_codec, load_codec_with_template
from tests.chat.harness import TOOLS, SessionDriver, assistant, system, user

STRICT = RoleRules(
    allows_late_system=False,
    must_alternate=True,
    allows_user_after_tool=False,
    allows_consecutive_system=False,
)
CALL = assistant("", ToolCall("look", '{"at": 1}', "abcdefghi"))
RESULT = Message("tool", "seven", tool_call_id="abcdefghi", name="look")
PLAIN = (
    "{% for m in messages %}{{ CHECK }}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATE_SYSTEM = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"

ALTERNATING = (
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{% if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endif %}{% endfor %}"
)


# Probed rules


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_2", "deepseek_v3"])
def test_most_templates_have_no_rules(family: str) -> None:
    codec = load_codec(family)
    for tools in (False, True):
        assert codec.profile(tools=tools).traits.role_rules == UNRESTRICTED_ROLES


def test_mistral_has_all_rules_and_gemma_those_for_its_roles() -> None:
    nemo, gemma = load_codec("mistral_nemo"), load_codec("gemma3")
    assert nemo.profile(tools=True).traits.role_rules == STRICT
    assert gemma.profile().traits.role_rules == RoleRules(
        allows_late_system=False, must_alternate=True, allows_consecutive_system=False
    )


def test_a_template_that_refuses_only_late_system_messages_keeps_user_messages_separate() -> None:
    codec = load_codec_with_template(PLAIN.replace("{{ CHECK }}", LATE_SYSTEM))
    assert codec.profile().traits.role_rules == RoleRules(
        allows_late_system=False, allows_consecutive_system=False
    )
    assert "system\nOne.\n\nTwo.<|im_end|>" in SessionDriver(codec).render(
        system("One."), system("Two."), user("a")
    )
    text = SessionDriver(codec).render(system("s"), user("a"), system("b"), user("c"))
    roles = [part.partition("\n")[0] for part in text.split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "user", "user", "assistant"]


def test_late_system_messages_that_a_template_drops_become_user_messages() -> None:
    skipped = PLAIN.replace("{{ CHECK }}", "{% if m.role != 'system' or loop.first %}").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    assert "<|im_start|>user\nBe brief." in SessionDriver(load_codec_with_template(skipped)).render(
        user("a"), system("Be brief.")
    )


def test_a_template_whose_users_must_alternate_keeps_system_messages_separate() -> None:
    codec = load_codec_with_template(ALTERNATING + PLAIN.replace("{{ CHECK }}", ""))
    assert codec.profile().traits.role_rules == RoleRules(must_alternate=True)
    text = SessionDriver(codec).render(system("One."), system("Two."), user("a"), user("b"))
    assert "system\nOne.<|im_end|>\n<|im_start|>system\nTwo.<|im_end|>" in text
    assert "user\na\n\nb<|im_end|>" in text


def test_a_template_that_accepts_no_order_has_no_rules() -> None:
    refusing = PLAIN.replace("{{ CHECK }}", "{% if not loop.first %}{{ raise_exception('no') }}{% endif %}")
    codec = load_codec_with_template(refusing)
    assert codec.profile().traits.role_rules == UNRESTRICTED_ROLES
    with pytest.raises(TemplateError, match="no"):
        SessionDriver(codec).prepare(user("a"), assistant("b"), user("c"))


# Rendering


@pytest.mark.parametrize("family", ["mistral_nemo", "gemma3"])
def test_consecutive_user_messages_become_one(family: str) -> None:
    driver = SessionDriver(load_codec(family))
    assert "first\n\nsecond" in driver.render(user("first"), user("second"))
    assert "first\n\nBe brief.\n\nsecond" in driver.render(user("first"), system("Be brief."), user("second"))
    assert "One.\n\nTwo." in driver.render(system("One."), system("Two."), user("first"))


@pytest.mark.parametrize("family", ["mistral_nemo", "gemma3"])
def test_a_system_message_after_a_reply_keeps_the_sampled_ids(family: str) -> None:
    driver = SessionDriver(load_codec(family))
    stop = {"mistral_nemo": "</s>", "gemma3": "<end_of_turn>"}[family]
    node = driver.commit_reply([user("p")], [*driver.encode("yes"), *driver.encode(stop)])
    turn = driver.prepare(user("p"), node.message, system("Be brief."), user("q"))
    assert turn.parent is node
    assert not turn.rewrite_reason
    rest = driver.decode(turn.prompt_ids.tolist()[node.end :])
    assert "Be brief.\n\nq" in rest
    assert len(turn.message_tokens) == 2
    assert "Be brief." in driver.decode(turn.message_tokens[0].ids.tolist())
    assert "q" in driver.decode(turn.message_tokens[1].ids.tolist())


def test_a_user_message_after_a_result_becomes_part_of_it() -> None:
    driver = SessionDriver(load_codec("mistral_nemo"))
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"at": 1}, "id": "abcdefghi"}]'
    node = driver.commit_reply([user("p")], [*driver.encode(text), *driver.encode("</s>")], tools=TOOLS)
    turn = driver.prepare(user("p"), node.message, RESULT, user("Hurry."), tools=TOOLS)
    assert turn.parent is node
    assert "seven\n\nHurry." in driver.decode(turn.prompt_ids.tolist())


def test_the_path_is_found_without_the_prompt_cache() -> None:
    driver = SessionDriver(load_codec("gemma3"))
    first = [user("p"), system("Be brief.")]
    node = driver.commit_reply(first, [*driver.encode("yes"), *driver.encode("<end_of_turn>")])
    driver.codec.prompt_cache.clear()
    assert driver.prepare(*first, node.message, user("q"), system("Briefer.")).parent is node


def test_images_in_merged_messages_stay_parts() -> None:
    image = Message("user", "look", parts=("look", Media("image", "cat")))
    (written,) = TemplateTraits(role_rules=STRICT).to_template_messages([user("see"), image, image, user("")])
    assert [part.get("text") for part in written["content"]] == ["see\n\nlook", None, "look", None]
    assert [part["type"] for part in written["content"]] == ["text", "image"] * 2
    codec = load_codec("gemma3")
    assert "see\n\nlook<start_of_image>" in codec.probe().render([user("see"), image])


def test_results_keep_their_call_ids_if_messages_are_merged() -> None:
    written = TemplateTraits(role_rules=STRICT).to_template_messages(
        [user("a"), user("b"), CALL, RESULT, system("c"), assistant("d")]
    )
    assert [raw["role"] for raw in written] == ["user", "assistant", "tool", "assistant"]
    assert written[2]["tool_call_id"] == written[1]["tool_calls"][0]["id"]
    assert written[2]["content"] == "seven\n\nc"


def test_what_mistral_accepts_is_not_changed() -> None:
    codec = load_codec("mistral_nemo")
    adapted = codec.probe(tools=True)
    plain = adapted.with_traits(role_rules=UNRESTRICTED_ROLES)
    make: dict[str, Callable[[str], Message]] = {
        "s": system,
        "u": user,
        "a": assistant,
        "c": lambda _: CALL,
        "r": lambda _: RESULT,
    }
    accepted = shown = 0
    for count in range(1, 6):
        # Of the longest ones, a part: all would take most of ten seconds.
        for roles in islice(product(make, repeat=count), 0, None, 1 if count < 5 else 7):
            messages = [make[role](f"w{index}.") for index, role in enumerate(roles)]
            text, adapted_text = (_render(probe, messages) for probe in (plain, adapted))
            assert not text or adapted_text == text, roles
            accepted, shown = accepted + bool(text), shown + bool(adapted_text)
    assert 0 < 2 * accepted < shown


def _render(probe: TemplateProbe, messages: list[Message]) -> str:
    return probe.render_or_empty(messages, TOOLS)


def test_a_user_message_may_be_due_after_a_result() -> None:
    traits = TemplateTraits(role_rules=STRICT)
    for before, role in (([], "user"), ([user("a"), assistant("b")], "user"), ([user("a")], "tool")):
        written = traits.to_template_messages([*before, CALL, RESULT, user("c")])
        assert written[-1]["role"] == role
        assert written[-1]["content"].endswith("c")


# Properties

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(ROLES, max_size=12), st.builds(RoleRules, *[st.booleans()] * 4))
def test_every_message_occurs_once_and_in_order(roles: list[Any], rules: RoleRules) -> None:
    written = [{"role": role, "content": f"w{index}."} for index, role in enumerate(roles)]
    ordered = rules.apply(written)
    assert "".join(raw["content"].replace("\n\n", "") for raw in ordered) == "".join(
        raw["content"] for raw in written
    )
    assert rules.apply(ordered) == ordered
    for one, other in pairwise(raw["role"] for raw in ordered):
        assert not (rules.must_alternate and one == other == "user")
        assert rules.allows_consecutive_system or not (one == other == "system")
        assert rules.allows_user_after_tool or rules.must_alternate or (one, other) != ("tool", "user")
        assert rules.allows_late_system or other != "system" or one == "system"


@given(st.lists(ROLES, max_size=12), st.integers(0, 12))
def test_earlier_messages_do_not_change_as_a_conversation_grows(roles: list[Any], cut: int) -> None:
    written = [{"role": role, "content": f"w{index}."} for index, role in enumerate(roles)]
    whole, prefix = STRICT.apply(written), STRICT.apply(written[:cut])
    if prefix:
        *unchanged, last = prefix
        assert whole[: len(unchanged)] == unchanged
        assert whole[len(unchanged)]["role"] == last["role"]
        assert whole[len(unchanged)]["content"].startswith(last["content"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(data=st.data())
@settings(max_examples=25)
def test_every_order_of_user_and_system_messages_is_accepted(family: str, data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=8))
    messages = [user("w0.")]
    for index, role in enumerate(roles, start=1):
        if role == messages[-1].role == "assistant":
            role = "user"  # No two replies in a row.
        messages.append(Message(role, f"w{index}."))  # type: ignore[arg-type]
    text = SessionDriver(load_codec(family)).render(*messages)
    assert all(f"w{index}." in text for index in range(len(messages)))


PARTS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- for part in m.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Iterates over content, as the templates of Idefics3, LLaVA and SmolVLM: text that is no part vanishes."""


def test_text_is_passed_as_a_part_to_a_template_that_reads_only_parts() -> None:
    codec = load_codec_with_template(PARTS)
    assert codec.profile().traits.requires_content_parts
    driver = SessionDriver(codec)
    node = driver.commit_reply([system("s"), user("hi")], driver.encode("yes<|im_end|>"))
    turn = driver.prepare(system("s"), user("hi"), node.message, user("and"))
    assert turn.parent is node
    assert driver.decode(turn.prompt_ids.tolist()) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "yes<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_text_stays_text_for_templates_that_read_it(family: str) -> None:
    assert not load_codec(family).profile().traits.requires_content_parts
