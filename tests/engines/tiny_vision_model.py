"""A tiny random Qwen2.5-VL model, and what transformers computes for its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from branchline.chat.vision import ImageProcessor, ImageSpan, VisionConfig
from branchline.core.message import Media
from branchline.core.token_arrays import Ids, as_ids
from tests.chat.test_vision import make_image
from tests.engines.tiny_model import CONFIG, VOCAB, torch, transformers

IMAGE_TOKEN = VOCAB - 1
VISION = VisionConfig(
    patch_size=14,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 40,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
PROCESSOR = ImageProcessor(VISION)
SIZES = ((60, 60), (150, 60), (70, 170), (200, 120))


def tiny_vision_config(image_token: int = IMAGE_TOKEN, **changes: Any) -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": CONFIG["hidden_size"],
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    text = {key: value for key, value in CONFIG.items() if key != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, **changes},
        vision_config={**vision, "initializer_range": 0.2},
        image_token_id=image_token,
        video_token_id=image_token - 1,
        vision_start_token_id=image_token - 2,
        vision_end_token_id=image_token - 3,
    )


def tiny_vision_model(seed: int = 0, config: Any = None) -> Any:
    """A random model whose outputs depend on the images."""
    torch.manual_seed(seed)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config or tiny_vision_config())
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.model.visual.merger.mlp[-1].weight *= 4
    return model.eval()


def image(number: int) -> Media:
    return make_image(*SIZES[number % len(SIZES)], seed=number)


def build_prompt(*parts: Sequence[int] | Media) -> tuple[Ids, list[ImageSpan]]:
    """The ids of a prompt of texts and images, and its images."""
    ids: list[int] = []
    images: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, Media):
            count = PROCESSOR.placeholder_count(part)
            images.append(ImageSpan(part, len(ids), count))
            ids += [IMAGE_TOKEN] * count
        else:
            ids += part
    return as_ids(ids), images


def text(seed: int, size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB - 10, size).tolist()
    return ids


def reference_inputs(ids: Sequence[int] | Ids, images: Sequence[ImageSpan]) -> dict[str, Any]:
    """The inputs that transformers' processor would give."""
    batch = torch.tensor([list(map(int, ids))])
    types = torch.zeros_like(batch)
    for span in images:
        types[0, span.offset : span.offset + span.length] = 1
    inputs: dict[str, Any] = {"input_ids": batch, "mm_token_type_ids": types}
    if images:
        pixels = [PROCESSOR.pixels(span.media) for span in images]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([one.values for one in pixels]))
        inputs["image_grid_thw"] = torch.tensor([one.grid for one in pixels])
    return inputs


def reference_ids(model: Any, ids: Ids, images: Sequence[ImageSpan], max_tokens: int) -> list[int]:
    """The ids that `generate` gives for this prompt alone."""
    inputs = reference_inputs(ids, images)
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    return list(output[0, len(ids) :].tolist())


def full_logprobs(model: Any, ids: Sequence[int], images: Sequence[ImageSpan], start: int) -> Any:
    """The log-softmax before each id from `start` on, computed in one forward pass without a cache."""
    with torch.inference_mode():
        logits = model(**reference_inputs(ids, images), use_cache=False).logits[0]
    return logits[start - 1 : -1].float().log_softmax(-1)
