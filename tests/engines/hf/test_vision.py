"""Images in the embedded engine: its outputs are those of transformers, alone, batched and after a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.vision import ImageProcessor, ImageSpan
from branchline.core.errors import CodecError, EngineInputError
from branchline.core.message import Media
from branchline.core.token_arrays import Ids, as_ids
from tests.engines.tiny_model import CollectedOutput, greedy, hf, run, running_engine, tiny_model, torch
from tests.engines.tiny_vision_model import (
    IMAGE_TOKEN,
    PROCESSOR,
    VISION,
    build_prompt,
    full_logprobs,
    image,
    reference_ids,
    reference_inputs,
    text,
    tiny_vision_model,
)

TOKENS = 12


async def collect(
    engine: Any, ids: Ids, images: Sequence[ImageSpan], max_tokens: int = TOKENS
) -> CollectedOutput:
    output = CollectedOutput()
    async for chunk in engine.generate(ids, greedy(max_tokens), images=images):
        output.ids += chunk.ids.tolist()
        output.logprobs += chunk.logprobs.tolist()
        output.versions += [chunk.version] * len(chunk.ids)
    return output


def assert_exact(model: Any, ids: Ids, images: Sequence[ImageSpan], output: CollectedOutput) -> None:
    whole = [*ids.tolist(), *output.ids]
    logprobs = full_logprobs(model, whole, images, len(ids))
    expected = logprobs[torch.arange(len(output.ids)), torch.tensor(output.ids)]
    np.testing.assert_allclose(output.logprobs, expected.numpy(), atol=2e-3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=4), st.integers(0, 5))
def test_positions_equal_those_of_transformers(pieces: list[tuple[int, int]], tail: int) -> None:
    from branchline.engines.hf.vision import rope_positions

    parts: list[Any] = []
    for size, number in pieces:
        # Transformers reads two adjacent images as one.
        parts += [text(number, size + 1), image(number)]
    ids, images = build_prompt(*parts, text(9, tail + 1))
    inputs = reference_inputs(ids, images)
    model = tiny_vision_model().model
    expected, _ = model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
    )
    grids = [(span.offset, PROCESSOR.pixels(span.media).grid) for span in images]
    assert rope_positions(len(ids), grids, 2).tolist() == expected[:, 0].tolist()


@pytest.mark.parametrize("prefill_tokens", [512, 7])
def test_outputs_equal_those_of_transformers_alone_and_batched(prefill_tokens: int) -> None:
    model = tiny_vision_model()
    prompts = [
        build_prompt(text(1, 5), image(0), text(2, 3)),
        build_prompt(text(3, 2), image(1), text(4, 9), image(2), text(5, 4)),
        build_prompt(text(6, 20)),
        build_prompt(image(3), text(7, 1)),
    ]
    expected = [reference_ids(model, ids, images, TOKENS) for ids, images in prompts]

    async def main() -> None:
        config = hf.HfConfig(prefill_tokens=prefill_tokens)
        async with running_engine(model, config, image_processor=PROCESSOR) as engine:
            assert engine.supports_images
            outputs = await asyncio.gather(*[collect(engine, *one) for one in prompts])
            assert [output.ids for output in outputs] == expected
            for (ids, images), output in zip(prompts, outputs, strict=True):
                assert_exact(model, ids, images, output)

    run(main())


def test_a_conversation_reuses_its_prefix_and_another_image_does_not() -> None:
    model = tiny_vision_model()
    first, other = image(0), image(4)
    assert PROCESSOR.placeholder_count(first) == PROCESSOR.placeholder_count(other)

    async def main() -> None:
        async with running_engine(model, image_processor=PROCESSOR) as engine:
            parts: list[Any] = [text(1, 30), first, text(2, 5)]
            ids, images = build_prompt(*parts)
            reply = await collect(engine, ids, images)
            # The same ids with another image reuse only what precedes the image.
            other_ids, other_images = build_prompt(text(1, 30), other, text(2, 5))
            assert other_ids.tolist() == ids.tolist()
            before = engine.stats.reused_tokens
            other_reply = await collect(engine, other_ids, other_images)
            assert engine.stats.reused_tokens - before == 30
            assert other_reply.ids == reference_ids(model, other_ids, other_images, TOKENS) != reply.ids
            # The next turn reuses everything before it, images included.
            parts += [reply.ids, text(3, 4), image(1), text(4, 2)]
            next_ids, next_images = build_prompt(*parts)
            before = engine.stats.reused_tokens
            output = await collect(engine, next_ids, next_images)
            assert engine.stats.reused_tokens - before == len(ids) + TOKENS - 1
            assert output.ids == reference_ids(model, next_ids, next_images, TOKENS)
            assert_exact(model, next_ids, next_images, output)

    run(main())


def test_a_sampled_placeholder_is_text() -> None:
    model = tiny_vision_model()

    async def main() -> None:
        async with running_engine(model, image_processor=PROCESSOR) as engine:
            ids, images = build_prompt(text(1, 3), image(0), text(2, 2))
            ids = as_ids([*ids.tolist(), IMAGE_TOKEN, 5])
            output = await collect(engine, ids, images, 4)
            assert len(output.ids) == 4

    run(main())


def test_a_weight_update_changes_the_features_of_images() -> None:
    model, new = tiny_vision_model(0), tiny_vision_model(1)
    ids, images = build_prompt(text(1, 5), image(1), text(2, 3))
    expected = reference_ids(new, ids, images, TOKENS)

    async def main() -> None:
        async with running_engine(model, image_processor=PROCESSOR) as engine:
            await collect(engine, ids, images)
            await engine.update_weights(new.state_dict(), 1)
            output = await collect(engine, ids, images)
            assert output.ids == expected
            assert set(output.versions) == {1}

    run(main())


def test_wrong_images_are_refused() -> None:
    model = tiny_vision_model()
    ids, images = build_prompt(text(1, 5), image(1), text(2, 3))
    broken = Media("image", "broken", images[0].media.payload[:200])

    async def main() -> None:
        async with running_engine(model, image_processor=PROCESSOR) as engine:
            for wrong in (
                replace(images[0], length=2),
                replace(images[0], offset=1),
                replace(images[0], offset=500),
            ):
                with pytest.raises(EngineInputError, match="placeholders at"):
                    await collect(engine, ids, [wrong])
            with pytest.raises(CodecError, match="image broken: cannot be read"):
                await collect(engine, ids, [replace(images[0], media=broken)])
            assert (await collect(engine, ids, images)).ids == reference_ids(model, ids, images, TOKENS)
        async with running_engine(tiny_model()) as engine:
            assert not engine.supports_images
            with pytest.raises(EngineInputError, match="images: got 1, expected none: hf takes no images"):
                await collect(engine, ids, images)

    run(main())


def test_the_image_processor_must_fit_the_model() -> None:
    with pytest.raises(EngineInputError, match="got patch_size 16, expected the model's 14"):
        hf.HfEngine(tiny_vision_model(), image_processor=ImageProcessor(replace(VISION, patch_size=16)))
    with pytest.raises(EngineInputError, match="got 'qwen3' for images, expected qwen2_5_vl, qwen2_vl"):
        hf.HfEngine(tiny_model(), image_processor=PROCESSOR)


def test_a_folder_with_an_image_processor_takes_images(tmp_path: Path) -> None:
    model = tiny_vision_model()
    model.save_pretrained(tmp_path)
    settings = '{"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 31360}'
    (tmp_path / "preprocessor_config.json").write_text(settings)
    ids, images = build_prompt(text(1, 5), image(1), text(2, 3))

    async def main() -> None:
        engine = hf.HfEngine.load(tmp_path, device="cpu")
        try:
            assert engine.supports_images
            assert (await collect(engine, ids, images)).ids == reference_ids(model, ids, images, TOKENS)
        finally:
            await engine.close()

    run(main())
