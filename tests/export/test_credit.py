"""Advantages and weights: statistics by episode, credit along the parent path, normalisers."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import (
    CreditPolicy,
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
)
from branchline.core.errors import ExportError
from branchline.export.credit import (
    GroupStatistics,
    GroupStd,
    advantages,
    group_statistics,
    token_advantages,
    token_rewards,
    token_weights,
)
from branchline.export.samples import DROPPABLE
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from tests.export.packed_rows import make_trajectory

ZERO_MEAN = GroupStatistics(0.0, 1.0, 2, "none")


def random_trajectory(seed: int, steps: int, policy: ExportPolicy | None = None) -> Trajectory:
    """Returns the trajectory of a random agent, whose timelines have rewards of their own."""
    codec = ToyCodec.chatml(strip_thinking=seed % 2 == 0)
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(Random(seed)).generate(steps))
    leaves = runner.session.tree.leaves()
    rewards = [{"score": float(index), "timeline": leaf.id} for index, leaf in enumerate(leaves)]
    return Trajectory.from_session(runner.session, rewards=[{"score": 0.5}, *rewards], policy=policy)


# -- group statistics --------------------------------------------------------------------------------


def test_failed_episodes_are_left_out_of_the_statistics() -> None:
    group = TrajectoryGroup(
        [
            make_trajectory([[1]], reward=1.0),
            make_trajectory([[1]], reward=0.0),
            make_trajectory([[1]], reward=100.0, failed=True),
            make_trajectory([[1]], failed=True),
        ]
    )
    assert group_statistics(group, group_std="population") == GroupStatistics(0.5, 0.5, 2, "population")
    assert advantages(group) == [pytest.approx(0.707, abs=1e-3), pytest.approx(-0.707, abs=1e-3), 0.0, 0.0]


def test_an_episode_alone_in_its_group_has_advantage_zero() -> None:
    alone = TrajectoryGroup([make_trajectory([[1]], reward=5.0), make_trajectory([[1]], failed=True)])
    assert advantages(alone) == [0.0, 0.0]
    assert advantages(alone, group_std="none") == [0.0, 0.0]
    assert advantages(TrajectoryGroup([])) == []


def test_the_reward_of_an_episode_is_the_share_weighted_mean_of_its_timelines() -> None:
    episode = make_trajectory([[1, 2, 3], [4]], rewards=[1.0, 0.0])
    assert episode.episode_reward == 0.75
    assert make_trajectory([[1, 2, 3], [4], [5]], rewards=[1.0, 0.0, None]).episode_reward == 0.75
    assert make_trajectory([[1], [2]], rewards=[None, None]).episode_reward is None


def test_a_timeline_without_a_reward_gets_that_of_its_episode() -> None:
    trajectory = make_trajectory([[1, 2, 3], [4], [5]], rewards=[1.0, 0.0, None])
    for name in ("per_branch", "discounted"):
        credit = CreditPolicy(name)  # type: ignore[arg-type]
        rows = token_advantages(trajectory, ZERO_MEAN, credit)
        assert [float(row[0]) for row in rows] == [1.0, 0.0, 0.75]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_episode_without_a_finite_reward_is_refused(reward: float | None) -> None:
    group = TrajectoryGroup([make_trajectory([[1]], reward=0.0), make_trajectory([[1]], reward=reward)])
    with pytest.raises(ExportError, match=r"trajectories\[1\].*expected a finite number, or failed=True"):
        group_statistics(group)


def group_of(rewards: list[float | None]) -> TrajectoryGroup:
    """Returns a group of episodes; those without a reward have failed."""
    return TrajectoryGroup(
        [make_trajectory([[1]], reward=reward, failed=reward is None) for reward in rewards]
    )


REWARDS = st.lists(st.none() | st.floats(-100, 100), min_size=2, max_size=8).filter(
    lambda rewards: sum(reward is not None for reward in rewards) >= 2
)


@given(REWARDS)
@example([0.0, 0.0, 1.56e-8])
def test_default_advantages_are_those_of_trl(rewards: list[float | None]) -> None:
    # TRL 1.16: failed rows are NaN, excluded from mean and sample deviation, and get advantage 0.
    values = np.array([math.nan if reward is None else reward for reward in rewards])
    expected = (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + 1e-4)
    assert advantages(group_of(rewards)) == pytest.approx(np.nan_to_num(expected).tolist(), abs=1e-4)


@given(REWARDS, st.sampled_from(["sample", "population", "none"]))
def test_advantages_divide_by_the_deviation_that_is_named(
    rewards: list[float | None], group_std: GroupStd
) -> None:
    values = np.array([reward for reward in rewards if reward is not None])
    std = values.std(ddof=0 if group_std == "population" else 1)
    divisor = 1.0 if group_std == "none" or std <= 1e-8 else std + 1e-4
    statistics = group_statistics(group_of(rewards), group_std=group_std)
    assert statistics.std == pytest.approx(std, abs=1e-9)
    for reward in values:
        assert statistics.advantage(reward) == pytest.approx((reward - values.mean()) / divisor, abs=1e-6)


def test_four_rewards_give_smaller_advantages_than_with_the_deviation_of_a_population() -> None:
    group = group_of([1.0, 0.0, 0.0, 0.0])
    sample, population = advantages(group)[0], advantages(group, group_std="population")[0]
    assert (sample, population) == (pytest.approx(0.75 / 0.5001), pytest.approx(0.75 / (0.1875**0.5 + 1e-4)))
    assert population / sample == pytest.approx(1.155, abs=1e-3)


@pytest.mark.parametrize("name", [True, False, "std", "", None])
def test_an_unknown_deviation_is_refused(name: object) -> None:
    with pytest.raises(ExportError, match=r"group_std: got .*, expected one of sample, population, none"):
        group_statistics(group_of([1.0, 0.0]), group_std=name)  # type: ignore[arg-type]


def test_equal_rewards_that_have_no_exact_mean_are_equal() -> None:
    statistics = group_statistics(group_of([0.1] * 3))
    assert statistics.has_equal_rewards
    assert statistics.scale == 1
    assert not group_statistics(group_of([0.1, 0.1, 0.1001])).has_equal_rewards


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-50, 50))
def test_advantages_sum_to_zero_and_do_not_depend_on_a_common_reward(
    rewards: list[float], shift: float
) -> None:
    plain = advantages(TrajectoryGroup([make_trajectory([[1]], reward=reward) for reward in rewards]))
    shifted = advantages(
        TrajectoryGroup([make_trajectory([[1]], reward=reward + shift) for reward in rewards]),
        group_std="none",
    )
    unscaled = advantages(
        TrajectoryGroup([make_trajectory([[1]], reward=reward) for reward in rewards]), group_std="none"
    )
    assert sum(plain) == pytest.approx(0, abs=1e-6)
    assert shifted == pytest.approx(unscaled, abs=1e-9)


def test_branches_of_a_group_with_equal_episodes_are_not_divided_by_zero() -> None:
    trajectory = make_trajectory([[1], [2]], rewards=[1.0, 0.0])
    statistics = group_statistics(TrajectoryGroup([trajectory, trajectory]))
    rows = token_advantages(trajectory, statistics, CreditPolicy("per_branch"))
    assert [row.tolist() for row in rows] == [[0.5], [-0.5]]


# -- credit ------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["broadcast", "discounted", "per_branch"]))
def test_untrained_tokens_have_no_advantage_and_equal_rewards_give_equal_credit(
    seed: int, steps: int, name: str
) -> None:
    trajectory = random_trajectory(seed, steps)
    credit = CreditPolicy(name)  # type: ignore[arg-type]
    rows = token_advantages(trajectory, ZERO_MEAN, credit)
    for row, sample in zip(rows, trajectory.samples, strict=True):
        assert (row[sample.response_mask == 0] == 0).all()
        if name == "broadcast":
            assert (row[sample.response_mask == 1] == 0.5).all()
        if name == "per_branch":
            assert (row[sample.response_mask == 1] == np.float32(sample.reward or 0.0)).all()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 1))
def test_discounted_credit_is_the_mean_over_the_leaves_of_the_parent_path(
    seed: int, steps: int, discount: float
) -> None:
    trajectory = random_trajectory(seed, steps)
    rows = token_advantages(trajectory, ZERO_MEAN, CreditPolicy("discounted", discount))
    found: dict[int, float] = {}
    rewards: dict[int, list[tuple[float, float]]] = {}
    for row, sample in zip(rows, trajectory.samples, strict=True):
        for answer in sample.answers:
            values = row[answer.start : answer.end]
            assert found.setdefault(answer.node, float(values[0])) == values[0] == values[-1]
            share = float(sample.shares[answer.start])
            rewards.setdefault(answer.node, []).append((share, sample.reward or 0.0))
    # Written independently: from each leaf up to every answer above it.
    parents = {node: trajectory.parent_answers[node] for node in rewards}
    for node, above in parents.items():
        while above != -1 and above not in rewards:
            above = trajectory.parent_answers[above]
        parents[node] = above
    leaves = set(rewards) - set(parents.values())
    returns: dict[int, list[float]] = {}
    for leaf in leaves:
        total = sum(share for share, _ in rewards[leaf])
        value = sum(share * reward for share, reward in rewards[leaf]) / total
        node = leaf
        while node != -1:
            returns.setdefault(node, []).append(value)
            node, value = parents[node], value * discount
    assert found == pytest.approx({node: np.mean(values) for node, values in returns.items()}, abs=1e-5)


def commit(
    session: Session, messages: list[Message], output: Message | str, agent: str = "", spawned_by: str = ""
) -> Message:
    turn = session.prepare(Request(tuple(messages), agent=agent, spawned_by=spawned_by))
    answer = Message("assistant", output) if isinstance(output, str) else output
    ids = session.codec.encode_reply(answer)
    call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), message=answer)).call
    session.record_delivery(call)
    return answer


def discounted_by_text(trajectory: Trajectory) -> dict[str, float]:
    rows = token_advantages(trajectory, ZERO_MEAN, CreditPolicy("discounted", 0.5))
    return {
        ToyCodec().decode(sample.response_ids[answer.start : answer.end]): float(row[answer.start])
        for row, sample in zip(rows, trajectory.samples, strict=True)
        for answer in sample.answers
    }


def test_an_answer_whose_reasoning_the_template_drops_is_still_the_parent_of_the_next() -> None:
    session = Session("s", ToyCodec(strip_thinking=True))
    messages = [Message("user", "u")]
    for index in range(3):
        answer = commit(session, messages, Message("assistant", f"A{index}", reasoning_content=f"R{index}"))
        messages += [answer, Message("user", f"x{index}")]
    trajectory = Trajectory.from_session(session, reward=1.0)
    assert len(trajectory.samples) == 3
    assert discounted_by_text(trajectory) == {
        "<think>R0</think>A0": 0.25,
        "<think>R1</think>A1": 0.5,
        "<think>R2</think>A2": 1.0,
    }


def test_a_sub_agent_continues_the_answer_that_spawned_it() -> None:
    session = Session("s", ToyCodec())
    question = Message("user", "do it")
    call = ToolCall("helper", '{"task":"count the apples in the box"}', "c1")
    spawn = commit(session, [question], Message("assistant", "", tool_calls=(call,)))
    helper = [Message("system", "You help."), Message("user", "count the apples in the box")]
    commit(session, helper, "seven", agent="helper", spawned_by="")
    commit(session, [question, spawn, Message("tool", "seven", tool_call_id="c1")], "done")
    found = discounted_by_text(Trajectory.from_session(session, reward=1.0))
    spawned = next(text for text in found if text.startswith("<call>"))
    assert found == {"seven": 1.0, "done": 1.0, spawned: 0.5}


def test_a_compacted_conversation_continues_its_summary() -> None:
    session = Session("s", ToyCodec())
    question = Message("user", "a long question")
    first = commit(session, [question], "a first answer")
    summary = commit(
        session,
        [question, first, Message("user", "Summarise.")],
        "There was one request, and it got an answer of some length.",
    )
    commit(session, [Message("user", f"Earlier: {summary.content} Go on.")], "the end")
    found = discounted_by_text(Trajectory.from_session(session, reward=1.0))
    assert found == {"a first answer": 0.25, summary.content: 0.5, "the end": 1.0}


def test_discounted_credit_needs_the_answers_of_samples() -> None:
    from dataclasses import replace

    trajectory = make_trajectory([[1, 2]], reward=1.0)
    bare = replace(trajectory, samples=(replace(trajectory.samples[0], answers=()),))
    with pytest.raises(ExportError, match=r"samples\[0\]: 2 trained tokens"):
        token_advantages(bare, ZERO_MEAN, CreditPolicy("discounted"))


@pytest.mark.parametrize(("name", "discount"), [("mean", 1.0), ("discounted", 1.5), ("discounted", -0.1)])
def test_an_unknown_credit_policy_is_refused(name: str, discount: float) -> None:
    with pytest.raises(ExportError, match=r"expected (one of broadcast|a number from 0 to 1)"):
        CreditPolicy(name, discount)  # type: ignore[arg-type]


# -- normalisers -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(0, 6),
    st.sampled_from(["split", "first", "all"]),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 600),
)
def test_weights_sum_as_their_normaliser_says(
    seed: int, steps: int, shares: str, max_samples: int | None, max_tokens: int | None
) -> None:
    policy = ExportPolicy(shares=shares, max_samples=max_samples, max_tokens=max_tokens)  # type: ignore[arg-type]
    trajectory = random_trajectory(seed, steps, policy)
    count = len(trajectory.samples)
    by_token = token_weights(trajectory, "token")
    for sample, values in zip(trajectory.samples, by_token, strict=True):
        np.testing.assert_array_equal(values, sample.shares)
        assert ((values > 0) == (sample.response_mask == 1)).all()
    if count:
        total = sum(float(values.sum()) for values in token_weights(trajectory, "trajectory"))
        assert total == pytest.approx(1)
        sums = [float(values.sum()) for values in token_weights(trajectory, "episode")]
        assert sums == pytest.approx([1 / count] * count)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(0, 6),
    st.sampled_from(["split", "first", "all"]),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 600),
    st.frozensets(st.sampled_from(sorted(DROPPABLE)), max_size=3),
)
def test_the_shares_of_each_sampled_token_sum_to_one_or_it_is_reported_as_dropped(
    seed: int,
    steps: int,
    shares: str,
    max_samples: int | None,
    max_tokens: int | None,
    drop: frozenset[str],
) -> None:
    policy = ExportPolicy(
        shares=shares,  # type: ignore[arg-type]
        max_samples=max_samples,
        max_tokens=max_tokens,
        drop=drop,
    )
    trajectory = random_trajectory(seed, steps, policy)
    sums: dict[tuple[int, int], float] = {}
    counts: dict[tuple[int, int], int] = {}
    for sample in trajectory.samples:
        in_answers = np.zeros(len(sample.response_ids), np.int8)
        for answer in sample.answers:
            in_answers[answer.start : answer.end] += 1
            for offset in range(answer.start, answer.end):
                token = answer.node, offset - answer.start
                sums[token] = sums.get(token, 0.0) + float(sample.shares[offset])
                counts[token] = counts.get(token, 0) + 1
        np.testing.assert_array_equal(in_answers, sample.response_mask)
    for token, total in sums.items():
        assert total == pytest.approx(counts[token] if shares == "all" else 1, abs=1e-5)
    assert trajectory.report is not None
    assert trajectory.report.trained_tokens == len(sums)
    assert trajectory.report.is_balanced
    reasons = {entry.reason for entry in trajectory.report.dropped}
    assert reasons <= drop | {"capped", "over_length"}


def test_an_unknown_normaliser_is_refused() -> None:
    with pytest.raises(ExportError, match="expected one of token, trajectory, episode"):
        token_weights(make_trajectory([[1]]), "group")  # type: ignore[arg-type]


def test_a_reward_is_on_the_last_token_of_its_sample() -> None:
    samples = make_trajectory([[1, 2, 3], [4], []], rewards=[0.5, None, 1.0]).samples
    assert [row.tolist() for row in token_rewards(samples)] == [[0, 0, 0.5], [0], []]
