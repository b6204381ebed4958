from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from branchline.engines.hf import sampling
from branchline.engines.hf.job import Job
from tests.engines.tiny_model import torch, transformers


def make_job(seed: int = 0, ids: Any = (1, 2), **params: Any) -> Any:
    return Job(as_ids(list(ids)), SamplingParams(**{"max_tokens": 50, **params}), seed)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.floats(0.05, 0.999),
    st.floats(0.001, 0.9),
)
def test_truncation_equals_that_of_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(4, 50) * 3
    params = [
        SamplingParams(top_k=top_k),
        SamplingParams(top_p=top_p),
        SamplingParams(min_p=min_p),
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p),
    ]
    by_k = transformers.TopKLogitsWarper(top_k)
    by_p = transformers.TopPLogitsWarper(top_p)
    by_min = transformers.MinPLogitsWarper(min_p)
    rows = [scores[n : n + 1] for n in range(4)]
    expected = [
        by_k(None, rows[0]),
        by_p(None, rows[1]),
        by_min(None, rows[2]),
        by_min(None, by_p(None, by_k(None, rows[3]))),
    ]
    assert torch.equal(sampling.truncate_scores(scores, params), torch.cat(expected))


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    jobs = [make_job(seed, temperature=1.5) for seed in range(20_000)]
    draws = sampling.sample(logits.expand(len(jobs), -1), jobs, "processed")
    expected = (logits / 1.5).softmax(-1)
    counts = np.bincount(draws.ids, minlength=5)
    assert np.allclose(counts / len(jobs), expected, atol=0.012)
    assert counts[4] == 0
    assert np.allclose(draws.logprobs, expected.log()[draws.ids], atol=1e-5)


def test_random_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    numbers = [sampling.uniform(seed, position) for seed in range(100) for position in range(100)]
    assert np.allclose(np.histogram(numbers, bins=10, range=(0, 1))[0], 1000, atol=150)
    assert len(set(numbers)) == len(numbers)
    assert sampling.uniform(-1, 0) == sampling.uniform(2**64 - 1, 0)


def test_id_of_probability_zero_is_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    for number, expected in ((0.0, 1), (1.0, 2)):
        monkeypatch.setattr(sampling, "uniform", lambda seed, position, number=number: number)
        assert sampling.sample(logits, [make_job()], "raw").ids == [expected]


def test_penalties_count_prompt_and_output_ids() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 2.8, 0.0]])
    # Prompt ids 0 and 2, output ids 1, 1: repetition applies to 0, 1, 2; presence and frequency to 1.
    job = make_job(
        ids=(0, 2),
        temperature=1.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        top_k=1,
    )
    job.append(1)
    job.append(1)
    expected = torch.tensor([[1.5, 2.9 / 2 - 0.5 - 2 * 0.25, -2.0, 2.8, 0.0]])
    draws = sampling.sample(logits, [job], "raw")
    assert torch.allclose(sampling._apply_penalties(logits, [copy_job(job)]), expected)
    assert draws.ids == [3]
    assert draws.logprobs == pytest.approx([logits.log_softmax(-1)[0, 3].item()])
    # The sampled id is counted from now on.
    again = sampling._apply_penalties(logits, [job])[0, 3].item()
    assert again == pytest.approx(2.8 / 2 - 0.5 - 0.25)


def copy_job(job: Any) -> Any:
    """The same job without penalty counts."""
    copy = Job(job.prompt_ids, job.params, job.seed)
    for token in job.output_ids:
        copy.append(token)
    return copy


def test_rows_with_different_parameters_share_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    jobs = [
        make_job(1, temperature=0),
        make_job(2, temperature=0.7),
        make_job(3, top_p=0.3),
        make_job(4, temperature=0, repetition_penalty=1.5),
        make_job(5, temperature=1e-30),
    ]
    together = sampling.sample(logits, jobs, "processed")
    apart = [sampling.sample(logits[n : n + 1], [copy_job(job)], "processed") for n, job in enumerate(jobs)]
    assert together.ids == [draws.ids[0] for draws in apart]
    assert together.logprobs == pytest.approx([draws.logprobs[0] for draws in apart])
    assert together.ids[4] == logits[4].argmax().item(), "a temperature near 0 is greedy"


# -- constraints -------------------------------------------------------------------------------------

STOP = 3


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.dictionaries(st.integers(0, 7), st.floats(-100, 100, width=32), max_size=4),
    st.sets(st.integers(0, 7)),
    st.integers(0, 2),
)
def test_constraints_change_what_is_sampled_and_not_the_raw_logprobs(
    seed: int, bias: dict[int, float], allowed: set[int], min_tokens: int
) -> None:
    if min_tokens and allowed == {STOP}:
        allowed = set()
    torch.manual_seed(seed)
    logits = torch.randn(1, 8)
    job = make_job(
        seed,
        logit_bias=bias,
        allowed_token_ids=tuple(allowed),
        min_tokens=min_tokens,
        stop_ids=(STOP,),
        requested_fields=("logit_bias",),
    )
    job.append(5)
    scores = logits[0].clone()
    for token, value in bias.items():
        scores[token] += value
    excluded = [token for token in range(8) if allowed and token not in allowed]
    # One token was sampled already.
    excluded += [STOP] if min_tokens > 1 else []
    scores[excluded] = float("-inf")
    draw = sampling.sample(logits, [job], "processed")
    assert draw.ids[0] not in excluded
    assert draw.logprobs[0] == pytest.approx(float(scores.log_softmax(-1)[draw.ids[0]]), abs=1e-5)
    assert draw.raw_logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[draw.ids[0]]), abs=1e-5)
    greedy = make_job(seed, temperature=0.0, logit_bias={2: 100.0}, requested_fields=("logit_bias",))
    assert sampling.sample(logits, [greedy], "raw").ids == [2]


def test_rows_without_constraints_are_sampled_as_before() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 8)
    plain = make_job(3)
    biased = make_job(4, allowed_token_ids=(6,), requested_fields=("allowed_token_ids",))
    both = sampling.sample(logits, [plain, biased], "processed")
    alone = sampling.sample(logits[:1], [make_job(3)], "processed")
    assert (both.ids[0], both.logprobs[0]) == (alone.ids[0], alone.logprobs[0])
    assert (both.ids[1], both.logprobs[1]) == (6, 0.0)
