"""Encodes replies as a real model would: in its template's format, but not always as its tokenizer encodes.

Sampled ids may differ from the tokenizer's encoding of their text. With `vary_tokenization` words are split
at random places and JSON is compact, so that a codec that encodes sampled text again is detected.
"""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import numpy as np

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import ORDINARY
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids


class TemplateReplyEncoder:
    """A model that writes replies as its chat template shows them."""

    def __init__(self, codec: GenericCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        ids = self._encode(self._render(message), self._codec.last_prompt_id(tools=bool(message.tool_calls)))
        _, terminator = self._codec.render_reply(message) or ("", None)
        return as_ids(np.append(ids, terminator)) if stop and terminator is not None else as_ids(ids)

    def _render(self, message: Message) -> str:
        """Returns the text that the template shows for the reply if it is the last message."""
        reply = self._codec.render_reply(message)
        assert reply is not None, f"the template does not show {message}"
        text, _ = reply
        if self._vary_tokenization and self._rng.random() < 0.5:
            for call in message.tool_calls:
                compact = json.dumps(json.loads(call.arguments), separators=(",", ":"))
                text = text.replace(json.dumps(json.loads(call.arguments)), compact)
        return text

    def _encode(self, text: str, after: int) -> Ids:
        encoder = self._codec.segment_encoder
        if not self._vary_tokenization:
            return encoder.encode(text, after)
        parts: list[Ids] = []
        position = 0
        for start, end, token in encoder.find_added_tokens(text):
            parts += [*self._encode_split(text[position:start], after), as_ids([token])]
            position, after = end, token
        parts += self._encode_split(text[position:], after)
        return np.concatenate(parts) if parts else as_ids([])

    def _encode_split(self, text: str, after: int) -> list[Ids]:
        parts: list[Ids] = []
        for piece in self._codec.segment_encoder.escaper.split(text):
            count = self._rng.randint(0, 3) if piece else 0
            edges = [0, *sorted(self._rng.randrange(len(piece)) for _ in range(count)), len(piece)]
            for start, end in pairwise(edges):
                if end > start:
                    parts.append(self._codec.segment_encoder.encode(piece[start:end], after))
                    after = ORDINARY
        return parts
