from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.context_edits import (
    DELETED_CONTENT,
    SUMMARY_HEADING,
    ContextEdit,
    build_view,
    expand_summaries,
    is_deletion_stub,
    read_summary,
    stub_message,
)
from branchline.core.errors import InputError
from branchline.core.message import Media, Message, ToolCall

IMAGE = Media("image", "d1", b"x", mime="image/png")
HISTORY = [
    Message("system", "s"),
    Message("user", "u"),
    Message("assistant", "a", reasoning_content="r", tool_calls=(ToolCall("f", '{"x": 1}', "c1"),)),
    Message("tool", '{"msg_id":3,"status":"error","message":"no"}', tool_call_id="c1", name="f"),
    Message("assistant", "b"),
    Message("user", "v"),
]


def test_a_view_without_edits_is_the_history() -> None:
    view = build_view(HISTORY, [])
    assert view.messages == tuple(HISTORY)
    assert view.message_ids == tuple(range(6))


def test_stubs_keep_the_structure_of_the_conversation() -> None:
    view = build_view(HISTORY, [ContextEdit((2, 3))])
    assert [m.role for m in view.messages] == [m.role for m in HISTORY]
    assistant, tool = view.messages[2:4]
    assert (assistant.content, assistant.reasoning_content) == (DELETED_CONTENT, "")
    assert [(one.name, one.id) for one in assistant.tool_calls] == [("f", "c1")]
    assert json.loads(assistant.tool_calls[0].arguments) == {"message": DELETED_CONTENT}
    assert json.loads(tool.content) == {
        "msg_id": 3,
        "status": "error",
        "message": DELETED_CONTENT,
        "original_tool": "f",
    }
    assert tool.tool_call_id == "c1"
    assert (view.messages[4], view.messages[5]) == (HISTORY[4], HISTORY[5])


@pytest.mark.parametrize("content", ["plain", "{", '{"a": 1}', "[1]", '"text"'])
def test_a_result_without_an_id_becomes_the_stub_text(content: str) -> None:
    stub = stub_message(Message("tool", content, tool_call_id="c", parts=(content, IMAGE)))
    assert (stub.content, stub.parts, stub.tool_call_id) == (DELETED_CONTENT, (), "c")


@pytest.mark.parametrize("role", ["system", "user", "developer"])
def test_other_messages_have_no_stub(role: str) -> None:
    with pytest.raises(InputError, match=f"role: got '{role}', expected 'assistant' or 'tool'"):
        stub_message(Message(role, "x"))  # type: ignore[arg-type]


def test_a_stub_is_recognised_and_a_quotation_of_its_text_is_not() -> None:
    for index in (2, 3, 4):
        assert is_deletion_stub(stub_message(HISTORY[index]))
        assert not is_deletion_stub(HISTORY[index])
    assert not is_deletion_stub(Message("tool", f"it says: {DELETED_CONTENT}"))
    assert not is_deletion_stub(Message("assistant", f"it says: {DELETED_CONTENT}"))


def test_a_summary_replaces_its_messages_by_one() -> None:
    view = build_view(HISTORY, [ContextEdit((2, 3)), ContextEdit((2, 3, 4), "They tried.")])
    assert view.messages[2] == Message("user", f"{SUMMARY_HEADING}\nThey tried.")
    assert (view.message_ids, view.summarized_ids) == ((0, 1, 2, 5), {2, 3, 4})
    assert read_summary(view.messages[2]) == "They tried."
    assert read_summary(HISTORY[1]) == ""
    again = ContextEdit(expand_summaries((2, 5), [ContextEdit((2, 3, 4), "They tried.")]), "All.")
    assert again.message_ids == (2, 3, 4, 5)
    assert build_view(HISTORY, [ContextEdit((2, 3, 4), "They tried."), again]).message_ids == (0, 1, 2)


def test_two_summaries_with_equal_texts_are_both_shown() -> None:
    view = build_view(HISTORY, [ContextEdit((2, 3), "same"), ContextEdit((4,), "same")])
    assert [read_summary(m) for m in view.messages[2:4]] == ["same", "same"]


deletable = st.sets(st.sampled_from([2, 3, 4]), min_size=1).map(lambda ids: ContextEdit(tuple(sorted(ids))))


@given(st.lists(deletable, max_size=4), st.integers(0, 4))
def test_a_view_depends_on_the_set_of_deletions_and_not_on_their_order(
    edits: list[ContextEdit], shift: int
) -> None:
    rotated = edits[shift:] + edits[:shift]
    assert build_view(HISTORY, edits) == build_view(HISTORY, rotated)
    view = build_view(HISTORY, edits)
    deleted = {index for edit in edits for index in edit.message_ids}
    for index, message in enumerate(HISTORY):
        assert view.messages[index] == (stub_message(message) if index in deleted else message)
