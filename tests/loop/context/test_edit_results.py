"""The results of the context tools say what happened: the view shows it, and no result claims more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.context_edits import DELETED_CONTENT, ContextEdit
from branchline.core.errors import InputError
from branchline.core.message import Message, ToolCall
from branchline.loop.context.context_loop import ContextOptions
from branchline.loop.context.context_state import ContextState
from branchline.loop.task import LoopLimits
from branchline.runtime.compaction import Summarize
from tests.loop.context.harness import answer, call, context_harness
from tests.loop.context.test_context_loop import first_prompt_tokens
from tests.loop.context.test_tools import Tools
from tests.loop.harness import run

HISTORY = [
    Message("system", "s"),
    Message("user", "u"),
    *[
        message
        for turn in range(4)
        for message in (
            Message("assistant", f"a{turn}", tool_calls=(ToolCall("look", "{}"),)),
            Message("tool", f"r{turn}", name="look"),
        )
    ],
    Message("assistant", "now"),
]
LAST = len(HISTORY) - 1
ids = st.lists(st.integers(1, LAST), min_size=1, max_size=3)
operations = st.one_of(
    st.tuples(st.just("delete"), ids),
    st.tuples(st.sampled_from(["undo", "redo", "undo", "redo"]), st.just([0])),
    st.tuples(st.sampled_from(["stub", "summarize"]), ids),
)


def shown(context: ContextState) -> dict[int, str]:
    """What the view shows of each message; nothing if a summary replaces it."""
    view = context.view(HISTORY)
    texts = dict(zip(view.message_ids, (one.content for one in view.messages), strict=True))
    return {index: texts.get(index, "") for index in range(len(HISTORY))}


@settings(max_examples=300)
@given(st.lists(operations, max_size=12))
def test_a_success_names_exactly_the_messages_that_the_view_shows_otherwise(
    plan: list[tuple[str, list[int]]],
) -> None:
    context = ContextState()
    for operation, message_ids in plan:
        before, state = shown(context), (context.deletions[:], context.undone[:])
        try:
            if operation == "delete":
                named = set(context.delete(HISTORY, message_ids))
            elif operation in ("undo", "redo"):
                effect = context.undo() if operation == "undo" else context.redo()
                named = set(effect.changed)
                assert not named & set(effect.compacted)
            else:
                wanted = sorted({one for one in message_ids if HISTORY[one].role != "user"})
                if wanted:
                    summary = "short" if operation == "summarize" else ""
                    context.compactions.append(ContextEdit(tuple(wanted), summary))
                continue
        except InputError:
            assert shown(context) == before
            assert (context.deletions, context.undone) == state
            continue
        after = shown(context)
        assert named == {index for index in after if after[index] != before[index]}
        assert named, "a success without an effect"


def tools_with(*deletions: int) -> Tools:
    tools = Tools()
    tools.state.messages[:] = HISTORY
    for message_id in deletions:
        tools.workspace.context.delete(HISTORY, [message_id])
    return tools


def test_an_undo_after_a_compaction_is_an_error_that_says_so() -> None:
    async def test() -> None:
        tools = tools_with(2)
        tools.workspace.context.compactions.append(ContextEdit((2, 3), "short"))
        for _ in range(2):
            assert await tools.error("undoDelete") == (
                "nothing to undo: the messages [2] were deleted and then replaced when the context was "
                "compacted, which cannot be undone"
            )
        assert "no deletion was undone" in await tools.error("redoDelete")
        for message_id in (2, 3):
            assert "already" in await tools.error("deleteContext", msg_id=message_id) or message_id == 3
        assert await tools.error("deleteContext", msg_id=3) == (
            "message_ids: 3 was replaced when the context was compacted, expected another message"
        )

    run(test)


def test_an_undo_restores_what_is_left_of_a_deletion_and_names_the_rest() -> None:
    async def test() -> None:
        tools = tools_with()
        await tools.call("deleteContext", message_ids=[2, 3, 6])
        tools.workspace.context.compactions.append(ContextEdit((2, 3, 4, 5), "short"))
        expected = {
            "status": "success",
            "restored_msg_id": 6,
            "restored_role": "assistant",
            "compacted_msg_ids": [2, 3],
        }
        assert await tools.call("undoDelete") == expected
        assert shown(tools.workspace.context)[6] == "a2"
        assert "nothing to undo" in await tools.error("undoDelete")
        again = await tools.call("redoDelete")
        assert (again["deleted_msg_id"], again["compacted_msg_ids"]) == (6, [2, 3])
        assert shown(tools.workspace.context)[6] == DELETED_CONTENT
        assert "nothing to redo" in await tools.error("redoDelete")

    run(test)


def test_an_undo_skips_a_deletion_that_was_compacted_away() -> None:
    async def test() -> None:
        tools = tools_with(7, 2)
        tools.workspace.context.compactions.append(ContextEdit((2, 3), "short"))
        assert (await tools.call("undoDelete"))["restored_msg_id"] == 7

    run(test)


def test_a_redo_after_a_compaction_is_an_error_that_says_so() -> None:
    async def test() -> None:
        tools = tools_with(2)
        await tools.call("undoDelete")
        tools.workspace.context.compactions.append(ContextEdit((2,)))
        for _ in range(2):
            assert await tools.error("redoDelete") == (
                "nothing to redo: the messages [2] were restored and then replaced when the context was "
                "compacted, which cannot be undone"
            )
        assert "no deletion is in effect" in await tools.error("undoDelete")

    run(test)


def test_without_a_deletion_there_is_nothing_to_undo() -> None:
    async def test() -> None:
        tools = tools_with()
        tools.workspace.context.compactions.append(ContextEdit((2, 3)))
        assert await tools.error("undoDelete") == "nothing to undo: no deletion is in effect"
        assert "nothing to redo" in await tools.error("redoDelete")
        tools.workspace.context.compactions.clear()
        await tools.call("deleteContext", msg_id=2)
        await tools.call("undoDelete")
        assert await tools.error("undoDelete") == "nothing to undo: no deletion is in effect"

    run(test)


def test_a_message_that_looks_deleted_cannot_be_deleted() -> None:
    async def test() -> None:
        tools = tools_with()
        tools.state.messages[2] = Message("assistant", DELETED_CONTENT)
        assert "has been deleted already" in await tools.error("deleteContext", msg_id=2)

    run(test)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mode": "append", "content": ""}, "has this content and summary already"),
        ({"mode": "append", "summary": "s"}, "has this content and summary already"),
        ({"mode": "overwrite", "content": "c"}, "has this content and summary already"),
        ({"mode": "overwrite", "content": "c", "summary": "s"}, "has this content and summary already"),
        ({"mode": "overwrite"}, "expected a content or a summary to overwrite"),
        ({"mode": "delete", "content": "d"}, "mode: got delete with a content or a summary"),
        ({"mode": "delete", "summary": "d"}, "mode: got delete with a content or a summary"),
    ],
)
def test_an_update_that_changes_nothing_is_an_error(arguments: dict[str, Any], problem: str) -> None:
    async def test() -> None:
        tools = Tools()
        await tools.call("note", key="k", summary="s", content="c")
        assert problem in await tools.error("updateNote", key="k", **arguments)
        assert await tools.call("readNote", key="k") == {"summary": "s", "full_content": "c"}

    run(test)


def test_a_note_is_deleted_once_and_can_be_emptied() -> None:
    async def test() -> None:
        tools = Tools()
        await tools.call("note", key="k", summary="s", content="c")
        await tools.call("updateNote", key="k", mode="overwrite", content="")
        assert await tools.call("readNote", key="k") == {"summary": "s", "full_content": ""}
        await tools.call("updateNote", key="k", mode="append", content="x", summary="t")
        assert await tools.call("readNote", key="k") == {"summary": "t", "full_content": "\nx"}
        await tools.call("updateNote", key="k", mode="delete")
        assert "expected one of []" in await tools.error("updateNote", key="k", mode="delete")

    run(test)


def test_the_answer_is_given_once() -> None:
    async def test() -> None:
        tools = Tools()
        given: list[Any] = await asyncio.gather(
            *[tools.call("finish", answer=text) for text in ("42", "43")], return_exceptions=True
        )
        assert given[0] == {"final_answer": "42"}
        assert "the final answer is '42' already" in str(given[1])
        assert tools.workspace.context.final_answer == "42"

    run(test)


LONG = "long text " * 40


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
def test_the_model_is_told_that_a_compaction_cannot_be_undone_and_sees_no_change(setup: str) -> None:
    async def test() -> None:
        answers = [
            answer(call("echo", text=f"0 {LONG}")),
            answer(call("deleteContext", message_ids=[2, 3])),
            *[answer(call("echo", text=f"{turn} {LONG}")) for turn in range(1, 4)],
            answer(text="a summary"),
            answer(call("undoDelete"), call("undoDelete"), call("redoDelete")),
            answer(call("finish", answer="x")),
        ]
        options = ContextOptions(response_room=600, compaction=Summarize(keep_last=2))
        limits = LoopLimits(model_length=await first_prompt_tokens() + 3400)
        async with context_harness(answers, setup, limits=limits, options=options) as s:
            state = await s.run()
            assert state.context is not None
            (summary,) = state.context.compactions
            assert {2, 3} <= set(summary.message_ids)
            assert str(state.stop_reason) == "finish"
            results = [
                json.loads(m.content) for m in state.messages if m.name in ("undoDelete", "redoDelete")
            ]
            assert [one["status"] for one in results] == ["error"] * 3
            assert "replaced when the context was compacted" in results[0]["message"]
            shown_ids = state.context.view(state.messages).message_ids
            assert 3 not in shown_ids
            before, after = (s.codec.decode(reply.prompt_ids) for reply in s.model.replies[-2:])
            assert after.startswith(before)
            output = await s.output(state)
            assert output.left_out == {}

    run(test)
