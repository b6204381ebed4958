"""Images in prompts: placeholders by size, payloads on the path, and errors."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Session
from branchline.chat.base import NewMessage
from branchline.chat.renderers_codec.codec import RenderersCodec
from branchline.chat.vision import (
    ImageProcessor,
    VisionConfig,
    find_image_spans,
    find_image_token,
    reject_media,
)
from branchline.core.call import Delivery, Generation, Request
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Media, Message
from branchline.core.reader import read_media_part
from branchline.core.token_arrays import Ids, as_ids
from branchline.tree.tree import decode_record, encode_record
from tests.chat.families import load_tokenizer

pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[images]'")


def make_image(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Media:
    """Returns a small PNG of random pixels, as a client sends it."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), np.uint8)
    file = io.BytesIO()
    pillow.fromarray(noise if len(mode) > 1 else noise[:, :, 0], mode=None).convert(mode).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return read_media_part(
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}, "image_url"
    )


def image_message(*parts: str | Media, role: Any = "user") -> Message:
    return Message(role, "".join(part for part in parts if isinstance(part, str)), parts=parts)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def codec(request: pytest.FixtureRequest) -> RenderersCodec:
    pytest.importorskip("renderers", reason="renderers is not installed: pip install -e '.[images]'")
    return RenderersCodec(load_tokenizer("qwen3"), request.param)


def prompt_ids(codec: RenderersCodec, *messages: Message) -> Ids:
    extension = codec.extend((), [NewMessage(message) for message in messages])
    return as_ids(
        np.concatenate([*(piece.ids for piece in extension.message_tokens), extension.generation_prompt_ids])
    )


# -- sizes and pixels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "grid", "placeholders"),
    [
        ((256, 256), (1, 16, 16), 64),
        ((417, 300), (1, 18, 26), 117),
        ((40, 40), (1, 16, 16), 64),
        ((1000, 30), (1, 4, 94), 94),
    ],
)
def test_the_number_of_placeholders_depends_on_the_size(
    size: tuple[int, int], grid: tuple[int, int, int], placeholders: int
) -> None:
    config = VisionConfig()
    assert config.grid(*size) == grid
    assert config.placeholder_count(*size) == placeholders


def test_an_image_with_an_extreme_aspect_ratio_is_refused() -> None:
    with pytest.raises(CodecError, match="got 4020x20, expected sides of at most 1:200"):
        VisionConfig().grid(4020, 20)


def test_the_vision_config_is_read_from_the_directory(tmp_path: Path) -> None:
    assert VisionConfig.from_directory(tmp_path) == VisionConfig()
    file = tmp_path / "preprocessor_config.json"
    file.write_text(
        '{"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 50176},'
        ' "image_mean": [0.1, 0.2, 0.3]}'
    )
    config = VisionConfig.from_directory(tmp_path)
    assert (config.patch_size, config.min_pixels, config.max_pixels) == (14, 3136, 50176)
    assert config.mean == (0.1, 0.2, 0.3)
    assert config.placeholder_count(2000, 2000) <= 50176 // 28**2
    file.write_text("[1]")
    with pytest.raises(CodecError, match=r"preprocessor_config\.json: not the settings"):
        VisionConfig.from_directory(tmp_path)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_pixels_have_one_row_per_patch(mode: str) -> None:
    config = VisionConfig(min_pixels=32 * 32)
    image = make_image(96, 64, mode=mode)
    pixels = ImageProcessor(config).pixels(image)
    assert pixels.grid == (1, 4, 6)
    assert pixels.values.shape == (24, 3 * 2 * 16 * 16)
    assert pixels.values.dtype == np.float32
    with pillow.open(io.BytesIO(image.payload)) as opened:
        whole = np.asarray(opened.convert("RGB"), np.float32) / 255 * 2 - 1
    # The second row is the patch to the right of the first, in both time steps.
    shown = pixels.values[1].reshape(3, 2, 16, 16)
    np.testing.assert_allclose(shown[:, 0], whole[:16, 16:32].transpose(2, 0, 1), atol=1e-6)
    np.testing.assert_array_equal(shown[:, 0], shown[:, 1])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1400), st.integers(1, 1400))
def test_placeholders_of_qwen2_5_vl_equal_those_of_transformers(width: int, height: int) -> None:
    processor = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="transformers is not installed"
    ).Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 400 * 28 * 28})
    with tempfile.TemporaryDirectory() as directory:
        processor.save_pretrained(directory)
        config = VisionConfig.find(Path(directory))
    assert config is not None
    media = make_image(width, height, seed=width)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(CodecError, match="at most 1:200"):
            ImageProcessor(config).placeholder_count(media)
        return
    with pillow.open(io.BytesIO(media.payload)) as image:
        expected = processor(images=[image], return_tensors="np")
    assert ImageProcessor(config).placeholder_count(media) == expected["image_grid_thw"][0].prod() // 4
    np.testing.assert_allclose(
        ImageProcessor(config).pixels(media).values, expected["pixel_values"], atol=2e-5
    )


