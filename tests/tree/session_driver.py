"""A session that tests drive call by call."""

from __future__ import annotations

from branchline import Generation, Message, Request, Session, ToyCodec, Tree
from branchline.tree.tree import Node, Turn

CODEC = ToyCodec()


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


class SessionDriver:
    """Prepares and commits calls of one session."""

    def __init__(self, codec: ToyCodec = CODEC, **options: object) -> None:
        self.codec = codec
        self.session = Session("s", codec, **options)  # type: ignore[arg-type]

    @property
    def tree(self) -> Tree:
        return self.session.tree

    def sample(self, messages: list[Message], *outputs: Message | str, **fields: object) -> Node:
        turn = self.session.prepare(Request(tuple(messages), **fields))  # type: ignore[arg-type]
        messages = [Message("assistant", output) if isinstance(output, str) else output for output in outputs]
        generations = [Generation(self.codec.encode_reply(message), message=message) for message in messages]
        call = self.session.commit(turn, *generations).call
        return self.tree.nodes[call.outputs[0]]

    def prepare(self, *messages: Message, **fields: object) -> Turn:
        return self.session.prepare(Request(messages, **fields))  # type: ignore[arg-type]
