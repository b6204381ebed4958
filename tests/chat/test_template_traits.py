"""Words between turns: templates that mind whose turn it is are shown what they take, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise, product
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
    "{% set ns = namespace(said=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{% if (m.role == 'user') != (ns.said % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}"
    "{% set ns.said = ns.said + 1 %}{% endif %}{% endfor %}"
)


# What templates take


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_2", "deepseek_v3"])
def test_most_templates_mind_nothing(family: str) -> None:
    codec = load_codec(family)
    for tools in (False, True):
        assert codec.profile(tools=tools).traits.role_rules == UNRESTRICTED_ROLES


def test_mistral_minds_all_of_it_and_gemma_all_that_it_knows() -> None:
    nemo, gemma = load_codec("mistral_nemo"), load_codec("gemma3")
    assert nemo.profile(tools=True).traits.role_rules == STRICT
    assert gemma.profile().traits.role_rules == RoleRules(
        allows_late_system=False, must_alternate=True, allows_consecutive_system=False
    )


def test_a_template_that_minds_only_late_system_messages_keeps_the_rest_apart() -> None:
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


def test_a_template_that_drops_late_system_messages_is_shown_them_as_words_of_the_user() -> None:
    skipped = PLAIN.replace("{{ CHECK }}", "{% if m.role != 'system' or loop.first %}").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    assert "<|im_start|>user\nBe brief." in SessionDriver(load_codec_with_template(skipped)).render(
        user("a"), system("Be brief.")
    )


def test_a_template_in_which_only_user_and_assistant_alternate_keeps_system_messages_apart() -> None:
    codec = load_codec_with_template(ALTERNATING + PLAIN.replace("{{ CHECK }}", ""))
    assert codec.profile().traits.role_rules == RoleRules(must_alternate=True)
    text = SessionDriver(codec).render(system("One."), system("Two."), user("a"), user("b"))
    assert "system\nOne.<|im_end|>\n<|im_start|>system\nTwo.<|im_end|>" in text
    assert "user\na\n\nb<|im_end|>" in text


def test_a_template_that_takes_nothing_is_left_as_it_is() -> None:
    refusing = PLAIN.replace("{{ CHECK }}", "{% if not loop.first %}{{ raise_exception('no') }}{% endif %}")
    codec = load_codec_with_template(refusing)
    assert codec.profile().traits.role_rules == UNRESTRICTED_ROLES
    with pytest.raises(TemplateError, match="no"):
        SessionDriver(codec).prepare(user("a"), assistant("b"), user("c"))


# How they are shown


@pytest.mark.parametrize("family", ["mistral_nemo", "gemma3"])
def test_what_the_user_says_twice_in_a_row_is_one_message(family: str) -> None:
    talk = SessionDriver(load_codec(family))
    assert "first\n\nsecond" in talk.render(user("first"), user("second"))
    assert "first\n\nBe brief.\n\nsecond" in talk.render(user("first"), system("Be brief."), user("second"))
    assert "One.\n\nTwo." in talk.render(system("One."), system("Two."), user("first"))


@pytest.mark.parametrize("family", ["mistral_nemo", "gemma3"])
def test_a_reminder_behind_a_reply_goes_on_behind_the_sampled_ids(family: str) -> None:
    talk = SessionDriver(load_codec(family))
    stop = {"mistral_nemo": "</s>", "gemma3": "<end_of_turn>"}[family]
    node = talk.commit_reply([user("p")], [*talk.encode("yes"), *talk.encode(stop)])
    turn = talk.prepare(user("p"), node.message, system("Be brief."), user("q"))
    assert turn.parent is node
    assert not turn.rewrite_reason
    behind = talk.decode(turn.prompt_ids.tolist()[node.end :])
    assert "Be brief.\n\nq" in behind
    assert len(turn.message_tokens) == 2
    assert "Be brief." in talk.decode(turn.message_tokens[0].ids.tolist())
    assert "q" in talk.decode(turn.message_tokens[1].ids.tolist())


def test_words_beside_a_result_stand_in_it_and_the_call_keeps_its_ids() -> None:
    talk = SessionDriver(load_codec("mistral_nemo"))
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"at": 1}, "id": "abcdefghi"}]'
    node = talk.commit_reply([user("p")], [*talk.encode(text), *talk.encode("</s>")], tools=TOOLS)
    turn = talk.prepare(user("p"), node.message, RESULT, user("Hurry."), tools=TOOLS)
    assert turn.parent is node
    assert "seven\n\nHurry." in talk.decode(turn.prompt_ids.tolist())


def test_the_path_is_found_again_without_anything_remembered() -> None:
    talk = SessionDriver(load_codec("gemma3"))
    first = [user("p"), system("Be brief.")]
    node = talk.commit_reply(first, [*talk.encode("yes"), *talk.encode("<end_of_turn>")])
    talk.codec.prompt_cache.clear()
    assert talk.prepare(*first, node.message, user("q"), system("Briefer.")).parent is node


def test_pictures_beside_words_stay_pictures_and_words_stay_apart() -> None:
    picture = Message("user", "look", parts=("look", Media("image", "cat")))
    (written,) = TemplateTraits(role_rules=STRICT).to_template_messages(
        [user("see"), picture, picture, user("")]
    )
    assert [part.get("text") for part in written["content"]] == ["see\n\nlook", None, "look", None]
    assert [part["type"] for part in written["content"]] == ["text", "image"] * 2
    codec = load_codec("gemma3")
    assert "see\n\nlook<start_of_image>" in codec.probe().render([user("see"), picture])


def test_results_keep_their_calls_where_words_were_joined() -> None:
    written = TemplateTraits(role_rules=STRICT).to_template_messages(
        [user("a"), user("b"), CALL, RESULT, system("c"), assistant("d")]
    )
    assert [raw["role"] for raw in written] == ["user", "assistant", "tool", "assistant"]
    assert written[2]["tool_call_id"] == written[1]["tool_calls"][0]["id"]
    assert written[2]["content"] == "seven\n\nc"


def test_nothing_that_mistral_takes_is_shown_otherwise() -> None:
    codec = load_codec("mistral_nemo")
    adapted = codec.probe(tools=True)
    plain = adapted.with_traits(role_rules=UNRESTRICTED_ROLES)
    speak = {"s": system, "u": user, "a": assistant, "c": lambda _: CALL, "r": lambda _: RESULT}
    taken = shown = 0
    for count in range(1, 6):
        for roles in product(speak, repeat=count):
            messages = [speak[role](f"w{place}.") for place, role in enumerate(roles)]
            text, adapted_text = (_render(probe, messages) for probe in (plain, adapted))
            assert not text or adapted_text == text, roles
            taken, shown = taken + bool(text), shown + bool(adapted_text)
    assert 0 < 2 * taken < shown


def _render(probe: TemplateProbe, messages: list[Message]) -> str:
    return probe.render_or_empty(messages, TOOLS)


def test_behind_a_result_it_may_be_the_users_turn() -> None:
    dialect = TemplateTraits(role_rules=STRICT)
    for before, role in (([], "user"), ([user("a"), assistant("b")], "user"), ([user("a")], "tool")):
        written = dialect.to_template_messages([*before, CALL, RESULT, user("c")])
        assert written[-1]["role"] == role
        assert written[-1]["content"].endswith("c")


# Properties

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(ROLES, max_size=12), st.builds(RoleRules, *[st.booleans()] * 4))
def test_every_word_is_there_once_and_in_order(roles: list[Any], turns: RoleRules) -> None:
    written = [{"role": role, "content": f"w{place}."} for place, role in enumerate(roles)]
    ordered = turns.apply(written)
    assert "".join(raw["content"].replace("\n\n", "") for raw in ordered) == "".join(
        raw["content"] for raw in written
    )
    assert turns.apply(ordered) == ordered
    for one, other in pairwise(raw["role"] for raw in ordered):
        assert not (turns.must_alternate and one == other == "user")
        assert turns.allows_consecutive_system or not (one == other == "system")
        assert turns.allows_user_after_tool or turns.must_alternate or (one, other) != ("tool", "user")
        assert turns.allows_late_system or other != "system" or one == "system"


@given(st.lists(ROLES, max_size=12), st.integers(0, 12))
def test_what_was_shown_stays_where_it_stood_as_a_conversation_goes_on(roles: list[Any], cut: int) -> None:
    written = [{"role": role, "content": f"w{place}."} for place, role in enumerate(roles)]
    whole, begun = STRICT.apply(written), STRICT.apply(written[:cut])
    *settled, last = begun or [{"role": "", "content": ""}]
    assert whole[: len(settled)] == settled
    if begun:
        assert whole[len(settled)]["role"] == last["role"]
        assert whole[len(settled)]["content"].startswith(last["content"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(data=st.data())
@settings(max_examples=25)
def test_no_order_of_users_and_reminders_is_refused(family: str, data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(["system", "user", "said"]), min_size=1, max_size=8))
    messages = [user("w0.")]
    for place, role in enumerate(roles, start=1):
        if role == "said" and messages[-1].role == "assistant":
            role = "user"  # Nobody answers twice.
        messages.append(assistant(f"w{place}.") if role == "said" else Message(role, f"w{place}."))  # type: ignore[arg-type]
    text = SessionDriver(load_codec(family)).render(*messages)
    assert all(f"w{place}." in text for place in range(len(messages)))
