"""Images with the generic codec: one placeholder of a template becomes as many as the image needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Session
from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.vision import VisionConfig
from branchline.core.call import Delivery, Generation, Request
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Media, Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.tree.tree import Turn
from tests.chat.families import CACHE, load_codec_with_template
from tests.chat.test_vision import image_message, make_image
from tests.templates.corpus import load_template_tokenizer

QWEN_VL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADJACENT = QWEN_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|fim_pad|>")
"""Writes nothing between two images, as `<image><image>` of LLaVA."""
WITHOUT_IMAGES = QWEN_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
VISION = VisionConfig(patch_size=14, min_pixels=56 * 56, max_pixels=400 * 28 * 28)


def open_codec(template: str = QWEN_VL, **options: Any) -> GenericCodec:
    return load_codec_with_template(template, "qwen2_5", vision=VISION, **options)


@pytest.fixture(scope="module", params=["separated", "adjacent"])
def codec(request: pytest.FixtureRequest) -> GenericCodec:
    if request.param == "adjacent":
        return open_codec(ADJACENT, image_token="<|fim_pad|>")
    return open_codec()


def prompt_ids(codec: GenericCodec, *messages: Message) -> Ids:
    return codec.extend((), [NewMessage(message) for message in messages]).ids


def commit_reply(session: Session, messages: list[Message], output: Ids) -> Turn:
    turn = session.prepare(Request(tuple(messages)))
    call = session.commit(turn, Generation(output)).call
    session.record_delivery(call, Delivery.DELIVERED)
    return turn


def sampled(codec: GenericCodec, text: str) -> Ids:
    """Returns a reply in ids that no tokenizer would choose: one token per character."""
    ids = [token for char in text for token in codec.tokenizer.encode(char).tolist()]
    return as_ids([*ids, *codec.tokenizer.encode("<|im_end|>").tolist()])


def test_a_placeholder_is_repeated_as_the_size_of_its_image_requires(codec: GenericCodec) -> None:
    image = make_image(417, 300)
    message = image_message("What is ", image, " this?")
    prompt = prompt_ids(codec, message)
    pads = codec.image_token * VISION.placeholder_count(417, 300)
    assert pads in codec.decode(prompt)
    (span,) = codec.image_spans([message], prompt)
    assert (span.media, span.length) == (image, VISION.placeholder_count(417, 300))
    assert codec.decode(prompt[span.offset : span.offset + span.length]) == pads


def test_the_prompt_is_that_of_the_template_with_expanded_placeholders() -> None:
    codec = open_codec()
    messages = [image_message("a ", make_image(90, 60, 1), make_image(60, 90, 2)), Message("assistant", "b")]
    messages += [image_message(make_image(300, 200, 3), "c")]
    text = codec.decode(codec.encode_prompt(messages))
    for message in messages:
        for image in message.media:
            assert codec.image_processor is not None
            size = codec.image_processor.image_size(image)
            text = text.replace("<|image_pad|>", "#" * VISION.placeholder_count(*size), 1)
    text = text.replace("#", "<|image_pad|>")
    assert prompt_ids(codec, *messages).tolist() == codec.tokenizer.encode(text).tolist()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.text("ab <|é", max_size=6), st.integers(1, 6)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_a_path_with_images_is_kept_and_its_images_are_found(
    codec: GenericCodec, history: Any, turns: list[list[str | int]]
) -> None:
    session = Session("s", codec, history=history)
    messages: list[Message] = []
    before: list[int] = []
    for step, parts in enumerate(turns):
        images = [make_image(20 * part, 30, part) if isinstance(part, int) else part for part in parts]
        messages.append(image_message(*images))
        output = sampled(codec, f"answer {step}")
        turn = commit_reply(session, messages, output)
        assert turn.prompt_ids[: len(before)].tolist() == before
        assert turn.rewrite_reason == ""
        expected = [part for message in messages for part in message.media]
        assert [span.media for span in turn.images] == expected
        pad = codec.tokenizer.added_tokens[codec.image_token]
        for span in turn.images:
            assert set(turn.prompt_ids[span.offset : span.offset + span.length].tolist()) == {pad}
        before = [*turn.prompt_ids.tolist(), *output.tolist()]
        messages.append(Message("assistant", f"answer {step}"))


def test_a_reopened_path_with_images_is_kept() -> None:
    """A codec without cached prompts compares the recorded ids with the rendered text."""
    codec = open_codec()
    session = Session("s", codec)
    messages = [image_message("look ", make_image(90, 60))]
    output = sampled(codec, "a")
    first = commit_reply(session, messages, output)
    session.codec = open_codec()
    turn = session.prepare(Request((*messages, Message("assistant", "a"), Message("user", "q"))))
    before = [*first.prompt_ids.tolist(), *output.tolist()]
    assert turn.prompt_ids[: len(before)].tolist() == before
    assert len(turn.images) == 1


def test_a_sampled_placeholder_is_not_an_image() -> None:
    codec = open_codec()
    session = Session("s", codec)
    messages = [image_message("look ", make_image(90, 60))]
    pad, stop = (codec.tokenizer.added_tokens[name] for name in ("<|image_pad|>", "<|im_end|>"))
    output = as_ids([*codec.tokenizer.encode("x").tolist(), pad, stop])
    first = commit_reply(session, messages, output)
    messages += [session.tree.nodes[-1].message, image_message(make_image(60, 90, 2), "and?")]
    turn = session.prepare(Request(tuple(messages)))
    before = [*first.prompt_ids.tolist(), *output.tolist()]
    assert turn.prompt_ids[: len(before)].tolist() == before
    assert [span.media for span in turn.images] == [part for message in messages for part in message.media]
    assert turn.images[1].offset > len(before)


def test_a_template_that_shows_no_images_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"writes 0 times <\|image_pad\|>, expected 1"):
        prompt_ids(open_codec(WITHOUT_IMAGES), image_message("look", make_image(60, 60)))


def test_an_image_by_link_and_a_video_are_refused() -> None:
    link = Media("image", "url:http://x/y.png", url="http://x/y.png")
    with pytest.raises(CodecError, match=r"messages\[0\]: got an image by link, 'http://x/y.png', expected"):
        prompt_ids(open_codec(), image_message("look", link))
    with pytest.raises(CodecError, match=r"messages\[1\]: carries a video, but .* takes no videos"):
        prompt_ids(open_codec(), Message("user", "s"), image_message("look", Media("video", "v", b"x")))


def test_a_directory_with_an_image_processor_takes_images(tmp_path: Path) -> None:
    for file in (CACHE / "qwen2_5").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text('{"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 313600}')
    codec = GenericCodec.open(tmp_path, chat_template=QWEN_VL)
    assert codec.image_token == "<|image_pad|>"
    assert (
        len(
            codec.image_spans(
                [image_message(image := make_image(90, 60))], prompt_ids(codec, image_message(image))
            )
        )
        == 1
    )
    processor.write_text('{"image_processor_type": "CLIPImageProcessor"}')
    codec = GenericCodec.open(tmp_path, chat_template=QWEN_VL)
    assert len(prompt_ids(codec, Message("user", "text")))
    with pytest.raises(
        CodecError, match=r"takes no images \(.*got image_processor_type 'CLIPImageProcessor'"
    ):
        prompt_ids(codec, image_message("look", make_image(60, 60)))


@pytest.mark.parametrize("name", ["trl/qwen2_5_vl", "trl/qwen3_vl", "trl/qwen3_5_nothink"])
def test_real_templates_show_every_image(name: str) -> None:
    codec = GenericCodec(load_template_tokenizer(name), vision=VISION)
    session = Session("s", codec)
    messages: list[Message] = []
    before: list[int] = []
    for step in range(3):
        messages.append(image_message(f"look {step} ", make_image(60 + 40 * step, 80, step)))
        stop = min(codec.profile().terminator_ids)
        output = as_ids([*codec.tokenizer.encode(f"answer {step}").tolist(), stop])
        turn = commit_reply(session, messages, output)
        assert turn.prompt_ids[: len(before)].tolist() == before
        assert [span.media for span in turn.images] == [part for m in messages for part in m.media]
        before = np.concatenate((turn.prompt_ids, output)).tolist()
        messages.append(session.tree.nodes[-1].message)
