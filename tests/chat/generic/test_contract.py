"""The contract with every real template: random behaviours, oddly tokenized replies, both histories.

`verify` is the whole of it; the last tests break the codec on purpose and show that `verify` sees it.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import Session, export_samples, timelines_of
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.field_markers import SpanFinder, TextSpan
from branchline.chat.generic.prompt_builder import PromptBuilder
from branchline.core.message import Message
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator, PlannedCall
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.tree.tree import Tree
from tests.chat.families import FAMILIES, load_codec
from tests.chat.harness import without_whitespace

seeds = st.integers(0, 2**32)
steps = st.integers(0, 6)
histories = st.sampled_from(["template", "verbatim"])
families = pytest.mark.parametrize("family", FAMILIES)
some = settings(max_examples=25, deadline=None)


def plan_of(family: str, seed: int, count: int) -> list[PlannedCall]:
    reasoning = family == "qwen3"
    return PlanGenerator(Random(seed), reasoning=reasoning, style=FAMILIES[family]).generate(count)


def run_plan(
    family: str, seed: int, count: int, history: str = "template", *, odd: bool = True
) -> PlanRunner:
    codec, rng = load_codec(family), Random(seed)
    plan = plan_of(family, seed, count)
    session = Session("s", codec, history=history)  # type: ignore[arg-type]
    player = PlanRunner(session, TemplateReplyEncoder(codec, Random(seed), vary_tokenization=odd))
    player.run(plan, causal_order(plan, rng), overlap=rng)
    return player


def plain_text(codec: GenericCodec, messages: list[Message], planned: PlannedCall) -> str:
    """The conversation as the template writes it, nothing reused."""
    return codec.probe(tools=bool(planned.tools)).render(messages, [dict(tool) for tool in planned.tools])


def verify(family: str, player: PlanRunner) -> None:
    codec, tree, history = load_codec(family), player.session.tree, player.session.history
    for one in player.executed:
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            path = tree.path_ids(tree.nodes[node_id])
            assert path.tolist() == [*one.prompt_ids.tolist(), *ids.tolist()]
        shown = tree.nodes[one.call.prompt_node].path()
        if history == "template":
            plain = plain_text(codec, [node.message for node in shown], one.planned)
            assert without_whitespace(codec.decode(one.prompt_ids)) == without_whitespace(plain)
        fork = tree.nodes[one.call.outputs[0]]
        for place, node in enumerate(shown):
            if node.sampled_ids is not None and not node.ends_sampled:
                # Shown otherwise than it was sampled: the template must really have dropped something.
                assert family == "qwen3"
                assert node.message.reasoning_content
                assert any(later.message.role == "user" for later in shown[place + 1 :])
        if one.call.rewrite_reason:
            # Where users must not speak twice, a second one is written into what the first had said.
            roles = [node.message.role for node in shown]
            is_joined = family == "gemma3" and ("user", "user") in pairwise(roles)
            assert family in ("qwen3", "mistral_nemo") or is_joined, (
                f"{fork} forks: {one.call.rewrite_reason}"
            )
    assert export_samples(tree).report.is_balanced


@families
@some
@example(seed=231223, count=6, history="template")  # a stripped thought is shown again
@given(seed=seeds, count=steps, history=histories)
def test_every_call_is_exact_and_forks_only_where_the_template_drops_something(
    family: str, seed: int, count: int, history: str
) -> None:
    verify(family, run_plan(family, seed, count, history))


def timeline_set(tree: Tree) -> list[tuple[bytes, bytes]]:
    return sorted((line.ids.tobytes(), line.mask.tobytes()) for line in timelines_of(tree))


@families
@settings(max_examples=12, deadline=None)
@given(seed=seeds, count=steps, history=histories)
def test_the_order_of_calls_does_not_matter(family: str, seed: int, count: int, history: str) -> None:
    codec = load_codec(family)
    plan = plan_of(family, seed, count)
    sets = []
    for order in (None, causal_order(plan, Random(seed + 1))):
        # Plain spelling: one message is always the same ids, whoever speaks first.
        player = PlanRunner(
            Session("s", codec, history=history),
            TemplateReplyEncoder(codec, Random(0), vary_tokenization=False),
        )  # type: ignore[arg-type]
        player.run(plan, order)
        sets.append(timeline_set(player.session.tree))
    assert sets[0] == sets[1]


@families
@settings(max_examples=12, deadline=None)
@given(seed=seeds, count=steps)
def test_plainly_spelled_replies_give_the_ids_of_the_plain_render(family: str, seed: int, count: int) -> None:
    codec = load_codec(family)
    player = run_plan(family, seed, count, odd=False)
    for one in player.executed:
        shown = player.session.tree.nodes[one.call.prompt_node].path()
        plain = plain_text(codec, [node.message for node in shown], one.planned)
        assert one.prompt_ids.tolist() == codec.tokenizer.encode(plain).tolist()


@families
@settings(max_examples=12, deadline=None)
@given(seed=seeds, count=steps)
def test_what_is_remembered_changes_nothing(family: str, seed: int, count: int) -> None:
    """The cheap path (compare with the last render) equals the full one (spell out what was recorded)."""
    codec = load_codec(family)
    warm = run_plan(family, seed, count)
    rng = Random(seed)
    plan = plan_of(family, seed, count)
    cold = PlanRunner(Session("s", codec), TemplateReplyEncoder(codec, Random(seed)))
    cold.prepare = _clearing_prompt_cache(codec, cold.prepare)  # type: ignore[method-assign]
    cold.run(plan, causal_order(plan, rng), overlap=rng)
    assert [one.prompt_ids.tolist() for one in cold.executed] == [
        one.prompt_ids.tolist() for one in warm.executed
    ]
    assert timeline_set(cold.session.tree) == timeline_set(warm.session.tree)


def _clearing_prompt_cache(codec: GenericCodec, prepare: Any) -> Any:
    def forget_and_prepare(planned: PlannedCall) -> Any:
        codec.prompt_cache.clear()
        return prepare(planned)

    return forget_and_prepare


# -- broken on purpose: each of these must be caught -------------------------------------------------


def detects_violation(family: str) -> bool:
    for seed in range(30):
        try:
            verify(family, run_plan(family, seed, 6))
        except AssertionError:
            return True
    return False


def test_a_codec_that_ignores_what_the_template_drops_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    find = SpanFinder.find

    def careless(self: SpanFinder, text: str, index: int, message: Message, sampled: Any, start: int) -> Any:
        found = find(self, text, index, message, sampled, start)
        if not isinstance(found, TextSpan):
            stop = self.find_next_stop(text, start)
            return TextSpan(start, stop[1]) if stop else found
        return found

    monkeypatch.setattr(SpanFinder, "find", careless)
    assert detects_violation("qwen3")


def test_a_codec_that_encodes_a_sampled_message_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    monkeypatch.setattr(PromptBuilder, "_is_marked", lambda self, index: False)
    assert detects_violation("qwen3")
    assert detects_violation("qwen2_5")


def test_a_codec_that_loses_a_separator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    find = SpanFinder.find

    def greedy(self: SpanFinder, *about: Any) -> Any:
        found = find(self, *about)
        return TextSpan(found.start, found.end + 12) if isinstance(found, TextSpan) else found

    monkeypatch.setattr(SpanFinder, "find", greedy)
    assert detects_violation("qwen2_5")
