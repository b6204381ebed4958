"""Training rows and padded batches: every token keeps its place, weight, advantage and logprob."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import CreditPolicy, ExportPolicy, TrajectoryGroup, pack_rows, pad_rows, training_rows
from branchline.core.errors import ExportError
from branchline.core.message import Media
from branchline.export.batches import mask_sample
from branchline.export.credit import Normaliser, group_statistics, token_advantages, token_weights
from tests.export.packed_rows import make_row, make_trajectory, random_rows
from tests.export.test_credit import random_trajectory

NORMALISERS: list[Normaliser] = ["token", "trajectory", "episode"]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 4)), min_size=1, max_size=4),
    st.sampled_from(NORMALISERS),
    st.sampled_from(["broadcast", "discounted", "per_branch"]),
    st.booleans(),
)
def test_rows_have_the_weights_and_advantages_of_their_trajectories(
    seeds: list[tuple[int, int]], normaliser: Normaliser, name: str, share: bool
) -> None:
    group = TrajectoryGroup([random_trajectory(seed, steps) for seed, steps in seeds])
    credit = CreditPolicy(name, 0.9)  # type: ignore[arg-type]
    rows = training_rows([group], normaliser=normaliser, credit=credit, scale_weights=False)
    samples = [sample for trajectory in group for sample in trajectory.samples]
    statistics = group_statistics(group)
    weights = [values for trajectory in group for values in token_weights(trajectory, normaliser)]
    advantages = [
        values for trajectory in group for values in token_advantages(trajectory, statistics, credit)
    ]
    assert [row.sample for row in rows] == samples
    for row, values, expected in zip(rows, weights, advantages, strict=True):
        np.testing.assert_allclose(row.weights, values, rtol=1e-6)
        np.testing.assert_array_equal(row.advantages, expected)
    scaled = training_rows([group], normaliser=normaliser, credit=credit)
    trained = sum(float(sample.shares.sum(dtype=np.float64)) for sample in samples)
    assert sum(float(row.weights.sum(dtype=np.float64)) for row in scaled) == pytest.approx(trained, rel=1e-5)
    longest = max(map(len, scaled), default=0)
    for batch in pack_rows(scaled, longest * 2, share_prefixes=share):
        totals = np.zeros((2, len(batch)))
        for index, path in zip(batch.rows, batch.paths, strict=True):
            row = scaled[index]
            ids = np.concatenate([row.sample.prompt_ids, row.sample.response_ids])
            np.testing.assert_array_equal(batch.ids[path], ids)
            places = path[len(row.sample.prompt_ids) :]
            totals[0, places] += row.weights
            totals[1, places] += row.weights.astype(np.float64) * row.advantages
        np.testing.assert_allclose(batch.weights, totals[0], rtol=1e-6)
        summed = batch.positive_advantages + batch.negative_advantages
        np.testing.assert_allclose(summed, totals[1], rtol=1e-5, atol=1e-6)


def test_failed_trajectories_have_no_rows() -> None:
    group = TrajectoryGroup(
        [
            make_trajectory([[1]], reward=1.0),
            make_trajectory([[2]], failed=True),
            make_trajectory([[3]], reward=0.0),
        ]
    )
    assert [row.sample.response_ids.tolist() for row in training_rows([group])] == [[1], [3]]
    assert training_rows([]) == []


def test_weights_are_scaled_over_all_groups() -> None:
    groups = [
        TrajectoryGroup([make_trajectory([[1, 2, 3]], reward=1.0)]),
        TrajectoryGroup([make_trajectory([[4]], reward=0.0)]),
    ]
    rows = training_rows(groups)
    assert [row.weights.tolist() for row in rows] == [pytest.approx([2 / 3] * 3), [2.0]]


def test_a_masked_sample_keeps_its_tokens_reward_and_media() -> None:
    (sample,) = make_trajectory([[1, 2]], reward=0.5).samples
    sample = replace(sample, media=(Media("image", "cat"),))
    masked = mask_sample(sample)
    assert (masked.trained_tokens, masked.shares.tolist(), masked.answers) == (0, [0, 0], ())
    assert (masked.reward, masked.media, len(masked)) == (0.5, sample.media, len(sample))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 8), st.booleans(), st.sampled_from([1, 8]))
def test_a_padded_row_keeps_its_tokens_and_their_values(
    seed: int, count: int, limited: bool, multiple: int
) -> None:
    rng = Random(seed)
    rows = random_rows(rng, count)
    longest = max((-(-len(row) // multiple) * multiple for row in rows), default=0)
    limit = rng.randint(1, max(1, longest * 3)) if limited else None
    batches = pad_rows(rows, limit, pad_id=99, multiple_of=multiple)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(count))
    for batch in batches:
        assert batch.ids.shape[1] % multiple == 0
        assert limit is None or batch.ids.size <= limit or len(batch) == 1
        for place, index in enumerate(batch.rows):
            row, sample, length = rows[index], rows[index].sample, len(rows[index])
            start = int(batch.prompt_lengths[place])
            assert start == len(sample.prompt_ids)
            expected = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
            assert batch.ids[place].tolist() == expected + [99] * (batch.ids.shape[1] - length)
            assert batch.attention_mask[place].sum() == length
            assert batch.positions[place, :length].tolist() == list(range(length))
            response = slice(start, length)
            np.testing.assert_array_equal(batch.weights[place, response], row.weights)
            trained = row.weights != 0
            np.testing.assert_array_equal(
                batch.advantages[place, response], np.where(trained, row.advantages, 0)
            )
            np.testing.assert_array_equal(
                batch.old_logprobs[place, response], np.where(trained, sample.response_logprobs, np.nan)
            )
            np.testing.assert_array_equal(
                batch.versions[place, response], np.where(trained, sample.response_versions, -1)
            )
            assert not batch.weights[place, :start].any()
            assert not batch.weights[place, length:].any()


def test_padded_rows_carry_their_media() -> None:
    row = make_row([1], [2])
    image = Media("image", "cat")
    row = replace(row, sample=replace(row.sample, media=(image,)))
    (batch,) = pad_rows([row, make_row([1], [2, 3])])
    assert batch.rows == (1, 0)
    assert batch.media == ((), (image,))


def test_a_padded_row_over_the_limit_is_a_batch_of_its_own() -> None:
    rows = [make_row([1], [2]), make_row([1], [2, 3, 4, 5]), make_row([1], [3])]
    batches = pad_rows(rows, 4, multiple_of=2)
    assert [(batch.rows, batch.ids.shape) for batch in batches] == [((1,), (1, 6)), ((0, 2), (2, 2))]


def test_limits_that_hold_no_token_are_refused() -> None:
    with pytest.raises(ExportError, match="max_tokens: got 0, expected 1 or more"):
        pad_rows([make_row([1], [2])], 0)
    with pytest.raises(ExportError, match="multiple_of: got 0"):
        pad_rows([make_row([1], [2])], multiple_of=0)


def test_a_capped_trajectory_trains_what_its_report_says() -> None:
    trajectory = random_trajectory(3, 6, ExportPolicy(max_samples=1))
    rows = training_rows(
        [TrajectoryGroup([trajectory, make_trajectory([[1]], reward=0.0)])], normaliser="token"
    )
    assert len(rows) == 2
    assert trajectory.report is not None
    assert int(np.count_nonzero(rows[0].weights)) == trajectory.report.trained_tokens
