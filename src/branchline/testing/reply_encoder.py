"""Says messages as a real model would: in its template's format, and not always in its tokenizer's words.

Sampled ids need not be what the tokenizer would make of their text. An odd speaker cuts words anywhere and
writes compact JSON, so that whatever encodes a sampled text again is found out.
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
    """A model that writes as its chat template shows its own replies."""

    def __init__(self, codec: GenericCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization
        self._template = codec.tokenizer.chat_template(tools=True)
        self._dialect = codec.template_traits(self._template)

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        text = self._render(message)
        ids = self._encode(text)
        if stop:
            (terminator, *_) = sorted(self._codec.terminator_ids)
            ids = np.append(ids, terminator)
        return as_ids(ids)

    def _render(self, message: Message) -> str:
        """The reply as the template shows it when it is the last thing said."""
        ask = Message("user", ".")
        prompt = self._template.render(self._dialect.to_template_messages([ask]), now=self._codec.now)
        whole = self._template.render(
            self._dialect.to_template_messages([ask, message]),
            now=self._codec.now,
            add_generation_prompt=False,
        )
        assert whole.startswith(prompt), (prompt, whole)
        said = whole[len(prompt) :]
        ends = [
            start
            for start, _, token in self._codec.segment_encoder.find_added_tokens(said)
            if token in self._codec.stop_ids
        ]
        said = said[: ends[-1]] if ends else said
        if not message.reasoning_content:
            said = said.removeprefix(EMPTY_THINK)
        if self._vary_tokenization and self._rng.random() < 0.5:
            for call in message.tool_calls:
                compact = json.dumps(json.loads(call.arguments), separators=(",", ":"))
                said = said.replace(json.dumps(json.loads(call.arguments)), compact)
        return said

    def _encode(self, text: str) -> Ids:
        if not self._vary_tokenization:
            return self._codec.tokenizer.encode(text)
        parts: list[Ids] = []
        place = 0
        for start, end, token in [
            *self._codec.segment_encoder.find_added_tokens(text),
            (len(text), len(text), -1),
        ]:
            parts += self._encode_split(text[place:start])
            if token >= 0:
                parts.append(as_ids([token]))
            place = end
        return np.concatenate(parts) if parts else as_ids([])

    def _encode_split(self, text: str) -> list[Ids]:
        count = self._rng.randint(0, 3) if text else 0
        cuts = sorted(self._rng.randrange(len(text)) for _ in range(count))
        edges = [0, *cuts, len(text)]
        return [
            self._codec.tokenizer.encode(text[start:end]) for start, end in pairwise(edges) if end > start
        ]
