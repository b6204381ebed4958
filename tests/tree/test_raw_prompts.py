"""Bare prompts: ids that no template frames, in the same tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline import Generation, Message, Request, Session, ToyCodec
from branchline.core.token_arrays import as_ids


def _commit_raw_prompt(session: Session, prompt: bytes, said: bytes) -> list[int]:
    request = Request((Message("user"),), is_raw_prompt=True)
    turn = session.prepare_ids(request, as_ids(list(prompt)))
    session.commit(turn, Generation(as_ids(list(said)), message=Message("assistant", said.decode())))
    return turn.prompt_ids.tolist()


def test_a_raw_prompt_continues_the_longest_path_it_repeats() -> None:
    session = Session("s", ToyCodec())
    _commit_raw_prompt(session, b"ab", b"cd")
    _commit_raw_prompt(session, b"ab", b"c")
    _commit_raw_prompt(session, b"abcdef", b"g")
    _commit_raw_prompt(session, b"abcx", b"y")
    _commit_raw_prompt(session, b"abcd", b"z")
    tree = session.tree
    paths = [bytes(tree.path_ids(leaf).tolist()) for leaf in tree.leaves()]
    assert sorted(paths) == [b"abcdefg", b"abcdz", b"abcxy"]
    assert sorted(node.message.content for node in tree.nodes[1:]) == sorted(
        ["ab", "cd", "c", "ef", "g", "x", "y", "z"]
    )


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=6), st.binary(max_size=3)), max_size=8))
def test_raw_prompts_are_token_exact_paths_of_the_tree(calls: list[tuple[bytes, bytes]]) -> None:
    session = Session("s", ToyCodec())
    for prompt, said in calls:
        turn = session.prepare_ids(Request((Message("user"),), is_raw_prompt=True), as_ids(list(prompt)))
        session.commit(turn, Generation(as_ids(list(said)), message=Message("assistant")))
    tree = session.tree
    for call, (prompt, said) in zip(tree.calls, calls, strict=True):
        (output,) = call.outputs
        assert bytes(tree.path_ids(tree.nodes[output]).tolist()) == prompt + said
