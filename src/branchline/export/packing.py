"""Packs training rows into batches of tokens: one after the other, or as a tree in which prefixes are shared.

A packed batch is laid out depth-first. Token q attends to token k if `k <= q < subtree_ends[k]`: its own
ancestors and itself. Without shared prefixes every row is a chain, and the same rule is a document mask. The
weights of a shared token are summed over the rows through it, so the loss and its gradient are those of the
single rows. A token is shared only if its id, and where it is trained its logprob and version, are equal in
both rows. Two answers that begin alike share their first tokens, unless a loss needs whole answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import ExportError
from branchline.core.sample import Sample
from branchline.core.token_arrays import Floats, Ids

NO_PARENT = -1
NO_ANSWER, SEVERAL_ANSWERS = -1, -2


@dataclass(frozen=True)
class TrainingRow:
    """A sample with the loss weight and the advantage of each of its response tokens."""

    sample: Sample
    weights: Floats
    """Share × normaliser; 0 where nothing is trained."""
    advantages: Floats

    def __post_init__(self) -> None:
        for name, values in (("weights", self.weights), ("advantages", self.advantages)):
            if len(values) != len(self.sample.response_ids):
                expected = len(self.sample.response_ids)
                raise ExportError(
                    f"{name}: got {len(values)} values, expected one for each of {expected} tokens"
                )

    def __len__(self) -> int:
        return len(self.sample)

    def answer_spans(self) -> Iterator[tuple[int, int]]:
        """Yields start and end of each trained answer in the response: the sample's answers, or if it lists
        none, the runs of trained tokens."""
        if self.sample.answers:
            for answer in self.sample.answers:
                if self.weights[answer.start] != 0:
                    yield answer.start, answer.end
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.weights != 0, [0]])))
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of several rows in depth-first order. All arrays have one entry per token."""

    ids: Ids
    parents: NDArray[np.int32]
    """The index of the token before each token on its path; NO_PARENT for the first."""
    positions: NDArray[np.int32]
    """The number of tokens before each token on its path."""
    subtree_ends: NDArray[np.int32]
    """The index after the last token that attends to each token."""
    old_logprobs: Floats
    """As sampled; NaN for tokens that are not trained or came without one."""
    versions: NDArray[np.int32]
    weights: NDArray[np.float64]
    """The sum of the weights of the rows that train the token; 0: not trained."""
    positive_advantages: NDArray[np.float64]
    """The sum of weight × advantage over the rows with a positive advantage."""
    negative_advantages: NDArray[np.float64]
    """The same over the rows with a negative advantage. PPO clips either sign differently."""
    shares: NDArray[np.float64]
    """The sum of the shares of the token in the rows that train it: how much it counts in a mean over tokens,
    however the rows are packed."""
    positive_shares: NDArray[np.float64]
    """The same over the rows with a positive advantage."""
    negative_shares: NDArray[np.float64]
    """The same over the rows with a negative advantage."""
    answers: NDArray[np.int32]
    """The number of the answer that each trained token belongs to; SEVERAL_ANSWERS for a token of answers
    that only begin alike, NO_ANSWER for tokens that are not trained."""
    paths: tuple[NDArray[np.int32], ...]
    """The indices of the tokens of each row, in order."""
    rows: tuple[int, ...]
    """The place of each path's row in the sequence that was packed."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def path_tokens(self) -> int:
        """The number of tokens without sharing."""
        return sum(len(path) for path in self.paths)


def pack_rows(
    rows: Sequence[TrainingRow],
    max_tokens: int | None = None,
    *,
    share_prefixes: bool = True,
    share_partial_answers: bool = True,
) -> list[PackedBatch]:
    """Packs rows into batches of at most `max_tokens` tokens; a row that is longer is a batch of its own.

    With `share_partial_answers=False` answers that only begin alike share no token, as losses need that have
    one ratio for an answer. A tree that is larger than the limit is cut between two rows where the fewest
    tokens are needed twice. Rows that add no token to a longer row, its prefixes and copies, stay with it.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ExportError(f"max_tokens: got {max_tokens}, expected 1 or more")
    for index, row in enumerate(rows):
        if row.sample.media:
            raise ExportError(f"rows[{index}]: carries images, which packed batches cannot hold")
    sequences = [np.concatenate([row.sample.prompt_ids, row.sample.response_ids]) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: sequences[index].astype(">u4").tobytes())
    shared = [0] * len(rows)
    if share_prefixes:
        shared = _shared_prefixes([rows[index] for index in order], share_partial_answers)
    lengths = [len(sequences[index]) for index in order]
    pieces = _cut(lengths, shared, max_tokens)
    batches: list[PackedBatch] = []
    for group in _fill_bins(pieces, lengths, shared, max_tokens):
        places = [place for start, end in sorted(group) for place in range(start, end)]
        firsts = {start for start, _ in group}
        batches.append(
            _lay_out(
                rows,
                sequences,
                [order[place] for place in places],
                [0 if place in firsts else shared[place] for place in places],
            )
        )
    return batches


