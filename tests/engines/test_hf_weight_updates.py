"""Weights that change under running generations: no id lost, none repeated, each tagged with its version."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams
from tests.engines.tiny_model import (
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


def start_streams(
    engine: Any, sizes: list[int], params: SamplingParams
) -> list[asyncio.Task[CollectedOutput]]:
    return [
        asyncio.create_task(collect(engine, prompt(n, size), params), name=f"stream {n}")
        for n, size in enumerate(sizes)
    ]


def test_eight_streams_go_on_behind_their_own_ids_under_new_weights() -> None:
    sizes = [10 + 25 * n for n in range(8)]

    async def body() -> None:
        model = tiny_model()
        async with running_engine(model, version=3) as engine:
            gate = ForwardGate(model, 30)
            tasks = start_streams(engine, sizes, greedy(60))
            await gate.run_during_step(engine.pause())
            sampled = engine.stats.sampled_tokens
            await engine.swap(tiny_model(seed=1).state_dict(), version=4)
            assert engine.version == 4
            assert engine.stats.sampled_tokens == sampled, "nothing is sampled while paused"
            assert engine.stats.cached_tokens == 0, "what the old weights computed is gone"
            await engine.resume()
            outputs = await asyncio.gather(*tasks)
        old, new = tiny_model(), tiny_model(seed=1)
        for n, output in enumerate(outputs):
            assert (len(output.ids), output.finish_reason) == (60, "length")
            before = output.versions.count(3)
            assert output.versions == [3] * before + [4] * (60 - before)
            assert 20 < before < 30
            ids = prompt(n, sizes[n])
            assert output.ids[:before] == reference_ids(old, ids, before)
            behind = as_ids([*ids.tolist(), *output.ids[:before]])
            assert output.ids[before:] == reference_ids(new, behind, 60 - before)

    run(body())


def test_a_swap_needs_no_pause_and_keeps_seeds_and_penalties() -> None:
    params = SamplingParams(max_tokens=40, seed=7, top_p=0.95, frequency_penalty=0.3)

    async def body() -> None:
        model = tiny_model()
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 15)
            tasks = start_streams(engine, [20, 50], params)
            # The same weights again: whoever did not notice the swap samples what it would have sampled.
            await gate.run_during_step(engine.swap(tiny_model().state_dict(), version=1))
            outputs = await asyncio.gather(*tasks)
        async with running_engine(tiny_model()) as engine:
            undisturbed = await asyncio.gather(*start_streams(engine, [20, 50], params))
        for output, expected in zip(outputs, undisturbed, strict=True):
            assert output.ids == expected.ids
            assert set(output.versions) == {0, 1}

    run(body())


def test_the_next_turn_after_a_swap_uses_nothing_of_the_old_weights() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            first = await collect(engine, prompt(0, 100), greedy(10))
            await engine.swap(tiny_model(seed=1).state_dict(), version=1)
            ids = as_ids([*prompt(0, 100).tolist(), *first.ids, *prompt(1, 20).tolist()])
            second = await collect(engine, ids, greedy(10))
            assert engine.stats.reused_tokens == 0
        assert second.ids == reference_ids(tiny_model(seed=1), ids, 10)

    run(body())


def test_resuming_under_a_new_version_forgets_what_weights_changed_in_place_computed() -> None:
    model = tiny_model()

    async def body() -> None:
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 15)
            (task,) = start_streams(engine, [40], greedy(40))
            await gate.run_during_step(engine.pause())
            model.load_state_dict(tiny_model(seed=1).state_dict())  # a trainer that shares the model
            await engine.resume(5)
            output = await task
        before = output.versions.count(0)
        assert set(output.versions) == {0, 5}
        behind = as_ids([*prompt(0, 40).tolist(), *output.ids[:before]])
        assert output.ids[before:] == reference_ids(tiny_model(seed=1), behind, 40 - before)

    run(body())


def test_a_trainer_may_learn_on_the_very_model_while_it_is_paused() -> None:
    def learn(model: Any) -> None:
        ids = torch.tensor([prompt(7, 50).tolist()])
        model.train()
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=5.0).step()
        model.eval()

    model, other = tiny_model(), tiny_model()

    async def body() -> None:
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 15)
            (task,) = start_streams(engine, [40], greedy(40))
            await gate.run_during_step(engine.pause())
            learn(model)
            await engine.resume(1)
            output = await task
        learn(other)
        before = output.versions.count(0)
        behind = as_ids([*prompt(0, 40).tolist(), *output.ids[:before]])
        assert output.ids[:before] == reference_ids(tiny_model(), prompt(0, 40), before)
        assert output.ids[before:] == reference_ids(other, behind, 40 - before)
        assert output.ids[before:] != reference_ids(tiny_model(), behind, 40 - before), "it did learn"

    run(body())


def test_requests_that_arrive_while_paused_wait() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            await engine.pause()
            task = asyncio.create_task(collect(engine, prompt(1, 30), greedy(5)))
            await asyncio.sleep(0)
            await engine.pause()  # by the time this returns, the request has arrived
            assert (engine.stats.waiting, engine.stats.steps) == (1, 0)
            await engine.resume()
            output = await task
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)
        assert output.versions == [0] * 5

    run(body())


def test_ids_not_yet_delivered_keep_the_version_that_sampled_them() -> None:
    async def body() -> None:
        model = tiny_model()
        async with running_engine(model, hf.HfConfig(stream_interval_s=3600)) as engine:
            gate = ForwardGate(model, 15)
            (task,) = start_streams(engine, [30], greedy(40))
            await gate.run_during_step(engine.swap(tiny_model().state_dict(), version=1))
            output = await task
        assert output.versions == [0] * 15 + [1] * 25
        assert output.ids == reference_ids(tiny_model(), prompt(0, 30), 40)

    run(body())


def test_weights_that_do_not_fit_change_nothing() -> None:
    good = tiny_model(seed=1).state_dict()
    name = "model.norm.weight"

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            for wrong, message in (
                ({**good, "model.extra": good[name]}, "got 'model.extra'"),
                ({key: value for key, value in good.items() if key != name}, f"got no '{name}'"),
                ({**good, name: torch.zeros(3)}, r"got \(3,\), expected \(64,\)"),
            ):
                with pytest.raises(EngineInputError, match=message):
                    await engine.swap(wrong, version=1)
            assert engine.version == 0
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    run(body())


def test_a_tied_weight_may_be_left_out() -> None:
    def tied(seed: int) -> Any:
        return tiny_model(seed, tie_word_embeddings=True)

    weights = tied(1).state_dict()
    del weights["lm_head.weight"]

    async def body() -> None:
        async with running_engine(tied(0)) as engine:
            await engine.swap(weights, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tied(1), prompt(1, 30), 5)

    run(body())


def test_tied_weights_that_differ_are_refused() -> None:
    def tied(seed: int) -> Any:
        return tiny_model(seed, tie_word_embeddings=True)

    weights = {**tied(1).state_dict(), "lm_head.weight": tied(2).state_dict()["lm_head.weight"]}

    async def body() -> None:
        async with running_engine(tied(0)) as engine:
            with pytest.raises(EngineInputError, match="expected the same: the model ties them"):
                await engine.swap(weights, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
            assert output.versions == [0] * 5
            assert output.ids == reference_ids(tied(0), prompt(1, 30), 5)
            copies = {name: value.clone() for name, value in tied(1).state_dict().items()}
            await engine.swap(copies, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tied(1), prompt(1, 30), 5)

    run(body())
