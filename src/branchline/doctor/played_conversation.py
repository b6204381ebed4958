"""Plays a conversation through a session, as the gateway would serve it, and reports where prompts fork.

The codec decides whether a prompt forks. A comparison of rendered texts would only estimate it: the codec
keeps replies that the template writes in another style, and generation prompts that history shows
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from branchline.chat.base import HistoryPolicy, RewriteReason
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.template_probe import REASONING_WORD, TOOLS
from branchline.core.call import Generation, Request
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.testing.probed_reply_encoder import ProbedReplyEncoder
from branchline.tree.session import Session


@dataclass(frozen=True)
class PlayedPrompt:
    """The last prompt of a played conversation."""

    text: str
    rewrite_reason: RewriteReason
    sampled_text: str
    """The path that the prompt continues, as it was sampled."""

    @property
    def forks(self) -> bool:
        return self.rewrite_reason != RewriteReason.NONE


class ConversationPlayer:
    """Plays conversations with one codec."""

    def __init__(self, codec: GenericCodec) -> None:
        self._codec = codec
        self.encoder = ProbedReplyEncoder(codec, Random(0), tools=TOOLS, vary_tokenization=False)

    def natural_reply(self, message: Message) -> Message | None:
        """Returns the reply as this model gives it: without reasoning, or with it if the generation prompt
        opens reasoning. None if the template's format does not have such a reply."""
        if self.encoder.can_express(message):
            return message
        thinking = Message(
            "assistant", message.content, reasoning_content=REASONING_WORD, tool_calls=message.tool_calls
        )
        return thinking if self.encoder.can_express(thinking) else None

    def play(
        self, messages: Sequence[Message], *, tools: bool = False, history: HistoryPolicy = "template"
    ) -> PlayedPrompt | None:
        """Samples every assistant message of a conversation and returns the last prompt, or None if the
        format does not have one of the replies. Raises TemplateError if the template refuses a prompt.

        A conversation of context messages only is sent message by message, as by an agent that adds some
        before it asks again.
        """
        tool_list: tuple[dict[str, Any], ...] = TOOLS if tools else ()
        session = Session("probe", self._codec, started_at=self._codec.now, history=history)
        shown: list[Message] = []
        sampled_text = ""
        ends = [index for index, message in enumerate(messages) if message.role == "assistant"]
        for index, message in enumerate(messages):
            reply = self.natural_reply(message) if index in ends else None
            if index in ends and reply is None:
                return None
            if reply is not None or (not ends and index > 0):
                turn = session.prepare(Request(tuple(shown), tool_list))
                answer = reply or self.natural_reply(Message("assistant", "zqaside"))
                if answer is None:
                    return None
                ids = self.encoder.encode_reply(answer)
                session.commit(turn, Generation(as_ids(ids), finish_reason="stop", message=answer))
                sampled_text = self._codec.decode(turn.prompt_ids)
                sampled_text += self._codec.decode(ids) if reply is not None else ""
            shown.append(reply or message)
        last = session.prepare(Request(tuple(shown), tool_list))
        return PlayedPrompt(
            self._codec.decode(last.prompt_ids), RewriteReason(last.rewrite_reason), sampled_text
        )

    def play_or_none(self, messages: Sequence[Message], *, tools: bool) -> PlayedPrompt | None:
        """Returns the same, or None also if the template refuses a prompt."""
        try:
            return self.play(messages, tools=tools)
        except TemplateError:
            return None
