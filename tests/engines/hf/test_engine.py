"""The embedded engine, compared with transformers: one prompt at a time, no cache, no batch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import SamplingParams
from tests.engines.tiny_model import (
    VOCAB,
    collect,
    full_logprobs,
    greedy,
    hf,
    prompt,
    reference_ids,
    run,
    running_engine,
    tiny_model,
    torch,
    transformers,
)

# Sampling


def test_prompts_that_join_at_different_times_get_the_ids_of_generate() -> None:
    prompts = [prompt(n, 1 + (n * 37) % 300) for n in range(50)]
    sizes = [5 + n % 17 for n in range(50)]

    async def body() -> None:
        async with running_engine(tiny_model(), hf.HfConfig(max_batch=16)) as engine:
            can_start = [asyncio.Event() for _ in prompts]
            for event in can_start[:3]:
                event.set()

            async def generate(n: int) -> list[int]:
                await can_start[n].wait()
                ids: list[int] = []
                async for chunk in engine.generate(prompts[n], greedy(sizes[n])):
                    ids += chunk.ids.tolist()
                    if len(ids) > n % 4 and n + 3 < len(prompts):
                        can_start[n + 3].set()
                return ids

            outputs = await asyncio.gather(*(generate(n) for n in range(50)))
        model = tiny_model()
        assert outputs == [reference_ids(model, ids, size) for ids, size in zip(prompts, sizes, strict=True)]

    run(body())


def test_raw_logprobs_are_those_of_a_full_forward_pass() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            prompts = [prompt(n, 20 + 40 * n) for n in range(8)]
            params = [SamplingParams(max_tokens=20, temperature=0.3 * n, seed=n, top_k=n) for n in range(8)]
            outputs = await asyncio.gather(*map(collect, [engine] * 8, prompts, params))
        assert engine.logprob_kind == "raw"
        for ids, output in zip(prompts, outputs, strict=True):
            expected = full_logprobs(tiny_model(), [*ids.tolist(), *output.ids], len(ids))
            picked = expected.gather(-1, torch.tensor(output.ids)[:, None])[:, 0]
            assert np.allclose(output.logprobs, picked, atol=1e-4)

    run(body())


def test_processed_logprobs_are_those_of_the_distribution_sampled_from() -> None:
    params = SamplingParams(
        max_tokens=20, temperature=1.7, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.3, seed=3
    )
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            transformers.TemperatureLogitsWarper(params.temperature),
            transformers.TopKLogitsWarper(params.top_k),
            transformers.TopPLogitsWarper(params.top_p),
            transformers.MinPLogitsWarper(params.min_p),
        ]
    )

    async def body() -> None:
        async with running_engine(tiny_model(), hf.HfConfig(logprob_kind="processed")) as engine:
            assert engine.logprob_kind == "processed"
            assert (engine.logprobs_after_truncation, engine.greedy_logprob_temperature) == (True, 0.0)
            output = await collect(engine, prompt(1, 30), params)
            greedy_output = await collect(engine, prompt(1, 30), greedy(5))
        ids = [*prompt(1, 30).tolist(), *output.ids]
        for n, logprob in enumerate(output.logprobs):
            with torch.inference_mode():
                logits = tiny_model()(torch.tensor([ids[: 30 + n]])).logits[:, -1]
            scores = processors(torch.tensor([ids[: 30 + n]]), logits).log_softmax(-1)
            assert logprob == pytest.approx(scores[0, ids[30 + n]].item(), abs=1e-4)
        assert greedy_output.logprobs == [0] * 5

    run(body())


def test_seed_gives_the_same_ids_in_any_batch() -> None:
    params = SamplingParams(max_tokens=24, seed=5)

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            alone = await collect(engine, prompt(1, 50), params)
        async with running_engine(tiny_model(), hf.HfConfig(prefill_tokens=16)) as engine:
            others = [collect(engine, prompt(n, 20 * n), SamplingParams(max_tokens=40)) for n in range(2, 9)]
            batched, *_ = await asyncio.gather(collect(engine, prompt(1, 50), params), *others)
            other_seed = await collect(engine, prompt(1, 50), SamplingParams(max_tokens=24, seed=6))
            unseeded = [await collect(engine, prompt(1, 50), SamplingParams(max_tokens=24)) for _ in range(2)]
        assert batched.ids == alone.ids
        assert other_seed.ids != alone.ids
        assert unseeded[0].ids != unseeded[1].ids

    run(body())


def test_seeded_generation_continues_on_another_engine_with_the_same_ids() -> None:
    params = SamplingParams(max_tokens=20, seed=9, top_p=0.9)

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            full = await collect(engine, prompt(1, 30), params)
        async with running_engine(tiny_model()) as engine:
            moved = as_ids([*prompt(1, 30).tolist(), *full.ids[:8]])
            rest = await collect(engine, moved, params.for_continuation(8))
        assert rest.ids == full.ids[8:]

    run(body())


# Finish reasons and refusals


def test_stop_id_ends_a_generation_and_is_its_last_id() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            full = await collect(engine, prompt(1, 30), greedy(12))
            assert (full.finish_reason, len(full.ids)) == ("length", 12)
            stop = full.ids[6]
            stopped = await collect(engine, prompt(1, 30), greedy(12, stop_ids=(stop, VOCAB + 7)))
        assert stopped.ids == full.ids[: full.ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"

    run(body())


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], greedy(1), "prompt_ids: got none"),
        ([3, VOCAB], greedy(1), "prompt_ids: got 1000, expected ids from 0 to 999"),
        ([-1], greedy(1), "prompt_ids: got -1"),
        ([1] * 2040, greedy(9), "got 2040 \\+ 9 ids, expected at most 2048 together"),
        ([1], greedy(0), "max_tokens: got 0"),
        ([1], SamplingParams(temperature=-1), "temperature: got -1"),
        ([1], SamplingParams(top_k=-1), "top_k: got -1"),
        ([1], SamplingParams(top_p=1.5), "top_p: got 1.5"),
        ([1], SamplingParams(min_p=-0.1), "min_p: got -0.1"),
        ([1], SamplingParams(temperature=float("inf")), "temperature: got inf"),
        ([1], SamplingParams(temperature=float("nan")), "temperature: got nan"),
        ([1], SamplingParams(repetition_penalty=0), "repetition_penalty: got 0"),
        ([1], SamplingParams(presence_penalty=float("inf")), "presence_penalty: got inf"),
        ([1], SamplingParams(frequency_penalty=float("nan")), "frequency_penalty: got nan"),
        ([1], SamplingParams(grammar={"type": "json_object"}), "grammar"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias: got 1000, expected ids from 0 to 999"),
        ([1], SamplingParams(allowed_token_ids=(5, VOCAB)), "allowed_token_ids: got 1000"),
        (
            [1],
            SamplingParams(allowed_token_ids=(5,), stop_ids=(5,), min_tokens=1),
            "allowed_token_ids: got only stop ids",
        ),
        ([1], SamplingParams(bad_words=("no",)), "bad_words"),
    ],
)
def test_invalid_request_is_refused(ids: list[int], params: SamplingParams, message: str) -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            assert engine.max_context == 2048
            with pytest.raises(EngineInputError, match=message):
                await collect(engine, np.array(ids, np.int32), params)

    run(body())


@pytest.mark.parametrize("field", ["max_batch", "prefill_tokens"])
def test_limit_that_prevents_all_computation_is_refused(field: str) -> None:
    with pytest.raises(EngineInputError, match=f"{field}: got 0, expected 1 or more"):
        hf.HfConfig(**{field: 0})


def test_context_may_be_filled_completely() -> None:
    async def body() -> None:
        async with running_engine(tiny_model(max_position_embeddings=64)) as engine:
            output = await collect(engine, prompt(1, 60), greedy(4))
        assert output.ids == reference_ids(tiny_model(max_position_embeddings=64), prompt(1, 60), 4)

    run(body())


# Prefix reuse and batching


def test_later_turns_compute_only_new_ids() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            ids, model = prompt(0, 200).tolist(), tiny_model()
            for turn in range(10):
                before = engine.stats
                output = await collect(engine, as_ids(ids), greedy(16))
                after = engine.stats
                assert output.ids == reference_ids(model, as_ids(ids), 16)
                computed = after.computed_tokens - before.computed_tokens
                # The last sampled id was never an input; it is computed with the new message.
                assert computed == (200 if turn == 0 else 31)
                assert after.reused_tokens - before.reused_tokens == len(ids) - computed
                ids += [*output.ids, *prompt(turn + 1, 30).tolist()]
            # A growing conversation is one entry, not ten.
            assert engine.stats.cached_tokens == len(ids) - 30 - 1

    run(body())


def test_branch_computes_only_the_ids_that_differ() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            trunk = prompt(0, 100).tolist()
            await collect(engine, as_ids([*trunk, *prompt(1, 50)]), greedy(4))
            branch = as_ids([*trunk, VOCAB - 1, *prompt(2, 19)])
            before = engine.stats.computed_tokens
            output = await collect(engine, branch, greedy(8))
            assert engine.stats.computed_tokens - before == 20
        assert output.ids == reference_ids(tiny_model(), branch, 8)

    run(body())


def test_group_with_one_prompt_computes_it_once() -> None:
    async def body() -> None:
        async with running_engine(tiny_model(), hf.HfConfig(prefill_tokens=64)) as engine:
            params = [SamplingParams(max_tokens=8, seed=n) for n in range(8)]
            outputs = await asyncio.gather(*(collect(engine, prompt(0, 300), each) for each in params))
            assert engine.stats.computed_tokens == 300 + 7
            alone = [await collect(engine, prompt(0, 300), each) for each in params]
        assert [output.ids for output in outputs] == [output.ids for output in alone]

    run(body())


def test_sessions_are_decoded_in_the_same_steps() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            await engine.pause()
            tasks = [asyncio.create_task(collect(engine, prompt(n, 50), greedy(40))) for n in range(8)]
            await asyncio.sleep(0)
            await engine.resume()
            await asyncio.gather(*tasks)
            assert engine.stats.sampled_tokens == 320
            assert engine.stats.steps <= 41

    run(body())


def test_prefix_cache_stays_within_its_bytes_and_evicts_the_least_recently_used() -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4

    async def body() -> None:
        async with running_engine(tiny_model(), hf.HfConfig(cache_bytes=250 * token_bytes)) as engine:

            async def reused(ids: Ids) -> int:
                before = engine.stats.reused_tokens
                await collect(engine, ids, greedy(1))
                assert engine.stats.cached_tokens <= 250
                return int(engine.stats.reused_tokens - before)

            first, second, third = (prompt(n, 100) for n in range(3))
            assert [await reused(ids) for ids in (first, second)] == [0, 0]
            assert await reused(first) == 99
            assert engine.stats.evictions == 0
            assert await reused(third) == 0
            assert engine.stats.evictions == 1
            assert await reused(first) == 99
            assert await reused(second) == 0
            assert await reused(prompt(9, 300)) == 0
            assert await reused(prompt(9, 300)) == 0

    run(body())


def test_batch_beyond_its_bytes_preempts_requests_and_loses_no_token() -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    prompts = [prompt(n, 235 + n) for n in range(6)]

    async def body() -> None:
        config = hf.HfConfig(batch_bytes=3 * 256 * token_bytes, cache_bytes=0)
        async with running_engine(tiny_model(), config) as engine:
            outputs = await asyncio.gather(*(collect(engine, ids, greedy(40)) for ids in prompts))
            assert engine.stats.preemptions > 0
            assert sum(output.num_preempted for output in outputs) == engine.stats.preemptions
        model = tiny_model()
        assert [output.ids for output in outputs] == [reference_ids(model, ids, 40) for ids in prompts]

    run(body())


# Streaming


def test_tokens_are_coalesced_by_flush_s() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            single, coalesced = await asyncio.gather(
                collect(engine, prompt(1, 30), greedy(20)),
                collect(engine, prompt(1, 30), greedy(20, flush_s=3600)),
            )
        assert (single.chunks, coalesced.chunks) == (20, 2), "the first token at once, the rest at the end"
        assert single.ids == coalesced.ids
        assert single.logprobs == pytest.approx(coalesced.logprobs, abs=1e-4)

    run(body())


def test_model_runs_only_in_the_computing_thread() -> None:
    model, threads = tiny_model(), set()
    forward = model.forward

    def tracked_forward(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return forward(*args, **kwargs)

    async def body() -> None:
        async with running_engine(model) as engine:
            model.forward = tracked_forward
            await asyncio.gather(*(collect(engine, prompt(n, 30), greedy(5)) for n in range(3)))
        assert len(threads) == 1
        assert threading.current_thread() not in threads

    run(body())


def test_closing_a_generation_frees_its_row() -> None:
    async def body() -> None:
        async with running_engine(tiny_model(), hf.HfConfig(max_batch=1)) as engine:
            closed = engine.generate(prompt(1, 30), greedy(1500))
            await anext(closed)
            waiting = asyncio.create_task(collect(engine, prompt(2, 30), greedy(5)))
            never_started = engine.generate(prompt(3, 30), greedy(5))
            queued = asyncio.create_task(anext(never_started))
            await asyncio.sleep(0)
            await engine.pause()
            assert (engine.stats.running, engine.stats.waiting) == (1, 2)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            await closed.aclose()
            await engine.resume()
            output = await waiting
            assert (engine.stats.running, engine.stats.waiting) == (0, 0)
            assert engine.stats.sampled_tokens < 1500
        assert output.ids == reference_ids(tiny_model(), prompt(2, 30), 5)

    run(body())


def test_generation_cancelled_with_pending_tokens_does_not_affect_others() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            kept = asyncio.create_task(collect(engine, prompt(1, 30), greedy(300, flush_s=3600)))
            cancelled = asyncio.create_task(collect(engine, prompt(2, 30), greedy(1500, flush_s=3600)))
            await collect(engine, prompt(3, 30), greedy(3))
            cancelled.cancel()
            output = await kept
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 300)

    run(body())
