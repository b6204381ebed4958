"""Media parts are read in every form that clients use and written in Chat Completions form."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from branchline.core.message import Media, Message
from branchline.core.reader import read_message, write_message

PNG = b"\x89PNG\r\n\x1a\n-a picture \xff\xfe\xfb"
WAV = base64.b64encode(b"RIFF").decode()


def user_message(*parts: Any) -> Message:
    return read_message({"role": "user", "content": list(parts)})


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


LINK = "https://a.example/x"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": LINK}}, "image"),
        ({"type": "image_url", "image_url": LINK}, "image"),
        ({"type": "input_image", "image_url": LINK}, "image"),
        ({"type": "input_image", "image_url": {"url": LINK}}, "image"),
        ({"type": "image", "image": LINK}, "image"),
        ({"type": "image", "url": LINK}, "image"),
        ({"type": "image", "data": LINK}, "image"),
        ({"type": "image", "source": {"type": "url", "url": LINK}}, "image"),
        ({"type": "video_url", "video_url": {"url": LINK}}, "video"),
        ({"type": "video", "video": LINK}, "video"),
        ({"type": "input_video", "video_url": LINK}, "video"),
        ({"type": "audio_url", "audio_url": {"url": LINK}}, "audio"),
        ({"type": "audio", "audio": LINK}, "audio"),
        ({"type": "file", "file": {"file_id": LINK}}, "file"),
        ({"type": "input_file", "file_url": LINK}, "file"),
        ({"type": "input_file", "file_id": LINK}, "file"),
    ],
)
def test_a_link_is_kept_as_a_link(part: dict[str, Any], kind: Any) -> None:
    assert user_message(part).parts == (Media(kind, "url:" + LINK, url=LINK),)


@pytest.mark.parametrize(
    ("part", "kind", "mime"),
    [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{WAV}"}}, "image", "image/png"),
        ({"type": "image_url", "image_url": f"data:image/png;base64,{WAV}"}, "image", "image/png"),
        ({"type": "image", "data": WAV, "mime_type": "image/png"}, "image", "image/png"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": WAV}},
            "image",
            "image/png",
        ),
        ({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{WAV}"}}, "video", "video/mp4"),
        ({"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}, "audio", "audio/wav"),
        ({"type": "input_audio", "input_audio": WAV}, "audio", ""),
        ({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{WAV}"}}, "audio", "audio/wav"),
        ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{WAV}"}}, "file", "text/plain"),
        ({"type": "file", "file": {"file_data": WAV, "filename": "a.txt"}}, "file", ""),
        ({"type": "input_file", "file_data": "data:,RIFF"}, "file", ""),
    ],
)
def test_data_is_decoded_to_bytes(part: dict[str, Any], kind: str, mime: str) -> None:
    (media,) = user_message(part).media
    assert (media.kind, media.payload, media.mime, media.url) == (kind, b"RIFF", mime, "")


def test_an_uploaded_file_is_identified_by_its_id() -> None:
    for kind in ("file", "audio"):
        assert user_message({"type": kind, kind: {"file_id": "file-1a"}}).parts == (
            Media(kind, "url:file-1a", url="file-1a"),
        )


def test_media_keep_their_position_between_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": LINK, "detail": "low"}}
    message = user_message(text_part("a"), image, text_part("b"))
    assert message.content == "ab"
    assert message.parts == ("a", Media("image", "url:" + LINK, url=LINK, detail="low"), "b")


def image_message(source: str, **more: str) -> Message:
    part = {"type": "image_url", "image_url": {"url": source, **more}}
    return read_message({"role": "user", "content": [{"type": "text", "text": "see"}, part]})


STANDARD = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64," + base64.encodebytes(PNG).decode(),
        "data:image/png;base64," + STANDARD.replace("=", ""),
        "data:image/png;base64," + base64.urlsafe_b64encode(PNG).decode(),
        "data:image/png;base64," + STANDARD.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:image/jpeg;base64," + STANDARD,
        "data:;base64," + STANDARD,
        "data:image/png;name=a.png;base64," + STANDARD,
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
def test_equal_bytes_have_one_digest_in_every_encoding(source: str) -> None:
    plain = image_message("data:image/png;base64," + STANDARD)
    assert "+" in STANDARD or "/" in STANDARD
    assert STANDARD.endswith("=")
    assert image_message(source).media[0].payload == PNG
    assert image_message(source).media[0].digest == plain.media[0].digest
    assert image_message(source).key == plain.key


def test_other_bytes_have_another_digest() -> None:
    one, other = (
        image_message("data:image/png;base64," + base64.b64encode(data).decode()) for data in (b"1", b"2")
    )
    assert one.media[0].digest != other.media[0].digest
    assert one.key != other.key


def test_a_link_is_identified_by_its_url() -> None:
    link = image_message("https://a.example/1.png")
    assert link.media == (Media("image", "url:https://a.example/1.png", url="https://a.example/1.png"),)
    assert link.key == image_message("https://a.example/1.png").key
    assert link.key != image_message("https://a.example/2.png").key
    assert link.key != image_message("https://a.example/1.png", detail="high").key


@pytest.mark.parametrize(
    ("media", "written"),
    [
        (
            Media("image", "url:" + LINK, url=LINK, detail="low"),
            {"type": "image_url", "image_url": {"url": LINK, "detail": "low"}},
        ),
        (
            Media("video", "d", b"RIFF", mime="video/mp4"),
            {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{WAV}"}},
        ),
        (
            Media("audio", "d", b"RIFF"),
            {"type": "audio_url", "audio_url": {"url": f"data:application/octet-stream;base64,{WAV}"}},
        ),
        (Media("file", "url:file-1", url="file-1"), {"type": "file", "file": {"file_id": "file-1"}}),
        (
            Media("file", "d", b"RIFF", mime="text/plain"),
            {"type": "file", "file": {"file_data": f"data:text/plain;base64,{WAV}"}},
        ),
    ],
)
def test_media_are_written_as_parts(media: Media, written: dict[str, Any]) -> None:
    message = Message("user", "see", parts=("see", media))
    assert write_message(message)["content"] == [text_part("see"), written]
