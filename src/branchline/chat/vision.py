"""Images in prompts: the number of placeholder ids of an image, and its pixels.

An image is identified by its digest. The number of placeholders depends only on its size, so building a
prompt decodes only the header, once; pixels are computed on demand. Resizing, normalisation and patching
equal those of Qwen's image processor, with numpy and Pillow only.

A chat template writes one placeholder for each image, in order. `ImageExpander` repeats it in the rendered
text, before anything is encoded or compared, so a recorded path with images is compared like any other.
"""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError, TemplateError
from branchline.core.extras import requires_extra
from branchline.core.message import Media, Message
from branchline.core.token_arrays import Ids

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_CACHED_SIZES = 65536
_MAX_ASPECT_RATIO = 200
_QWEN_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")
"""Image processors (and their Fast and Pil variants) whose placeholders and pixels are computed here."""
_IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "[IMG]")
"""Placeholder tokens to look for if no file of the model names one."""


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
        """Reads the settings of the image processor; returns the defaults if there are none."""
        return cls.find(directory) or cls()

    @classmethod
    def find(cls, directory: Path) -> VisionConfig | None:
        """Reads `preprocessor_config.json`, or the image processor in `processor_config.json`; returns None
        if there is neither. Raises CodecError for a processor of another kind than Qwen's."""
        file, config = _read_processor_file(directory)
        if config is None:
            return None
        kind = str(config.get("image_processor_type") or "")
        if kind and not kind.startswith(_QWEN_PROCESSORS):
            expected = " or ".join(_QWEN_PROCESSORS)
            raise CodecError(f"{file}: got image_processor_type {kind!r}, expected {expected}")
        values = dict(_QWEN2_VL_DEFAULTS) if kind.startswith("Qwen2VL") else {}
        try:
            size = config.get("size") or {}
            min_pixels = config.get("min_pixels") or size.get("shortest_edge")
            max_pixels = config.get("max_pixels") or size.get("longest_edge")
            names = ("patch_size", "merge_size", "temporal_patch_size")
            values |= {name: int(config[name]) for name in names if name in config}
            values |= {"min_pixels": int(min_pixels)} if min_pixels else {}
            values |= {"max_pixels": int(max_pixels)} if max_pixels else {}
            values |= {"mean": tuple(config["image_mean"])} if "image_mean" in config else {}
            values |= {"std": tuple(config["image_std"])} if "image_std" in config else {}
        except (ValueError, TypeError, AttributeError) as error:
            raise _not_a_processor(file, error) from error
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


