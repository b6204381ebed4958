"""The contract C1-C6 as properties of random agent plans.

A plan is drawn from a seed, a number of steps and the causes that may occur, so that a failure shrinks to few
steps and few causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Session, ToyCodec, export_samples, merge, timelines_of
from branchline.core.call import Delivery
from branchline.core.token_arrays import Origin
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator, PlannedCall, ReplyStyle
from branchline.timelines.causes import Cause
from branchline.timelines.links import MergePolicy
from branchline.tree.tree import Tree, decode_record, encode_record

NOT_AGENT_CAUSES = (
    Cause.UNKNOWN,
    Cause.DRIFT,
    Cause.OTHER_MODEL,
    Cause.THINK_STRIP,
    Cause.TEMPLATE_REWRITE,
)
PLANNED_CAUSES = [cause for cause in Cause if cause not in NOT_AGENT_CAUSES]

seeds = st.integers(0, 2**32)
steps = st.integers(0, 8)
cause_lists = st.lists(st.sampled_from(PLANNED_CAUSES), max_size=4, unique=True)
codecs = st.sampled_from([ToyCodec(), ToyCodec.chatml(), ToyCodec.chatml(strip_thinking=True)])
thinking = st.booleans()

property_settings = settings(max_examples=120, deadline=None)


def draw_plan(
    seed: int, count: int, only: list[Cause], think: bool, reserialize: bool = True
) -> list[PlannedCall]:
    return PlanGenerator(
        Random(seed), reasoning=think, style=ReplyStyle(reserialize_echoes=reserialize)
    ).generate(count, only=only)


def run_plan(plan: list[PlannedCall], codec: ToyCodec, seed: int, history: str = "template") -> PlanRunner:
    rng = Random(seed)
    runner = PlanRunner(Session("s", codec, history=history), codec)  # type: ignore[arg-type]
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    return runner


def timeline_set(tree: Tree) -> list[tuple[bytes, bytes]]:
    return sorted((line.ids.tobytes(), line.mask.tobytes()) for line in timelines_of(tree))


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking, st.sampled_from(["template", "verbatim"]))
def test_c1_every_call_is_a_path_of_exactly_its_prompt_and_output(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool, history: str
) -> None:
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed, history)
    tree = runner.session.tree
    for executed in runner.executed:
        for node_id, ids in zip(executed.call.outputs, executed.outputs, strict=True):
            node = tree.nodes[node_id]
            assert tree.path_ids(node).tolist() == [*executed.prompt_ids.tolist(), *ids.tolist()]
            assert node.sampled_ids is not None
            assert node.sampled_ids.tolist() == ids.tolist()


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking, st.sampled_from(["split", "first"]))
def test_c2_every_sampled_token_is_trained_once_or_accounted_for(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool, shares: str
) -> None:
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed)
    tree = runner.session.tree
    export = export_samples(tree, ExportPolicy(shares=shares))  # type: ignore[arg-type]
    weights: dict[tuple[bytes, int], float] = {}
    for sample in export.samples:
        ids = np.concatenate((sample.prompt_ids, sample.response_ids))
        for position in np.flatnonzero(sample.response_mask).tolist():
            end = len(sample.prompt_ids) + position + 1
            key = (ids[:end].tobytes(), 0)
            weights[key] = weights.get(key, 0.0) + float(sample.shares[position])
    # Equal ids sampled twice after the same ids (duplicates) are two tokens with one key.
    expected: dict[tuple[bytes, int], int] = {}
    dropped = {entry.call for entry in export.report.dropped}
    for executed in runner.executed:
        if executed.call.id in dropped:
            continue
        for ids in executed.outputs:
            sequence = np.concatenate((executed.prompt_ids, ids))
            for end in range(len(executed.prompt_ids) + 1, len(sequence) + 1):
                key = (sequence[:end].tobytes(), 0)
                expected[key] = expected.get(key, 0) + 1
    assert weights.keys() == expected.keys()
    assert all(abs(weights[key] - expected[key]) < 1e-4 for key in expected)
    assert export.report.is_balanced
    assert export.report.sampled_tokens == sum(
        len(ids) for executed in runner.executed for ids in executed.outputs
    )


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_c2_only_undelivered_outputs_are_dropped(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed)
    dropped = {entry.call for entry in export_samples(runner.session.tree).report.dropped}
    for executed in runner.executed:
        lost = executed.planned.delivery != Delivery.DELIVERED
        assert (executed.call.id in dropped) == (lost and any(len(ids) for ids in executed.outputs))


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_c3_a_trained_token_follows_the_ids_it_was_sampled_after(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed)
    sampled_prefixes = {
        np.concatenate((executed.prompt_ids, ids))[:end].tobytes()
        for executed in runner.executed
        for ids in executed.outputs
        for end in range(len(executed.prompt_ids) + 1, len(executed.prompt_ids) + len(ids) + 1)
    }
    for line in timelines_of(runner.session.tree):
        for position in np.flatnonzero(line.mask).tolist():
            assert line.ids[: position + 1].tobytes() in sampled_prefixes


def node_fields(tree: Tree) -> Iterator[tuple[object, ...]]:
    for node in tree.nodes:
        yield (
            node.id,
            node.parent and node.parent.id,
            node.message,
            node.ids.tobytes(),
            node.spans,
            node.output,
        )


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_c4_a_commit_only_adds_and_a_failed_call_changes_nothing(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    plan = draw_plan(seed, count, only, think)
    runner = PlanRunner(Session("s", codec), codec)
    tree = runner.session.tree
    for planned in plan:
        before = list(node_fields(tree))
        runner.prepare(planned)
        assert list(node_fields(tree)) == before
        runner.commit(planned)
        assert list(node_fields(tree))[: len(before)] == before


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking, seeds)
def test_c5_every_causally_possible_order_gives_the_same_timelines(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool, other: int
) -> None:
    plan = draw_plan(seed, count, only, think)
    in_order = PlanRunner(Session("s", codec), codec)
    in_order.run(plan)
    assert timeline_set(run_plan(plan, codec, other).session.tree) == timeline_set(in_order.session.tree)


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_c6_all_arrays_of_a_timeline_and_a_sample_are_aligned(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    tree = run_plan(draw_plan(seed, count, only, think), codec, seed).session.tree
    for line in timelines_of(tree):
        arrays = (line.ids, line.origins, line.mask, line.logprobs, line.versions, line.token_node_ids)
        assert {len(array) for array in arrays} == {len(line)}
        assert ((line.origins == Origin.SAMPLED) == (line.versions >= 0)).all()
        assert len(line.messages) == len(line.authors)
    for sample in export_samples(tree).samples:
        sample_arrays = (
            sample.response_ids,
            sample.response_mask,
            sample.response_logprobs,
            sample.response_versions,
            sample.shares,
        )
        assert len({len(array) for array in sample_arrays}) == 1
        assert ((sample.shares > 0) == (sample.response_mask == 1)).all()
        assert sample.response_mask[0] == 1


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_a_replayed_journal_gives_an_equal_tree(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    written: list[bytes] = []
    runner = PlanRunner(Session("s", codec), codec)
    apply = runner.session.tree.apply

    def recording(record):  # type: ignore[no-untyped-def]
        written.append(encode_record(record))
        return apply(record)

    runner.session.tree.apply = recording  # type: ignore[method-assign]
    runner.run(draw_plan(seed, count, only, think))
    replayed = Tree()
    for data in written:
        replayed.apply(decode_record(data))
    original = list(node_fields(runner.session.tree))
    for one, other in zip(original, node_fields(replayed), strict=True):
        assert one[:5] == other[:5]
    assert replayed.calls == runner.session.tree.calls
    assert timeline_set(replayed) == timeline_set(runner.session.tree)


@property_settings
@given(seeds, steps, cause_lists, codecs, thinking)
def test_merging_the_same_calls_as_a_foreign_log_by_ids_gives_the_same_timelines(
    seed: int, count: int, only: list[Cause], codec: ToyCodec, think: bool
) -> None:
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed)
    log = runner.to_log()
    Random(seed).shuffle(log)
    merged = merge(log, MergePolicy(compare="token", ignore_tools=False))
    assert timeline_set(merged.tree) == timeline_set(runner.session.tree)
    assert all(line.exact for line in timelines_of(merged.tree))


@property_settings
@given(seeds, steps, cause_lists, thinking)
def test_merging_by_text_keeps_every_sampled_token_and_marks_inexact_ones(
    seed: int, count: int, only: list[Cause], think: bool
) -> None:
    codec = ToyCodec.chatml()
    runner = run_plan(draw_plan(seed, count, only, think), codec, seed)
    log = runner.to_log()
    Random(seed).shuffle(log)
    merged = merge(log, MergePolicy(ignore_tools=False))
    report = export_samples(merged.tree, ExportPolicy(include_inexact=True)).report
    assert report.trained_tokens == report.sampled_tokens
    assert report.sampled_tokens == sum(len(ids) for executed in runner.executed for ids in executed.outputs)
    prompts = {
        np.concatenate((executed.prompt_ids, ids)).tobytes()
        for executed in runner.executed
        for ids in executed.outputs
    }
    for node in merged.tree.nodes:
        if node.output is not None and not node.output.inexact:
            assert merged.tree.path_ids(node).tobytes() in prompts
