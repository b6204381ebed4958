"""What is said of a rewritten history: which message, which field, from what to what."""

from __future__ import annotations

import pytest

from branchline import (
    Cause,
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    classify_forks,
    diagnose,
)
from branchline.timelines.edit_description import describe_edit

ASK = Message("user", "Count the files.")


def tool_call_message(arguments: str, name: str = "shell") -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments, "c1"),))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            tool_call_message('{"run": "cd /srv && cat a"}'),
            tool_call_message('{"run": "cat a"}'),
            "message 2 (assistant), arguments of shell: run: 'cd /srv && ' taken out at letter 0",
        ),
        (
            tool_call_message('{"old": "a"}', "edit"),
            tool_call_message('{"all": false, "old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all added (false)",
        ),
        (
            tool_call_message('{"old": "a", "all": [1]}', "edit"),
            tool_call_message('{"old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all left out (it was [1])",
        ),
        (
            tool_call_message('{"count": 1}'),
            tool_call_message('{"count": 2}'),
            "message 2 (assistant), arguments of shell: count: '1' became '2' at letter 0",
        ),
        (
            tool_call_message("just ls"),
            tool_call_message("just cat"),
            "message 2 (assistant), arguments of shell: 'ls' became 'cat' at letter 5",
        ),
        (
            tool_call_message("{}"),
            Message("assistant", ""),
            "message 2 (assistant), calls: shell became none",
        ),
        (
            Message("user", "Files: a.py"),
            Message("user", "Files: a.py, b.py"),
            "message 2 (user), text: ', b.py' put in at letter 11",
        ),
        (
            Message("user", "x" * 100),
            Message("user", "y" * 100),
            f"message 2 (user), text: '{'x' * 60}…' became '{'y' * 60}…' at letter 0",
        ),
        (
            Message("tool", "three"),
            Message("user", "three"),
            "message 2: tool 'three' became user 'three'",
        ),
    ],
)
def test_a_rewritten_message_is_told_by_its_fields(old: Message, new: Message, told: str) -> None:
    assert describe_edit([old, ASK], [new], 2) == told


def test_messages_left_out_and_put_in_are_counted_and_the_first_is_shown() -> None:
    reminder, more = Message("system", "Remember the tests."), Message("user", "More.")
    assert describe_edit([reminder, more, ASK], [ASK], 3) == (
        "2 messages left out at 3: system 'Remember the tests.' and 1 more"
    )
    assert describe_edit([ASK], [reminder, ASK], 3) == "1 message put in at 3: system 'Remember the tests.'"


def test_nothing_is_told_of_messages_that_are_the_same() -> None:
    assert describe_edit([ASK], [ASK, ASK], 1) == ""
    assert describe_edit([], [ASK], 1) == ""


def test_the_diagnosis_of_an_edit_says_what_was_rewritten() -> None:
    codec = ToyCodec.chatml()
    session = Session("s", codec)
    said = tool_call_message('{"run": "cd /srv && ls"}')
    session.commit(session.prepare(Request((ASK,))), Generation(codec.encode_reply(said), message=said))
    turn = session.prepare(
        Request((ASK, tool_call_message('{"run": "ls"}'), Message("tool", "a.py", tool_call_id="c1")))
    )
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "One."))))
    (fork,) = classify_forks(session.tree).forks
    told = diagnose(session.tree, fork, codec.decode)
    assert told.cause == Cause.EDIT
    assert str(told).endswith(
        "; message 2 (assistant), arguments of shell: run: 'cd /srv && ' taken out at letter 0; "
        "cause edit; 0 tokens computed again"
    )