# What transformers' Qwen2VLImageProcessor uses where its file has no value.
_QWEN2_VL_DEFAULTS: dict[str, Any] = {
    "patch_size": 14,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


def find_image_token(directory: Path, added_tokens: Mapping[str, int]) -> str:
    """Returns the placeholder token of images, which the model's files name by id or by text; "" if none."""
    config = _read_json(directory / "config.json")
    names = {token: name for name, token in added_tokens.items()}
    for key in ("image_token_id", "image_token_index"):
        if config.get(key) in names:
            return names[config[key]]
    for file in ("processor_config.json", "tokenizer_config.json"):
        name = _read_json(directory / file).get("image_token")
        name = name.get("content") if isinstance(name, dict) else name
        if name in added_tokens:
            return str(name)
    return next((name for name in _IMAGE_TOKENS if name in added_tokens), "")


def _read_processor_file(directory: Path) -> tuple[Path, dict[str, Any] | None]:
    file = directory / "preprocessor_config.json"
    if file.exists():
        return file, _read_json(file)
    file = directory / "processor_config.json"
    config = _read_json(file).get("image_processor")
    return file, config if isinstance(config, dict) else None


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file; empty if there is no file."""
    if not file.exists():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise _not_a_processor(file, error) from error


def _not_a_processor(file: Path, error: Exception) -> CodecError:
    return CodecError(f"{file}: not the settings of an image processor: {error}")


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
        self._sizes: ByteLimitedCache[tuple[int, int]] = ByteLimitedCache(_MAX_CACHED_SIZES)

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
            self._sizes.put(media.digest, size, 1)
        return size

    def placeholder_count(self, media: Media) -> int:
        """Returns the number of placeholder ids of an image."""
        return self.config.placeholder_count(*self.image_size(media))

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


class ImageExpander:
    """Repeats the placeholder that a template writes for an image as often as the image's size requires."""

    def __init__(self, processor: ImageProcessor, token: str) -> None:
        self._processor = processor
        self._token = token
        self._hidden = "Zi" + secrets.token_hex(8)
        """Replaces the token in the text of messages while the template renders them."""

    def render(
        self, render: Callable[[Any], str], raw_messages: Sequence[Any], media: Sequence[Media]
    ) -> str:
        """Returns the rendered text with all placeholders. Raises TemplateError unless the template writes
        one placeholder for each image; a token in the text of a message does not count."""
        is_hidden = any(_contains_text(raw, self._token) for raw in raw_messages)
        if is_hidden:
            raw_messages = [_replace_text(raw, self._token, self._hidden) for raw in raw_messages]
        texts = render(raw_messages).split(self._token)
        if len(texts) != len(media) + 1:
            raise TemplateError(
                f"images: the chat template writes {len(texts) - 1} times {self._token}, "
                f"expected {len(media)}, one for each image"
            )
        expanded = [texts[0]]
        for image, text in zip(media, texts[1:], strict=True):
            expanded += (self._token * self._processor.placeholder_count(image), text)
        text = "".join(expanded)
        return text.replace(self._hidden, self._token) if is_hidden else text


def _contains_text(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(_contains_text(key, text) or _contains_text(item, text) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_contains_text(item, text) for item in value)


def _replace_text(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {_replace_text(key, old, new): _replace_text(item, old, new) for key, item in value.items()}
    return [_replace_text(item, old, new) for item in value] if isinstance(value, list | tuple) else value


def find_image_spans(
    messages: Sequence[Message],
    prompt_ids: Ids,
    pad: int,
    processor: ImageProcessor,
    is_sampled: NDArray[np.bool_] | None = None,
) -> tuple[ImageSpan, ...]:
    """Returns where the images of a conversation stand in its prompt. Raises CodecError unless the
    placeholders are exactly those of the images; ids that were sampled are none."""
    media = [part for message in messages for part in message.media]
    counts = [processor.placeholder_count(part) for part in media]
    is_pad = prompt_ids == pad
    places = np.flatnonzero(is_pad if is_sampled is None else is_pad & ~is_sampled)
    if len(places) != sum(counts):
        raise CodecError(f"images: got {len(places)} placeholders for {len(media)}, expected {sum(counts)}")
    spans: list[ImageSpan] = []
    start = 0
    for part, count in zip(media, counts, strict=True):
        offset, last = int(places[start]), int(places[start + count - 1])
        if last - offset + 1 != count:
            raise CodecError(f"image {part.digest}: got separate placeholders, expected {count} in one run")
        spans.append(ImageSpan(part, offset, count))
        start += count
    return tuple(spans)


def reject_media(messages: Sequence[Message], model: str, first_index: int = 0, reason: str = "") -> None:
    """Raises CodecError if a message carries media; the model reads text only."""
    for index, message in enumerate(messages, start=first_index):
        for media in message.media:
            raise _unsupported(index, media, model, reason)


def check_media(messages: Sequence[Message], model: str, first_index: int = 0) -> None:
    """Raises CodecError if a message carries media other than images, or an image without its data."""
    for index, message in enumerate(messages, start=first_index):
        for media in message.media:
            if media.kind != "image":
                raise _unsupported(index, media, model)
            if not media.payload:
                raise CodecError(f"messages[{index}]: got an image by link, {media.url!r}, expected its data")


def _unsupported(index: int, media: Media, model: str, reason: str = "") -> CodecError:
    article = "an" if media.kind in ("image", "audio") else "a"
    plural = media.kind if media.kind == "audio" else f"{media.kind}s"
    why = f" ({reason})" if reason else ""
    return CodecError(
        f"messages[{index}]: carries {article} {media.kind}, but {model} takes no {plural}{why}"
    )


def _import_pillow() -> Any:
    with requires_extra():
        import PIL.Image
    return PIL.Image


def _open_image(media: Media) -> Any:
    image = _import_pillow()
    try:
        return image.open(io.BytesIO(media.payload))
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise CodecError(f"image {media.digest}: cannot be read: {error}") from error
