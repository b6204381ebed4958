"""Weights that change under running generations: no id lost, none repeated, each tagged with its version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from branchline.core.errors import EngineInputError
from branchline.core.runs import as_ids
from branchline.engines.base import SamplingParams

pytest.importorskip("torch", reason="torch is not installed: pip install 'branchline[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'branchline[hf]'")

from tests.engines.test_hf import Output, collect, greedy, hf, plain, prompt, run, running, tiny, torch


class Gate:
    """Holds the computing thread in the model's n-th forward until the test has asked for something."""

    def __init__(self, model: Any, forwards: int) -> None:
        self.forward, self.left = model.forward, forwards
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.is_reached.set()
            assert self.is_open.wait(60)
        return self.forward(*args, **kwargs)

    async def meanwhile(self, asked: Coroutine[Any, Any, None]) -> None:
        """Asks for something in the middle of a step."""
        await asyncio.to_thread(self.is_reached.wait)
        task = asyncio.create_task(asked)
        await asyncio.sleep(0)
        self.is_open.set()
        await task


def streams(engine: Any, sizes: list[int], params: SamplingParams) -> list[asyncio.Task[Output]]:
    return [
        asyncio.create_task(collect(engine, prompt(n, size), params), name=f"stream {n}")
        for n, size in enumerate(sizes)
    ]


def test_eight_streams_go_on_behind_their_own_ids_under_new_weights() -> None:
    sizes = [10 + 25 * n for n in range(8)]

    async def body() -> None:
        model = tiny()
        async with running(model, version=3) as engine:
            gate = Gate(model, 30)
            tasks = streams(engine, sizes, greedy(60))
            await gate.meanwhile(engine.pause())
            sampled = engine.stats.sampled_tokens
            await engine.swap(tiny(seed=1).state_dict(), version=4)
            assert engine.version == 4
            assert engine.stats.sampled_tokens == sampled, "nothing is sampled while paused"
            assert engine.stats.cached_tokens == 0, "what the old weights computed is gone"
            await engine.resume()
            outputs = await asyncio.gather(*tasks)
        old, new = tiny(), tiny(seed=1)
        for n, output in enumerate(outputs):
            assert (len(output.ids), output.finish) == (60, "length")
            before = output.versions.count(3)
            assert output.versions == [3] * before + [4] * (60 - before)
            assert 20 < before < 30
            ids = prompt(n, sizes[n])
            assert output.ids[:before] == plain(old, ids, before)
            behind = as_ids([*ids.tolist(), *output.ids[:before]])
            assert output.ids[before:] == plain(new, behind, 60 - before)

    run(body())


def test_a_swap_needs_no_pause_and_keeps_seeds_and_penalties() -> None:
    params = SamplingParams(max_tokens=40, seed=7, top_p=0.95, frequency_penalty=0.3)

    async def body() -> None:
        model = tiny()
        async with running(model) as engine:
            gate = Gate(model, 15)
            tasks = streams(engine, [20, 50], params)
            # The same weights again: whoever did not notice the swap samples what it would have sampled.
            await gate.meanwhile(engine.swap(tiny().state_dict(), version=1))
            outputs = await asyncio.gather(*tasks)
        async with running(tiny()) as engine:
            undisturbed = await asyncio.gather(*streams(engine, [20, 50], params))
        for output, expected in zip(outputs, undisturbed, strict=True):
            assert output.ids == expected.ids
            assert set(output.versions) == {0, 1}

    run(body())


def test_the_next_turn_after_a_swap_uses_nothing_of_the_old_weights() -> None:
    async def body() -> None:
        async with running(tiny()) as engine:
            first = await collect(engine, prompt(0, 100), greedy(10))
            await engine.swap(tiny(seed=1).state_dict(), version=1)
            ids = as_ids([*prompt(0, 100).tolist(), *first.ids, *prompt(1, 20).tolist()])
            second = await collect(engine, ids, greedy(10))
            assert engine.stats.reused_tokens == 0
        assert second.ids == plain(tiny(seed=1), ids, 10)

    run(body())


def test_resuming_under_a_new_version_forgets_what_weights_changed_in_place_computed() -> None:
    model = tiny()

    async def body() -> None:
        async with running(model) as engine:
            gate = Gate(model, 15)
            (task,) = streams(engine, [40], greedy(40))
            await gate.meanwhile(engine.pause())
            model.load_state_dict(tiny(seed=1).state_dict())  # a trainer that shares the model
            await engine.resume(5)
            output = await task
        before = output.versions.count(0)
        assert set(output.versions) == {0, 5}
        behind = as_ids([*prompt(0, 40).tolist(), *output.ids[:before]])
        assert output.ids[before:] == plain(tiny(seed=1), behind, 40 - before)

    run(body())


def test_requests_that_arrive_while_paused_wait() -> None:
    async def body() -> None:
        async with running(tiny()) as engine:
            await engine.pause()
            task = asyncio.create_task(collect(engine, prompt(1, 30), greedy(5)))
            await asyncio.sleep(0)
            await engine.pause()  # by the time this returns, the request has arrived
            assert (engine.stats.waiting, engine.stats.steps) == (1, 0)
            await engine.resume()
            output = await task
        assert output.ids == plain(tiny(), prompt(1, 30), 5)
        assert output.versions == [0] * 5

    run(body())


def test_ids_not_yet_delivered_keep_the_version_that_sampled_them() -> None:
    async def body() -> None:
        model = tiny()
        async with running(model, hf.HfConfig(stream_interval_s=3600)) as engine:
            gate = Gate(model, 15)
            (task,) = streams(engine, [30], greedy(40))
            await gate.meanwhile(engine.swap(tiny().state_dict(), version=1))
            output = await task
        assert output.versions == [0] * 15 + [1] * 25
        assert output.ids == plain(tiny(), prompt(0, 30), 40)

    run(body())


def test_weights_that_do_not_fit_change_nothing() -> None:
    good = tiny(seed=1).state_dict()
    name = "model.norm.weight"

    async def body() -> None:
        async with running(tiny()) as engine:
            for wrong, message in (
                ({**good, "model.extra": good[name]}, "got 'model.extra'"),
                ({key: value for key, value in good.items() if key != name}, f"got no '{name}'"),
                ({**good, name: torch.zeros(3)}, r"got \(3,\), expected \(64,\)"),
            ):
                with pytest.raises(EngineInputError, match=message):
                    await engine.swap(wrong, version=1)
            assert engine.version == 0
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == plain(tiny(), prompt(1, 30), 5)

    run(body())


def test_a_tied_weight_may_be_left_out() -> None:
    def tied(seed: int) -> Any:
        return tiny(seed, tie_word_embeddings=True)

    weights = tied(1).state_dict()
    del weights["lm_head.weight"]

    async def body() -> None:
        async with running(tied(0)) as engine:
            await engine.swap(weights, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == plain(tied(1), prompt(1, 30), 5)

    run(body())
