"""The tools of the agent `state`: their results, their errors, and that they never block the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.errors import MissingExtraError
from branchline.core.extras import install_line
from branchline.core.message import Message
from branchline.loop.context import documents
from branchline.loop.context.context_loop import CONTEXT_TOOLS
from branchline.loop.context.tools import _DEFINITIONS, ContextWorkspace, build_context_tools
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.tools.arguments import argument_validator
from tests.hang import HANG_S
from tests.loop.context.harness import DOCUMENT
from tests.loop.harness import run


class CodecModel:
    """A model of which the tools use only the codec."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec


class Tools:
    """All tools of one trajectory, called as the loop does."""

    def __init__(self, limits: LoopLimits | None = None, *, codec: Any = None, **task: Any) -> None:
        task = {"documents": {"book": DOCUMENT}, **task}
        self.state = LoopState.begin(Task((Message("user", "q"),), agent_name="state", **task))
        model: Any = CodecModel(codec)
        self.workspace = ContextWorkspace(self.state, model, limits or LoopLimits())
        self._tools = {tool.name: tool for tool in build_context_tools(self.workspace, CONTEXT_TOOLS)}

    async def call(self, tool: str, **arguments: Any) -> Any:
        return json.loads((await self._tools[tool].execute(None, arguments)).content)

    async def error(self, tool: str, **arguments: Any) -> str:
        with pytest.raises(Exception) as raised:
            await self.call(tool, **arguments)
        return str(raised.value)


def test_every_tool_is_defined_and_its_schema_is_valid() -> None:
    assert tuple(_DEFINITIONS) == CONTEXT_TOOLS
    workspace: Any = None
    for tool in build_context_tools(workspace, CONTEXT_TOOLS):
        argument_validator(tool)
        assert tool.schema["function"]["description"]
        assert (tool.is_repeatable, tool.is_stateful) == (True, False)


def test_documents_are_read_in_chunks() -> None:
    async def test() -> None:
        tools = Tools(codec=ToyCodec())
        assert await tools.call("analyzeText") == {"file_name": "book", "total_tokens": len(DOCUMENT)}
        assert await tools.call("loadDocument") == {"file_name": "book", "content": DOCUMENT}
        built = await tools.call("buildIndex", chunk_size=400, overlap=50)
        total = built["total_chunks"]
        assert built == {
            "index_id": "index_1",
            "total_chunks": total,
            "first_chunk_id": 0,
            "last_chunk_id": total - 1,
        }
        assert total > len(DOCUMENT) / 400
        chunk = await tools.call("readChunk", chunk_id=0)
        assert list(chunk) == ["retrieved_chunk", "chunk_id"]
        assert DOCUMENT.startswith(chunk["retrieved_chunk"])
        assert (await tools.call("buildIndex", chunk_size=200))["index_id"] == "index_2"

    run(test)


def test_a_scan_reports_what_was_read_and_what_is_next() -> None:
    async def test() -> None:
        tools = Tools()
        total = (await tools.call("buildIndex", chunk_size=100))["total_chunks"]
        for chunk_id, count, following in ((0, 1, 1), (2, 2, 1), (2, 2, 1), (1, 3, 3)):
            chunk = await tools.call("readChunk", chunk_id=chunk_id, enable_scan=True)
            assert chunk["reading_progress"] == {
                "read_chunks": count,
                "total_chunks": total,
                "next_chunk_id": following,
            }
        assert "reading_progress" not in await tools.call("readChunk", chunk_id=3)
        for chunk_id in range(total):
            last = await tools.call("readChunk", chunk_id=chunk_id, enable_scan=True)
        assert last["reading_progress"]["next_chunk_id"] is None
        await tools.call("buildIndex", chunk_size=100)
        assert tools.workspace.context.scanned_chunks == [], "a new index is unread"

    run(test)


def test_a_search_returns_chunks_with_score_and_highlights() -> None:
    async def test() -> None:
        tools = Tools(codec=ToyCodec())
        await tools.call("buildIndex", chunk_size=300)
        found = (await tools.call("searchEngine", keyword="item 41"))["retrieved_chunks"]
        assert 0 < len(found) <= 20
        assert list(found[0]) == ["chunk_id", "relevance_score", "highlights"]
        best = await tools.call("readChunk", chunk_id=found[0]["chunk_id"])
        assert "item 41" in best["retrieved_chunk"]
        assert "**41**" in found[0]["highlights"]

    run(test)


