"""Logprobs in OpenAI's protocols: for every token its text, its bytes and its log-probability.

A token need not end at a character boundary; the bytes of all tokens together are the text. Engines report
the logprob of the sampled token only, so it is the only entry in a list of alternatives.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from branchline.chat.base import Codec
from branchline.core.token_arrays import Floats, Ids

LogprobEntry = dict[str, Any]


def logprob_entries(
    ids: Ids, logprobs: Floats, codec: Codec, *, with_top_logprobs: bool
) -> list[LogprobEntry]:
    """One entry per token; `with_top_logprobs` adds the alternatives, as far as they are known."""
    entries: list[LogprobEntry] = []
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        data = codec.token_bytes(token)
        entry = {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
        entries.append({**entry, "top_logprobs": [entry] if with_top_logprobs else []})
    return entries


class TextOffsets:
    """Computes where in a text each of its tokens begins, in characters.

    >>> offsets = TextOffsets()
    >>> [offsets.advance(data) for data in (b"a\\xc3", b"\\xa9", b"b")]
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def advance(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        offset = self._length
        self._length += len(self._decoder.decode(data))
        return offset


class LogprobAligner:
    """Assigns the tokens of an answer to the texts that they produced; each token is assigned once.

    Reasoning, template markers and tool calls lie between the texts. So a text is searched by its bytes,
    after the text before it, at the start of a token.
    """

    def __init__(self, codec: Codec, *, with_top_logprobs: bool) -> None:
        self._codec = codec
        self._with_top_logprobs = with_top_logprobs
        self._entries: list[LogprobEntry] = []
        self._starts: list[int] = []
        self._bytes = bytearray()
        self._text_end = 0
        """The end of the previous text, in bytes."""
        self._next_token = 0
        """The first token that was not assigned."""

    def add_tokens(
        self, ids: Ids, logprobs: Floats | None, upstream_entries: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Adds sampled tokens, or those of an upstream; tokens without logprobs are ignored."""
        entries = [dict(entry) for entry in upstream_entries]
        if not entries and logprobs is not None:
            entries = logprob_entries(ids, logprobs, self._codec, with_top_logprobs=self._with_top_logprobs)
        for entry in entries:
            self._entries.append(entry)
            self._starts.append(len(self._bytes))
            self._bytes += bytes(entry.get("bytes") or entry["token"].encode())

    def entries_for_text(self, text: str) -> list[LogprobEntry]:
        """The entries of the next text; [] if the tokens do not contain it."""
        data = text.encode()
        start = next(self._candidate_offsets(data), -1)
        if start < 0:
            return []
        self._text_end = start + len(data)
        entries: list[LogprobEntry] = []
        while self._next_token < len(self._starts) and self._starts[self._next_token] < self._text_end:
            if self._token_end(self._next_token) > start:
                entries.append(self._entries[self._next_token])
            self._next_token += 1
        return entries

    def _token_end(self, token: int) -> int:
        return self._starts[token + 1] if token + 1 < len(self._starts) else len(self._bytes)

    def _candidate_offsets(self, data: bytes) -> Iterator[int]:
        """Offsets of the text, best first: right after the previous text, at a token's start, anywhere."""
        if self._bytes.startswith(data, self._text_end):
            yield self._text_end
        for start in self._starts[self._next_token :]:
            if self._bytes.startswith(data, start):
                yield start
        if (found := self._bytes.find(data, self._text_end)) >= 0:
            yield found
