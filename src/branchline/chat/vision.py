"""Images in prompts: the number of placeholder ids of an image, and its pixels.

An image is identified by its digest. The number of placeholders depends only on its size, so building a
prompt decodes only the header, once; pixels are computed on demand. Resizing, normalisation and patching
equal those of Qwen's image processor, with numpy and Pillow only.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.message import Media, Message
from branchline.core.token_arrays import Ids

if TYPE_CHECKING:
    from PIL.Image import Image

_INSTALL = "images need Pillow: pip install 'branchline[vision]'"
_MAX_CACHED_SIZES = 65536
_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class VisionConfig:
    """How a model family splits images into patches; the defaults are Qwen3-VL's."""

    patch_size: int = 16
    merge_size: int = 2
    """Patches per side of one placeholder."""
    temporal_patch_size: int = 2
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_directory(cls, directory: Path) -> VisionConfig:
        """Reads `preprocessor_config.json`; returns the defaults if there is none."""
        file = directory / "preprocessor_config.json"
        if not file.exists():
            return cls()
        try:
            config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            size = config.get("size") or {}
            min_pixels = config.get("min_pixels") or size.get("shortest_edge")
            max_pixels = config.get("max_pixels") or size.get("longest_edge")
            names = ("patch_size", "merge_size", "temporal_patch_size")
            values: dict[str, Any] = {name: int(config[name]) for name in names if name in config}
            values |= {"min_pixels": int(min_pixels)} if min_pixels else {}
            values |= {"max_pixels": int(max_pixels)} if max_pixels else {}
            values |= {"mean": tuple(config["image_mean"])} if "image_mean" in config else {}
            values |= {"std": tuple(config["image_std"])} if "image_std" in config else {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CodecError(f"{file}: not the settings of an image processor: {error}") from error
        return cls(**values)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size to which an image is resized: whole placeholders, and pixels within the bounds."""
        if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise CodecError(f"image: got {width}x{height}, expected sides of at most 1:{_MAX_ASPECT_RATIO}")
        unit = self.patch_size * self.merge_size
        wide, high = round(width / unit) * unit, round(height / unit) * unit
        if wide * high > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            wide = max(unit, math.floor(width / scale / unit) * unit)
            high = max(unit, math.floor(height / scale / unit) * unit)
        elif wide * high < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            wide, high = math.ceil(width * scale / unit) * unit, math.ceil(height * scale / unit) * unit
        return wide, high

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns the number of patches in time, vertically and horizontally."""
        wide, high = self.resized_size(width, height)
        return 1, high // self.patch_size, wide // self.patch_size

    def placeholder_count(self, width: int, height: int) -> int:
        """Returns the number of placeholder ids of an image of this size."""
        return math.prod(self.grid(width, height)) // self.merge_size**2


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image of a prompt: its placeholders start at `offset`. The media holds the payload."""

    media: Media
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PixelPatches:
    """The input of a vision encoder for one image."""

    values: NDArray[np.float32]
    """One row per patch."""
    grid: tuple[int, int, int]


class ImageProcessor:
    """The images of one model family, with the processor interface that `renderers` expects."""

    def __init__(self, config: VisionConfig) -> None:
        self.config = config
        self.merge_size = config.merge_size
        self._sizes: ByteLimitedCache[tuple[int, int]] = ByteLimitedCache(_MAX_CACHED_SIZES, lambda _: 1)

    @property
    def image_processor(self) -> ImageProcessor:
        return self

    def placeholder(self, media: Media) -> Image:
        """Returns a tiny image whose pixels are the digest: `renderers` identifies images by their bytes."""
        image = _import_pillow()
        size = self.image_size(media)
        name = f"{media.digest} {size[0]}x{size[1]}".encode()
        name += b" " * (-len(name) % 3)
        placeholder: Image = image.frombytes("RGB", (len(name) // 3, 1), name)
        placeholder.info["size"] = size
        return placeholder

    def __call__(self, images: Sequence[Image], **_: Any) -> Mapping[str, Any]:
        """Returns the grids of placeholder images; called by `renderers`."""
        grids = [self.config.grid(*image.info["size"]) for image in images]
        return {"pixel_values": None, "image_grid_thw": np.array(grids, np.int64)}

    def image_size(self, media: Media) -> tuple[int, int]:
        """Returns width and height, read from the header."""
        size = self._sizes.get(media.digest)
        if size is None:
            with _open_image(media) as image:
                size = image.size
            self._sizes.put(media.digest, size)
        return size

    def pixels(self, media: Media) -> PixelPatches:
        """Returns the patches of an image, equal to those of Qwen's processor."""
        config = self.config
        with _open_image(media) as opened:
            try:
                image = opened.convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                raise CodecError(f"image {media.digest}: cannot be read: {error}") from error
        wide, high = config.resized_size(*image.size)
        image = image.resize((wide, high), _import_pillow().Resampling.BICUBIC)
        values = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
        mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
        values = (values - mean[:, None, None]) / std[:, None, None]
        patch, merge, times = config.patch_size, config.merge_size, config.temporal_patch_size
        down, across = high // patch, wide // patch
        blocks = values.reshape(3, down // merge, merge, patch, across // merge, merge, patch)
        # The patches of one placeholder are adjacent; each is repeated for every time step.
        blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        blocks = np.broadcast_to(blocks, (*blocks.shape[:5], times, patch, patch))
        patches = blocks.reshape(down * across, 3 * times * patch * patch).astype(np.float32, copy=False)
        return PixelPatches(patches, (1, down, across))


def find_image_spans(messages: Sequence[Message], prompt_ids: Ids, pad: int) -> tuple[ImageSpan, ...]:
    """Returns where the images of a conversation stand in its prompt: each is a run of placeholders."""
    media = [part for message in messages for part in message.media]
    is_pad = np.concatenate(([False], prompt_ids == pad, [False]))
    edges = np.flatnonzero(is_pad[1:] != is_pad[:-1]).tolist()
    starts, ends = edges[::2], edges[1::2]
    if len(starts) != len(media):
        raise CodecError(f"images: got {len(media)} for a prompt with {len(starts)} places for one")
    return tuple(
        ImageSpan(part, start, end - start) for part, start, end in zip(media, starts, ends, strict=True)
    )


def reject_media(messages: Sequence[Message], model: str, first_index: int = 0) -> None:
    """Raises CodecError if a message carries media; the model reads text only."""
    for index, message in enumerate(messages, start=first_index):
        for media in message.media:
            raise _unsupported(index, media, model)


def check_media(messages: Sequence[Message], model: str) -> None:
    """Raises CodecError if a message carries media other than images, or an image without its data."""
    for index, message in enumerate(messages):
        for media in message.media:
            if media.kind != "image":
                raise _unsupported(index, media, model)
            if not media.payload:
                raise CodecError(f"messages[{index}]: got an image by link, {media.url!r}, expected its data")


def _unsupported(index: int, media: Media, model: str) -> CodecError:
    article = "an" if media.kind in ("image", "audio") else "a"
    plural = media.kind if media.kind == "audio" else f"{media.kind}s"
    return CodecError(f"messages[{index}]: carries {article} {media.kind}, but {model} takes no {plural}")


def _import_pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise CodecError(_INSTALL) from error
    return PIL.Image


def _open_image(media: Media) -> Any:
    image = _import_pillow()
    try:
        return image.open(io.BytesIO(media.payload))
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise CodecError(f"image {media.digest}: cannot be read: {error}") from error
