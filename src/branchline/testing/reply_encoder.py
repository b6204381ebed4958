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
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids


class TemplateReplyEncoder:
    """A model that writes replies as its chat template shows them."""

    def __init__(self, codec: GenericCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        ids = self._encode(self._render(message))
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

    def _encode(self, text: str) -> Ids:
        if not self._vary_tokenization:
            return self._codec.tokenizer.encode(text)
        parts: list[Ids] = []
        position = 0
        for start, end, token in self._codec.segment_encoder.find_added_tokens(text):
            parts += [*self._encode_split(text[position:start]), as_ids([token])]
            position = end
        parts += self._encode_split(text[position:])
        return np.concatenate(parts) if parts else as_ids([])

    def _encode_split(self, text: str) -> list[Ids]:
        count = self._rng.randint(0, 3) if text else 0
        cuts = sorted(self._rng.randrange(len(text)) for _ in range(count))
        edges = [0, *cuts, len(text)]
        return [
            self._codec.tokenizer.encode(text[start:end]) for start, end in pairwise(edges) if end > start
        ]
