"""Tree-packed training equals training on single rows: logprobs, losses and gradients."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from branchline.core.errors import InputError  # noqa: E402
from branchline.export.packing import TrainingRow, pack_rows  # noqa: E402
from branchline.train.losses import LossConfig  # noqa: E402
from branchline.train.packed_forward import block_pattern, forward_packed  # noqa: E402
from branchline.train.policy_loss import number_outputs, policy_loss  # noqa: E402
from tests.export.packed_rows import make_row, random_rows  # noqa: E402
from tests.train.tiny_models import SHAPES, VOCABULARY, tiny_model  # noqa: E402

every_shape = pytest.mark.parametrize("shape", SHAPES)


def row_distributions(model: Any, row: TrainingRow) -> tuple[Any, Any]:
    """Returns the logprobs and the entropies of a row's response by a plain forward pass of the model."""
    ids = torch.from_numpy(np.concatenate([row.sample.prompt_ids, row.sample.response_ids])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    start = len(row.sample.prompt_ids)
    logprobs = torch.log_softmax(logits.double(), -1)[start - 1 : -1]
    return logprobs.gather(-1, ids[start:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def row_logprobs(model: Any, row: TrainingRow) -> Any:
    return row_distributions(model, row)[0]


def output_ratios(new: Any, old: Any, trained: list[bool]) -> Any:
    """Returns the ratio of each token's output, with the gradient of the token's own logprob."""
    ratios = torch.ones_like(new)
    start = 0
    while start < len(trained):
        end = start + 1
        while trained[start] and end < len(trained) and trained[end]:
            end += 1
        mean = (new[start:end] - old[start:end]).mean().detach()
        ratios[start:end] = torch.exp(mean) * torch.exp(new[start:end] - new[start:end].detach())
        start = end
    return ratios


def row_loss(model: Any, rows: list[TrainingRow], config: LossConfig) -> Any:
    """Returns the loss of rows one by one, written independently of the packed loss."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        new, entropies = row_distributions(model, row)
        weights, advantages = (
            torch.from_numpy(row.weights).double(),
            torch.from_numpy(row.advantages).double(),
        )
        engine = torch.from_numpy(row.sample.response_logprobs).double()
        old = (engine * 0.9).where(weights != 0, new.detach())
        ratio = torch.exp(new - old)
        if config.name == "gspo":
            ratio = output_ratios(new, old, (row.weights != 0).tolist())
        if config.name in ("ppo", "gspo"):
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)
        elif config.name == "cispo":
            loss = -ratio.clamp(max=1 + config.clip_high).detach() * advantages * new
        else:
            loss = -advantages * new
        if config.max_importance_weight is not None:
            loss = loss * torch.exp(old - engine).clamp(max=config.max_importance_weight)
        if config.reference_kl_coefficient:
            difference = engine * 0.8 - new
            divergence = torch.exp(difference) - difference - 1
            if config.reference_kl_estimator == "k3_ratio":
                divergence = divergence * torch.exp(new - old)
            loss = loss + config.reference_kl_coefficient * divergence
        loss = loss - config.entropy_coefficient * entropies
        total = total + (weights * loss).where(weights != 0, 0.0).sum()
    return total / 7.0


def gradients(model: Any, loss: Any) -> Any:
    model.zero_grad()
    loss.backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def packed_loss(model: Any, rows: list[TrainingRow], config: LossConfig, **options: Any) -> Any:
    total = torch.zeros((), dtype=torch.float64)
    for batch in pack_rows(rows, share_partial_answers=config.name != "gspo", **options):
        outputs = forward_packed(model, batch, chunk_tokens=7, with_entropy=bool(config.entropy_coefficient))
        engine = torch.from_numpy(batch.old_logprobs[outputs.places.numpy()]).to(outputs.logprobs.dtype)
        total = (
            total
            + policy_loss(
                outputs,
                batch,
                config,
                normalizer=7.0,
                old_logprobs=engine * 0.9,
                reference_logprobs=engine * 0.8,
            ).loss
        )
    return total


def relative(one: Any, other: Any) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-30)).item()


CONFIGS = [
    LossConfig(),
    LossConfig("reinforce"),
    LossConfig("cispo"),
    LossConfig("gspo", 0.05, 0.1),
    LossConfig(reference_kl_coefficient=0.1, max_importance_weight=1.05, entropy_coefficient=0.01),
    LossConfig(reference_kl_coefficient=0.1, reference_kl_estimator="k3"),
]
CONFIG_NAMES = ["ppo", "reinforce", "cispo", "gspo", "kl", "plain-k3"]


@every_shape
@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
def test_losses_and_gradients_equal_those_of_single_rows(shape: str, config: LossConfig) -> None:
    model = tiny_model(shape)
    for seed in range(3):
        rows = random_rows(Random(seed), 6, vocabulary=VOCABULARY)
        expected = row_loss(model, rows, config)
        expected_gradients = gradients(model, expected)
        longest = max(map(len, rows))
        for options in ({}, {"share_prefixes": False}, {"max_tokens": longest + 5}):
            loss = packed_loss(model, rows, config, **options)
            assert abs((loss - expected).item()) <= 1e-12 * max(1.0, abs(expected.item()))
            assert relative(gradients(model, loss), expected_gradients) <= 1e-12


@every_shape
def test_logprobs_in_single_precision_are_those_of_single_rows(shape: str) -> None:
    model = tiny_model(shape, torch.float32)
    rows = random_rows(Random(4), 8, vocabulary=VOCABULARY)
    (batch,) = pack_rows(rows)
    outputs = forward_packed(model, batch)
    found = dict(zip(outputs.places.tolist(), outputs.logprobs.tolist(), strict=True))
    for index, path in zip(batch.rows, batch.paths, strict=True):
        row = rows[index]
        expected = row_logprobs(model, row)
        for offset in np.flatnonzero(row.weights).tolist():
            place = int(path[len(row.sample.prompt_ids) + offset])
            assert abs(found[place] - expected[offset].item()) <= 5e-5


@every_shape
def test_gradients_in_single_precision_stay_within_the_gate(shape: str) -> None:
    model = tiny_model(shape, torch.float32)
    rows = random_rows(Random(5), 8, vocabulary=VOCABULARY)
    expected = row_loss(model, rows, LossConfig())
    expected_gradients = gradients(model, expected)
    loss = packed_loss(model, rows, LossConfig())
    assert abs((loss - expected).item()) <= 1e-5 * max(1.0, abs(expected.item()))
    assert relative(gradients(model, loss), expected_gradients) <= 1e-5


def test_eager_attention_gives_the_same_logprobs() -> None:
    rows = random_rows(Random(1), 5, vocabulary=VOCABULARY)
    (batch,) = pack_rows(rows)
    one, other = (
        forward_packed(tiny_model("qwen3", attention=kind), batch).logprobs for kind in ("sdpa", "eager")
    )
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_the_flex_mask_are_full_or_partial_exactly_where_the_mask_is(seed: int) -> None:
    rows = random_rows(Random(seed), 20, vocabulary=VOCABULARY, max_branch=60)
    (batch,) = pack_rows(rows)
    padding = -len(batch) % 128
    length = len(batch) + padding
    ends = torch.from_numpy(
        np.concatenate([batch.subtree_ends, np.arange(len(batch) + 1, length + 1, dtype=np.int32)])
    )
    places = torch.arange(length)
    visible = (places[None, :] <= places[:, None]) & (places[:, None] < ends[None, :])
    tiles = visible.view(length // 128, 128, length // 128, 128).transpose(1, 2)
    some, full = block_pattern(ends)
    assert torch.equal(full, tiles.all(-1).all(-1))
    # A block may be listed although no pair in it is visible, never the other way round.
    assert not (tiles.any(-1).any(-1) & ~some & ~full).any()


def test_entropy_and_temperature_are_those_of_the_distribution() -> None:
    model = tiny_model("qwen3")
    row = make_row([1, 2], [3, 4, 5])
    (batch,) = pack_rows([row])
    outputs = forward_packed(model, batch, temperature=0.7, with_entropy=True, chunk_tokens=2)
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 1:4] / 0.7
    expected = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(outputs.logprobs, expected.log_prob(torch.tensor([3, 4, 5])))
    assert outputs.entropies is not None
    assert torch.allclose(outputs.entropies, expected.entropy())


def test_gspo_uses_one_ratio_for_each_output() -> None:
    model = tiny_model("qwen3")
    row = make_row([1, 2], [3, 4, 5, 6, 7], weights=[1, 1, 0, 1, 1], advantages=[2, 2, 0, -1, -1])
    (batch,) = pack_rows([row])
    assert number_outputs(batch).tolist() == [-1, -1, 0, 0, -1, 1, 1]
    outputs = forward_packed(model, batch)
    new = outputs.logprobs.detach()
    old = torch.full_like(new, -3.9)
    loss = policy_loss(outputs, batch, LossConfig("gspo", 0.3, 0.3), normalizer=1.0, old_logprobs=old).loss
    expected = 0.0
    for part, advantage in ((slice(0, 2), 2.0), (slice(2, 4), -1.0)):
        ratio = torch.exp((new[part] - old[part]).mean())
        expected -= 2 * float(torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage))
    assert loss.item() == pytest.approx(expected)


def test_gspo_refuses_an_output_that_two_rows_share_in_part() -> None:
    (batch,) = pack_rows([make_row([1], [2, 3]), make_row([1], [2, 4])])
    with pytest.raises(InputError, match="share_partial_answers=False"):
        number_outputs(batch)


def test_a_model_with_linear_attention_is_refused() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    (batch,) = pack_rows([make_row([1], [2])])
    with pytest.raises(InputError, match="linear_attention"):
        forward_packed(model, batch)


def test_a_trained_first_token_is_refused() -> None:
    (batch,) = pack_rows([make_row([], [2, 3])])
    with pytest.raises(InputError, match="expected a prompt before it"):
        forward_packed(tiny_model("qwen3"), batch)
