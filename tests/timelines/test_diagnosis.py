"""The sentence that says why two timelines did not merge."""

from __future__ import annotations

from branchline import (
    Generation,
    LoggedCall,
    LoggedOutput,
    MergePolicy,
    Message,
    Request,
    Session,
    ToyCodec,
    classify_forks,
    diagnose,
    merge,
)
from branchline.core.token_arrays import as_ids


def test_a_stripped_thought_is_shown_with_both_sides_and_its_cost() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    said = Message("assistant", "one", reasoning_content="plan")
    ask = Message("user", "p")
    session.commit(session.prepare(Request((ask,))), Generation(codec.encode_reply(said), message=said))
    turn = session.prepare(Request((ask, Message("assistant", "one"), Message("user", "q"))))
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


def test_a_new_answer_to_the_same_prompt_costs_nothing_again() -> None:
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


def test_a_drifted_log_names_the_token_where_ids_part() -> None:
    def call(messages: list[Message], said: str, prompt: list[int], ids: list[int]) -> LoggedCall:
        return LoggedCall(
            Request(tuple(messages)), (LoggedOutput(Message("assistant", said), as_ids(ids)),), as_ids(prompt)
        )

    ask, answer = Message("user", "q"), Message("assistant", "hello")
    calls = [
        call([ask], "hello", [1, 2], [20, 21]),
        call([ask, answer, Message("user", "go")], "ok", [1, 2, 22, 4], [5]),
    ]
    tree = merge(calls, MergePolicy(compare="token")).tree
    (fork,) = classify_forks(tree).forks
    assert str(diagnose(tree, fork)) == (
        "first divergent token 2: '20 21' became '22 4'; cause drift; 1 token computed again"
    )


def test_without_ids_the_messages_are_shown() -> None:
    codec_free = [
        LoggedCall(Request((Message("user", "q"),)), (LoggedOutput(Message("assistant", said)),))
        for said in ("yes", "no")
    ]
    tree = merge(codec_free).tree
    (fork,) = classify_forks(tree).forks
    assert str(diagnose(tree, fork)) == (
        "message 2: 'assistant: yes' became 'assistant: no'; cause best_of_n; 0 tokens computed again"
    )
