"""Signals that are read from indexes equal those of a search through the tree."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from branchline import Generation, Message, Request, Session, ToyCodec, Tree
from branchline.timelines.fork_signals import ForkSignals
from branchline.tree.tree import Node

TEXTS = ("ok", "continue", "look at the logs", "a longer text that is quoted elsewhere")


def random_tree(rng: Random) -> Tree:
    """A tree of edits, deletions and repetitions of a few messages."""
    codec = ToyCodec.chatml()
    session = Session("s", codec)
    conversations: list[list[Message]] = [[]]
    for _ in range(rng.randint(2, 25)):
        messages = list(rng.choice(conversations))
        if messages and rng.random() < 0.4:
            del messages[rng.randrange(len(messages))]
        count = rng.randint(1, 2)
        messages += [Message(rng.choice(("user", "tool")), rng.choice(TEXTS)) for _ in range(count)]
        answer = Message("assistant", rng.choice(TEXTS))
        turn = session.prepare(Request(tuple(messages)))
        session.commit(turn, Generation(codec.encode_reply(answer), message=answer))
        conversations.append([*messages, answer])
    return session.tree


def searched_keys(tree: Tree, signals: ForkSignals, sibling: Node, branch: Node) -> list[bytes]:
    """The definition of `shared_keys`: walks all older paths through the sibling, latest children first."""
    call = signals.first_call(branch)
    keys = {message.key for message in signals.prompt_messages_below(branch)}
    best, last = (-1.0, -1), sibling
    stack = [(sibling, 0.0)]
    while stack:
        node, shared = stack.pop()
        shared += (node.message.key in keys) + 0.5 * (node.message.key == branch.message.key)
        if (shared, node.depth) > best:
            best, last = (shared, node.depth), node
        stack += [
            (child, shared)
            for child in node.all_children()
            if signals.first_call(child).index < call.index or not tree.is_chronological
        ]
    path = last.path()[sibling.depth - 1 :]
    return [node.message.key for node in path if node.message.key in keys]


@given(st.integers(0, 10**9), st.booleans())
def test_shared_keys_are_those_of_the_path_that_shares_most(seed: int, is_chronological: bool) -> None:
    tree = random_tree(Random(seed))
    tree.is_chronological = is_chronological
    signals = ForkSignals(tree)
    for node in tree.nodes:
        children = node.all_children()
        for index, branch in enumerate(children):
            for sibling in children[:index] if not branch.is_sampled else ():
                found = signals.shared_keys(sibling, branch)
                assert Counter(found) == Counter(searched_keys(tree, signals, sibling, branch))


@given(st.integers(0, 10**9))
def test_a_node_is_below_its_ancestors_and_itself(seed: int) -> None:
    tree = random_tree(Random(seed))
    signals = ForkSignals(tree)
    for node in tree.nodes[1:]:
        above = {other.id for other in tree.nodes[1:] if signals.is_below(node, other)}
        assert above == {other.id for other in node.path()}
