"""The parts of the embedded engine: sampling, prefix cache, scheduler, attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams

pytest.importorskip("torch", reason="torch is not installed: pip install 'branchline[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'branchline[hf]'")

from branchline.engines.hf import attention, prefix_cache, sampling, scheduler
from branchline.engines.hf.job import Job
from tests.engines.tiny_model import greedy, hf, prompt, reference_ids, tiny_model, torch, transformers

properties = settings(max_examples=50, deadline=None)


def make_job(seed: int = 0, ids: Any = (1, 2), **params: Any) -> Any:
    return Job(as_ids(list(ids)), SamplingParams(**{"max_tokens": 50, **params}), seed)


# Sampling


@properties
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


# Prefix cache


@properties
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20), st.integers(1, 20))
def test_prefix_cache_stays_within_its_limit_and_finds_the_longest_prefix(
    added: list[list[int]], limit: int
) -> None:
    cache = prefix_cache.PrefixCache(limit, 1)
    for ids in added:
        cache.add(as_ids(ids), list)
        assert cache.token_count <= limit
        if len(ids) <= limit:
            assert cache.find_longest(as_ids([*ids, 9]))[0] == len(ids), "the sequence just added is found"
        entries = [entry.ids.tolist() for entry in cache._entries]
        assert not any(a == b[: len(a)] for a in entries for b in entries if a is not b)
        for probe in added:
            best = max(
                (prefix_cache.common_prefix_length(as_ids(probe), as_ids(entry)) for entry in entries),
                default=0,
            )
            assert cache.find_longest(as_ids(probe))[0] == best


def test_keys_and_values_of_a_cached_prefix_are_not_copied() -> None:
    cache = prefix_cache.PrefixCache(10, 1)
    cache.add(as_ids([1, 2, 3]), list)
    for ids in ([1, 2], [1, 2, 3], list(range(11))):
        cache.add(as_ids(ids), lambda: pytest.fail("copied"))


def test_cached_keys_and_values_use_the_counted_bytes() -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(cache_bytes=400 * token_bytes))
    with torch.inference_mode():
        for n in range(8):
            work.add(Job(prompt(n, 90), greedy(4 + n), 0))
            while work.is_busy:
                work.step()
    held = sum(
        states.untyped_storage().nbytes()
        for entry in work._prefix_cache._entries
        for pair in entry.kv
        for states in pair
    )
    assert held == work.stats.cached_tokens * token_bytes <= 400 * token_bytes
    assert work.stats.evictions == 4, "four of eight fit"


# Scheduler


def test_long_prompt_does_not_delay_decoding_rows() -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(prefill_tokens=32))
    short, long = Job(prompt(1, 10), greedy(40), 0), Job(prompt(2, 320), greedy(3), 0)
    with torch.inference_mode():
        work.add(short)
        work.step()
        work.add(long)
        while not long.output_ids.size:
            before = short.length
            work.step()
            assert short.length == before + 1
        assert short.length == 10 + 1 + 10, "320 ids in portions of 32"
        while work.is_busy:
            work.step()
    assert short.output_ids.tolist() == reference_ids(tiny_model(), prompt(1, 10), 40)
    assert long.output_ids.tolist() == reference_ids(tiny_model(), prompt(2, 320), 3)


@pytest.mark.parametrize("at_once", [1, 2])
def test_long_and_short_prompts_do_not_delay_each_other(at_once: int) -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(prefill_tokens=32))
    long = Job(prompt(2, 320), greedy(3), 0)
    with torch.inference_mode():
        work.add(long)
        work.step()
        for turn in range(12):
            shorts = [Job(prompt(10 * turn + n, 30), greedy(3), 0) for n in range(at_once)]
            for short in shorts:
                work.add(short)
            work.step()
            work.step()
            if at_once == 1:
                assert shorts[0].output_ids.size, "a short prompt is computed within two steps"
            assert long.num_computed_tokens >= min(32 * (turn + 2), 320), (
                "the long prompt is computed in every second step"
            )
    assert long.output_ids.tolist() == reference_ids(tiny_model(), prompt(2, 320), 3)


def test_batch_memory_is_freed_when_nothing_runs() -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig())
    with torch.inference_mode():
        work.add(Job(prompt(1, 10), greedy(2), 0))
        work.step()
        assert work._kv_cache.capacity == (1, 256)
        work.step()
    assert work._kv_cache.capacity == (0, 0)


def test_prompt_removed_half_way_leaves_no_nan_in_its_row() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[999] = float("nan")
    work = scheduler.Scheduler(model, hf.HfConfig(prefill_tokens=16))
    kept, poisoned = Job(prompt(1, 10), greedy(30), 0), Job(as_ids([999] * 100), greedy(5), 0)
    next_in_row = Job(prompt(2, 12), greedy(30), 0)
    with torch.inference_mode():
        work.add(kept)
        work.add(poisoned)
        for _ in range(4):
            work.step()
        assert 0 < poisoned.num_computed_tokens < 100
        work.remove(poisoned)
        work.add(next_in_row)
        while work.is_busy:
            work.step()
    assert kept.output_ids.tolist() == reference_ids(tiny_model(), prompt(1, 10), 30)
    assert next_in_row.output_ids.tolist() == reference_ids(tiny_model(), prompt(2, 12), 30)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_adding_removing_and_invalidating_gives_the_same_ids(seed: int) -> None:
    """Small limits, shared prefixes, random removals and invalidations: the ids are those of `generate`."""
    random = np.random.default_rng(seed)
    token_bytes = 3 * 2 * 2 * 16 * 4
    config = hf.HfConfig(
        max_batch=int(random.integers(1, 6)),
        batch_bytes=int(random.integers(1, 5)) * 512 * token_bytes,
        cache_bytes=int(random.integers(0, 800)) * token_bytes,
        prefill_tokens=int(random.integers(8, 200)),
    )
    work = scheduler.Scheduler(tiny_model(), config)
    trunk, model = prompt(99, 240).tolist(), tiny_model()
    jobs, removed = [], set()
    with torch.inference_mode():
        for n in range(14):
            ids = as_ids(
                [*trunk[: random.integers(0, 240)], *prompt(n, int(random.integers(1, 60))).tolist()]
            )
            jobs.append(Job(ids, greedy(int(random.integers(1, 40))), 0))
            work.add(jobs[-1])
            for _ in range(random.integers(0, 6)):
                if work.is_busy:
                    work.step()
            if random.random() < 0.2:
                job = jobs[random.integers(0, len(jobs))]
                work.remove(job)
                removed.add(job)
            if random.random() < 0.15:
                work.invalidate()
            stats = work.stats
            assert stats.running <= config.max_batch
            assert stats.cached_tokens * token_bytes <= config.cache_bytes
            rows, length = work._kv_cache.capacity
            assert rows <= 1 or rows * length * token_bytes <= config.batch_bytes
        while work.is_busy:
            work.step()
    for job in jobs:
        size = len(job.output_ids)
        assert job in removed or size == job.params.max_tokens
        assert job.output_ids.tolist() == (reference_ids(model, job.prompt_ids, size) if size else [])


# Attention


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("has_mask", [True, False])
def test_grouped_attention_equals_that_of_transformers(width: int, has_mask: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    query, key, value = torch.randn(2, 6, width, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    if not has_mask and width > 1:
        key, value = key[:, :, :width], value[:, :, :width]
    mask = torch.randn(2, 1, width, 11) if has_mask else None
    expected, _ = attention.sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    output, _ = attention.grouped_sdpa_attention(module, query, key, value, mask, scaling=0.3)
    assert output.shape == (2, width, 6, 8)
    assert torch.allclose(output, expected, atol=1e-6)


def test_model_with_grouped_attention_computes_and_trains_as_before() -> None:
    ids = torch.from_numpy(prompt(1, 40).astype(np.int64))[None]
    models = [tiny_model(), tiny_model()]
    attention.install(models[0])
    assert models[0].config._attn_implementation == attention.ATTENTION_NAME
    losses = [model(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    assert reference_ids(models[0], prompt(1, 40), 8) == reference_ids(models[1], prompt(1, 40), 8)
