"""What is said of a rewritten history: which message, which field, from what to what."""

from __future__ import annotations

import pytest

from branchline import Cause, Generation, Message, Request, Session, ToolCall, ToyCodec, diagnose, judge
from branchline.timelines.rewriting import rewriting

ASK = Message("user", "Count the files.")


def made(arguments: str, name: str = "shell") -> Message:
    return Message("assistant", "", calls=(ToolCall(name, arguments, "c1"),))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            made('{"run": "cd /srv && cat a"}'),
            made('{"run": "cat a"}'),
            "message 2 (assistant), arguments of shell: run: 'cd /srv && ' taken out at letter 0",
        ),
        (
            made('{"old": "a"}', "edit"),
            made('{"all": false, "old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all added (false)",
        ),
        (
            made('{"old": "a", "all": [1]}', "edit"),
            made('{"old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all left out (it was [1])",
        ),
        (
            made('{"count": 1}'),
            made('{"count": 2}'),
            "message 2 (assistant), arguments of shell: count: '1' became '2' at letter 0",
        ),
        (
            made("just ls"),
            made("just cat"),
            "message 2 (assistant), arguments of shell: 'ls' became 'cat' at letter 5",
        ),
        (
            made("{}"),
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
    assert rewriting([old, ASK], [new], 2) == told


def test_messages_left_out_and_put_in_are_counted_and_the_first_is_shown() -> None:
    reminder, more = Message("system", "Remember the tests."), Message("user", "More.")
    assert rewriting([reminder, more, ASK], [ASK], 3) == (
        "2 messages left out at 3: system 'Remember the tests.' and 1 more"
    )
    assert rewriting([ASK], [reminder, ASK], 3) == "1 message put in at 3: system 'Remember the tests.'"


def test_nothing_is_told_of_messages_that_are_the_same() -> None:
    assert rewriting([ASK], [ASK, ASK], 1) == ""
    assert rewriting([], [ASK], 1) == ""


def test_the_diagnosis_of_an_edit_says_what_was_rewritten() -> None:
    codec = ToyCodec.chatml()
    session = Session("s", codec)
    said = made('{"run": "cd /srv && ls"}')
    session.commit(session.prepare(Request((ASK,))), Generation(codec.spell(said), message=said))
    turn = session.prepare(Request((ASK, made('{"run": "ls"}'), Message("tool", "a.py", answers="c1"))))
    session.commit(turn, Generation(codec.spell(Message("assistant", "One."))))
    (fork,) = judge(session.tree).forks
    told = diagnose(session.tree, fork, codec.decode)
    assert told.cause == Cause.EDIT
    assert str(told).endswith(
        "; message 2 (assistant), arguments of shell: run: 'cd /srv && ' taken out at letter 0; "
        "cause edit; 0 tokens computed again"
    )
