"""The tokens of each message of a merged timeline: those of a live session, or unknown."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Message, Session, ToyCodec, merge, timelines_of
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.links import MergePolicy
from branchline.timelines.message_spans import MessageSpans
from tests.timelines.test_merge import assistant, logged, user


def test_outputs_and_single_messages_between_them_have_spans_without_a_codec() -> None:
    calls = [
        logged([Message("system", "s"), user("a")], "b", [1, 2, 3], [4, 5], 1),
        logged(
            [Message("system", "s"), user("a"), assistant("b"), user("c")], "d", [1, 2, 3, 4, 5, 6, 7], [8], 2
        ),
    ]
    merged = merge(calls)
    (timeline,) = timelines_of(merged.tree)
    assert MessageSpans(merged).of_timeline(timeline) == [None, None, (3, 5), (5, 7), (7, 8)]


def test_a_message_without_logged_ids_has_no_span() -> None:
    merged = merge([logged([user("a")], "b", None, None)])
    (timeline,) = timelines_of(merged.tree)
    assert MessageSpans(merged, ToyCodec()).of_timeline(timeline) == [None, None]


def test_a_codec_that_renders_another_prompt_is_not_believed() -> None:
    codec = ToyCodec()
    prompt = codec.encode("system:s\nuser:a\nassistant:").tolist()
    for ids, spans in ((prompt, [(0, 9), (9, 16)]), ([*prompt[:-1], 1], [None, None])):
        merged = merge([logged([Message("system", "s"), user("a")], "b", ids, [98])])
        (timeline,) = timelines_of(merged.tree)
        assert MessageSpans(merged, codec).of_timeline(timeline)[:2] == spans


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_with_a_codec_every_span_is_that_of_the_live_session(seed: int, steps: int) -> None:
    codec = ToyCodec.chatml()
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(Random(seed)).generate(steps))
    merged = merge(runner.to_log(), MergePolicy(compare="token", ignore_tools=False))
    live = {timeline.ids.tobytes(): timeline for timeline in timelines_of(runner.session.tree)}
    for timeline in timelines_of(merged.tree):
        found = MessageSpans(merged, codec).of_timeline(timeline)
        nodes = live[timeline.ids.tobytes()].nodes
        for span, node in zip(found, nodes, strict=True):
            start = node.sampled_start if node.is_sampled else node.start
            if span is not None:
                text = codec.decode(timeline.ids[slice(*span)])
                assert (
                    text.removesuffix("assistant:").strip()
                    == codec.decode(node.ids[start - node.start :]).strip()
                )
