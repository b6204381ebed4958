from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from branchline.engines.base import SamplingParams
from branchline.engines.hf.decode_graphs import DecodeGraphs
from tests.engines.tiny_model import collect, hf, prompt, tiny_model, torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gpu_model(seed: int = 0, **changes: Any) -> Any:
    return tiny_model(seed, **changes).cuda()


def largest_difference(model: Any, ids: list[int], logprobs: list[float]) -> float:
    """How far logprobs of the last ids are from those of one forward pass without a cache."""
    tokens = torch.tensor([ids]).cuda()
    with torch.inference_mode():
        full = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return float(np.abs(full[-len(logprobs) :].cpu().numpy() - np.array(logprobs)).max())


@needs_cuda
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "GPTNeoX"])
def test_replayed_steps_give_the_logprobs_of_a_full_forward(kind: str) -> None:
    """Requests of different lengths come and go; rows and keys are rounded up."""
    changes = {} if kind != "GPTNeoX" else {"num_key_value_heads": 4}
    model = gpu_model(kind=kind, **changes)

    async def play() -> None:
        engine = hf.HfEngine(model)
        lengths = np.random.default_rng(0).integers(5, 400, 21).tolist()

        async def one(number: int, length: int) -> None:
            await asyncio.sleep(0.02 * number)
            ids = prompt(number, length)
            output = await collect(engine, ids, SamplingParams(max_tokens=20 + 9 * number))
            assert largest_difference(model, [*ids.tolist(), *output.ids], output.logprobs) < 1e-4

        await asyncio.gather(*(one(number, length) for number, length in enumerate(lengths)))
        await engine.close()

    asyncio.run(play())


@needs_cuda
def test_replayed_steps_use_the_new_weights_after_an_update() -> None:
    model, other = gpu_model(), gpu_model(seed=1)

    async def play() -> None:
        engine = hf.HfEngine(model)
        await collect(engine, prompt(0, 30), SamplingParams(max_tokens=40))
        running = asyncio.create_task(collect(engine, prompt(1, 30), SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.2)
        await engine.update_weights(other.state_dict(), 1)
        output = await running
        assert set(output.versions) == {0, 1}
        new = output.versions.count(1)
        ids = [*prompt(1, 30).tolist(), *output.ids]
        assert largest_difference(other, ids, output.logprobs[-new:]) < 1e-4
        await engine.close()

    asyncio.run(play())


@needs_cuda
def test_model_that_cannot_be_captured_is_computed_kernel_by_kernel() -> None:
    graphs = DecodeGraphs()
    values = torch.arange(3, device="cuda")

    def compute() -> Any:
        return values * int(values.sum())  # Reads a value back from the device.

    for _ in range(8):
        assert graphs.run((1, 1), compute).tolist() == [0, 3, 6]
