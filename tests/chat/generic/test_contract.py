"""The contract with every real template: random plans, varied tokenization, both history policies.

`verify` checks it; the last tests break the codec on purpose to show that `verify` detects it.
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
from branchline.chat.generic.prompt_builder import PromptBuilder
from branchline.chat.generic.span_finder import SpanFinder, TextSpan
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
    family: str, seed: int, count: int, history: str = "template", *, vary_tokenization: bool = True
) -> PlanRunner:
    codec, rng = load_codec(family), Random(seed)
    plan = plan_of(family, seed, count)
    session = Session("s", codec, history=history)  # type: ignore[arg-type]
    runner = PlanRunner(
        session, TemplateReplyEncoder(codec, Random(seed), vary_tokenization=vary_tokenization)
    )
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    return runner


def plain_text(codec: GenericCodec, messages: list[Message], planned: PlannedCall) -> str:
    """Returns the conversation as the template renders it, without reused ids."""
    return codec.probe(tools=bool(planned.tools)).render(messages, [dict(tool) for tool in planned.tools])


def verify(family: str, runner: PlanRunner) -> None:
    codec, tree, history = load_codec(family), runner.session.tree, runner.session.history
    for one in runner.executed:
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            path = tree.path_ids(tree.nodes[node_id])
            assert path.tolist() == [*one.prompt_ids.tolist(), *ids.tolist()]
        shown = tree.nodes[one.call.prompt_node].path()
        if history == "template":
            plain = plain_text(codec, [node.message for node in shown], one.planned)
            assert without_whitespace(codec.decode(one.prompt_ids)) == without_whitespace(plain)
        fork = tree.nodes[one.call.outputs[0]]
        for index, node in enumerate(shown):
            if node.sampled_ids is not None and not node.ends_sampled:
                # Not shown as sampled: the template must have dropped something.
                assert family == "qwen3"
                assert node.message.reasoning_content
                assert any(later.message.role == "user" for later in shown[index + 1 :])
        if one.call.rewrite_reason:
            # If roles must alternate, a second user message is merged into the first.
            roles = [node.message.role for node in shown]
            is_merged = family == "gemma3" and ("user", "user") in pairwise(roles)
            assert family in ("qwen3", "mistral_nemo") or is_merged, (
                f"{fork} forks: {one.call.rewrite_reason}"
            )
    assert export_samples(tree).report.is_balanced


@families
@some
@example(seed=231223, count=6, history="template")  # stripped reasoning is shown again
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
        # Canonical tokenization: a message has the same ids in every order.
        runner = PlanRunner(
            Session("s", codec, history=history),  # type: ignore[arg-type]
            TemplateReplyEncoder(codec, Random(0), vary_tokenization=False),
        )
        runner.run(plan, order)
        sets.append(timeline_set(runner.session.tree))
    assert sets[0] == sets[1]


@families
@settings(max_examples=12, deadline=None)
@example(seed=15141, count=4)  # A reply between two questions is deleted, and Nemo joins the questions.
@given(seed=seeds, count=steps)
def test_canonical_replies_give_the_ids_of_the_plain_render(family: str, seed: int, count: int) -> None:
    codec = load_codec(family)
    runner = run_plan(family, seed, count, vary_tokenization=False)
    for one in runner.executed:
        shown = runner.session.tree.nodes[one.call.prompt_node].path()
        plain = plain_text(codec, [node.message for node in shown], one.planned)
        assert one.prompt_ids.tolist() == codec.tokenizer.encode(plain).tolist()


@families
@settings(max_examples=12, deadline=None)
@given(seed=seeds, count=steps)
def test_the_prompt_cache_does_not_change_prompts(family: str, seed: int, count: int) -> None:
    """Comparing with the remembered prompt equals decoding the recorded ids."""
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
    def clear_and_prepare(planned: PlannedCall) -> Any:
        codec.prompt_cache.clear()
        return prepare(planned)

    return clear_and_prepare


# -- broken codecs, each of which must be detected ---------------------------------------------------


def detects_violation(family: str) -> bool:
    for seed in range(30):
        try:
            verify(family, run_plan(family, seed, 6))
        except AssertionError:
            return True
    return False


def test_a_codec_that_ignores_dropped_text_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    find = SpanFinder.find_span

    def ignoring(self: SpanFinder, text: str, index: int, message: Message, sampled: Any, start: int) -> Any:
        found = find(self, text, index, message, sampled, start)
        if not isinstance(found, TextSpan):
            stop = self.find_next_stop_token(text, start)
            return TextSpan(start, stop[1]) if stop else found
        return found

    monkeypatch.setattr(SpanFinder, "find_span", ignoring)
    assert detects_violation("qwen3")


def test_a_codec_that_encodes_a_sampled_message_again_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    monkeypatch.setattr(PromptBuilder, "_is_marked", lambda self, index: False)
    assert detects_violation("qwen3")
    assert detects_violation("qwen2_5")


def test_a_codec_that_loses_a_separator_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    load_codec("qwen3")
    find = SpanFinder.find_span

    def greedy(self: SpanFinder, *fields: Any) -> Any:
        found = find(self, *fields)
        return TextSpan(found.start, found.end + 12) if isinstance(found, TextSpan) else found

    monkeypatch.setattr(SpanFinder, "find_span", greedy)
    assert detects_violation("qwen2_5")
