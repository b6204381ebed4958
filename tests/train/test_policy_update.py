"""One update: its gradient is that of the loss, and rows without an advantage only count in the mean."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from branchline.core.errors import InputError  # noqa: E402
from branchline.export.packing import TrainingRow  # noqa: E402
from branchline.train.losses import LossConfig  # noqa: E402
from branchline.train.policy_update import PolicyUpdater, UpdateConfig  # noqa: E402
from tests.export.packed_rows import make_row, random_rows  # noqa: E402
from tests.train.test_packed_forward import row_logprobs  # noqa: E402
from tests.train.tiny_models import VOCABULARY, tiny_model  # noqa: E402


def updater(loss: LossConfig | None = None, **changes: Any) -> PolicyUpdater:
    config = UpdateConfig(max_grad_norm=1e9, loss=loss or LossConfig(), **{"learning_rate": 1e-3, **changes})
    return PolicyUpdater(tiny_model("qwen3"), config)


def gradient(model: Any) -> Any:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_gradient_is_that_of_the_mean_loss_of_single_rows() -> None:
    rows = random_rows(Random(0), 6, vocabulary=VOCABULARY)
    policy = updater(LossConfig(max_importance_weight=1.5))
    reference = tiny_model("qwen3")
    total = sum(float(row.weights.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        new = row_logprobs(reference, row)
        weights, advantages = (torch.from_numpy(values).double() for values in (row.weights, row.advantages))
        engine = torch.from_numpy(row.sample.response_logprobs).double()
        correction = torch.exp(new.detach() - engine).clamp(max=1.5)
        ratio = torch.exp(new - new.detach())
        token_loss = (-weights * advantages * correction * ratio).where(weights != 0, 0.0)
        loss = loss + token_loss.sum() / total
    loss.backward()
    metrics = policy.update(rows)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert torch.allclose(gradient(policy.model), gradient(reference), atol=1e-12)


def test_a_row_without_an_advantage_counts_in_the_mean_and_changes_nothing_else() -> None:
    one = make_row([1, 2], [3, 4], advantages=[1.0, 1.0])
    other = make_row([1, 2], [5, 6], advantages=[0.0, 0.0])
    alone, both = updater(), updater()
    alone.update([one])
    metrics = both.update([one, other])
    assert torch.allclose(gradient(both.model), gradient(alone.model) / 2, atol=1e-14)
    assert metrics["tree_reuse"] == 1


def test_rows_without_any_advantage_leave_the_weights_unchanged() -> None:
    policy = updater()
    before = [parameter.clone() for parameter in policy.model.parameters()]
    metrics = policy.update([make_row([1], [2, 3], advantages=[0.0, 0.0])])
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-3}
    assert all(torch.equal(one, other) for one, other in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.parametrize("layout", ["rows", "auto"])
@pytest.mark.parametrize("term", ["entropy_coefficient", "reference_kl_coefficient"])
def test_a_row_without_any_weight_is_left_out_of_every_term(layout: str, term: str) -> None:
    trained = make_row([1, 2], [3, 4], advantages=[1.0, 0.0])
    masked = make_row([5, 6], [7, 3], weights=[0.0, 0.0])
    config = UpdateConfig(layout=layout, max_batch_tokens=4, loss=LossConfig(**{term: 0.1}))  # type: ignore[arg-type]

    def policy() -> PolicyUpdater:
        return PolicyUpdater(tiny_model("qwen3"), config, tiny_model("qwen3"))

    assert policy().update([trained, masked]) == policy().update([trained])
    assert policy().update([masked])["loss"] == 0.0


def test_the_second_pass_uses_the_logprobs_of_the_start_of_the_step() -> None:
    rows: list[TrainingRow] = [make_row([1, 2], [3], advantages=[1.0])]
    policy = updater(passes=2, learning_rate=0.05)
    before = row_logprobs(policy.model, rows[0]).detach()
    single = updater(passes=1, learning_rate=0.05)
    single.update(rows)
    after = row_logprobs(single.model, rows[0]).detach()
    assert (after - before > 0.2).all()
    # After the first pass the ratio is beyond the clip range, so the second pass has no gradient.
    metrics = policy.update(rows)
    assert metrics["clip_ratio/region_mean"] == 1
    assert metrics["grad_norm"] == 0


def test_the_gap_to_the_engine_is_measured_before_the_update() -> None:
    row = make_row([1, 2], [3, 4], advantages=[1.0, 1.0])
    policy = updater(learning_rate=0.1)
    own = row_logprobs(policy.model, row).detach().numpy()
    expected = np.abs(own - row.sample.response_logprobs)
    metrics = policy.update([row])
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(expected.mean(), rel=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(expected.max(), rel=1e-5)


def test_a_linear_schedule_falls_to_zero() -> None:
    policy = updater(schedule="linear", learning_rate=0.5)
    rows = [make_row([1], [2])]
    assert [policy.update(rows, progress)["learning_rate"] for progress in (0, 0.5, 1)] == [0.5, 0.25, 0.0]


def test_a_kl_term_pulls_towards_the_reference() -> None:
    row = make_row([1, 2], [3, 4], advantages=[0.0, 0.0])
    reference = tiny_model("qwen3")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    config = UpdateConfig(learning_rate=1e-3, loss=LossConfig(reference_kl_coefficient=1.0))
    policy = PolicyUpdater(tiny_model("qwen3"), config, reference)
    losses = [policy.update([row])["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    with pytest.raises(InputError, match="reference_kl_coefficient: needs a reference model"):
        PolicyUpdater(tiny_model("qwen3"), config)
