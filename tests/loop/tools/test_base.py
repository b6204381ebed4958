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
from tests.loop.fake_tools import RecordingTool, call, tool_session
from tests.loop.harness import run
from tests.loop.tools.mcp_server import PIXEL


class Echo(BaseTool):
    name = "echo"
    schema = function_schema("echo", "Repeats a text.", {"type": "object"})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(arguments["text"] * instance["times"])


def test_only_execute_has_to_be_written() -> None:
    async def test() -> None:
        echo: Tool = Echo()
        async with tool_session(echo, arguments={"echo": {"times": 2}}) as session:
            result = await session.run_one(call("echo", '{"text": "ha"}'))
            assert await session.calc_rewards() == ({}, [])
        assert result.content == "haha"
        assert (session.release_faults, session.save()) == ([], [])
        assert (echo.is_stateful, RecordingTool().is_stateful) == (False, True)
        with pytest.raises(NotImplementedError, match=r"BaseTool\.execute"):
            await BaseTool().execute({}, {})
        with pytest.raises(NotImplementedError, match=r"Echo\.restore"):
            await echo.restore("t1", {})

    run(test)


def test_default_instances_are_separate() -> None:
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


def test_texts_are_unchanged_and_data_becomes_json() -> None:
    assert to_tool_result("a text") == ToolResult("a text")
    assert to_tool_result({"a": [1, None, "ü"]}).content == '{"a":[1,null,"ü"]}'
    assert to_tool_result([1, 2]).content == "[1,2]"
    assert to_tool_result(1.5).content == "1.5"
    assert to_tool_result(Point(3)).content == '{"x":3}'
    assert to_tool_result(None) == ToolResult("")


def test_numpy_values_become_json() -> None:
    assert to_tool_result(np.float64(1.5)).content == "1.5"
    assert to_tool_result({"n": np.int64(3), "x": np.float32(0.5)}).content == '{"n":3,"x":0.5}'
    assert to_tool_result([np.arange(3), np.bool_(True)]).content == "[[0,1,2],true]"
    with pytest.raises(
        TypeError, match="the tool's result: got a object, expected a text, values that JSON can hold"
    ):
        to_tool_result({"a": object()})


def test_a_tool_result_is_unchanged() -> None:
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
def test_bytes_are_media_by_their_first_bytes(payload: bytes, kind: str, mime: str) -> None:
    (media,) = to_tool_result(payload).media
    assert (media.kind, media.mime, media.payload) == (kind, mime, payload)


def test_bytes_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a PNG"):
        to_tool_result(b"plain text")


def test_texts_and_media_can_be_mixed() -> None:
    link = Media("image", "url:x", url="x")
    result = to_tool_result(["seen", PIXEL, "and", link])
    assert result.content == "seen\nand"
    assert [media.digest for media in result.media] == [media_from_bytes(PIXEL).digest, "url:x"]


def test_media_from_bytes_equals_media_from_a_message() -> None:
    sent = write_message(Message("user", parts=(media_from_bytes(PIXEL),)))
    assert read_message(sent).media == (media_from_bytes(PIXEL),)
    assert media_from_bytes(b"OggS", "audio/ogg").kind == "audio"
    assert media_from_bytes(b"%PDF", "application/pdf").kind == "file"
