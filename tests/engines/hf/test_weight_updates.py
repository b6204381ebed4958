"""Weight updates during generations: no id is lost or repeated, each has the version that sampled it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from branchline.core.errors import EngineError, EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams
from tests.engines.tiny_model import (
    CollectedOutput,
    ForwardGate,
    collect,
    greedy,
    prompt,
    reference_ids,
    run,
    running_engine,
    tiny_model,
    torch,
)

if TYPE_CHECKING:
    from torch import Tensor

engine_module = pytest.importorskip("branchline.engines.hf.engine")


def start_streams(
    engine: Any, sizes: list[int], params: SamplingParams
) -> list[asyncio.Task[CollectedOutput]]:
    return [
        asyncio.create_task(collect(engine, prompt(n, size), params), name=f"stream {n}")
        for n, size in enumerate(sizes)
    ]


async def start_together(
    engine: Any, sizes: list[int], params: SamplingParams
) -> list[asyncio.Task[CollectedOutput]]:
    """Starts streams that begin in the same step, however slowly they are submitted."""
    await engine.pause()
    tasks = start_streams(engine, sizes, params)
    await asyncio.sleep(0)
    await engine.pause()  # When this returns, all have arrived.
    assert engine.stats.waiting == len(sizes)
    await engine.resume()
    return tasks


def test_generations_continue_after_their_own_ids_under_new_weights() -> None:
    sizes = [10 + 25 * n for n in range(8)]

    async def body() -> None:
        model = tiny_model()
        async with running_engine(model, version=3) as engine:
            gate = ForwardGate(model, 30)
            tasks = await start_together(engine, sizes, greedy(60))
            await gate.run_during_step(engine.pause())
            sampled = engine.stats.sampled_tokens
            await engine.update_weights(tiny_model(seed=1).state_dict(), version=4)
            assert engine.version == 4
            assert engine.stats.sampled_tokens == sampled, "nothing is sampled while paused"
            assert engine.stats.cached_tokens == 0, "keys and values of the old weights are dropped"
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
            prefix = as_ids([*ids.tolist(), *output.ids[:before]])
            assert output.ids[before:] == reference_ids(new, prefix, 60 - before)

    run(body())


def test_update_without_a_pause_keeps_seeds_and_penalties() -> None:
    params = SamplingParams(max_tokens=40, seed=7, top_p=0.95, frequency_penalty=0.3)

    async def body() -> None:
        model = tiny_model()
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 15)
            tasks = await start_together(engine, [20, 50], params)
            # The weights are equal, so the ids must be those of an undisturbed generation.
            await gate.run_during_step(engine.update_weights(tiny_model().state_dict(), version=1))
            outputs = await asyncio.gather(*tasks)
        async with running_engine(tiny_model()) as engine:
            undisturbed = await asyncio.gather(*start_streams(engine, [20, 50], params))
        for output, expected in zip(outputs, undisturbed, strict=True):
            assert output.ids == expected.ids
            assert set(output.versions) == {0, 1}

    run(body())


def test_turn_after_an_update_reuses_no_keys_and_values_of_the_old_weights() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            first = await collect(engine, prompt(0, 100), greedy(10))
            await engine.update_weights(tiny_model(seed=1).state_dict(), version=1)
            ids = as_ids([*prompt(0, 100).tolist(), *first.ids, *prompt(1, 20).tolist()])
            second = await collect(engine, ids, greedy(10))
            assert engine.stats.reused_tokens == 0
        assert second.ids == reference_ids(tiny_model(seed=1), ids, 10)

    run(body())


def test_resume_with_a_new_version_drops_keys_and_values_of_weights_changed_in_place() -> None:
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
        prefix = as_ids([*prompt(0, 40).tolist(), *output.ids[:before]])
        assert output.ids[before:] == reference_ids(tiny_model(seed=1), prefix, 40 - before)

    run(body())


def test_trainer_may_train_the_same_model_while_it_is_paused() -> None:
    def train_step(model: Any) -> None:
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
            train_step(model)
            await engine.resume(1)
            output = await task
        train_step(other)
        before = output.versions.count(0)
        prefix = as_ids([*prompt(0, 40).tolist(), *output.ids[:before]])
        assert output.ids[:before] == reference_ids(tiny_model(), prompt(0, 40), before)
        assert output.ids[before:] == reference_ids(other, prefix, 40 - before)
        assert output.ids[before:] != reference_ids(tiny_model(), prefix, 40 - before), "the model changed"

    run(body())


def test_requests_that_arrive_while_paused_wait() -> None:
    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            await engine.pause()
            task = asyncio.create_task(collect(engine, prompt(1, 30), greedy(5)))
            await asyncio.sleep(0)
            await engine.pause()  # When this returns, the request has arrived.
            assert (engine.stats.waiting, engine.stats.steps) == (1, 0)
            await engine.resume()
            output = await task
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)
        assert output.versions == [0] * 5

    run(body())


def test_pending_tokens_keep_the_version_that_sampled_them() -> None:
    async def body() -> None:
        model = tiny_model()
        async with running_engine(model) as engine:
            gate = ForwardGate(model, 15)
            (task,) = start_streams(engine, [30], greedy(40, flush_s=3600))
            await gate.run_during_step(engine.update_weights(tiny_model().state_dict(), version=1))
            output = await task
        assert output.versions == [0] * 15 + [1] * 25
        assert output.ids == reference_ids(tiny_model(), prompt(0, 30), 40)

    run(body())


def test_weights_that_do_not_fit_are_refused_and_change_nothing() -> None:
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
                    await engine.update_weights(wrong, version=1)
            assert engine.version == 0
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    run(body())


def test_tied_weight_may_be_left_out() -> None:
    def tied(seed: int) -> Any:
        return tiny_model(seed, tie_word_embeddings=True)

    weights = tied(1).state_dict()
    del weights["lm_head.weight"]

    async def body() -> None:
        async with running_engine(tied(0)) as engine:
            await engine.update_weights(weights, version=1)
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
                await engine.update_weights(weights, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
            assert output.versions == [0] * 5
            assert output.ids == reference_ids(tied(0), prompt(1, 30), 5)
            copies = {name: value.clone() for name, value in tied(1).state_dict().items()}
            await engine.update_weights(copies, version=1)
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tied(1), prompt(1, 30), 5)

    run(body())


def test_weights_without_data_are_refused_before_anything_is_copied() -> None:
    good = tiny_model(seed=1).state_dict()
    name = "model.norm.weight"

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            with pytest.raises(EngineInputError, match=f"{name}.*meta"):
                await engine.update_weights({**good, name: good[name].to("meta")}, version=1)
            assert engine.version == 0
            output = await collect(engine, prompt(1, 30), greedy(5))
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)
        assert output.versions == [0] * 5

    run(body())


def test_sharded_weights_are_refused_with_the_way_to_gather_them(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        good = tiny_model(seed=1).state_dict()
        sharded = {name: distribute_tensor(value, mesh) for name, value in good.items()}

        async def body() -> None:
            async with running_engine(tiny_model()) as engine:
                with pytest.raises(EngineInputError, match=r"full_tensor\(\)"):
                    await engine.update_weights(sharded, version=1)
                assert engine.version == 0
                gathered = {name: value.full_tensor() for name, value in sharded.items()}
                await engine.update_weights(gathered, version=1)
                output = await collect(engine, prompt(1, 30), greedy(5))
            assert output.ids == reference_ids(tiny_model(seed=1), prompt(1, 30), 5)

        run(body())
    finally:
        torch.distributed.destroy_process_group()


def test_an_update_that_fails_halfway_samples_nothing_until_another_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = tiny_model(seed=1).state_dict()

    async def body() -> None:
        async with running_engine(tiny_model()) as engine:
            copied = []

            def fail_later(target: Tensor, value: Tensor) -> None:
                copied.append(value)
                if len(copied) == 3:
                    raise RuntimeError("out of memory")
                target.copy_(value)

            monkeypatch.setattr(engine_module, "_copy_weight", fail_later)
            with pytest.raises(EngineError, match="partly updated"):
                await engine.update_weights(good, version=1)
            monkeypatch.undo()
            assert engine.version == 0
            task = asyncio.create_task(collect(engine, prompt(1, 30), greedy(5)))
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match="partly updated"):
                await engine.resume()
            assert not task.done()
            await engine.update_weights(good, version=2)
            output = await task
        assert output.ids == reference_ids(tiny_model(seed=1), prompt(1, 30), 5)
        assert output.versions == [2] * 5

    run(body())


def test_a_trainer_that_shares_the_model_may_leave_it_in_training_mode() -> None:
    async def body() -> None:
        model = tiny_model(attention_dropout=0.5)
        async with running_engine(model) as engine:
            model.train()
            model.lm_head.eval()
            output = await collect(engine, prompt(1, 30), greedy(20))
            modes = [model.training, model.model.layers[0].training, model.lm_head.training]
            assert modes == [True, True, False]
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 20)

    run(body())