def test_errors_say_what_was_expected() -> None:
    async def test() -> None:
        tools = Tools(LoopLimits(model_length=100), codec=ToyCodec())
        assert "expected a call of buildIndex" in await tools.error("readChunk", chunk_id=0)
        assert "expected a call of buildIndex" in await tools.error("searchEngine", keyword="a")
        assert "expected one of ['book']" in await tools.error("analyzeText", file_name="x")
        assert "use buildIndex and readChunk" in await tools.error("loadDocument")
        assert "overlap: got 9" in await tools.error("buildIndex", chunk_size=9, overlap=9)
        await tools.call("buildIndex", chunk_size=5000)
        assert await tools.error("readChunk", chunk_id=1) == "chunk_id: got 1, expected 0 to 0"
        assert "the task has no document" in await Tools(documents={}).error("analyzeText")

    run(test)


def test_notes_and_their_summaries() -> None:
    async def test() -> None:
        tools = Tools()
        assert await tools.call("note", key="k", summary="s", content="c") == {
            "status": "success",
            "key": "k",
        }
        assert await tools.call("readNote", key="k") == {"summary": "s", "full_content": "c"}
        await tools.call("updateNote", key="k", mode="append", content="d")
        assert (await tools.call("readNote", key="k"))["full_content"] == "c\nd"
        assert await tools.call("readNote") == {"notes": {"k": "s"}}
        await tools.call("updateNote", key="k", mode="delete")
        assert await tools.call("readNote") == {"notes": {}}

    run(test)


def test_the_budget_counts_rounds_and_tokens() -> None:
    async def test() -> None:
        tools = Tools(LoopLimits(model_length=100, max_assistant_turns=5))
        tools.state.tokens, tools.state.assistant_turns = 30, 2
        expected = {"conv_rounds": 2, "available_tokens": 70, "available_rounds": 3}
        assert await tools.call("checkBudget") == expected
        unlimited = await Tools().call("checkBudget")
        assert unlimited == {"conv_rounds": 0, "available_tokens": None, "available_rounds": None}

    run(test)


def test_finish_keeps_the_answer() -> None:
    async def test() -> None:
        tools = Tools()
        assert await tools.call("finish", answer="42") == {"final_answer": "42"}
        assert tools.workspace.context.final_answer == "42"

    run(test)


def test_without_a_codec_lengths_are_estimated_from_characters() -> None:
    async def test() -> None:
        assert (await Tools().call("analyzeText"))["total_tokens"] == -(-len(DOCUMENT) // 4)

    run(test)


def test_long_work_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tool that encodes, indexes or searches waits in a thread until the event loop has run."""
    loop_ran = threading.Event()

    def waits(function: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            assert loop_ran.wait(HANG_S), "the event loop is blocked"
            return function(*args)

        return wrapped

    async def test() -> None:
        tools = Tools(codec=ToyCodec())
        for name, arguments in (
            ("analyzeText", {}),
            ("buildIndex", {"chunk_size": 111}),
            ("searchEngine", {"keyword": "item"}),
        ):
            loop_ran.clear()
            task = asyncio.create_task(tools.call(name, **arguments))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done(), name
            loop_ran.set()
            await task

    monkeypatch.setattr(ToyCodec, "encode", waits(ToyCodec.encode))
    monkeypatch.setattr(documents.DocumentIndex, "search", waits(documents.DocumentIndex.search))
    monkeypatch.setattr(documents, "_build_index", waits(documents._build_index))
    run(test)


def test_calls_of_one_turn_take_effect_in_their_order() -> None:
    async def test() -> None:
        tools = Tools(codec=ToyCodec())
        built, chunk, noted, read = await asyncio.gather(
            tools.call("buildIndex", chunk_size=123),
            tools.call("readChunk", chunk_id=0),
            tools.call("note", key="k", summary="s", content="c"),
            tools.call("readNote", key="k"),
        )
        assert (built["index_id"], chunk["chunk_id"], noted["key"]) == ("index_1", 0, "k")
        assert read["full_content"] == "c"

    run(test)


def test_a_resumed_trajectory_finds_its_index_and_notes() -> None:
    async def test() -> None:
        tools = Tools()
        await tools.call("buildIndex", chunk_size=50, overlap=5)
        await tools.call("note", key="k", summary="s", content="c")
        expected = await tools.call("readChunk", chunk_id=2)
        resumed = Tools()
        resumed.state = LoopState.decode(tools.state.encode())
        model: Any = CodecModel(None)
        resumed.workspace = ContextWorkspace(resumed.state, model, LoopLimits())
        resumed._tools = {tool.name: tool for tool in build_context_tools(resumed.workspace, CONTEXT_TOOLS)}
        assert await resumed.call("readChunk", chunk_id=2) == expected
        assert (await resumed.call("readNote", key="k"))["full_content"] == "c"

    run(test)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "tantivy", None)
    monkeypatch.delitem(sys.modules, "branchline.loop.context.documents")
    with pytest.raises(MissingExtraError, match=re.escape(install_line("agent"))):
        importlib.import_module("branchline.loop.context.documents")
