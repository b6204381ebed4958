"""Encodes replies as a real model samples them: in the template's format, with non-canonical tokenization.

Sampled ids need not be the ids that the tokenizer gives for their text. With `vary_tokenization`, texts are
split at random positions and JSON is sometimes compact, so that code which re-encodes sampled text fails
tests.
"""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import numpy as np

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.template_profile import EMPTY_THINK
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids


class TemplateReplyEncoder:
    """Encodes replies as the chat template renders them."""

    def __init__(self, codec: GenericCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization
        self._template = codec.tokenizer.chat_template(tools=True)
        self._traits = codec.template_traits(self._template)

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        text = self._render(message)
        ids = self._encode(text)
        if stop:
            (terminator, *_) = sorted(self._codec.terminator_ids)
            ids = np.append(ids, terminator)
        return as_ids(ids)

    def _render(self, message: Message) -> str:
        """Returns the reply as the template renders it as the last message."""
        user = Message("user", ".")
        prompt = self._template.render(self._traits.to_template_messages([user]), now=self._codec.now)
        conversation = self._template.render(
            self._traits.to_template_messages([user, message]),
            now=self._codec.now,
            add_generation_prompt=False,
        )
        assert conversation.startswith(prompt), (prompt, conversation)
        reply = conversation[len(prompt) :]
        ends = [
            start
            for start, _, token in self._codec.segment_encoder.find_added_tokens(reply)
            if token in self._codec.stop_ids
        ]
        reply = reply[: ends[-1]] if ends else reply
        if not message.reasoning_content:
            reply = reply.removeprefix(EMPTY_THINK)
        if self._vary_tokenization and self._rng.random() < 0.5:
            for call in message.tool_calls:
                compact = json.dumps(json.loads(call.arguments), separators=(",", ":"))
                reply = reply.replace(json.dumps(json.loads(call.arguments)), compact)
        return reply

    def _encode(self, text: str) -> Ids:
        if not self._vary_tokenization:
            return self._codec.tokenizer.encode(text)
        parts: list[Ids] = []
        position = 0
        for start, end, token in [
            *self._codec.segment_encoder.find_added_tokens(text),
            (len(text), len(text), -1),
        ]:
            parts += self._encode_split(text[position:start])
            if token >= 0:
                parts.append(as_ids([token]))
            position = end
        return np.concatenate(parts) if parts else as_ids([])

    def _encode_split(self, text: str) -> list[Ids]:
        count = self._rng.randint(0, 3) if text else 0
        cuts = sorted(self._rng.randrange(len(text)) for _ in range(count))
        edges = [0, *cuts, len(text)]
        return [
            self._codec.tokenizer.encode(text[start:end]) for start, end in pairwise(edges) if end > start
        ]
