from __future__ import annotations

from collections.abc import Sequence

import pytest

from branchline.core.errors import CodecError, EngineError, InputError
from branchline.core.message import Media, Message
from branchline.loop.media_filter import filter_media
from branchline.loop.state import ToolRecord
from tests.loop.clock_runner import run

IMAGE, FILM = Media("image", "d1", b"1"), Media("video", "d2", b"2")


def record(text: str, *media: Media) -> ToolRecord:
    return ToolRecord("look", 1, Message("tool", text, tool_call_id="c", parts=(text, *media)), 0.5, {"x": 1})


@pytest.mark.parametrize("kind", [CodecError, InputError])
def test_of_several_results_only_what_cannot_be_seen_is_told_in_words(kind: type[Exception]) -> None:
    asked: list[list[int]] = []

    async def count(messages: Sequence[Message]) -> int:
        asked.append([len(message.media) for message in messages])
        if any(media.kind == "video" for message in messages for media in message.media):
            raise kind("messages[7]: carries a video, but toy takes no videos")
        return 1

    async def test() -> None:
        given = [record("a", IMAGE), record("b"), record("c", FILM), record("d", IMAGE)]
        shown = await filter_media(given, count)
        assert [shown[place] for place in (0, 1, 3)] == [given[place] for place in (0, 1, 3)]
        words = "Error executing tool 'look': its result: carries a video, but toy takes no videos"
        assert shown[2] == ToolRecord(
            "look", 1, Message("tool", words, tool_call_id="c"), 0.5, {"x": 1}, error=words
        ), "what it was worth stays"
        assert asked == [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]

    run(test)


def test_results_in_words_are_not_asked_about() -> None:
    async def count(messages: Sequence[Message]) -> int:
        raise AssertionError("nobody asks")

    async def test() -> None:
        given = [record("a"), record("b")]
        assert await filter_media(given, count) == given

    run(test)


def test_an_error_that_is_none_of_the_results_is_raised() -> None:
    async def count(messages: Sequence[Message]) -> int:
        raise EngineError("gone")

    async def test() -> None:
        with pytest.raises(EngineError, match="gone"):
            await filter_media([record("a", IMAGE)], count)

    run(test)
