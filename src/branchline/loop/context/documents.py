"""Documents outside the context: split into chunks and searched by an embedded index.

A chunk is a range of a document's characters. Chunks overlap by whole words, and together they cover the
whole document: the text of a chunk without the part that the chunk before it has, joined, is the document.
An index follows from the document and its chunks alone, so trajectories of one task share it, and a resumed
trajectory opens it again.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra

with requires_extra():
    import tantivy

MAX_SEARCH_RESULTS = 20
_SNIPPET_CHARACTERS = 200
_MAX_CACHED_INDEXES = 32
_INDEX_MEMORY_BYTES = 15_000_000
"""The least that tantivy accepts; used only while an index is built."""
_WORD = re.compile(r"\S+\s*|\s+")
_QUERY_SYNTAX = re.compile(r"[^\w\s]+")
TokenCounter = Callable[[str], int]


@dataclass(frozen=True)
class SearchHit:
    """A chunk that matches a query."""

    chunk_id: int
    relevance_score: float
    highlights: str
    """The part of the chunk that matches best, with the matching words between `**`."""


class DocumentIndex:
    """The chunks of one document. Building and searching block: call them in a thread."""

    def __init__(self, text: str, ranges: Sequence[tuple[int, int]]) -> None:
        """`ranges` are the start and end of each chunk, as `chunk_ranges` returns them."""
        self._text = text
        self.ranges = ranges
        self._index = _build_index([text[start:end] for start, end in ranges])

    def __len__(self) -> int:
        return len(self.ranges)

    def read(self, chunk_id: int) -> str:
        start, end = self.ranges[chunk_id]
        return self._text[start:end]

    def search(self, query: str) -> list[SearchHit]:
        """The chunks that contain words of the query, the most relevant (BM25) first."""
        # Upper-case words such as AND are operators of tantivy's query syntax.
        words = _QUERY_SYNTAX.sub(" ", query).lower()
        if not words.strip():
            return []
        parsed, _ = self._index.parse_query_lenient(words, ["body"])
        searcher = self._index.searcher()
        snippets = tantivy.SnippetGenerator.create(searcher, parsed, self._index.schema, "body")
        snippets.set_max_num_chars(_SNIPPET_CHARACTERS)
        hits: list[SearchHit] = []
        for score, address in searcher.search(parsed, MAX_SEARCH_RESULTS).hits:
            document = searcher.doc(address)
            snippet = snippets.snippet_from_doc(document)
            hits.append(
                SearchHit(
                    int(document["chunk_id"][0]),
                    round(float(score), 4),
                    _highlight(snippet.fragment(), snippet.highlighted()),
                )
            )
        # Equal scores come in the order of tantivy's segments, which need not be the same twice.
        return sorted(hits, key=lambda hit: (-hit.relevance_score, hit.chunk_id))


def _build_index(chunks: list[str]) -> tantivy.Index:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("body", stored=True)
    builder.add_integer_field("chunk_id", stored=True)
    index = tantivy.Index(builder.build())
    writer = index.writer(_INDEX_MEMORY_BYTES, 1)
    for chunk_id, text in enumerate(chunks):
        writer.add_document(tantivy.Document(body=text, chunk_id=chunk_id))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return index


def _highlight(fragment: str, ranges: list[Any]) -> str:
    """The fragment with the ranges, which are in bytes of UTF-8, between `**`."""
    data = fragment.encode()
    parts: list[bytes] = []
    position = 0
    for part in sorted(ranges, key=lambda one: int(one.start)):
        parts += [data[position : part.start], b"**", data[part.start : part.end], b"**"]
        position = part.end
    return b"".join([*parts, data[position:]]).decode("utf-8", "replace")


def chunk_ranges(
    text: str, chunk_size: int, overlap: int, count_tokens: TokenCounter
) -> list[tuple[int, int]]:
    """The ranges of chunks of at most `chunk_size` tokens, counted word by word; an empty text has one chunk.

    >>> chunk_ranges("one two three four", 8, 4, len)
    [(0, 8), (8, 14), (14, 18)]
    """
    if chunk_size < 1:
        raise InputError(f"chunk_size: got {chunk_size}, expected 1 or more")
    if not 0 <= overlap < chunk_size:
        raise InputError(f"overlap: got {overlap}, expected 0 or more and less than chunk_size, {chunk_size}")
    words = _split_words(text, chunk_size, count_tokens)
    ranges: list[tuple[int, int]] = []
    first = 0
    while first < len(words):
        last, used = first, 0
        while last < len(words) and (last == first or used + words[last][2] <= chunk_size):
            used += words[last][2]
            last += 1
        ranges.append((words[first][0], words[last - 1][1]))
        if last == len(words):
            break
        first = _overlap_start(words, first, last, overlap, chunk_size)
    return ranges or [(0, len(text))]


def _overlap_start(
    words: list[tuple[int, int, int]], first: int, last: int, overlap: int, chunk_size: int
) -> int:
    """The first word of the next chunk: it repeats at most `overlap` tokens and has room for a new word."""
    start, used = last, 0
    # The next chunk must hold the repeated words and at least one new word.
    room = min(overlap, chunk_size - words[last][2])
    while start - 1 > first and used + words[start - 1][2] <= room:
        start -= 1
        used += words[start][2]
    return start


def _split_words(text: str, chunk_size: int, count_tokens: TokenCounter) -> list[tuple[int, int, int]]:
    """Start, end and tokens of each word with the spaces after it; a word of more tokens than a chunk is cut
    into single characters."""
    counts: dict[str, int] = {}
    words: list[tuple[int, int, int]] = []
    for match in _WORD.finditer(text):
        word = match[0]
        count = counts.get(word)
        if count is None:
            count = counts[word] = count_tokens(word)
        if count <= chunk_size:
            words.append((match.start(), match.end(), count))
            continue
        for offset, character in enumerate(word, match.start()):
            words.append((offset, offset + 1, min(chunk_size, count_tokens(character))))
    return words


# -- shared indexes ----------------------------------------------------------------------------------

_indexes: OrderedDict[bytes, DocumentIndex] = OrderedDict()
_indexes_lock = threading.Lock()


def open_index(text: str, chunk_size: int, overlap: int, count_tokens: TokenCounter) -> DocumentIndex:
    """The index of a document; those used last are kept."""
    ranges = chunk_ranges(text, chunk_size, overlap, count_tokens)
    digest = xxhash.xxh3_128(text.encode("utf-8", "surrogatepass"))
    digest.update(msgspec.msgpack.encode(ranges))
    key = digest.digest()
    with _indexes_lock:
        index = _indexes.get(key)
        if index is not None:
            _indexes.move_to_end(key)
            return index
    # Outside the lock: another thread may build the same index, but none waits for a different one.
    index = DocumentIndex(text, ranges)
    with _indexes_lock:
        _indexes[key] = index
        while len(_indexes) > _MAX_CACHED_INDEXES:
            _indexes.popitem(last=False)
    return index
