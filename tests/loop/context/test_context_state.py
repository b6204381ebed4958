from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.context_edits import ContextEdit
from branchline.core.errors import InputError
from branchline.core.message import Media, Message
from branchline.loop.context.context_state import ContextState, label_result
from branchline.loop.tools.base import ToolResult

HISTORY = [
    Message("user", "u"),
    *[Message(role, f"{role} {index}") for index in range(4) for role in ("assistant", "tool")],
    Message("assistant", "now"),
]


@given(st.lists(st.sampled_from(["undo", "redo", 1, 2, 3, 4, 5, 6]), max_size=12))
def test_undo_and_redo_are_those_of_an_editor(operations: list[str | int]) -> None:
    context = ContextState()
    done: list[set[int]] = []
    undone: list[set[int]] = []
    for operation in operations:
        if operation == "undo" and done:
            assert set(context.undo().changed) == done[-1]
            undone.append(done.pop())
        elif operation == "redo" and undone:
            assert set(context.redo().changed) == undone[-1]
            done.append(undone.pop())
        elif isinstance(operation, int) and not any(operation in one for one in done):
            assert context.delete(HISTORY, [operation]) == (operation,)
            done.append({operation})
            undone.clear()
        else:
            before = context.deletions[:], context.undone[:]
            name = "delete" if isinstance(operation, int) else operation
            arguments = (HISTORY, [operation]) if isinstance(operation, int) else ()
            with pytest.raises(InputError):
                getattr(context, name)(*arguments)
            assert (context.deletions, context.undone) == before, "an error changes nothing"
    deleted = set().union(*done) if done else set()
    shown = context.view(HISTORY).messages
    assert {index for index, m in enumerate(HISTORY) if shown[index] != m} == deleted


def test_a_deletion_with_one_bad_id_deletes_nothing() -> None:
    context = ContextState()
    with pytest.raises(InputError, match="0 is a user message"):
        context.delete(HISTORY, [1, 0])
    assert not context.deletions


def test_summarised_messages_cannot_be_deleted() -> None:
    context = ContextState(compactions=[ContextEdit((1, 2), "They agreed.")])
    with pytest.raises(InputError, match="2 was replaced when the context was compacted"):
        context.delete(HISTORY, [2])


def test_notes_are_written_read_and_changed() -> None:
    context = ContextState()
    context.add_note("a", "about a", "one")
    context.update_note("a", "append", "two")
    assert context.find_note("a").content == "one\ntwo"
    context.update_note("a", "overwrite", "three", "new")
    assert (context.find_note("a").summary, context.find_note("a").content) == ("new", "three")
    context.update_note("a", "append", summary="newer")
    assert (context.find_note("a").summary, context.find_note("a").content) == ("newer", "three")
    context.update_note("a", "delete")
    with pytest.raises(InputError, match=r"key: got 'a', expected one of \[\]"):
        context.find_note("a")


@pytest.mark.parametrize("key", ["", "a"])
def test_a_note_needs_a_new_key(key: str) -> None:
    context = ContextState()
    context.add_note("a", "s", "c")
    with pytest.raises(InputError, match="key: "):
        context.add_note(key, "s", "other")
    assert context.find_note("a").content == "c"


def test_an_update_needs_something_to_write() -> None:
    context = ContextState()
    context.add_note("a", "s", "c")
    with pytest.raises(InputError, match="expected a content or a summary to append"):
        context.update_note("a", "append")


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (ToolResult("42"), {"message": "42"}),
        (ToolResult('{"a": 1, "msg_id": 99}'), {"a": 1}),
        (ToolResult("[1]"), {"message": "[1]"}),
        (ToolResult("{}"), {"message": "{}"}),
        (ToolResult("{broken"), {"message": "{broken"}),
        (ToolResult("no", is_error=True), {"status": "error", "message": "no"}),
        (
            ToolResult('{"status": "success"}', is_error=True),
            {"status": "error", "message": '{"status": "success"}'},
        ),
    ],
)
def test_a_result_is_labelled_with_its_ids(result: ToolResult, fields: dict[str, object]) -> None:
    message = label_result(result, 7, 6)
    assert json.loads(message.content) == {"msg_id": 7, "msg_id(invoking_assistant)": 6, **fields}


def test_media_of_a_result_follow_the_labelled_text() -> None:
    image = Media("image", "d", b"x", mime="image/png")
    message = label_result(ToolResult("look", (image,), tool="see", tool_call_id="c"), 3, 2)
    assert message.parts == (message.content, image)
    assert (message.tool_call_id, message.name) == ("c", "see")