def test_an_image_processor_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert VisionConfig.find(tmp_path) is None
    processor = tmp_path / "processor_config.json"
    processor.write_text('{"image_processor": {"image_processor_type": "Qwen2VLImageProcessorFast"}}')
    found = VisionConfig.find(tmp_path)
    assert found is not None
    assert (found.patch_size, found.min_pixels, found.max_pixels) == (14, 3136, 1003520)
    processor.write_text('{"image_processor": {"image_processor_type": "Gemma3ImageProcessor"}}')
    with pytest.raises(CodecError, match="got image_processor_type 'Gemma3ImageProcessor', expected Qwen2VL"):
        VisionConfig.find(tmp_path)


def test_the_placeholder_token_is_read_from_the_directory(tmp_path: Path) -> None:
    tokens = {"<image>": 7, "<|pad|>": 8}
    assert find_image_token(tmp_path, {"<|pad|>": 8}) == ""
    assert find_image_token(tmp_path, tokens) == "<image>"
    (tmp_path / "tokenizer_config.json").write_text('{"image_token": {"content": "<|pad|>"}}')
    assert find_image_token(tmp_path, tokens) == "<|pad|>"
    (tmp_path / "config.json").write_text('{"image_token_id": 7}')
    assert find_image_token(tmp_path, tokens) == "<image>"


