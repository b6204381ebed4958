"""Training on trajectories: padded, packed and tree-packed rows give the losses and gradients of single rows.

The trajectories come from sessions that branch: their rows share answers, their advantages have both signs on
shared tokens, and trees over the token limit are cut.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from branchline import (  # noqa: E402
    CreditPolicy,
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
    pack_rows,
    pad_rows,
    training_rows,
)
from branchline.export.packing import TrainingRow  # noqa: E402
from branchline.train.losses import LossConfig  # noqa: E402
from tests.train.test_packed_forward import (  # noqa: E402
    CONFIG_NAMES,
    CONFIGS,
    gradients,
    packed_loss,
    relative,
    row_logprobs,
    row_loss,
)
from tests.train.tiny_models import tiny_model  # noqa: E402

VOCABULARY = 300
CODEC = ToyCodec(strip_thinking=True, header=lambda role: role[:1].encode(), separator=b"|")
"""Short headers: the rows of these sessions have about fifty tokens."""


def random_session(rng: Random, calls: int) -> Session:
    """Returns a session that continues, forks and samples again at random; some answers have reasoning."""
    session = Session("s", CODEC)
    conversations: list[list[Message]] = [[Message("user", "q")]]
    for _ in range(calls):
        messages = rng.choice(conversations)
        reasoning = rng.choice(["", "r1", "r2"])
        answer = Message("assistant", rng.choice(["aa", "ab", "abc", "b"]), reasoning_content=reasoning)
        turn = session.prepare(Request(tuple(messages)))
        ids = CODEC.encode_reply(answer)
        # Equal for equal beginnings, as a deterministic engine gives them.
        logprobs = -0.1 - (ids % 7 + np.arange(len(ids))) / 5
        generation = Generation(ids, logprobs.astype(np.float32), message=answer)
        call = session.commit(turn, generation).call
        session.record_delivery(call)
        conversations.append([*messages, answer, Message("user", rng.choice(["x", "yy"]))])
    return session


def random_group(seed: int, policy: ExportPolicy | None = None) -> TrajectoryGroup:
    rng = Random(seed)
    trajectories: list[Trajectory] = []
    for _ in range(2):
        session = random_session(rng, rng.randint(3, 6))
        leaves = session.tree.leaves()
        rewards: list[dict[str, Any]] = [{"score": rng.choice([0.0, 1.0, 2.0])}]
        rewards += [{"score": rng.uniform(-3, 3), "timeline": leaf.id} for leaf in leaves]
        trajectories.append(Trajectory.from_session(session, rewards=rewards, policy=policy))
    return TrajectoryGroup(trajectories)


def has_mixed_advantages(rows: list[TrainingRow]) -> bool:
    (batch,) = pack_rows(rows)
    return bool(((batch.positive_advantages != 0) & (batch.negative_advantages != 0)).any())


def test_the_trajectories_of_these_tests_have_mixed_advantages_and_shared_tokens() -> None:
    groups = [random_group(seed) for seed in range(4)]
    per_branch = CreditPolicy("per_branch")
    rows = [training_rows([group], credit=per_branch) for group in groups]
    assert sum(map(has_mixed_advantages, rows)) >= 2
    assert all(len(pack_rows(one)[0]) < pack_rows(one)[0].path_tokens for one in rows)


@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
@pytest.mark.parametrize("shape", ["qwen3", "llama", "gemma3"])
def test_packed_and_tree_packed_rows_give_the_loss_and_gradients_of_single_rows(
    shape: str, config: LossConfig
) -> None:
    model = tiny_model(shape, vocabulary=VOCABULARY)
    for seed, credit in enumerate(("per_branch", "discounted")):
        rows = training_rows([random_group(seed)], credit=CreditPolicy(credit, 0.9))  # type: ignore[arg-type]
        expected = row_loss(model, rows, config)
        expected_gradients = gradients(model, expected)
        longest = max(map(len, rows))
        cut: dict[str, Any] = {"max_tokens": longest + 10}
        assert len(pack_rows(rows, **cut)) > 1
        for options in ({}, {"share_prefixes": False}, cut):  # a tree, documents, a tree in pieces
            loss = packed_loss(model, rows, config, **options)
            assert abs((loss - expected).item()) <= 1e-12 * max(1.0, abs(expected.item()))
            assert relative(gradients(model, loss), expected_gradients) <= 1e-12


@pytest.mark.parametrize("shape", ["qwen3", "llama", "gemma3"])
def test_gradients_in_single_precision_stay_within_the_gate(shape: str) -> None:
    model = tiny_model(shape, torch.float32, vocabulary=VOCABULARY)
    rows = training_rows([random_group(11)], credit=CreditPolicy("per_branch"))
    expected = row_loss(model, rows, LossConfig())
    expected_gradients = gradients(model, expected)
    loss = packed_loss(model, rows, LossConfig(), max_tokens=max(map(len, rows)) + 10)
    assert abs((loss - expected).item()) <= 1e-5 * max(1.0, abs(expected.item()))
    assert relative(gradients(model, loss), expected_gradients) <= 1e-5


@pytest.mark.parametrize("shares", ["split", "first", "all"])
def test_every_share_mode_gives_the_gradients_of_single_rows(shares: str) -> None:
    model = tiny_model("qwen3", vocabulary=VOCABULARY)
    group = random_group(5, ExportPolicy(shares=shares, max_samples=4, max_tokens=40))  # type: ignore[arg-type]
    rows = training_rows([group], normaliser="episode", credit=CreditPolicy("per_branch"))
    expected = gradients(model, row_loss(model, rows, LossConfig()))
    assert relative(gradients(model, packed_loss(model, rows, LossConfig())), expected) <= 1e-12


def padded_logprobs(model: Any, ids: Any, attention_mask: Any) -> Any:
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def test_padded_rows_give_the_logprobs_and_the_reinforce_gradients_of_single_rows() -> None:
    model = tiny_model("qwen3", vocabulary=VOCABULARY)
    rows = training_rows([random_group(7)], credit=CreditPolicy("discounted", 0.5))
    expected = gradients(model, row_loss(model, rows, LossConfig("reinforce")))
    total = torch.zeros((), dtype=torch.float64)
    for batch in pad_rows(rows, 4 * max(map(len, rows)), multiple_of=8):
        ids = torch.from_numpy(batch.ids).long()
        logprobs = padded_logprobs(model, ids, torch.from_numpy(batch.attention_mask).long())
        products = torch.from_numpy(batch.weights * batch.advantages)[:, 1:]
        total = total - (products * logprobs).sum() / 7.0
        for place, index in enumerate(batch.rows):
            start, length = int(batch.prompt_lengths[place]), len(rows[index])
            single = row_logprobs(model, rows[index])
            assert torch.allclose(logprobs[place, start - 1 : length - 1], single, atol=1e-12)
    assert relative(gradients(model, total), expected) <= 1e-12


def test_dr_grpo_differs_from_grpo_only_in_the_scale_of_advantages() -> None:
    group = random_group(9)
    scaled = training_rows([group], normaliser="token")
    plain = training_rows([group], normaliser="token", group_std="none")
    factors = {
        round(float(one / other), 4)
        for row, bare in zip(scaled, plain, strict=True)
        for one, other in zip(row.advantages, bare.advantages, strict=True)
        if other
    }
    assert len(factors) <= 1
