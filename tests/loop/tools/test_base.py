from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from branchline.core.message import Media, Message
from branchline.core.reader import read_message, write_message
from branchline.loop.tools.base import (
    BaseTool,
    Tool,
    ToolResult,
    function_schema,
    media_from_bytes,
    to_tool_result,
)
from tests.loop.fake_tools import call, tool_session
from tests.loop.harness import run
from tests.loop.tools.mcp_server import PIXEL


class Echo(BaseTool):
    name = "echo"
    schema = function_schema("echo", "Says it again.", {"type": "object"})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(arguments["text"] * instance["times"])


def test_only_execute_has_to_be_written() -> None:
    async def test() -> None:
        echo: Tool = Echo()
        async with tool_session(echo, arguments={"echo": {"times": 2}}) as workshop:
            (outcome,) = await workshop.run([call("echo", '{"text": "ha"}')])
            assert await workshop.calc_rewards() == {"echo": None}
        assert outcome.message.content == "haha"
        assert workshop.faults == []
        with pytest.raises(NotImplementedError, match=r"BaseTool\.execute"):
            await BaseTool().execute({}, {})

    run(test)


def test_instances_share_nothing_unless_their_tool_makes_them() -> None:
    async def test() -> None:
        echo = Echo()
        arguments = {"times": 1}
        one, other = await echo.create("t1", **arguments), await echo.create("t2", **arguments)
        one["times"] = 9
        assert (other, arguments) == ({"times": 1}, {"times": 1})

    run(test)


@dataclass
class Point:
    x: int


def test_texts_stay_and_data_become_json() -> None:
    assert to_tool_result("a text") == ToolResult("a text")
    assert to_tool_result({"a": [1, None, "ü"]}).content == '{"a":[1,null,"ü"]}'
    assert to_tool_result([1, 2]).content == "[1,2]"
    assert to_tool_result(1.5).content == "1.5"
    assert to_tool_result(Point(3)).content == '{"x":3}'
    assert to_tool_result(None) == ToolResult("")


def test_numbers_and_arrays_of_numpy_are_data() -> None:
    assert to_tool_result(np.float64(1.5)).content == "1.5"
    assert to_tool_result({"n": np.int64(3), "x": np.float32(0.5)}).content == '{"n":3,"x":0.5}'
    assert to_tool_result([np.arange(3), np.bool_(True)]).content == "[[0,1,2],true]"
    with pytest.raises(
        TypeError, match="the tool returned object, expected a text, values that JSON can hold"
    ):
        to_tool_result({"a": object()})


def test_a_result_stays_as_it_is() -> None:
    result = ToolResult("x", reward=1.0)
    assert to_tool_result(result) is result


@pytest.mark.parametrize(
    ("payload", "kind", "mime"),
    [
        (PIXEL, "image", "image/png"),
        (b"\xff\xd8\xff\xe0rest", "image", "image/jpeg"),
        (b"GIF89a", "image", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image", "image/webp"),
        (b"\x00\x00\x00\x18ftypisom", "video", "video/mp4"),
        (b"\x1aE\xdf\xa3webm", "video", "video/webm"),
    ],
)
def test_bytes_are_media_by_how_they_begin(payload: bytes, kind: str, mime: str) -> None:
    (media,) = to_tool_result(payload).media
    assert (media.kind, media.mime, media.payload) == (kind, mime, payload)


def test_bytes_of_no_known_kind_are_refused_and_not_guessed() -> None:
    with pytest.raises(TypeError, match="expected a PNG"):
        to_tool_result(b"plain text")


def test_texts_and_pictures_may_come_together() -> None:
    link = Media("image", "url:x", url="x")
    result = to_tool_result(["seen", PIXEL, "and", link])
    assert result.content == "seen\nand"
    assert [media.digest for media in result.media] == [media_from_bytes(PIXEL).digest, "url:x"]


def test_a_picture_from_a_tool_is_the_same_as_one_a_client_sends() -> None:
    sent = write_message(Message("user", parts=(media_from_bytes(PIXEL),)))
    assert read_message(sent).media == (media_from_bytes(PIXEL),)
    assert media_from_bytes(b"OggS", "audio/ogg").kind == "audio"
    assert media_from_bytes(b"%PDF", "application/pdf").kind == "file"