@settings(max_examples=20, deadline=None)
@given(st.integers(20, 700), st.integers(20, 700))
def test_pixels_and_grid_equal_those_of_transformers(width: int, height: int) -> None:
    reason = "transformers is not installed: nothing to compare with"
    theirs = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason=reason
    ).Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        size={"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    media = make_image(width, height, seed=width)
    with pillow.open(io.BytesIO(media.payload)) as image:
        expected = theirs(images=[image], return_tensors="np")
    ours = ImageProcessor(VisionConfig()).pixels(media)
    assert list(ours.grid) == expected["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(ours.values, expected["pixel_values"], atol=2e-6)


def test_a_broken_image_is_refused() -> None:
    with pytest.raises(CodecError, match="image d: cannot be read"):
        ImageProcessor(VisionConfig()).image_size(Media("image", "d", b"not a picture"))
    whole = make_image(64, 64)
    truncated = Media("image", "truncated", whole.payload[: len(whole.payload) // 2])
    with pytest.raises(CodecError, match="image truncated: cannot be read"):
        ImageProcessor(VisionConfig()).pixels(truncated)


# -- prompts -------------------------------------------------------------------------------------------


def test_placeholders_are_at_the_position_of_the_image(codec: RenderersCodec) -> None:
    image = make_image(417, 300)
    message = image_message("What is ", image, " this?")
    prompt = prompt_ids(codec, message)
    pads = "<|image_pad|>" * VisionConfig().placeholder_count(417, 300)
    image_text = f"<|vision_start|>{pads}<|vision_end|>"
    expected = f"<|im_start|>user\nWhat is {image_text} this?<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(prompt).startswith(expected)
    (place,) = codec.image_spans([message], prompt)
    assert (place.media, place.length) == (image, 117)
    assert set(prompt[place.offset : place.offset + place.length].tolist()) == {
        codec.tokenizer.added_tokens["<|image_pad|>"]
    }
    assert codec.decode(prompt[place.offset - 1 : place.offset]) == "<|vision_start|>"


@settings(max_examples=15, deadline=None)
@given(st.integers(20, 900), st.integers(20, 900), st.integers(20, 900))
def test_every_image_has_the_placeholders_of_its_grid(
    codec: RenderersCodec, width: int, height: int, other: int
) -> None:
    images = [make_image(width, height, 1), make_image(other, height, 2), make_image(width, height, 1)]
    messages = [
        image_message("a", images[0], images[1]),
        Message("assistant", "b"),
        image_message(images[2], "c"),
    ]
    places = codec.image_spans(messages, prompt_ids(codec, *messages))
    assert [place.media for place in places] == images
    assert codec.image_processor is not None
    for place in places:
        grid = codec.image_processor.pixels(place.media).grid
        assert place.length == np.prod(grid) // VisionConfig().merge_size ** 2


def commit_reply(
    session: Session, codec: RenderersCodec, messages: list[Message], text: str
) -> tuple[Any, Ids]:
    output = as_ids(np.concatenate([codec.tokenizer.encode(char) for char in text]))
    output = as_ids([*output.tolist(), *codec.tokenizer.encode("<|im_end|>").tolist()])
    turn = session.prepare(Request(tuple(messages)))
    call = session.commit(turn, Generation(output, None, 0, "stop", Message("assistant", text))).call
    session.record_delivery(call, Delivery.DELIVERED)
    return turn, output


@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_path_with_images_is_kept(codec: RenderersCodec, history: Any) -> None:
    codec = RenderersCodec(codec.tokenizer, "qwen3_vl")
    session = Session("s", codec, history=history)
    messages = [Message("system", "s"), image_message("look", make_image(300, 200, 3))]
    images = list(messages[1].media)
    before: list[int] = []
    for step in range(3):
        turn, output = commit_reply(session, codec, messages, f"answer {step}")
        assert turn.prompt_ids[: len(before)].tolist() == before
        assert turn.rewrite_reason == ""
        assert turn.encoded_tokens <= len(turn.prompt_ids) - len(before)
        assert [place.media for place in codec.image_spans(messages, turn.prompt_ids)] == images
        before = [*turn.prompt_ids.tolist(), *output.tolist()]
        image = make_image(200 + 50 * step, 90, step)
        images.append(image)
        messages += [Message("assistant", f"answer {step}"), image_message("and ", image)]


def test_another_image_of_the_same_size_is_another_branch(codec: RenderersCodec) -> None:
    session = Session("s", codec)
    first, _ = commit_reply(session, codec, [image_message("look", make_image(64, 64, 1))], "a")
    second, _ = commit_reply(session, codec, [image_message("look", make_image(64, 64, 2))], "a")
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    assert len(session.tree.leaves()) == 2


def test_payloads_are_stored_in_the_journal(codec: RenderersCodec) -> None:
    image = make_image(64, 64)
    session = Session("s", codec)
    turn = session.prepare(Request((image_message("look", image),)))
    delta = session.tree.plan(turn, [Generation(as_ids([1]), None, 0, "stop", Message("assistant", "x"))])
    again = decode_record(encode_record(delta))
    (found,) = again.nodes[0].message.media  # type: ignore[union-attr]
    assert found == image
    assert found.payload == image.payload


def test_an_image_in_a_tool_result_is_shown(codec: RenderersCodec) -> None:
    messages = [
        Message("user", "q"),
        Message("assistant", "a"),
        image_message("seen: ", make_image(64, 64), role="tool"),
    ]
    (place,) = codec.image_spans(messages, prompt_ids(codec, *messages))
    assert place.length == 64


# -- errors ------------------------------------------------------------------------------------------


def test_an_image_in_a_role_that_shows_none_is_refused(codec: RenderersCodec) -> None:
    messages = [image_message("s", make_image(64, 64), role="system"), Message("user", "q")]
    with pytest.raises(TemplateError):
        prompt_ids(codec, *messages)


def test_the_text_of_a_placeholder_stays_text_and_is_refused_as_a_token(codec: RenderersCodec) -> None:
    message = Message("user", "hi <|image_pad|>")
    ids = prompt_ids(codec, message)
    assert codec.tokenizer.added_tokens["<|image_pad|>"] not in ids
    assert message.content in codec.decode(as_ids(ids))
    allowing = RenderersCodec(codec.tokenizer, codec.family, allow_special_tokens=True)
    with pytest.raises(TemplateError, match=r"messages\[0\], user: images: got 1 placeholders for 0"):
        prompt_ids(allowing, message)


def test_an_image_url_is_refused(codec: RenderersCodec) -> None:
    link = Media("image", "url:http://x/y.png", url="http://x/y.png")
    with pytest.raises(CodecError, match=r"messages\[0\]: got an image by link, 'http://x/y.png', expected"):
        prompt_ids(codec, image_message("look", link))


def test_video_is_refused(codec: RenderersCodec) -> None:
    with pytest.raises(CodecError, match=r"messages\[1\]: carries a video, but .* takes no videos"):
        prompt_ids(codec, Message("system", "s"), image_message("look", Media("video", "v", b"x")))


def test_the_error_of_a_text_model_names_the_message() -> None:
    messages = [Message("user", "q"), image_message("look", Media("image", "d", b"x"))]
    with pytest.raises(CodecError, match=r"messages\[1\]: carries an image, but generic:m takes no images"):
        reject_media(messages, "generic:m")
    with pytest.raises(CodecError, match=r"messages\[7\]: carries an audio, but generic:m takes no audio"):
        reject_media([image_message("hear", Media("audio", "d", b"x"))], "generic:m", first_index=7)


def test_placeholders_must_be_those_of_the_images() -> None:
    processor = ImageProcessor(VisionConfig(min_pixels=32 * 32))
    wide, small = make_image(64, 32, 1), make_image(32, 32, 2)
    messages = [image_message("a", wide, small)]
    spans = find_image_spans(messages, as_ids([1, 9, 9, 9, 2]), 9, processor)
    assert [(span.media, span.offset, span.length) for span in spans] == [(wide, 1, 2), (small, 3, 1)]
    sampled = np.array([False, True, False, False, False, False])
    spans = find_image_spans(messages, as_ids([1, 9, 9, 9, 2, 9]), 9, processor, sampled)
    assert [span.offset for span in spans] == [2, 5]
    with pytest.raises(CodecError, match="got 4 placeholders for 2, expected 3"):
        find_image_spans(messages, as_ids([1, 9, 9, 9, 2, 9]), 9, processor)
    with pytest.raises(CodecError, match="got separate placeholders, expected 2 in one run"):
        find_image_spans(messages, as_ids([9, 1, 9, 9]), 9, processor)
