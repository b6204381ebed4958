"""Finding the recorded path that a request continues."""

from __future__ import annotations

import pytest

from branchline import Generation, Message, Request, Session, ToyCodec
from branchline.core.call import AppliedEquivalence, Delivery, Equivalence
from branchline.core.message import Media
from branchline.core.reader import read_message
from branchline.core.token_arrays import as_ids
from tests.tree.session_driver import SessionDriver, assistant, user

TOOL = {"type": "function", "function": {"name": "look"}}


def test_the_longest_matching_path_wins() -> None:
    driver = SessionDriver()
    driver.sample([user("p")], "same")
    second = driver.sample([user("p")], Message("assistant", "same", id="resp_2"))
    echoed = Message("assistant", "same", id="resp_2")
    deep = driver.sample([user("p"), echoed, user("q")], "deep")
    turn = driver.prepare(user("p"), assistant("same"), user("q"), assistant("deep"), user("r"))
    assert turn.parent is deep
    assert second in deep.path()
    assert not turn.ambiguous_match


def test_a_delivered_answer_is_preferred_to_a_lost_one() -> None:
    driver = SessionDriver()
    lost = driver.sample([user("p")], "same")
    driver.session.record_delivery(driver.tree.call_of(lost), Delivery.LOST)
    arrived = driver.sample([user("p")], "same")
    driver.session.record_delivery(driver.tree.call_of(arrived))
    assert driver.prepare(user("p"), assistant("same"), user("q")).parent is arrived


def test_a_cancelled_answer_that_is_echoed_matches() -> None:
    driver = SessionDriver()
    cut = driver.sample([user("p")], "half an")
    driver.session.record_delivery(driver.tree.call_of(cut), Delivery.CANCELLED)
    assert driver.prepare(user("p"), assistant("half an"), user("q")).parent is cut


def test_another_agents_reply_is_context_and_its_ids_are_reused() -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], "mine", agent="a")
    turn = driver.prepare(user("p"), assistant("mine"), user("q"), agent="b")
    assert turn.parent.message.content == "p"
    assert turn.source_ids == (sampled.id, -1)
    assert turn.message_tokens[0].ids.tolist() == sampled.ids.tolist()
    assert all(origin != 2 for _, origin in turn.message_tokens[0].spans)


def test_other_tools_or_template_arguments_start_a_sibling() -> None:
    driver = SessionDriver()
    driver.sample([user("p")], "A")
    with_tools = driver.prepare(user("p"), tools=(TOOL,))
    assert with_tools.parent is driver.tree.root
    with_arguments = driver.prepare(user("p"), chat_template_kwargs={"enable_thinking": False})
    assert with_arguments.parent is driver.tree.root
    assert driver.prepare(user("p")).parent.message.content == "p"


def test_media_distinguish_messages_and_are_kept_on_the_path() -> None:
    driver = SessionDriver()
    cat = Message("user", "look", parts=("look", Media("image", "cat", b"...")))
    dog = Message("user", "look", parts=("look", Media("image", "dog", b"...")))
    sampled = driver.sample([cat], "a cat")
    assert driver.prepare(cat, assistant("a cat"), user("q")).parent is sampled
    assert driver.prepare(dog).parent is driver.tree.root
    assert sampled.path()[0].message.media[0].payload == b"..."


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": 1, "far": false}'},
}


OTHER = {"id": "call_2", "type": "function", "function": {"name": "listen", "arguments": "{}"}}
SENT = {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]}