@dataclass
class _PathTokens:
    """The tokens of a path, and how those that are trained were sampled."""

    ids: Ids
    is_trained: NDArray[np.bool_]
    logprobs: NDArray[np.int32]
    """As bits, so that NaN equals NaN."""
    versions: NDArray[np.int32]
    answers: NDArray[np.int32]
    """Equal numbers for tokens of equal answers at one place; 0 for all tokens if that does not matter."""

    @classmethod
    def of_row(cls, row: TrainingRow, numbers: dict[tuple[int, bytes], int] | None) -> _PathTokens:
        """`numbers` are those of the answers of earlier rows; None if answers do not matter."""
        sample, prompt = row.sample, np.zeros(len(row.sample.prompt_ids), np.int32)
        logprobs = sample.response_logprobs.astype(np.float32).view(np.int32)
        answers = np.zeros(len(row), np.int32)
        if numbers is not None:
            values = np.stack([sample.response_ids, logprobs, sample.response_versions])
            for start, end in row.answer_spans():
                key = len(prompt) + start, values[:, start:end].tobytes()
                answers[len(prompt) + start : len(prompt) + end] = numbers.setdefault(key, len(numbers) + 1)
        return cls(
            np.concatenate([sample.prompt_ids, sample.response_ids]),
            np.concatenate([prompt != 0, row.weights != 0]),
            np.concatenate([prompt, logprobs]),
            np.concatenate([prompt, sample.response_versions]),
            answers,
        )


def _shared_prefixes(rows: Sequence[TrainingRow], share_partial_answers: bool) -> list[int]:
    """Returns the length of the prefix that each row shares with the path before it."""
    shared = [0] * len(rows)
    numbers: dict[tuple[int, bytes], int] | None = None if share_partial_answers else {}
    path = _PathTokens.of_row(rows[0], numbers) if rows else None
    for place in range(1, len(rows)):
        assert path is not None
        row = _PathTokens.of_row(rows[place], numbers)
        length = min(len(path.ids), len(row.ids))
        part = slice(length)
        sampled_alike = (
            (path.logprobs[part] == row.logprobs[part])
            & (path.versions[part] == row.versions[part])
            & (path.answers[part] == row.answers[part])
        )
        both_trained = path.is_trained[part] & row.is_trained[part]
        differs = np.flatnonzero((path.ids[part] != row.ids[part]) | (both_trained & ~sampled_alike))
        end = int(differs[0]) if len(differs) else length
        number = row.answers[end] if 0 < end < len(row.ids) else 0
        if number and path.answers[end - 1] == row.answers[end - 1] == number:
            # A row in between left the path inside this answer: the answer is not shared at all.
            end = int(np.flatnonzero(row.answers == number)[0])
        shared[place] = end
        # A token that is context in this row may be trained in an earlier one.
        kept = np.flatnonzero(path.is_trained[: shared[place]])
        row.is_trained[kept] = True
        row.logprobs[kept], row.versions[kept] = path.logprobs[kept], path.versions[kept]
        row.answers[kept] = path.answers[kept]
        path = row
    return shared


def _cut(lengths: Sequence[int], shared: Sequence[int], max_tokens: int | None) -> list[tuple[int, int]]:
    """Splits the rows into pieces of consecutive rows that fit, so that the fewest tokens are repeated.

    A piece starts with a whole row, so a cut costs the prefix that its first row shares with the row before.
    """
    pieces: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or not shared[end]:
            pieces += [
                (start + a, start + b)
                for a, b in _cut_tree(lengths[start:end], shared[start:end], max_tokens)
            ]
            start = end
    return pieces


def _cut_tree(lengths: Sequence[int], shared: Sequence[int], max_tokens: int | None) -> list[tuple[int, int]]:
    count = len(lengths)
    if max_tokens is None:
        return [(0, count)]
    # best[end]: the fewest tokens and pieces for the rows before `end`, and where the last piece starts.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end in range(1, count + 1):
        candidates: list[tuple[int, int, int]] = []
        added = longest = 0
        for start in reversed(range(end)):
            longest = max(longest, lengths[start])
            if added + lengths[start] > max(max_tokens, longest):
                break
            tokens, pieces, _ = best[start]
            candidates.append((tokens + added + lengths[start], pieces + 1, start))
            added += lengths[start] - shared[start]
        best.append(min(candidates))
    cuts: list[tuple[int, int]] = []
    end = count
    while end:
        start = best[end][2]
        cuts.append((start, end))
        end = start
    return cuts[::-1]


