"""Metrics and losses held against their definitions on single rows, and against TRL's formulas (1.16).

The references use plain forward passes of the model, row by row and in double precision. TRL divides by the
number of unmasked tokens; its mask may have fractions, which are the shares here.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from branchline.core.errors import BranchlineError, InputError  # noqa: E402
from branchline.export.batches import training_rows  # noqa: E402
from branchline.export.packing import TrainingRow  # noqa: E402
from branchline.export.trajectory import TrajectoryGroup  # noqa: E402
from branchline.train.losses import LossConfig, LossName  # noqa: E402
from branchline.train.policy_update import PolicyUpdater, UpdateConfig  # noqa: E402
from tests.export.packed_rows import make_row, make_trajectory, random_rows  # noqa: E402
from tests.train.test_packed_forward import row_distributions  # noqa: E402
from tests.train.tiny_models import VOCABULARY, tiny_model  # noqa: E402

torch.set_num_threads(1)
CLIP = 0.05


def update(
    rows: list[TrainingRow], loss: LossConfig, *, divisor: float | None = None, **changes: Any
) -> tuple[dict[str, float], Any]:
    """Returns the metrics of an update and the model after it."""
    config = UpdateConfig(**{"learning_rate": 0.02, "max_grad_norm": 1e9, "loss": loss, **changes})
    reference = tiny_model("qwen3") if loss.reference_kl_coefficient else None
    updater = PolicyUpdater(tiny_model("qwen3"), config, reference)
    return updater.update(rows, divisor=divisor), updater.model


def masked_mean(values: list[Any], masks: list[Any]) -> float:
    """TRL's mean over the tokens of all rows."""
    total = sum(((value * mask).sum() for value, mask in zip(values, masks, strict=True)), torch.zeros(()))
    return float(total.detach() / sum(mask.sum() for mask in masks))


def with_gradient(rows: list[TrainingRow]) -> list[TrainingRow]:
    return [row for row in rows if (row.weights * row.advantages).any()]


def shares_of(row: TrainingRow) -> Any:
    return torch.from_numpy(row.sample.shares).double()


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from(["ppo", "cispo", "reinforce"]), st.sampled_from([None, 1, 40]))
def test_metrics_are_those_of_single_rows_however_they_are_packed(
    seed: int, name: LossName, max_batch_tokens: int | None
) -> None:
    rows = random_rows(Random(seed), 5, vocabulary=VOCABULARY)
    computed = with_gradient(rows)
    if not computed:
        return
    loss = LossConfig(name, CLIP, CLIP)
    _, after = update(rows, loss)
    found, _ = update(rows, loss, passes=2, max_batch_tokens=max_batch_tokens)
    before = tiny_model("qwen3")
    old = [row_distributions(before, row)[0].detach() for row in rows]
    new = [row_distributions(after, row)[0].detach() for row in rows]
    masks = [shares_of(row) for row in rows]
    # Before the update, of all rows that are computed.
    gaps, divergences = [], []
    for row, own in zip(rows, old, strict=True):
        gap = own - torch.from_numpy(row.sample.response_logprobs).double()
        gaps.append(gap.abs())
        divergences.append(torch.exp(gap) - gap - 1)
    kept = [index for index, row in enumerate(rows) if any(row is other for other in computed)]

    def pick(values: list[Any]) -> list[Any]:
        return [values[index] for index in kept]

    expected = {
        "sampling/sampling_logp_difference/mean": masked_mean(pick(gaps), pick(masks)),
        "kl/sampler": masked_mean(pick(divergences), pick(masks)),
        "entropy": masked_mean([row_distributions(after, row)[1] for row in computed], pick(masks)),
    }
    # TRL's clip ratios, over all rows.
    low, high = [], []
    for row, one, other in zip(rows, new, old, strict=True):
        ratio, advantages = torch.exp(one - other), torch.from_numpy(row.advantages)
        low.append(((ratio < 1 - CLIP) & (advantages < 0)).double())
        high.append(((ratio > 1 + CLIP) & (advantages > 0)).double())
    if name == "ppo":
        expected["clip_ratio/low_mean"] = masked_mean(low, masks)
        expected["clip_ratio/high_mean"] = masked_mean(high, masks)
        expected["clip_ratio/region_mean"] = masked_mean(
            [one + other for one, other in zip(low, high, strict=True)], masks
        )
    if name == "cispo":
        expected["cispo_clip_ratio"] = masked_mean(high, masks)
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-7)
    names = {key for key in found if "clip" in key}
    assert names == {key for key in expected if "clip" in key}


def test_a_ratio_outside_the_region_that_keeps_its_gradient_is_not_clipped() -> None:
    # Both rows share token 3, whose probability falls: the first has a positive advantage and keeps its
    # gradient, the second has a negative one and loses it.
    rows = [make_row([1, 2], [3], advantages=[0.01]), make_row([1, 2], [3], advantages=[-1.0])]
    found, _ = update(rows, LossConfig("ppo", 0.2, 0.2), passes=2, learning_rate=0.05)
    before, after = tiny_model("qwen3"), update(rows, LossConfig(), learning_rate=0.05)[1]
    change = row_distributions(after, rows[0])[0] - row_distributions(before, rows[0])[0]
    assert torch.exp(change).item() < 0.8
    ratios = {key: found[f"clip_ratio/{key}"] for key in ("low_mean", "high_mean", "region_mean")}
    assert ratios == {"low_mean": 0.5, "high_mean": 0.0, "region_mean": 0.5}


