"""Reads roles, texts and the presence of tools from the ids of a prompt, for two codecs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from zlib import crc32

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import STOP, ToyCodec
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.testing.reply_encoder import TemplateReplyEncoder

CANNED = ("Got it. Thanks for the context!",)
"""Assistant messages that clients write themselves."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    has_tools: bool
    messages: Sequence[tuple[str, str]]
    """Roles and texts, first to last."""

    @property
    def turn(self) -> int:
        """The number of the assistant's messages before this one."""
        replies = [text for role, text in self.messages if role == "assistant"]
        return sum(not text.startswith(CANNED) for text in replies)

    @property
    def text(self) -> str:
        return "\n".join([text for _, text in self.messages])

    def asks_for(self, task: str) -> bool:
        """Whether a user message contains this text."""
        return any(task in text for role, text in self.messages if role == "user")


class ToyPromptReader:
    """The toy codec: a message ends in its terminator."""

    name = "toy"

    def __init__(self) -> None:
        self.codec = ToyCodec.chatml()

    def read(self, ids: Ids) -> Prompt:
        starts = [0, *[index + 1 for index, token in enumerate(ids.tolist()) if token == STOP]]
        texts = [self.codec.decode(ids[a:b]).strip("\n") for a, b in pairwise(starts)]
        # The tools are one line before the first message.
        has_tools = texts[0].startswith("tools:")
        if has_tools:
            texts[0] = texts[0].partition("\n")[2]
        pairs = [text.partition(":") for text in texts]
        return Prompt(has_tools, [(role, text) for role, _, text in pairs])

    def decode(self, ids: Ids) -> str:
        return self.codec.decode(ids)

    def encode_reply(self, message: Message) -> Ids:
        return self.codec.encode_reply(message)


class TemplatePromptReader:
    """A real ChatML template and tokenizer; replies have token boundaries that it would not choose."""

    def __init__(self, codec: GenericCodec) -> None:
        self.codec = codec
        self.name = codec.tokenizer.name

    def read(self, ids: Ids) -> Prompt:
        found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", self.codec.decode(ids), re.DOTALL)
        # A tool result is a user message in this template, but not a task.
        messages = [("tool" if text.startswith("<tool_response>") else role, text) for role, text in found]
        return Prompt("<tools>" in messages[0][1], messages)

    def decode(self, ids: Ids) -> str:
        return self.codec.decode(ids)

    def encode_reply(self, message: Message) -> Ids:
        # Seeded by the reply, so that the order of agents does not matter.
        # Not seeded by arguments: they contain temporary paths, and the style would differ between runs.
        seed = crc32(repr((message.content, [call.name for call in message.tool_calls])).encode())
        return as_ids(TemplateReplyEncoder(self.codec, Random(seed)).encode_reply(message))


PromptReader = ToyPromptReader | TemplatePromptReader
