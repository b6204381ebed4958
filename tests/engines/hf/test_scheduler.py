from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import as_ids

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from branchline.engines.hf import scheduler
from branchline.engines.hf.decode_graphs import DecodeGraphs
from branchline.engines.hf.job import Job
from tests.engines.tiny_model import greedy, hf, prompt, reference_ids, tiny_model, torch


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


def test_batch_memory_is_freed_when_the_last_request_is_cancelled() -> None:
    work = scheduler.Scheduler(tiny_model(), hf.HfConfig())
    job = Job(prompt(1, 10), greedy(20), 0)
    with torch.inference_mode():
        work.add(job)
        work.step()
        work.remove(job)
    assert work._kv_cache.capacity == (0, 0)


def test_limits_suit_the_device_unless_they_are_given() -> None:
    limits = scheduler.HfLimits.for_model(tiny_model(), hf.HfConfig(max_batch=3))
    assert (limits.max_batch, limits.prefill_tokens, limits.threads) == (3, 512, 1)
    with pytest.raises(EngineInputError, match="threads: got 0, expected 1 or more"):
        hf.HfConfig(threads=0)


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


class UncapturedSteps(DecodeGraphs):
    """The padded decode steps of a GPU, on a CPU."""

    def run(self, shape: tuple[int, int], compute: Callable[[], Any]) -> Any:
        return compute()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_adding_removing_and_invalidating_gives_the_same_ids(seed: int, is_padded: bool) -> None:
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
    if is_padded:
        work._kv_cache._decode_graphs = UncapturedSteps()
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