def reserialised_call(arguments: str) -> dict[str, object]:
    return {**CALL, "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({**SENT, "content": ""}, Equivalence.EMPTY_CONTENT),
        ({key: value for key, value in SENT.items() if key != "content"}, Equivalence.EMPTY_CONTENT),
        ({**SENT, "tool_calls": [{**CALL, "id": "x"}, {**OTHER, "id": "y"}]}, Equivalence.RENAMED_IDS),
        (
            {**SENT, "tool_calls": [reserialised_call('{"far":false,"at":1}'), OTHER]},
            Equivalence.ARGUMENTS_RESERIALISED,
        ),
        (
            {**SENT, "tool_calls": [reserialised_call("{'at': 1, 'far': False}"), OTHER]},
            Equivalence.PYTHON_LITERALS,
        ),
        ({**SENT, "tool_calls": [OTHER, CALL]}, Equivalence.REORDERED_CALLS),
    ],
)
def test_b4_a_changed_tool_call_matches_with_a_named_equivalence(
    shown: dict[str, object], reason: Equivalence
) -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], read_message(SENT))
    result = Message("tool", "seen")
    turn = driver.prepare(user("p"), read_message(shown), result)
    assert turn.parent is sampled
    assert turn.applied_equivalences == (AppliedEquivalence(1, reason),)
    assert len(driver.tree.leaves()) == 1


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"role": "assistant", "content": [{"type": "text", "text": "hi there "}]}, Equivalence.PART_LIST),
        (
            {"role": "assistant", "content": "hi there", "reasoning_content": "hm"},
            Equivalence.TRIMMED_WHITESPACE,
        ),
        ({"role": "assistant", "content": "hi there "}, Equivalence.DROPPED_REASONING),
        (
            {"role": "assistant", "content": "hi there ", "tool_calls": None, "thinking": "hm"},
            Equivalence.EMPTY_CALLS,
        ),
    ],
)
def test_b4_a_changed_text_matches_with_a_named_equivalence(
    shown: dict[str, object], reason: Equivalence
) -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], Message("assistant", "hi there ", reasoning_content="hm"))
    turn = driver.prepare(user("p"), read_message(shown), user("q"))
    assert turn.parent is sampled
    assert reason in [echo.equivalence for echo in turn.applied_equivalences]


def test_b4_an_empty_tool_list_equals_no_tool_list_and_is_recorded() -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], "A")
    body = {
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "A"}],
        "tools": [],
    }
    turn = driver.session.prepare(Request.read(body))
    assert turn.parent is sampled
    assert turn.applied_equivalences == (AppliedEquivalence(-1, Equivalence.EMPTY_TOOLS),)


def test_results_of_reordered_calls_are_put_in_the_sampled_order() -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("p")], read_message(SENT))
    results = [
        Message("tool", "noise", tool_call_id="call_2"),
        Message("tool", "seen", tool_call_id="call_1"),
    ]
    turn = driver.prepare(user("p"), read_message({**SENT, "tool_calls": [OTHER, CALL]}), *results)
    assert turn.parent is sampled
    assert [message.content for message in turn.messages] == ["seen", "noise"]
    in_call_order = driver.prepare(user("p"), read_message(SENT), *results)
    assert [message.content for message in in_call_order.messages] == ["seen", "noise"]
    assert in_call_order.applied_equivalences == (AppliedEquivalence(1, Equivalence.REORDERED_RESULTS),)


def test_results_after_a_reply_sampled_elsewhere_are_put_in_the_sampled_order() -> None:
    driver = SessionDriver()
    driver.sample([user("p"), assistant("bad"), user("error")], read_message(SENT))
    results = [
        Message("tool", "noise", tool_call_id="call_2"),
        Message("tool", "seen", tool_call_id="call_1"),
    ]
    turn = driver.prepare(user("p"), read_message({**SENT, "tool_calls": [OTHER, CALL]}), *results)
    assert [message.content for message in turn.messages][1:] == ["seen", "noise"]


def test_an_assistant_message_that_was_not_sampled_is_context() -> None:
    driver = SessionDriver()
    sampled = driver.sample([user("example"), assistant("sure"), user("p")], "A")
    assert [node.is_sampled for node in sampled.path()] == [False, False, False, True]
    prefill = driver.prepare(user("p"), assistant("It starts with"))
    assert prefill.parent is driver.tree.root


def commit_raw_prompt(session: Session, prompt: bytes, output: bytes) -> list[int]:
    request = Request((Message("user"),), is_raw_prompt=True)
    turn = session.prepare_ids(request, as_ids(list(prompt)))
    session.commit(turn, Generation(as_ids(list(output)), message=Message("assistant", output.decode())))
    return turn.prompt_ids.tolist()


def test_a_raw_prompt_continues_the_longest_path_it_repeats() -> None:
    session = Session("s", ToyCodec())
    commit_raw_prompt(session, b"ab", b"cd")
    commit_raw_prompt(session, b"ab", b"c")
    commit_raw_prompt(session, b"abcdef", b"g")
    commit_raw_prompt(session, b"abcx", b"y")
    commit_raw_prompt(session, b"abcd", b"z")
    tree = session.tree
    paths = [bytes(tree.path_ids(leaf).tolist()) for leaf in tree.leaves()]
    assert sorted(paths) == [b"abcdefg", b"abcdz", b"abcxy"]
    assert sorted(node.message.content for node in tree.nodes[1:]) == sorted(
        ["ab", "cd", "c", "ef", "g", "x", "y", "z"]
    )
