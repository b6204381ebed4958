"""Logprobs as OpenAI's protocols tell them: of every token its text, its bytes and how likely it was.

A token need not be whole characters; its bytes are what it spells, and those of all tokens together are the
text. Engines tell how likely the sampled token was and nothing of any other, so where alternatives are asked
for it is the only one that is listed.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from branchline.chat.base import Codec
from branchline.core.token_arrays import Floats, Ids

LogprobEntry = dict[str, Any]


def logprob_entries(
    ids: Ids, logprobs: Floats, codec: Codec, *, with_top_logprobs: bool
) -> list[LogprobEntry]:
    """One for each token; `tops`: with the likeliest, as far as they are known."""
    told: list[LogprobEntry] = []
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        spelled = codec.token_bytes(token)
        entry = {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelled)}
        told.append({**entry, "top_logprobs": [entry] if with_top_logprobs else []})
    return told


class TextOffsets:
    """Where in a text each of its tokens begins, counted in characters.

    >>> offsets = TextOffsets()
    >>> [offsets.advance(spelled) for spelled in (b"a\\xc3", b"\\xa9", b"b")]
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def advance(self, spelled: bytes) -> int:
        """The place of the next token; one that goes on with a character stands where that does."""
        place = self._length
        self._length += len(self._decoder.decode(spelled))
        return place


class LogprobAligner:
    """The tokens of an answer, handed out with the texts that were said with them.

    Reasoning, marks of a template and tool calls lie between: a text is looked for by its bytes, behind the
    text before it, where a token begins. Each token is handed out once.
    """

    def __init__(self, codec: Codec, *, with_top_logprobs: bool) -> None:
        self._codec = codec
        self._with_top_logprobs = with_top_logprobs
        self._entries: list[LogprobEntry] = []
        self._starts: list[int] = []
        self._bytes = bytearray()
        self._text_end = 0
        """The end of the text before, in bytes."""
        self._next_token = 0
        """The first token that was not handed out."""

    def add_tokens(self, ids: Ids, logprobs: Floats | None) -> None:
        """More tokens, as they are sampled; without logprobs there is nothing to tell of them."""
        if logprobs is None:
            return
        for entry in logprob_entries(ids, logprobs, self._codec, with_top_logprobs=self._with_top_logprobs):
            self._entries.append(entry)
            self._starts.append(len(self._bytes))
            self._bytes += bytes(entry["bytes"])

    def entries_for_text(self, text: str) -> list[LogprobEntry]:
        """The tokens of a text that was said now; none where it is not what they spell."""
        spelled = text.encode()
        start = next(self._candidate_offsets(spelled), -1)
        if start < 0:
            return []
        self._text_end = start + len(spelled)
        told: list[LogprobEntry] = []
        while self._next_token < len(self._starts) and self._starts[self._next_token] < self._text_end:
            if self._token_end(self._next_token) > start:
                told.append(self._entries[self._next_token])
            self._next_token += 1
        return told

    def _token_end(self, token: int) -> int:
        return self._starts[token + 1] if token + 1 < len(self._starts) else len(self._bytes)

    def _candidate_offsets(self, spelled: bytes) -> Iterator[int]:
        """Where it stands: right behind the text before, else where a token begins, else anywhere."""
        if self._bytes.startswith(spelled, self._text_end):
            yield self._text_end
        for start in self._starts[self._next_token :]:
            if self._bytes.startswith(spelled, start):
                yield start
        if (found := self._bytes.find(spelled, self._text_end)) >= 0:
            yield found
