"""Images in the embedded engine: the features that replace placeholders, and the positions of a prompt.

Qwen2-VL and Qwen2.5-VL read an image as one feature for each placeholder. Their positions have three axes:
text advances all three together, an image spans rows and columns and then advances all by its longer side.
Positions and features of a prefix do not depend on what follows, so prefixes with equal ids and equal images
have equal keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from branchline.chat.vision import ImageProcessor, ImageSpan, PixelPatches
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import Ids

IMAGE_MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Models whose images only replace embeddings; others also add features to later layers."""
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, decoded. Its placeholders are `offset` to `offset + length`."""

    digest: str
    offset: int
    length: int
    pixels: PixelPatches


class VisionEncoder:
    """The vision part of a model. `decode` may run in any thread, the rest only in the computing thread."""

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        if model.config.model_type not in IMAGE_MODEL_TYPES:
            expected = ", ".join(sorted(IMAGE_MODEL_TYPES))
            raise EngineInputError(f"model: got {model.config.model_type!r} for images, expected {expected}")
        vision = model.config.vision_config
        for name, own, expected in (
            ("patch_size", processor.config.patch_size, vision.patch_size),
            ("merge_size", processor.config.merge_size, vision.spatial_merge_size),
            ("temporal_patch_size", processor.config.temporal_patch_size, vision.temporal_patch_size),
        ):
            if own != expected:
                raise EngineInputError(f"image processor: got {name} {own}, expected the model's {expected}")
        self._model = model
        self._processor = processor
        self._merge_size = processor.config.merge_size
        self._pixels: ByteLimitedCache[PixelPatches] = ByteLimitedCache(_CACHE_BYTES)
        self._features: ByteLimitedCache[Tensor] = ByteLimitedCache(_CACHE_BYTES)

    def decode(self, images: Sequence[ImageSpan], prompt_ids: Ids) -> tuple[PromptImage, ...]:
        """Returns the images of a prompt. Raises CodecError for an image that cannot be read, and
        EngineInputError if the prompt does not have the placeholders that it needs."""
        decoded: list[PromptImage] = []
        for image in images:
            pixels = self._pixels.get(image.media.digest)
            if pixels is None:
                pixels = self._processor.pixels(image.media)
                self._pixels.put(image.media.digest, pixels, pixels.values.nbytes)
            expected = int(np.prod(pixels.grid)) // self._merge_size**2
            ids = prompt_ids[image.offset : image.offset + image.length]
            if image.length != expected or len(ids) != expected or len(set(ids.tolist())) != 1:
                raise EngineInputError(
                    f"image {image.media.digest}: got {image.length} placeholders at {image.offset}, "
                    f"expected {expected}"
                )
            decoded.append(PromptImage(image.media.digest, image.offset, image.length, pixels))
        return tuple(decoded)

    def features(self, image: PromptImage) -> Tensor:
        """Returns the features of an image: [placeholders, hidden]."""
        features = self._features.get(image.digest)
        if features is None:
            device = self._model.device
            output = self._model.get_image_features(
                torch.from_numpy(image.pixels.values).to(device),
                torch.tensor([image.pixels.grid], device=device),
                return_dict=True,
            )
            features = torch.cat(list(output.pooler_output), dim=0)
            self._features.put(image.digest, features, features.numel() * features.element_size())
        return features

    def clear(self) -> None:
        """Drops all features: the weights have changed."""
        self._features.clear()

    def positions(self, length: int, images: Sequence[PromptImage]) -> NDArray[np.int64]:
        """Returns the positions of a prompt: [3, tokens]."""
        return rope_positions(
            length, [(image.offset, image.pixels.grid) for image in images], self._merge_size
        )


def rope_positions(
    length: int, images: Sequence[tuple[int, tuple[int, int, int]]], merge_size: int
) -> NDArray[np.int64]:
    """Returns the three positions of each token, given the offset and the grid of each image.

    >>> rope_positions(6, [(1, (1, 4, 4))], 2).tolist()
    [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    """
    parts: list[NDArray[np.int64]] = []
    done = position = 0
    for offset, (times, down, across) in images:
        text = np.arange(position, position + offset - done)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += len(text)
        shape = (times, down // merge_size, across // merge_size)
        parts.append(np.indices(shape).reshape(3, -1) + position)
        position += max(shape[1:])
        done = offset + int(np.prod(shape))
    parts.append(np.broadcast_to(np.arange(position, position + length - done), (3, length - done)))
    return np.concatenate(parts, axis=1)


def prefix_keys(ids: Ids, images: Sequence[PromptImage]) -> NDArray[np.int64]:
    """Returns numbers that are equal where ids and images are equal: a negative hash for each placeholder."""
    keys = ids.astype(np.int64)
    for image in images:
        number = xxhash.xxh3_64_intdigest(image.digest.encode()) >> 1
        keys[image.offset : image.offset + image.length] = -1 - number
    return keys
