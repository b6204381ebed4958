"""Failures of the embedded engine end the affected generations with an error, and no others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from branchline.core.errors import EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from branchline.engines.hf.kv_cache import BatchKvCache
from tests.engines.tiny_model import (
    VOCAB,
    CollectedOutput,
    ForwardGate,
    collect,
    greedy,
    hf,
    prompt,
    reference_ids,
    run,
    running_engine,
    tiny_model,
    torch,
)


def test_failing_model_ends_running_generations_and_the_engine_continues() -> None:
    model = tiny_model()
    forward = model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    async def body() -> None:
        async with running_engine(model) as engine:
            model.forward = failing
            for outcome in await asyncio.gather(
                *(collect(engine, prompt(n, 30), greedy(5)) for n in range(3)), return_exceptions=True
            ):
                assert isinstance(outcome, EngineError)
                assert "RuntimeError: out of memory" in str(outcome)
            model.forward = forward
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    run(body())


def test_failing_step_keeps_waiting_requests_and_sampled_tokens() -> None:
    model = tiny_model()
    forward, remaining = model.forward, 12

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    async def body() -> None:
        async with running_engine(model, hf.HfConfig(max_batch=3)) as engine:
            model.forward = failing
            received: list[list[int]] = [[] for _ in range(5)]

            async def generate(n: int) -> None:
                async for chunk in engine.generate(prompt(n, 20 + n), greedy(15, flush_s=3600)):
                    received[n] += chunk.ids.tolist()

            await engine.pause()
            tasks = [asyncio.create_task(generate(n)) for n in range(5)]
            await asyncio.sleep(0)
            await engine.resume()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for n, outcome in enumerate(outcomes):
            assert isinstance(outcome, EngineError) == (n < 3), outcome
            # Eleven steps were sampled before the twelfth failed.
            assert received[n] == reference_ids(tiny_model(), prompt(n, 20 + n), 11 if n < 3 else 15)

    run(body())


def test_failure_while_a_row_moves_ends_both_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("no copy")

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            with monkeypatch.context() as patch:
                # When the first job ends, the last one moves into its row.
                patch.setattr(BatchKvCache, "write_row", failing)
                outcomes = await asyncio.gather(
                    *(collect(engine, prompt(n, 30), greedy(5 + 10 * n)) for n in range(3)),
                    return_exceptions=True,
                )
            assert [isinstance(outcome, EngineError) for outcome in outcomes] == [False, True, True]
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    run(body())


def test_failure_to_reserve_memory_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> bool:
        raise MemoryError("no room")

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(BatchKvCache, "reserve", failing)
                with pytest.raises(EngineError, match="no room"):
                    await collect(engine, prompt(1, 30), greedy(5))
            await collect(engine, prompt(1, 30), greedy(5))

    run(body())


def test_death_of_the_computing_thread_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("a defect")

    async def body() -> None:
        model, died = tiny_model(), []
        monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 1)
            monkeypatch.setattr(engine, "_flush", broken)
            added = asyncio.create_task(collect(engine, prompt(1, 30), greedy(5)))
            late = asyncio.create_task(collect(engine, prompt(2, 30), greedy(5)))
            # The first is in the model when the second is submitted, and the thread dies before its task.
            await asyncio.to_thread(gate.is_reached.wait)
            gate.is_open.set()
            for outcome in await asyncio.gather(added, late, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert "closed" in str(outcome)
            with pytest.raises(EngineError, match="is closed"):
                await collect(engine, prompt(1, 30), greedy(5))
        assert died == [ValueError]

    run(body())


def test_logits_that_are_not_finite_end_only_their_own_generation() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB - 1] = float("nan")
    poisoned = as_ids([*prompt(0, 40).tolist(), VOCAB - 1])

    async def body() -> None:
        async with running_engine(model) as engine:
            good, bad, drawn = await asyncio.gather(
                collect(engine, prompt(1, 30), greedy(20)),
                collect(engine, poisoned, greedy(20)),
                collect(engine, poisoned, SamplingParams(max_tokens=20, top_p=0.5)),
                return_exceptions=True,
            )
            assert isinstance(good, CollectedOutput)
            assert isinstance(bad, EngineError)
            assert isinstance(drawn, EngineError)
            assert "NaN" in str(bad)
            # The next request in the row, longer or shorter, is not affected.
            later = [collect(engine, prompt(n, 20 * n), greedy(20)) for n in range(2, 6)]
            outputs = [good, *await asyncio.gather(*later)]
        sizes = [30, 40, 60, 80, 100]
        assert [output.ids for output in outputs] == [
            reference_ids(tiny_model(), prompt(n, size), 20) for n, size in enumerate(sizes, 1)
        ]

    run(body())


def test_close_ends_open_generations_and_refuses_new_ones() -> None:
    async def body() -> None:
        engine = hf.HfEngine(tiny_model(), hf.HfConfig(max_batch=3))
        streams = [engine.generate(prompt(n, 30), greedy(1500)) for n in range(3)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.create_task(collect(engine, prompt(4, 30), greedy(5)))
        await asyncio.sleep(0)
        await asyncio.gather(engine.close(), engine.close())
        for stream in streams:
            with pytest.raises(EngineError, match="was closed"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineError, match="was closed"):
            await waiting
        assert (engine.stats.running, engine.stats.waiting, engine.stats.cached_tokens) == (0, 0, 0)
        for refused in (collect(engine, prompt(1, 30), greedy(5)), engine.pause(), engine.resume()):
            with pytest.raises(EngineError, match="is closed"):
                await refused
        await engine.close()

    run(body())
