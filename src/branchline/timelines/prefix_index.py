"""Finds for all logged calls at once which outputs they repeat as a prefix, in time linear in the log.

Each call's messages are a sequence of 128-bit keys. The hashes of all prefixes turn "is this output's path a
prefix of that call's messages" into one lookup; a hit is then confirmed key by key. Token ids are handled the
same way. The result does not depend on the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from branchline.core.token_arrays import Ids

Hashes = NDArray[np.uint64]

_MIX_A = np.uint64(0x9E3779B97F4A7C15)
_MIX_B = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_C = np.uint64(0x165667B19E3779F9)
_UINT64_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class CallKeys:
    """The keys of one call's messages and outputs."""

    scope: int
    """Calls of different scopes (agents, tool lists) never match."""
    message_keys: bytes
    """16 bytes per message of the request."""
    output_keys: tuple[bytes, ...]


PrefixMatch = tuple[int, int, int]
"""(depth, call, output): messages[:depth] are that call's messages and that output."""


class MessagePrefixIndex:
    """Matches each call with the outputs that a prefix of its messages ends in, deepest first."""

    def __init__(self, calls: Sequence[CallKeys]) -> None:
        self._calls = calls
        self._keys = [np.frombuffer(call.message_keys, np.uint64).reshape(-1, 2) for call in calls]
        lengths = np.array([len(key) for key in self._keys], np.int64)
        powers = _powers(int(lengths.max(initial=0)) + 1)
        self._prefixes = _prefix_hashes(calls, self._keys, lengths, powers)
        self._offsets = np.concatenate(([0], np.cumsum(lengths + 1)))
        counts = [len(call.output_keys) for call in calls]
        self._outputs = [(call, output) for call, count in enumerate(counts) for output in range(count)]
        ends = np.repeat(self._offsets[1:] - 1, counts)
        output_keys = b"".join(key for call in calls for key in call.output_keys)
        last = _combine_halves(np.frombuffer(output_keys, np.uint64).reshape(-1, 2))
        path_hashes = self._prefixes[ends] + last * powers[np.repeat(lengths, counts)]
        self._outputs_by_hash: dict[int, list[int]] = {}
        for position, value in enumerate(path_hashes.tolist()):
            self._outputs_by_hash.setdefault(value, []).append(position)
        self._match_positions = np.flatnonzero(np.isin(self._prefixes, path_hashes))
        self._match_ranges = np.searchsorted(self._match_positions, self._offsets).tolist()

    def matches(self, call: int) -> Iterator[PrefixMatch]:
        first, end = self._match_ranges[call : call + 2]
        if first == end:
            return
        matched, keys, start = self._calls[call], self._keys[call], int(self._offsets[call])
        for position in self._match_positions[first:end][::-1].tolist():
            depth = position - start
            for candidate in self._outputs_by_hash[int(self._prefixes[position])]:
                parent, output = self._outputs[candidate]
                # Equal hashes are only a hint: compare the keys.
                if (
                    len(self._keys[parent]) == depth - 1
                    and self._calls[parent].scope == matched.scope
                    and self._calls[parent].output_keys[output]
                    == matched.message_keys[16 * depth - 16 : 16 * depth]
                    and np.array_equal(keys[: depth - 1], self._keys[parent])
                ):
                    yield depth, parent, output


def _prefix_hashes(
    calls: Sequence[CallKeys], keys: Sequence[Hashes], lengths: NDArray[np.int64], powers: Hashes
) -> Hashes:
    """Returns the hash of every prefix of every call, concatenated: the sum of key times power of
    position."""
    starts = np.cumsum(lengths) - lengths
    flat = np.concatenate(keys) if len(keys) else np.empty((0, 2), np.uint64)
    positions = np.arange(len(flat)) - np.repeat(starts, lengths)
    sums = np.concatenate(
        (np.zeros(1, np.uint64), np.cumsum(_combine_halves(flat) * powers[positions], dtype=np.uint64))
    )
    scopes = np.array([call.scope for call in calls], np.uint64) * _MIX_C
    # A call has one more prefix than messages: the empty one.
    owners = np.repeat(np.arange(len(calls)), lengths + 1)
    prefixes: Hashes = sums[np.arange(len(owners)) - owners] + (scopes - sums[starts])[owners]
    return prefixes


def _combine_halves(keys: Hashes) -> Hashes:
    folded: Hashes = keys[:, 0] * _MIX_B + keys[:, 1]
    return folded


class TokenPrefixIndex:
    """Matches each call with the outputs whose prompt and ids are a prefix of its prompt ids, deepest first.

    The depth of a match is a number of ids. At most one lookup per id of a prompt, so this is linear too.
    """

    def __init__(
        self, scopes: Sequence[int], prompts: Sequence[Ids | None], outputs: Sequence[Sequence[Ids | None]]
    ) -> None:
        self._scopes, self._prompts, self._outputs = scopes, prompts, outputs
        longest = max((len(prompt) for prompt in prompts if prompt is not None), default=0)
        self._powers = _powers(longest)
        self._outputs_by_hash: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        lengths: dict[int, set[int]] = {scope: set() for scope in scopes}
        for call, prompt in enumerate(prompts):
            if prompt is None:
                continue
            total = int(_weighted_ids(prompt, self._powers).sum(dtype=np.uint64))
            for choice, ids in enumerate(outputs[call]):
                if ids is None or len(prompt) + len(ids) > longest:
                    continue
                length = len(prompt) + len(ids)
                tail = int(_weighted_ids(ids, self._powers[len(prompt) :]).sum(dtype=np.uint64))
                key = (scopes[call], length, (total + tail) & _UINT64_MASK)
                self._outputs_by_hash.setdefault(key, []).append((call, choice))
                lengths[scopes[call]].add(length)
        self._lengths = {scope: np.array(sorted(found), np.int64) for scope, found in lengths.items()}

    def matches(self, call: int) -> Iterator[PrefixMatch]:
        prompt, scope = self._prompts[call], self._scopes[call]
        if prompt is None:
            return
        fitting = self._lengths[scope]
        fitting = fitting[: np.searchsorted(fitting, len(prompt), side="right")]
        sums = np.concatenate(
            (np.zeros(1, np.uint64), np.cumsum(_weighted_ids(prompt, self._powers), dtype=np.uint64))
        )
        for length in fitting[::-1].tolist():
            for parent, choice in self._outputs_by_hash.get((scope, length, int(sums[length])), ()):
                before, output = self._prompts[parent], self._outputs[parent][choice]
                # Only a longer prompt continues an empty output; otherwise equal calls would continue each
                # other.
                if before is not None and len(before) < len(prompt) and starts_with(prompt, before, output):
                    yield length, parent, choice


def starts_with(prompt: Ids, *parts: Ids | None) -> bool:
    """Whether a prompt starts with the concatenation of these parts; False if a part is None."""
    position = 0
    for part in parts:
        if part is None or not np.array_equal(prompt[position : position + len(part)], part):
            return False
        position += len(part)
    return True


def _powers(count: int) -> Hashes:
    return np.cumprod(np.concatenate(([np.uint64(1)], np.full(count, _MIX_A))), dtype=np.uint64)


def _weighted_ids(ids: Ids, powers: Hashes) -> Hashes:
    # +1, so that an id 0 changes the hash.
    return (ids.astype(np.uint64) + np.uint64(1)) * powers[: len(ids)]
