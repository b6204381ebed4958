"""Images in prompts: how many placeholder ids an image takes, and the pixels behind them.

An image is known by its digest. Its size alone says how many placeholders it takes, so building a prompt
decodes nothing but a header, once; pixels are made when an engine or a trainer asks for them. Resizing,
normalising and patching are those of Qwen's image processor, with numpy and Pillow and nothing else.
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
    """How a model family cuts images into patches; the defaults are Qwen3-VL's."""

    patch_size: int = 16
    merge_size: int = 2
    """Patches per side that become one placeholder."""
    temporal_patch_size: int = 2
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_directory(cls, directory: Path) -> VisionConfig:
        """What a `preprocessor_config.json` says; the defaults where there is none."""
        file = directory / "preprocessor_config.json"
        if not file.exists():
            return cls()
        try:
            given = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            size = given.get("size") or {}
            least = given.get("min_pixels") or size.get("shortest_edge")
            most = given.get("max_pixels") or size.get("longest_edge")
            names = ("patch_size", "merge_size", "temporal_patch_size")
            found: dict[str, Any] = {name: int(given[name]) for name in names if name in given}
            found |= {"min_pixels": int(least)} if least else {}
            found |= {"max_pixels": int(most)} if most else {}
            found |= {"mean": tuple(given["image_mean"])} if "image_mean" in given else {}
            found |= {"std": tuple(given["image_std"])} if "image_std" in given else {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CodecError(f"{file}: not the settings of an image processor: {error}") from error
        return cls(**found)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """The size an image is brought to: whole placeholders, and a number of pixels within bounds."""
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
        """Patches in time, down and across."""
        wide, high = self.resized_size(width, height)
        return 1, high // self.patch_size, wide // self.patch_size

    def placeholder_count(self, width: int, height: int) -> int:
        """How many ids stand for an image of a size."""
        return math.prod(self.grid(width, height)) // self.merge_size**2


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image of a prompt: its placeholders stand from `offset` on. The payload travels with the media."""

    media: Media
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PixelPatches:
    """An image as a vision encoder takes it."""

    values: NDArray[np.float32]
    """One row per patch."""
    grid: tuple[int, int, int]


class ImageProcessor:
    """Images of one model family. In the shape that `renderers` calls, it answers with sizes only."""

    def __init__(self, config: VisionConfig) -> None:
        self.config = config
        self.merge_size = config.merge_size
        self._sizes: ByteLimitedCache[tuple[int, int]] = ByteLimitedCache(_MAX_CACHED_SIZES, lambda _: 1)

    @property
    def image_processor(self) -> ImageProcessor:
        return self

    def placeholder(self, media: Media) -> Image:
        """A few pixels that spell an image's digest: `renderers` knows images by their bytes."""
        image = _import_pillow()
        size = self.image_size(media)
        name = f"{media.digest} {size[0]}x{size[1]}".encode()
        name += b" " * (-len(name) % 3)
        stand_in: Image = image.frombytes("RGB", (len(name) // 3, 1), name)
        stand_in.info["size"] = size
        return stand_in

    def __call__(self, images: Sequence[Image], **_: Any) -> Mapping[str, Any]:
        """The grids of stand-ins."""
        grids = [self.config.grid(*image.info["size"]) for image in images]
        return {"pixel_values": None, "image_grid_thw": np.array(grids, np.int64)}

    def image_size(self, media: Media) -> tuple[int, int]:
        """Width and height, read from the header."""
        known = self._sizes.get(media.digest)
        if known is None:
            with _open_image(media) as image:
                known = image.size
            self._sizes.put(media.digest, known)
        return known

    def pixels(self, media: Media) -> PixelPatches:
        """The patches of an image, as Qwen's processor makes them."""
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
        # Patches that become one placeholder stand together; each is shown as often as time has steps.
        blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        blocks = np.broadcast_to(blocks, (*blocks.shape[:5], times, patch, patch))
        return PixelPatches(blocks.reshape(down * across, 3 * times * patch * patch), (1, down, across))


def find_image_spans(messages: Sequence[Message], prompt_ids: Ids, pad: int) -> tuple[ImageSpan, ...]:
    """Where the images of a conversation stand in its prompt: each is a run of placeholders, in order."""
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
    """Raises where a message carries what a model that only reads text cannot see."""
    for index, message in enumerate(messages, start=first_index):
        for media in message.media:
            raise CodecError(
                f"messages[{index}]: carries {_with_article(media)}, but {model} takes no {_plural(media)}"
            )


def check_media(messages: Sequence[Message], model: str) -> None:
    """Raises where a message carries what a model that sees images cannot see, or only a link to it."""
    for index, message in enumerate(messages):
        for media in message.media:
            if media.kind != "image":
                raise CodecError(
                    f"messages[{index}]: carries {_with_article(media)}, but {model} takes no {_plural(media)}"
                )
            if not media.payload:
                raise CodecError(f"messages[{index}]: got an image by link, {media.url!r}, expected its data")


def _with_article(media: Media) -> str:
    return f"{'an' if media.kind in ('image', 'audio') else 'a'} {media.kind}"


def _plural(media: Media) -> str:
    return media.kind if media.kind == "audio" else f"{media.kind}s"


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
