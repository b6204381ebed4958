"""Tool calls that come back with filled-in schema defaults match the sampled calls; other changes do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchline import Generation, Message, Request, Session, ToolCall, ToyCodec, classify_forks
from branchline.core.call import AppliedEquivalence, Equivalence
from branchline.tree.argument_defaults import fill_defaults
from branchline.tree.journal import Journal

CODEC = ToyCodec.chatml()
ASK = Message("user", "Edit it.")
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "old": {"type": "string"},
                "all": {"type": "boolean", "default": False},
                "at": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"line": {}, "width": {"default": 80}}},
                },
            },
        },
    },
}


def edit_call(arguments: str, id: str = "c1", name: str = "edit") -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments, id),))


def run_session(sampled: Message, shown: Message, tools: tuple[object, ...] = (EDIT,)) -> Session:
    """Returns a session in which a sampled call came back as `shown`."""
    session = Session("s", CODEC)
    turn = session.prepare(Request((ASK,), tools))  # type: ignore[arg-type]
    session.commit(turn, Generation(CODEC.encode_reply(sampled), message=sampled))
    turn = session.prepare(Request((ASK, shown, Message("tool", "done", tool_call_id="c1")), tools))  # type: ignore[arg-type]
    session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "Edited."))))
    return session


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        ('{"old": "a"}', '{"all": false, "old": "a"}'),
        ('{"old": "a", "all": false}', '{"old": "a"}'),
        ('{"at": [{"line": 1}, {"line": 2}]}', '{"all":false,"at":[{"line":1,"width":80},{"line":2}]}'),
        ("", '{"all": false}'),
    ],
)
def test_added_or_omitted_defaults_are_the_same_call(sampled: str, shown: str) -> None:
    session = run_session(edit_call(sampled), edit_call(shown))
    assert not classify_forks(session.tree).forks
    assert AppliedEquivalence(1, Equivalence.DEFAULTS_FILLED) in session.tree.calls[1].applied_equivalences
    (node,) = [node for node in session.tree.nodes if node.is_sampled and node.message.tool_calls]
    assert node.message.tool_calls[0].arguments == sampled


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        ('{"old": "a"}', '{"all": true, "old": "a"}'),
        ('{"old": "a"}', '{"all": 0, "old": "a"}'),
        ('{"old": "a"}', '{"all": false, "old": "b"}'),
        ('{"old": "a"}', '{"new": false, "old": "a"}'),
        ("old a", "old a, all"),
    ],
)
def test_other_changes_are_edits(sampled: str, shown: str) -> None:
    session = run_session(edit_call(sampled), edit_call(shown))
    assert len(classify_forks(session.tree).forks) == 1
    assert not session.tree.calls[1].applied_equivalences


FILLED = '{"all": false}'


@pytest.mark.parametrize(
    ("sampled", "shown", "tools"),
    [
        pytest.param(edit_call("{}"), edit_call(FILLED, "c9"), (EDIT,), id="another id"),
        pytest.param(edit_call("{}"), edit_call(FILLED, name="write"), (EDIT,), id="another tool"),
        pytest.param(edit_call("{}", name="write"), edit_call(FILLED, name="write"), (EDIT,), id="no schema"),
        pytest.param(edit_call("{}"), edit_call(FILLED), (), id="no tools"),
    ],
)
def test_without_an_echoed_id_and_a_schema_nothing_is_filled(
    sampled: Message, shown: Message, tools: tuple[object, ...]
) -> None:
    assert len(classify_forks(run_session(sampled, shown, tools).tree).forks) == 1


def test_every_filled_call_of_a_long_history_matches() -> None:
    session = Session("s", CODEC)
    history: list[Message] = [ASK]
    for number in range(3):
        turn = session.prepare(Request(tuple(history), (EDIT,)))
        sampled = edit_call(f'{{"old": "{number}"}}', f"c{number}")
        session.commit(turn, Generation(CODEC.encode_reply(sampled), message=sampled))
        history += [
            edit_call(f'{{"all": false, "old": "{number}"}}', f"c{number}"),
            Message("tool", "done", tool_call_id=f"c{number}"),
        ]
    assert not classify_forks(session.tree).forks
    filled = [
        applied.message_index
        for applied in session.tree.calls[2].applied_equivalences
        if applied.equivalence == Equivalence.DEFAULTS_FILLED
    ]
    assert filled == [1, 3]


def test_a_restored_session_recognises_filled_calls(tmp_path: Path) -> None:
    sampled = edit_call('{"old": "a"}')
    with Journal(tmp_path / "journal") as journal:
        session = Session("s", CODEC, journal=journal)
        session.commit(
            session.prepare(Request((ASK,), (EDIT,))),
            Generation(CODEC.encode_reply(sampled), message=sampled),
        )
    with Journal(tmp_path / "journal") as journal:
        restored = Session.reopen("s", CODEC, journal)
        filled = edit_call('{"all": false, "old": "a"}')
        turn = restored.prepare(Request((ASK, filled, Message("tool", "done", tool_call_id="c1")), (EDIT,)))
        assert turn.applied_equivalences == (AppliedEquivalence(1, Equivalence.DEFAULTS_FILLED),)


@pytest.mark.parametrize("schema", [None, [], {"properties": []}, {"properties": {"a": None}}, {"items": 3}])
def test_an_invalid_schema_fills_nothing(schema: object) -> None:
    assert fill_defaults({"b": [1]}, schema) == {"b": [1]}