def _fill_bins(
    pieces: Sequence[tuple[int, int]], lengths: Sequence[int], shared: Sequence[int], max_tokens: int | None
) -> list[list[tuple[int, int]]]:
    """Puts pieces into batches, the largest first, each into the first batch with room for it."""
    if max_tokens is None:
        return [list(pieces)] if pieces else []
    sizes = {
        piece: sum(lengths[piece[0] : piece[1]]) - sum(shared[piece[0] + 1 : piece[1]]) for piece in pieces
    }
    bins: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -sizes[piece]):
        place = next((index for index, free in enumerate(room) if free >= sizes[piece]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(piece)
        room[place] -= sizes[piece]
    return bins


def _lay_out(
    rows: Sequence[TrainingRow], sequences: Sequence[Ids], order: Sequence[int], shared: Sequence[int]
) -> PackedBatch:
    """Lays out rows depth-first, given the prefix that each shares with the row before."""
    total = sum(len(sequences[index]) for index in order) - sum(shared)
    ids, parents = np.empty(total, np.int32), np.empty(total, np.int32)
    positions, subtree_ends = np.empty(total, np.int32), np.empty(total, np.int32)
    old_logprobs = np.full(total, np.nan, np.float32)
    versions = np.full(total, -1, np.int32)
    weights, positive, negative = np.zeros((3, total), np.float64)
    shares, positive_shares, negative_shares = np.zeros((3, total), np.float64)
    answers = np.full(total, NO_ANSWER, np.int32)
    numbered: dict[int, NDArray[np.int32]] = {}
    paths: list[NDArray[np.int32]] = []
    path = np.empty(0, np.int32)
    used = 0
    for index, prefix in zip(order, shared, strict=True):
        sequence, row = sequences[index], rows[index]
        subtree_ends[path[prefix:]] = used
        added = np.arange(used, used + len(sequence) - prefix, dtype=np.int32)
        used += len(added)
        ids[added] = sequence[prefix:]
        parents[added] = added - 1
        if len(added):
            parents[added[0]] = path[prefix - 1] if prefix else NO_PARENT
        positions[added] = np.arange(prefix, len(sequence), dtype=np.int32)
        path = np.concatenate([path[:prefix], added])
        paths.append(path)
        trained = np.flatnonzero(row.weights)
        places = path[len(row.sample.prompt_ids) + trained]
        products = row.weights[trained].astype(np.float64) * row.advantages[trained]
        old_logprobs[places] = row.sample.response_logprobs[trained]
        versions[places] = row.sample.response_versions[trained]
        weights[places] += row.weights[trained]
        positive[places] += np.maximum(products, 0)
        negative[places] += np.minimum(products, 0)
        row_shares = row.sample.shares[trained].astype(np.float64)
        shares[places] += row_shares
        positive_shares[places] += np.where(products > 0, row_shares, 0)
        negative_shares[places] += np.where(products < 0, row_shares, 0)
        for start, end in row.answer_spans():
            _number_answer(answers, path[len(row.sample.prompt_ids) :][start:end], numbered)
    subtree_ends[path] = used
    return PackedBatch(
        ids=ids,
        parents=parents,
        positions=positions,
        subtree_ends=subtree_ends,
        old_logprobs=old_logprobs,
        versions=versions,
        weights=weights,
        positive_advantages=positive,
        negative_advantages=negative,
        shares=shares,
        positive_shares=positive_shares,
        negative_shares=negative_shares,
        answers=answers,
        paths=tuple(paths),
        rows=tuple(order),
    )


def _number_answer(
    answers: NDArray[np.int32], places: NDArray[np.int32], numbered: dict[int, NDArray[np.int32]]
) -> None:
    """Gives the tokens of an answer the place of its first as number. If they belong to another answer too,
    the tokens of both are marked. `numbered` has the places of each number."""
    known, first = answers[places], int(places[0])
    if (known == NO_ANSWER).all():
        answers[places], numbered[first] = first, places
    elif not np.array_equal(numbered.get(first, ()), places):
        for number in np.unique(known[known >= 0]).tolist():
            answers[numbered[number]] = SEVERAL_ANSWERS
        answers[places] = SEVERAL_ANSWERS
