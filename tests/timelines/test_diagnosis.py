"""Diagnoses name the position, both sides, what changed, the cause and the cost of a fork."""

from __future__ import annotations

import pytest

from branchline import Generation, Message, Request, Session, ToolCall, ToyCodec, classify_forks, merge
from branchline.core.token_arrays import as_ids
from branchline.timelines.causes import Cause
from branchline.timelines.diagnosis import describe_edit, diagnose
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput


def test_stripped_reasoning_is_shown_with_both_sides_and_its_cost() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    reply = Message("assistant", "one", reasoning_content="plan")
    question = Message("user", "p")
    session.commit(
        session.prepare(Request((question,))), Generation(codec.encode_reply(reply), message=reply)
    )
    turn = session.prepare(Request((question, Message("assistant", "one"), Message("user", "q"))))
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "two"))))
    (fork,) = classify_forks(session.tree).forks
    diagnosis = diagnose(session.tree, fork, codec.decode)
    common = len("user:p") + 2 + len("assistant:")
    assert diagnosis.first_divergent_token == common
    assert diagnosis.before.startswith("<think>plan")
    assert diagnosis.after.startswith("one<end>\n")
    assert diagnosis.tokens_computed_again == len("one") + 2
    assert str(diagnosis) == (
        f"first divergent token {common}: {diagnosis.before!r} became {diagnosis.after!r}; "
        "cause think_strip; 5 tokens computed again"
    )


def test_a_new_answer_to_the_same_prompt_recomputes_nothing() -> None:
    codec = ToyCodec()
    session = Session("s", codec)
    for text in ("yes", "yet"):
        turn = session.prepare(Request((Message("user", "p"),)))
        session.commit(turn, Generation(codec.encode_reply(Message("assistant", text))))
    (fork,) = classify_forks(session.tree).forks
    diagnosis = diagnose(session.tree, fork, codec.decode)
    assert diagnosis.first_divergent_token == len("user:p\nassistant:ye")
    assert (diagnosis.before, diagnosis.after) == ("s", "t")
    assert diagnosis.tokens_computed_again == 0


def test_a_drifted_log_names_the_first_different_token() -> None:
    def call(messages: list[Message], output: str, prompt: list[int], ids: list[int]) -> LoggedCall:
        return LoggedCall(
            Request(tuple(messages)),
            (LoggedOutput(Message("assistant", output), as_ids(ids)),),
            as_ids(prompt),
        )

    question, answer = Message("user", "q"), Message("assistant", "hello")
    calls = [
        call([question], "hello", [1, 2], [20, 21]),
        call([question, answer, Message("user", "go")], "ok", [1, 2, 22, 4], [5]),
    ]
    tree = merge(calls, MergePolicy(compare="token")).tree
    (fork,) = classify_forks(tree).forks
    assert str(diagnose(tree, fork)) == (
        "first divergent token 2: '20 21' became '22 4'; cause drift; 1 token computed again"
    )


def test_without_ids_the_messages_are_shown() -> None:
    calls = [
        LoggedCall(Request((Message("user", "q"),)), (LoggedOutput(Message("assistant", text)),))
        for text in ("yes", "no")
    ]
    tree = merge(calls).tree
    (fork,) = classify_forks(tree).forks
    assert str(diagnose(tree, fork)) == (
        "message 2: 'assistant: yes' became 'assistant: no'; cause best_of_n; 0 tokens computed again"
    )


# -- what the client changed ---------------------------------------------------------------------------

ASK = Message("user", "Count the files.")


def tool_call_message(arguments: str, name: str = "shell") -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments, "c1"),))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            tool_call_message('{"run": "cd /srv && cat a"}'),
            tool_call_message('{"run": "cat a"}'),
            "message 2 (assistant), arguments of shell: run: 'cd /srv && ' removed at character 0",
        ),
        (
            tool_call_message('{"old": "a"}', "edit"),
            tool_call_message('{"all": false, "old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all added (false)",
        ),
        (
            tool_call_message('{"old": "a", "all": [1]}', "edit"),
            tool_call_message('{"old": "a"}', "edit"),
            "message 2 (assistant), arguments of edit: all removed (it was [1])",
        ),
        (
            tool_call_message('{"count": 1}'),
            tool_call_message('{"count": 2}'),
            "message 2 (assistant), arguments of shell: count: '1' became '2' at character 0",
        ),
        (
            tool_call_message("just ls"),
            tool_call_message("just cat"),
            "message 2 (assistant), arguments of shell: 'ls' became 'cat' at character 5",
        ),
        (
            tool_call_message("{}"),
            Message("assistant", ""),
            "message 2 (assistant), calls: shell became none",
        ),
        (
            Message("user", "Files: a.py"),
            Message("user", "Files: a.py, b.py"),
            "message 2 (user), text: ', b.py' inserted at character 11",
        ),
        (
            Message("user", "x" * 100),
            Message("user", "y" * 100),
            f"message 2 (user), text: '{'x' * 60}…' became '{'y' * 60}…' at character 0",
        ),
        (
            Message("tool", "three"),
            Message("user", "three"),
            "message 2: tool 'three' became user 'three'",
        ),
    ],
)
def test_a_rewritten_message_is_described_by_its_fields(old: Message, new: Message, expected: str) -> None:
    assert describe_edit([old, ASK], [new], 2) == expected


def test_removed_and_inserted_messages_are_counted_and_the_first_is_shown() -> None:
    reminder, more = Message("system", "Remember the tests."), Message("user", "More.")
    assert describe_edit([reminder, more, ASK], [ASK], 3) == (
        "2 messages removed at 3: system 'Remember the tests.' and 1 more"
    )
    assert describe_edit([ASK], [reminder, ASK], 3) == "1 message inserted at 3: system 'Remember the tests.'"


def test_equal_first_messages_have_no_description() -> None:
    assert describe_edit([ASK], [ASK, ASK], 1) == ""
    assert describe_edit([], [ASK], 1) == ""


def test_the_diagnosis_of_an_edit_describes_the_change() -> None:
    codec = ToyCodec.chatml()
    session = Session("s", codec)
    reply = tool_call_message('{"run": "cd /srv && ls"}')
    session.commit(session.prepare(Request((ASK,))), Generation(codec.encode_reply(reply), message=reply))
    turn = session.prepare(
        Request((ASK, tool_call_message('{"run": "ls"}'), Message("tool", "a.py", tool_call_id="c1")))
    )
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "One."))))
    (fork,) = classify_forks(session.tree).forks
    diagnosis = diagnose(session.tree, fork, codec.decode)
    assert diagnosis.cause == Cause.EDIT
    assert str(diagnosis).endswith(
        "; message 2 (assistant), arguments of shell: run: 'cd /srv && ' removed at character 0; "
        "cause edit; 0 tokens computed again"
    )
