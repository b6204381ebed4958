from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.token_arrays import as_ids

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from branchline.engines.hf import prefix_cache, scheduler
from branchline.engines.hf.job import Job
from tests.engines.tiny_model import greedy, hf, prompt, tiny_model, torch


@settings(max_examples=50, deadline=None)
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
        entries = [entry.ids.tolist() for entry in cache.entries]
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
        for entry in work._prefix_cache.entries
        for pair in entry.kv
        for states in pair
    )
    assert held == work.stats.cached_tokens * token_bytes <= 400 * token_bytes
    assert work.stats.evictions == 4, "four of eight fit"
