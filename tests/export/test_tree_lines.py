"""Samples read from tree lines equal the exported samples, and every token is written once."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import ExportPolicy, Session, ToyCodec
from branchline.export.jsonl import sample_to_json
from branchline.export.samples import SampleStream
from branchline.export.tree_lines import samples_from_tree_lines, tree_lines
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.tree.tree import Tree


def random_tree(seed: int, steps: int) -> Tree:
    codec = ToyCodec.chatml(strip_thinking=seed % 3 == 0)
    session = Session("s", codec)
    plan = PlanGenerator(Random(seed), reasoning=seed % 2 == 0).generate(steps)
    PlanRunner(session, codec).run(plan)
    return session.tree


@given(
    st.integers(0, 10**6),
    st.integers(1, 15),
    st.sampled_from(["split", "first", "all"]),
    st.sampled_from([None, 0, 5, 40, 200]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, -1.0]),
)
def test_samples_read_from_tree_lines_equal_the_exported_ones(
    seed: int, steps: int, shares: str, max_tokens: int | None, limit: int | None, missing: float | None
) -> None:
    policy = ExportPolicy(
        shares=shares,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        max_samples=limit,
        include_missing_logprobs=True,
        missing_logprob=missing,
    )
    tree = random_tree(seed, steps)
    rewards = [{"score": 0.5}, {"score": 1.0, "turn": 1}]
    stream = SampleStream(tree, policy, session="s", reward=0.5, rewards=rewards)
    expected = list(stream)
    lines = [msgspec.json.decode(msgspec.json.encode(line)) for line in tree_lines(stream)]
    assert [sample_to_json(sample) for sample in samples_from_tree_lines(lines)] == [
        sample_to_json(sample) for sample in expected
    ]
    assert lines[-1]["report"]["samples"] == len(expected)
    assert lines[-1]["report"]["trained_tokens"] == stream.report.trained_tokens


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_written_once(seed: int) -> None:
    tree = random_tree(seed, 20)
    stream = SampleStream(tree, ExportPolicy(include_missing_logprobs=True))
    ids = [line["ids"] for line in tree_lines(stream) if "node" in line]
    nodes = {node.id for leaf in stream.leaves for node in leaf.path()}
    assert sum(map(len, ids)) == sum(len(tree.nodes[node].ids) for node in nodes)


def test_lines_of_samples_repeat_no_tokens() -> None:
    stream = SampleStream(random_tree(1, 20), ExportPolicy(include_missing_logprobs=True))
    lines = [line for line in tree_lines(stream) if "sample" in line]
    assert lines
    arrays = {"prompt_ids", "response_ids", "response_mask", "response_logprobs", "response_versions"}
    for line in lines:
        assert not {*arrays, "shares", "calls", "answers"} & line.keys()