def test_the_clip_ratio_of_gspo_counts_sequences_as_trl_does() -> None:
    rows = [
        make_row([1, 2], [3, 4, 5], advantages=[-1.0] * 3),
        make_row([1, 2], [6], advantages=[1.0]),
        make_row([7], [8, 9], advantages=[0.0] * 2),
    ]
    loss = LossConfig("gspo", 0.1, 0.1)
    found, _ = update(rows, loss, passes=2, learning_rate=0.05)
    before, after = tiny_model("qwen3"), update(rows, loss, learning_rate=0.05)[1]
    clipped = 0.0
    for row in rows:
        change = row_distributions(after, row)[0] - row_distributions(before, row)[0]
        ratio, advantage = torch.exp(change.mean()).item(), row.advantages[0]
        clipped += (ratio < 0.9 and advantage < 0) or (ratio > 1.1 and advantage > 0)
    assert clipped
    assert found["clip_ratio/region_mean"] == pytest.approx(clipped / 3)


@pytest.mark.parametrize("estimator", ["k3", "k3_ratio"])
def test_the_divergence_from_the_reference_has_its_own_name(estimator: Any) -> None:
    rows = random_rows(Random(3), 4, vocabulary=VOCABULARY)
    loss = LossConfig("ppo", reference_kl_coefficient=0.1, reference_kl_estimator=estimator)
    found, _ = update(rows, loss, passes=2)
    after, reference = update(rows, loss)[1], tiny_model("qwen3")
    values = []
    for row in rows:
        new, old = row_distributions(after, row)[0], row_distributions(reference, row)[0]
        difference = old - new
        k3 = torch.exp(difference) - difference - 1
        # The reference is the policy at the start of the step; TRL's default multiplies by the ratio to it.
        values.append(k3 * torch.exp(new - old) if estimator == "k3_ratio" else k3)
    assert found["kl/reference"] == pytest.approx(masked_mean(values, [shares_of(row) for row in rows]))
    assert found["kl/sampler"] != pytest.approx(found["kl/reference"])
    assert "kl" not in found


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_the_normalisers_give_trls_losses_on_the_same_rows(name: str) -> None:
    rng = Random(5)
    lengths = [[3, 1, 5, 2], [4, 4, 1, 6]]
    rewards = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0]]
    groups = [
        TrajectoryGroup(
            [
                make_trajectory([[rng.randrange(VOCABULARY) for _ in range(length)]], reward=reward)
                for length, reward in zip(*pair, strict=True)
            ]
        )
        for pair in zip(lengths, rewards, strict=True)
    ]
    max_completion_length, batch_size = 32, 8
    rows = training_rows(
        groups,
        normaliser={"grpo": "trajectory", "dapo": "token", "dr_grpo": "constant"}[name],  # type: ignore[arg-type]
        group_std="none" if name == "dr_grpo" else "sample",
    )
    divisor = float(batch_size * max_completion_length) if name == "dr_grpo" else None
    found, model = update(rows, LossConfig(), divisor=divisor, learning_rate=0.0)
    losses = []
    pairs = [(reward, np.array(members)) for members in rewards for reward in members]
    for row, (reward, members) in zip(rows, pairs, strict=True):
        advantage = reward - members.mean()
        if name != "dr_grpo":
            advantage /= members.std(ddof=1) + 1e-4
        new = row_distributions(model, row)[0]
        losses.append(-torch.exp(new - new.detach()) * advantage)
    total = sum(loss.sum() for loss in losses)
    expected = {
        "grpo": sum(loss.mean() for loss in losses) / batch_size,
        "dapo": total / sum(len(loss) for loss in losses),
        "dr_grpo": total / (batch_size * max_completion_length),
    }[name]
    model.zero_grad()
    gradient = torch.cat(
        [value.flatten() for value in torch.autograd.grad(expected, list(model.parameters()))]
    )
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-7)
    assert found["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_loss_or_gradient_that_is_no_number_changes_nothing(what: str) -> None:
    rows = random_rows(Random(2), 4, vocabulary=VOCABULARY)
    updater = PolicyUpdater(tiny_model("qwen3"), UpdateConfig(passes=2, learning_rate=0.01))
    before = [parameter.clone() for parameter in updater.model.parameters()]
    if what == "loss":
        bad = [*rows, make_row([1], [2], advantages=[float("nan")])]
        with pytest.raises(BranchlineError, match=r"loss: got nan in batch .* no weight has changed"):
            updater.update(bad)
    else:
        weight, calls = next(updater.model.parameters()), []

        def spoil(gradient: Any) -> Any:
            calls.append(1)
            return gradient * float("nan") if len(calls) == 2 else gradient

        hook = weight.register_hook(spoil)
        with pytest.raises(
            BranchlineError, match=r"grad_norm: got nan for a loss of .* no weight has changed"
        ):
            updater.update(rows)
        hook.remove()
        assert len(calls) == 2  # The first pass had changed the weights.
    after = list(updater.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    fresh = PolicyUpdater(tiny_model("qwen3"), UpdateConfig(passes=2, learning_rate=0.01))
    assert updater.update(rows) == fresh.update(rows)


def test_unknown_names_and_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="reference_kl_estimator: got 'k1', expected one of k3, k3_ratio"):
        LossConfig(reference_kl_estimator="k1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="clip_low: got nan"):
        LossConfig(clip_low=float("nan"))
    with pytest.raises(InputError, match="learning_rate: got nan"):
        UpdateConfig(learning_rate=float("nan"))
