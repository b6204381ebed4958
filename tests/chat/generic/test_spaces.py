"""Tokenizers that insert or remove spaces: prompts show the rendered text, also after forks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Session, export_samples
from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import as_ids
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator, ReplyStyle
from branchline.testing.reply_encoder import TemplateReplyEncoder
from tests.chat.harness import (
    SessionDriver,
    SpaceRule,
    assistant,
    save_sentencepiece,
    user,
    without_whitespace,
)

PHI_LIKE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
LLAMA_2_LIKE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}"
    "{% else %}{{ '[TOOL_RESULTS]' + m.role + ': ' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
MISTRAL_LIKE = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ('</s>' if m.role == 'assistant' else '\\n') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {
    "phi": (PHI_LIKE, ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"), "<|end|>"),
    "llama_2": (LLAMA_2_LIKE, ("<s>", "</s>"), "</s>"),
    "mistral": (
        MISTRAL_LIKE,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "plain": (PLAIN, ("</s>",), "</s>"),
}
templates = pytest.mark.parametrize("name", TEMPLATES)
spaces = pytest.mark.parametrize("space", ["prepend", "always", "first", "never"])
strips = pytest.mark.parametrize("strip", ["", "l", "r", "lr"])
some = settings(max_examples=4, deadline=None)


@cache
def load(name: str, space: SpaceRule, strip: str) -> GenericCodec:
    template, special, eos = TEMPLATES[name]
    path = save_sentencepiece(
        Path(mkdtemp()) / "model",
        space,
        special=special,
        lstrip="l" in strip,
        rstrip="r" in strip,
        chat_template=template,
        eos_token=eos,
    )
    return GenericCodec.open(path)


@templates
@spaces
@strips
@pytest.mark.parametrize("clear_cache", [False, True])
def test_prompts_after_replies_have_the_ids_of_the_whole_text(
    name: str, space: SpaceRule, strip: str, clear_cache: bool
) -> None:
    codec = load(name, space, strip)
    driver = SessionDriver(codec)
    history = [user("[TOOL_CALLS] first"), user(" two\n")]
    after = codec.last_prompt_id(tools=False)
    for reply in ("hello there", "the [TOOL_CALLS]"):
        rendered = codec.render_reply(assistant(reply))
        text = rendered[0] if rendered is not None else f" {reply}"
        if "l" in strip:
            # The tokenizer would remove spaces before the stop token.
            text = text.rstrip()
        ids = [*codec.segment_encoder.encode(text, after).tolist(), *codec.stop_ids]
        node = driver.commit_reply(history, ids)
        history += [assistant(reply), user("\n more"), user("[TOOL_CALLS]")]
        if clear_cache:
            codec.prompt_cache.clear()
        turn = driver.prepare(*history)
        assert turn.parent is node
        plain = codec.probe().render(history)
        assert turn.prompt_ids.tolist() == codec.tokenizer.encode(plain).tolist()
    # A fork: another first message, so everything is rendered again.
    other = [user("OOL [TOOL_CALLS]"), *history[1:]]
    turn = driver.prepare(*other)
    shown = [*(node.message for node in turn.parent.path()), *turn.messages]
    plain = codec.probe().render(shown)
    assert without_whitespace(codec.decode(turn.prompt_ids)) == without_whitespace(plain)
    if name == "phi":
        # In the others the replies of the tree start with a space that was sampled.
        assert turn.prompt_ids.tolist() == codec.tokenizer.encode(plain).tolist()


@templates
@spaces
def test_decoded_prompts_show_the_rendered_text(name: str, space: SpaceRule) -> None:
    codec = load(name, space, "")
    messages = [user("[TOOL_CALLS]\n"), assistant("hello  the"), user("x")]
    plain = codec.probe().render(messages)
    decoded = codec.decode(codec.extend((), [NewMessage(message) for message in messages]).ids)
    if space in ("always", "first"):
        # These encode ` x` and `x` alike where a text starts.
        assert without_whitespace(decoded) == without_whitespace(plain)
    else:
        assert decoded == plain


@templates
@spaces
@strips
@some
@given(seed=st.integers(0, 2**32), history=st.sampled_from(["template", "verbatim"]))
def test_random_conversations_are_exact_and_show_the_rendered_text(
    name: str, space: SpaceRule, strip: str, seed: int, history: str
) -> None:
    codec, rng = load(name, space, strip), Random(seed)
    style = ReplyStyle(max_tool_calls=0)
    plan = PlanGenerator(Random(seed), reasoning=False, style=style).generate(5)
    runner = PlanRunner(
        Session("s", codec, history=history),  # type: ignore[arg-type]
        TemplateReplyEncoder(codec, Random(seed)),
    )
    if rng.random() < 0.5:
        codec.prompt_cache.clear()
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    tree = runner.session.tree
    for one in runner.executed:
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            path = tree.path_ids(tree.nodes[node_id])
            assert path.tolist() == [*one.prompt_ids.tolist(), *ids.tolist()]
        if history == "template":
            shown = [node.message for node in tree.nodes[one.call.prompt_node].path()]
            plain = codec.probe(tools=bool(one.planned.tools)).render(
                shown, [dict(tool) for tool in one.planned.tools]
            )
            assert without_whitespace(codec.decode(one.prompt_ids)) == without_whitespace(plain)
    assert export_samples(tree).report.is_balanced


@templates
def test_segments_are_encoded_separately_only_if_this_changes_nothing(name: str) -> None:
    assert not load(name, "prepend", "").segment_encoder.encodes_by_segment
    assert not load(name, "always", "").segment_encoder.encodes_by_segment
    assert not load(name, "first", "").segment_encoder.encodes_by_segment
    assert load(name, "never", "").segment_encoder.encodes_by_segment
    assert not load(name, "never", "r").segment_encoder.encodes_by_segment


def test_the_id_before_a_text_decides_whether_a_space_is_inserted() -> None:
    codec = load("llama_2", "prepend", "")
    encoder = codec.segment_encoder
    end = codec.tokenizer.added_tokens["</s>"]
    shown = [codec.token_bytes(encoder.encode("hello", after).tolist()[0]) for after in (None, end, 300)]
    assert shown == [b" hello", b" hello", b"hello"]
    parts, moves = encoder.encode_parts(["<s>x", "\n", "hello</s>"], 300)
    assert [codec.decode(as_ids(part)).strip(" ") for part in parts] == ["<s>x", "\n", "hello</s>"]
    assert moves == [0, 0]
