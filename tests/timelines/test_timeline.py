"""Timelines are aligned arrays with the boundaries of each turn."""

from __future__ import annotations

import numpy as np

from branchline import Generation, Message, Request, Session, ToyCodec, timelines_of
from branchline.core.token_arrays import Origin, as_ids


def conversation() -> Session:
    codec = ToyCodec()
    session = Session("s", codec)
    history: list[Message] = []
    for version, (question, reply) in enumerate((("p", "A1"), ("x", "A2")), start=3):
        history.append(Message("user", question))
        turn = session.prepare(Request(tuple(history)))
        session.commit(
            turn,
            Generation(
                codec.encode_reply(Message("assistant", reply)), np.array([-1, -2], np.float32), version
            ),
        )
        history.append(Message("assistant", reply))
    return session


def test_b1_template_tokens_between_turns_are_not_masked() -> None:
    (line,) = timelines_of(conversation().tree)
    assert ToyCodec().decode(line.ids) == "user:p\nassistant:A1user:x\nassistant:A2"
    start = len("user:p\nassistant:")
    assert line.mask[start:].tolist() == [1] * 2 + [0] * 17 + [1] * 2
    assert line.mask[:start].sum() == 0


def test_origins_distinguish_template_context_and_sampled() -> None:
    (line,) = timelines_of(conversation().tree)
    shown = "".join("tcS"[origin] for origin in line.origins)
    assert shown == "tttttct" + "t" * 10 + "SS" + "tttttct" + "t" * 10 + "SS"
    assert Origin.SAMPLED == 2


def test_nodes_give_the_exact_prompt_and_output_of_every_turn() -> None:
    session = conversation()
    (line,) = timelines_of(session.tree)
    prompts = [ToyCodec().decode(line.ids[: node.sampled_start]) for node in line.sampled_nodes]
    assert prompts == ["user:p\nassistant:", "user:p\nassistant:A1user:x\nassistant:"]
    outputs = [ToyCodec().decode(line.ids[node.sampled_start : node.end]) for node in line.sampled_nodes]
    assert outputs == ["A1", "A2"]
    assert [call.prompt_tokens for call in line.calls] == [len(prompt) for prompt in prompts]


def test_versions_are_known_per_token() -> None:
    session = conversation()
    history = [
        Message("user", "p"),
        Message("assistant", "A1"),
        Message("user", "x"),
        Message("assistant", "A2"),
    ]
    turn = session.prepare(Request((*history, Message("user", "y"))))
    session.commit(turn, Generation(as_ids([65, 66, 67]), versions=np.array([4, 5, 5])))
    (line,) = timelines_of(session.tree)
    assert line.versions[line.mask == 1].tolist() == [3, 3, 4, 4, 4, 5, 5]
    assert set(line.versions[line.mask == 0].tolist()) == {-1}
