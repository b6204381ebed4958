"""Encodes replies as a real model would: in its template's format, but not always as its tokenizer encodes.

Sampled ids may differ from the tokenizer's encoding of their text. With `vary_tokenization` words are split
at random places, JSON is compact and literals are JSON's (`true`) where the template writes Python's
(`True`), so that a codec that encodes sampled text again is detected.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import numpy as np

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import ORDINARY
from branchline.core.message import Message, Notation
from branchline.core.token_arrays import Ids, as_ids

_PYTHON_LITERAL = re.compile(r">(\s*)(True|False|None)(\s*)<")
"""A literal between two tags, as a template prints an argument that is no text."""
_JSON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class TemplateReplyEncoder:
    """A model that writes replies as its chat template shows them."""

    def __init__(self, codec: GenericCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        text, terminator = self._render(message)
        if self._vary_tokenization and self._rng.random() < 0.5:
            text = _with_json_style(text, message)
        ids = self._encode(text, self._codec.last_prompt_id(tools=bool(message.tool_calls)))
        return as_ids(np.append(ids, terminator)) if stop and terminator is not None else as_ids(ids)

    def _render(self, message: Message) -> tuple[str, int | None]:
        """Returns the text that the template shows for the reply if it is the last message, and the id that
        ends it."""
        reply = self._codec.render_reply(message)
        assert reply is not None, f"the template does not show {message}"
        return reply

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


def _with_json_style(text: str, message: Message) -> str:
    """Returns the text of a reply with compact JSON and with JSON's literals."""
    for call in message.tool_calls:
        if call.notation == Notation.JSON:
            arguments = json.loads(call.arguments)
            text = text.replace(json.dumps(arguments), json.dumps(arguments, separators=(",", ":")))
    if message.tool_calls:
        text = _PYTHON_LITERAL.sub(lambda found: f">{found[1]}{_JSON_LITERALS[found[2]]}{found[3]}<", text)
    return text
