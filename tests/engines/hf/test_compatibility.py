"""Models that the embedded engine supports give the ids of plain `generate`; others are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import EngineError, EngineInputError, InputError
from tests.core.fake_hub import fake_hub
from tests.engines.tiny_model import (
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
)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Qwen3", {"num_key_value_heads": 4}),
        ("Qwen3", {"num_key_value_heads": 1, "attn_implementation": "eager"}),
        ("Mistral", {"sliding_window": 24}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("Gemma3Text", {"sliding_window": 24, "sliding_window_pattern": 2}),
        ("GPT2", {"n_positions": 2048}),
    ],
    ids=["llama", "one head per group", "eager", "sliding", "mixed", "gemma3", "learned positions"],
)
def test_other_attention_gives_the_ids_of_generate(kind: str, changes: dict[str, Any]) -> None:
    prompts = [prompt(n, 10 + 31 * n) for n in range(6)]

    async def body() -> None:
        config = hf.HfConfig(prefill_tokens=48)
        async with running_engine(tiny_model(kind=kind, **changes), config) as engine:
            outputs = await asyncio.gather(*(collect(engine, ids, greedy(12)) for ids in prompts))
            again = await asyncio.gather(*(collect(engine, ids, greedy(12)) for ids in prompts))
        model = tiny_model(kind=kind, **changes)
        assert [output.ids for output in outputs] == [reference_ids(model, ids, 12) for ids in prompts]
        assert [output.ids for output in again] == [output.ids for output in outputs]

    run(body())


def test_model_folder_is_loaded(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "little")

    async def body() -> None:
        engine = hf.HfEngine.load(tmp_path / "little", device="cpu")
        output = await collect(engine, prompt(1, 30), greedy(5))
        assert engine.name == "hf:little"
        await engine.close()
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    run(body())
    with pytest.raises(InputError, match="nowhere: not a directory"):
        hf.HfEngine.load(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="config"):
        hf.HfEngine.load(tmp_path)


def test_a_model_is_loaded_by_its_hugging_face_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path / "repository")

    async def body() -> None:
        engine = hf.HfEngine.load("acme/little", device="cpu")
        output = await collect(engine, prompt(1, 30), greedy(5))
        await engine.close()
        assert engine.name == "hf:little"
        assert output.ids == reference_ids(tiny_model(), prompt(1, 30), 5)

    with fake_hub(monkeypatch, tmp_path / "cache", {"acme/little": tmp_path / "repository"}):
        run(body())
    run(body())  # cached: no hub
    with pytest.raises(InputError, match="revision: got 'v1', expected it in the name"):
        hf.HfEngine.load("acme/little", revision="v1")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Qwen3Next", {"layer_types": ["linear_attention", *["full_attention"] * 2]}, "'linear_attention'"),
        ("Llama4Text", {"attention_chunk_size": 24, "num_local_experts": 2}, "layers of 'chunked_attention'"),
        ("GPTNeo", {"attention_types": [[["global", "local", "local"], 1]]}, "layers of 'local'"),
        # Until transformers 5.22 its configuration does not name such layers.
        ("RecurrentGemma", {}, "layers of 'linear_attention'|which leaves a layer of its cache empty"),
        ("Bloom", {"n_layer": 3, "n_head": 4}, "rows of different lengths with a mask and positions"),
    ],
    ids=["linear", "chunked", "local", "recurrent", "alibi"],
)
def test_model_that_cannot_be_batched_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    model = tiny_model(kind=kind, attn_implementation=None, **changes)
    with pytest.raises(EngineInputError, match=message):
        hf.HfEngine(model)


def test_model_that_caches_no_keys_is_refused() -> None:
    model = tiny_model()
    forward = model.forward
    model.forward = lambda *args, past_key_values=None, **rest: forward(*args, **rest)
    with pytest.raises(EngineInputError, match="ForCausalLM, which leaves a layer of its cache empty"):
        hf.HfEngine(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_that_ignores_position_ids_is_refused(dtype: str) -> None:
    model = tiny_model(dtype=dtype)
    forward = model.forward
    model.forward = lambda *args, position_ids=None, **rest: forward(*args, **rest)
    with pytest.raises(EngineInputError, match=r"off by .* when two rows are computed together"):
        hf.HfEngine(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_exact_up_to_rounding(dtype: str) -> None:
    prompts = [prompt(n, 20 + 40 * n) for n in range(4)]

    async def body() -> None:
        async with running_engine(tiny_model(dtype=dtype), hf.HfConfig(prefill_tokens=48)) as engine:
            await engine.update_weights(tiny_model(seed=1).state_dict(), version=1)  # Rounded from float32.
            outputs = await asyncio.gather(*(collect(engine, ids, greedy(20)) for ids in prompts))
        model = tiny_model(seed=1, dtype=dtype)
        for ids, output in zip(prompts, outputs, strict=True):
            expected = full_logprobs(model, [*ids.tolist(), *output.ids], len(ids))
            picked = expected.gather(-1, torch.tensor(output.ids)[:, None])[:, 0]
            assert np.allclose(output.logprobs, picked, atol=0.3)
            assert np.allclose(expected.max(-1).values, picked, atol=0.3), "the best id, up to rounding"

    run(body())


def test_model_without_sdpa_is_loaded_with_its_own_attention(tmp_path: Path) -> None:
    tiny_model(kind="Gemma2", attn_implementation=None, sliding_window=24).save_pretrained(tmp_path)
    ids = prompt(1, 60)

    async def body() -> None:
        engine = hf.HfEngine.load(tmp_path, device="cpu")
        output = await collect(engine, ids, greedy(8))
        await engine.close()
        assert output.ids == reference_ids(
            tiny_model(kind="Gemma2", attn_implementation=None, sliding_window=24), ids, 8
        )

    run(body())


def test_attention_without_a_mask_is_refused() -> None:
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(EngineInputError, match="got 'flash_attention_2'"):
        hf.HfEngine(model)


def test_long_rope_is_limited_to_the_lengths_at_which_keys_stay_valid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [8.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model(
        kind="Phi3", max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=rope
    )

    async def body() -> None:
        async with running_engine(model) as engine:
            assert engine.max_context == 64
            assert "longrope" in caplog.text
            output = await collect(engine, prompt(1, 40), greedy(24))
            with pytest.raises(EngineInputError, match="expected at most 64 together"):
                await collect(engine, prompt(1, 41), greedy(24))
        expected = full_logprobs(model, [*prompt(1, 40).tolist(), *output.ids], 40)
        np.testing.assert_allclose(output.logprobs, expected[np.arange(24), output.ids], atol=1e-4)

    run(body())
