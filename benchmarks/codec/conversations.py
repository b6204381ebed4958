"""Realistic conversations of a tool-using agent, run through a session call by call.

User and assistant messages are prose, tool results are source code; both come from Python's own library.
Sampled ids are canonical (the tokenizer's encoding of the text the template shows), so that every prompt can
be compared with a full render and encode of the same conversation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

import numpy as np

from branchline import Generation, Message, Request, Session, ToolCall
from branchline.chat.base import Extension, HistoryPolicy, NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.call import ToolList
from branchline.core.token_arrays import Ids
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.tree.tree import Node

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
_LIBRARY = Path(os.__file__).parent
_SOURCES = ("argparse.py", "typing.py", "inspect.py", "tarfile.py", "subprocess.py", "http/client.py")
_PROSE_CHARS_PER_TOKEN, _CODE_CHARS_PER_TOKEN = 4.4, 4.35
"""Approximate characters per token."""
_ACCENTS = ("naïve — ✓ ", "größer → ", "«città» … ", "日本語 ")

TOOLS = ToolList(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} Returns text, or an error message.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where, from the root of the repository."},
                    "text": {"type": "string", "description": what},
                    "limit": {
                        "type": "integer",
                        "description": "The maximum number of lines.",
                        "default": 200,
                    },
                },
                "required": ["path"],
            },
        },
    }
    for name, what in (
        ("read_file", "Reads a file of the repository."),
        ("write_file", "Writes a text to a file, and creates the file if it does not exist."),
        ("search", "Finds a regular expression in all files."),
        ("run", "Runs a command in a shell and waits until it exits."),
    )
)


@dataclass(frozen=True)
class ConversationMix:
    """The composition of a conversation, in tokens per message."""

    name: str
    reply_tokens: int = 250
    result_tokens: int = 400
    system_tokens: int = 500
    reasoning_tokens: int = 0
    """The part of reply_tokens that is reasoning before a call."""
    user_every: int = 4
    """Every n-th reply is plain text and a user message follows; 0: never."""
    accents: bool = False
    """Every text contains some words that are not ASCII."""


AGENT = ConversationMix("agent")
SHORT = ConversationMix("short", reply_tokens=56, result_tokens=88, system_tokens=200)
NON_ASCII = ConversationMix("not ASCII", accents=True)
THINKING = ConversationMix("one long cycle with reasoning", reasoning_tokens=120, user_every=0)


class MessageWriter:
    """Writes messages; every text is a new excerpt with a number, so no text occurs twice."""

    def __init__(self, mix: ConversationMix, seed: int = 7) -> None:
        self.mix = mix
        self._rng = Random(seed)
        self._count = 0

    def system(self) -> Message:
        return Message("system", self._text(_prose(), self.mix.system_tokens * _PROSE_CHARS_PER_TOKEN))

    def user(self, tokens: int = 0) -> Message:
        return Message(
            "user", self._text(_prose(), (tokens or self.mix.result_tokens) * _PROSE_CHARS_PER_TOKEN)
        )

    def result(self, call: Message, tokens: int = 0) -> Message:
        text = self._text(_code(), (tokens or self.mix.result_tokens) * _CODE_CHARS_PER_TOKEN)
        return Message("tool", text, tool_call_id=call.tool_calls[0].id)

    def reply(self, *, calls: bool = True) -> Message:
        text_tokens = self.mix.reply_tokens - self.mix.reasoning_tokens
        if not calls:
            return Message("assistant", self._text(_prose(), text_tokens * _PROSE_CHARS_PER_TOKEN))
        reasoning = (
            self._text(_prose(), self.mix.reasoning_tokens * _PROSE_CHARS_PER_TOKEN)
            if self.mix.reasoning_tokens
            else ""
        )
        text = self._text(_prose(), text_tokens * 0.5 * _PROSE_CHARS_PER_TOKEN)
        written = self._text(_code(), text_tokens * 0.3 * _CODE_CHARS_PER_TOKEN)
        arguments = {"path": f"src/part_{self._count}.py", "text": written, "limit": self._rng.randrange(999)}
        name = self._rng.choice(TOOLS)["function"]["name"]
        call = ToolCall(name, json.dumps(arguments, ensure_ascii=False), f"call_{self._count}")
        return Message("assistant", text, reasoning_content=reasoning, tool_calls=(call,))

    def messages(self) -> Iterator[Message]:
        """Yields an endless conversation; it can be continued after any reply."""
        yield self.system()
        yield self.user()
        turn = 0
        while True:
            turn += 1
            calls = not self.mix.user_every or turn % self.mix.user_every > 0
            reply = self.reply(calls=calls)
            yield reply
            yield self.result(reply) if calls else self.user()

    def _text(self, pool: str, chars: float) -> str:
        self._count += 1
        start = self._rng.randrange(len(pool) - int(chars))
        text = pool[start : start + int(chars)].strip()
        if self.mix.accents:
            half = len(text) // 2
            text = text[:half] + self._rng.choice(_ACCENTS) + text[half:]
        return f"{self._count}. {text}"


@cache
def _prose() -> str:
    text = "\n".join(topics.values())
    return " ".join(text.encode("ascii", "ignore").decode().split(" "))


@cache
def _code() -> str:
    text = "\n".join((_LIBRARY / name).read_text(encoding="utf-8") for name in _SOURCES)
    return text.encode("ascii", "ignore").decode()


@dataclass(frozen=True)
class BenchmarkConversation:
    """A conversation in a session, ready for the next message."""

    session: Session
    codec: GenericCodec
    messages: tuple[Message, ...]
    path: list[Node]

    @property
    def tokens(self) -> int:
        return self.path[-1].end

    def extend(self, *new: Message) -> Extension:
        """Calls the codec as `Session.prepare` does."""
        shown = [NewMessage(message) for message in new]
        return self.codec.extend(
            self.path, shown, tools=TOOLS, chat_template_kwargs={}, history=self.session.history
        )

    def prompt_ids(self, extension: Extension) -> Ids:
        kept = [node.ids for node in self.path[: extension.kept]]
        return np.concatenate(
            [*kept, *(piece.ids for piece in extension.message_tokens), extension.generation_prompt_ids]
        )


def open_codec(tokenizer: TokenizerDir) -> GenericCodec:
    """Returns a codec with empty caches."""
    return GenericCodec(tokenizer)


def build_conversation(
    codec: GenericCodec,
    writer: MessageWriter,
    tokens: int,
    history: HistoryPolicy = "template",
    *,
    last_calls: bool = True,
) -> BenchmarkConversation:
    """Runs a conversation call by call until its path has this many tokens."""
    session = Session(writer.mix.name, codec, history=history)
    encoder = TemplateReplyEncoder(codec, Random(0), vary_tokenization=False)
    messages: list[Message] = []
    node = session.tree.root
    for message in writer.messages():
        if message.role == "assistant":
            turn = session.prepare(Request(tuple(messages), TOOLS))
            committed = session.commit(turn, Generation(encoder.encode_reply(message), message=message))
            session.record_delivery(committed.call)
            node = session.tree.nodes[committed.call.outputs[0]]
        messages.append(message)
        if message.role == "assistant" and node.end >= tokens and bool(message.tool_calls) == last_calls:
            break
    return BenchmarkConversation(session, codec, tuple(messages), node.path())


def append_turn(conversation: BenchmarkConversation, new: Message, reply: Message) -> BenchmarkConversation:
    """Returns the conversation after one more turn."""
    messages = (*conversation.messages, new)
    turn = conversation.session.prepare(Request(messages, TOOLS))
    ids = TemplateReplyEncoder(conversation.codec, Random(0), vary_tokenization=False).encode_reply(reply)
    committed = conversation.session.commit(turn, Generation(ids, message=reply))
    node = conversation.session.tree.nodes[committed.call.outputs[0]]
    return replace(conversation, messages=(*messages, reply), path=node.path())


def first_prompt(codec: GenericCodec, messages: Sequence[Message]) -> Extension:
    """Returns the first prompt of a conversation without a session."""
    return codec.extend((), [NewMessage(message) for message in messages], tools=TOOLS, history="template")
