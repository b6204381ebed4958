"""Random training rows that share prefixes, as the samples of a tree do."""

from __future__ import annotations

from random import Random

import numpy as np

from branchline.core.sample import AnswerSpan, Sample
from branchline.core.token_arrays import as_ids
from branchline.export.packing import TrainingRow
from branchline.export.trajectory import Trajectory


def make_row(
    prompt: list[int],
    response: list[int],
    *,
    weights: list[float] | None = None,
    advantages: list[float] | None = None,
    logprobs: list[float] | None = None,
    version: int = 0,
) -> TrainingRow:
    """Returns a row; by default every response token is trained with weight 1 and advantage 1."""
    count = len(response)
    token_weights = np.array([1.0] * count if weights is None else weights, np.float32)
    mask = (token_weights != 0).astype(np.int8)
    sample = Sample(
        prompt_ids=as_ids(prompt),
        response_ids=as_ids(response),
        response_mask=mask,
        response_logprobs=np.array([-0.5] * count if logprobs is None else logprobs, np.float32),
        response_versions=np.full(count, version, np.int32),
        shares=token_weights,
    )
    return TrainingRow(
        sample, token_weights, np.array([1.0] * count if advantages is None else advantages, np.float32)
    )


def random_rows(rng: Random, count: int, *, vocabulary: int = 50, max_branch: int = 12) -> list[TrainingRow]:
    """Returns rows that branch at random places, with sampled and context spans and mixed advantages."""
    spans: list[list[tuple[int, float, float]]] = []
    for _ in range(count):
        prefix: list[tuple[int, float, float]] = []
        if spans and rng.random() < 0.85:
            parent = rng.choice(spans)
            prefix = parent[: rng.randint(0, len(parent))]
        tokens = list(prefix)
        for _ in range(rng.randint(0 if prefix else 1, 3)):
            is_sampled = rng.random() < 0.6
            for _ in range(rng.randint(1, max_branch)):
                logprob = -rng.random() if is_sampled else 0.0
                tokens.append((rng.randrange(vocabulary), logprob, float(is_sampled)))
        spans.append(tokens)
    rows: list[TrainingRow] = []
    for tokens in spans:
        start = rng.randint(1, len(tokens)) if len(tokens) > 1 else 1
        advantage = rng.choice([-1.0, -0.3, 0.0, 0.7, 2.0])
        response = tokens[start:]
        rows.append(
            make_row(
                [token for token, _, _ in tokens[:start]],
                [token for token, _, _ in response],
                weights=[sampled * rng.choice([1.0, 0.5, 0.25]) for _, _, sampled in response],
                advantages=[advantage] * len(response),
                logprobs=[logprob for _, logprob, _ in response],
            )
        )
    return rows


def make_trajectory(
    responses: list[list[int]],
    *,
    reward: float | None = None,
    rewards: list[float | None] | None = None,
    finished: bool = True,
    failed: bool = False,
) -> Trajectory:
    """Returns a trajectory with a sample for each response; all tokens are trained with share 1."""
    samples: list[Sample] = []
    for index, response in enumerate(responses):
        count = len(response)
        samples.append(
            Sample(
                prompt_ids=as_ids([9, index]),
                response_ids=as_ids(response),
                response_mask=np.ones(count, np.int8),
                response_logprobs=np.full(count, -0.5, np.float32),
                response_versions=np.zeros(count, np.int32),
                shares=np.ones(count, np.float32),
                reward=reward if rewards is None else rewards[index],
                answers=(AnswerSpan(0, count, f"call-{index}", index),),
            )
        )
    return Trajectory(tuple(samples), reward=reward, finished=finished, failed=failed)
