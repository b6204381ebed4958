"""The parts of the embedded engine by themselves: sampling, kept prefixes, who computes next, attention."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams
from branchline.engines.hf import prefix_cache

pytest.importorskip("torch", reason="torch is not installed: pip install 'branchline[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'branchline[hf]'")

from branchline.engines.hf import attention, linear, sampling, scheduler
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
def test_truncation_is_that_of_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
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


def test_draws_follow_the_distribution() -> None:
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


def test_an_id_of_probability_zero_is_never_drawn_even_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    for number, expected in ((0.0, 1), (1.0, 2)):
        monkeypatch.setattr(sampling, "uniform", lambda seed, position, number=number: number)
        assert sampling.sample(logits, [make_job()], "raw").ids == [expected]


def test_penalties_count_what_they_should() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 2.8, 0.0]])
    # Prompt ids 0 and 2, output ids 1, 1: repetition touches 0, 1, 2; presence and frequency touch 1.
    one = make_job(
        ids=(0, 2),
        temperature=1.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        top_k=1,
    )
    one.append(1)
    one.append(1)
    expected = torch.tensor([[1.5, 2.9 / 2 - 0.5 - 2 * 0.25, -2.0, 2.8, 0.0]])
    draws = sampling.sample(logits, [one], "raw")
    assert torch.allclose(sampling._apply_penalties(logits, [copy_job(one)]), expected)
    assert draws.ids == [3]
    assert draws.logprobs == pytest.approx([logits.log_softmax(-1)[0, 3].item()])
    # The id just drawn counts from now on, once.
    again = sampling._apply_penalties(logits, [one])[0, 3].item()
    assert again == pytest.approx(2.8 / 2 - 0.5 - 0.25)


def copy_job(one: Any) -> Any:
    """The same job, counting from nothing."""
    other = Job(one.prompt_ids, one.params, one.seed)
    for token in one.output_ids:
        other.append(token)
    return other


def test_rows_of_every_kind_share_a_batch() -> None:
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
    apart = [sampling.sample(logits[n : n + 1], [copy_job(one)], "processed") for n, one in enumerate(jobs)]
    assert together.ids == [draws.ids[0] for draws in apart]
    assert together.logprobs == pytest.approx([draws.logprobs[0] for draws in apart])
    assert together.ids[4] == logits[4].argmax().item(), "too cold to divide by is greedy"


# Kept prefixes


@properties
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20), st.integers(1, 20))
def test_kept_prefixes_stay_within_the_limit_and_answer_the_longest(
    added: list[list[int]], limit: int
) -> None:
    kept = prefix_cache.PrefixCache(limit, 1)
    for ids in added:
        kept.add(as_ids(ids), list)
        assert kept.token_count <= limit
        if len(ids) <= limit:
            assert kept.find_longest(as_ids([*ids, 9]))[0] == len(ids), "what was just added is there"
        entries = [entry.ids.tolist() for entry in kept._entries]
        assert not any(a == b[: len(a)] for a in entries for b in entries if a is not b)
        for probe in added:
            best = max(
                (prefix_cache.common_prefix_length(as_ids(probe), as_ids(entry)) for entry in entries),
                default=0,
            )
            assert kept.find_longest(as_ids(probe))[0] == best


def test_keys_and_values_are_not_copied_for_what_is_kept_already() -> None:
    kept = prefix_cache.PrefixCache(10, 1)
    kept.add(as_ids([1, 2, 3]), list)
    for ids in ([1, 2], [1, 2, 3], list(range(11))):
        kept.add(as_ids(ids), lambda: pytest.fail("copied"))


def test_kept_keys_and_values_take_the_bytes_that_are_counted() -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(cache_bytes=400 * token_bytes), None)
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


# Who computes next


def test_a_long_prompt_does_not_hold_up_those_that_are_decoding() -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(prefill_tokens=32), None)
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
def test_a_long_prompt_does_not_hold_up_short_ones_nor_they_it(at_once: int) -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(prefill_tokens=32), None)
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
                assert shorts[0].output_ids.size, "a short one is answered within two steps"
            assert long.num_computed_tokens >= min(32 * (turn + 2), 320), (
                "and the long one computes in every other"
            )
    assert long.output_ids.tolist() == reference_ids(tiny_model(), prompt(2, 320), 3)


def test_memory_of_the_batch_is_given_back_when_nothing_runs() -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig(), None)
    with torch.inference_mode():
        work.add(Job(prompt(1, 10), greedy(2), 0))
        work.step()
        assert work._kv_cache.capacity == (1, 256)
        work.step()
    assert work._kv_cache.capacity == (0, 0)


def test_a_prompt_dropped_half_way_leaves_nothing_behind_that_is_no_number() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[999] = float("nan")
    work = scheduler.Scheduler(model, hf.HfConfig(prefill_tokens=16), None)
    staying, poisoned = Job(prompt(1, 10), greedy(30), 0), Job(as_ids([999] * 100), greedy(5), 0)
    next_in_row = Job(prompt(2, 12), greedy(30), 0)
    with torch.inference_mode():
        work.add(staying)
        work.add(poisoned)
        for _ in range(4):
            work.step()
        assert 0 < poisoned.num_computed_tokens < 100
        work.remove(poisoned)
        work.add(next_in_row)
        while work.is_busy:
            work.step()
    assert staying.output_ids.tolist() == reference_ids(tiny_model(), prompt(1, 10), 30)
    assert next_in_row.output_ids.tolist() == reference_ids(tiny_model(), prompt(2, 12), 30)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_joining_leaving_and_forgetting_gives_the_same_ids(seed: int) -> None:
    """Small limits, shared prefixes, removals and forgetting at random: the ids are what `generate` gives."""
    random = np.random.default_rng(seed)
    token_bytes = 3 * 2 * 2 * 16 * 4
    config = hf.HfConfig(
        max_batch=int(random.integers(1, 6)),
        batch_bytes=int(random.integers(1, 5)) * 512 * token_bytes,
        cache_bytes=int(random.integers(0, 800)) * token_bytes,
        prefill_tokens=int(random.integers(8, 200)),
    )
    work = scheduler.Scheduler(tiny_model(), config, None)
    trunk, model = prompt(99, 240).tolist(), tiny_model()
    jobs, dropped = [], set()
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
                gone = jobs[random.integers(0, len(jobs))]
                work.remove(gone)
                dropped.add(gone)
            if random.random() < 0.15:
                work.invalidate()
            stats = work.stats
            assert stats.running <= config.max_batch
            assert stats.cached_tokens * token_bytes <= config.cache_bytes
            rows, length = work._kv_cache.capacity
            assert rows <= 1 or rows * length * token_bytes <= config.batch_bytes
        while work.is_busy:
            work.step()
    for one in jobs:
        size = len(one.output_ids)
        assert one in dropped or size == one.params.max_tokens
        assert one.output_ids.tolist() == (reference_ids(model, one.prompt_ids, size) if size else [])


# Linear layers


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_rows_give_what_a_linear_layer_gives(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    plain_layer = torch.nn.Linear(512, 300, bias=has_bias)
    layer = copy.deepcopy(plain_layer)
    linear.install(layer)
    assert type(layer) is linear.SmallBatchLinear
    for shape in ((rows, 1, 512), (rows, 512), (1, rows, 512)):
        states = torch.randn(shape)
        with torch.inference_mode():
            output, expected = layer(states), plain_layer(states)
        assert output.stride() == expected.stride()
        assert torch.allclose(output, expected, atol=1e-5)


def test_few_rows_are_turned_round_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right: turned.append(right.shape[1]) or mm(left, right))
    layer = torch.nn.Linear(512, 300)
    linear.install(layer)
    with torch.inference_mode():
        for rows in (1, 2, 8, 9, 64):
            layer(torch.randn(rows, 1, 512))
    assert turned == [2, 8], "as long as the rows fit the nearest cache"
    layer(torch.randn(2, 512)).sum().backward()
    assert turned == [2, 8], "who learns beside the engine computes as ever"


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    layer = torch.nn.Linear(512, 300)
    linear.install(layer)
    other = copy.deepcopy(layer)
    with torch.inference_mode():
        other.weight.zero_()
        other.bias.zero_()
        assert not other(torch.randn(2, 512)).any()
        assert layer(torch.randn(2, 512)).any()


def test_layers_that_are_not_plain_are_left_alone() -> None:
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Other(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    linear.install(model)
    assert [type(layer) for layer in model] == [Other, torch.nn.Linear]


# Attention


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("has_mask", [True, False])
def test_grouped_attention_is_that_of_transformers(width: int, has_mask: bool) -> None:
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


def test_a_model_beside_the_engine_computes_and_learns_as_before() -> None:
    ids = torch.from_numpy(prompt(1, 40).astype(np.int64))[None]
    models = [tiny_model(), tiny_model()]
    attention.install(models[0])
    linear.install(models[0])
    assert models[0].config._attn_implementation == attention.ATTENTION_NAME
    losses = [model(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    assert reference_ids(models[0], prompt(1, 40), 8) == reference_ids(models[1], prompt(1, 40), 8)
