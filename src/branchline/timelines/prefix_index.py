"""Which logged call continues which output, for all calls at once and in time linear in the log.

Each call's messages are a sequence of 128-bit keys. Hashing every prefix of all calls at once
turns "is this output's path a prefix of that call's messages" into one look-up; a hit is then confirmed
key by key. The same is done on token ids. The answer does not depend on the order of the log.
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
    """One call as the hasher sees it: who asks, its messages' keys, its outputs' keys."""

    scope: int
    """Calls of different scopes (agents, tool lists) never meet."""
    message_keys: bytes
    """16 bytes for each message of the request."""
    output_keys: tuple[bytes, ...]


PrefixMatch = tuple[int, int, int]
"""(depth, call, output): messages[:depth] are that call's messages and that output."""


class MessagePrefixIndex:
    """For each call the outputs it shows as a prefix of its messages, deepest first."""

    def __init__(self, chains: Sequence[CallKeys]) -> None:
        self._calls = chains
        self._keys = [np.frombuffer(chain.message_keys, np.uint64).reshape(-1, 2) for chain in chains]
        lengths = np.array([len(key) for key in self._keys], np.int64)
        powers = _powers(int(lengths.max(initial=0)) + 1)
        self._prefixes = _prefix_hashes(chains, self._keys, lengths, powers)
        self._offsets = np.concatenate(([0], np.cumsum(lengths + 1)))
        counts = [len(chain.output_keys) for chain in chains]
        self._outputs = [(call, output) for call, count in enumerate(counts) for output in range(count)]
        ends = np.repeat(self._offsets[1:] - 1, counts)
        output_keys = b"".join(key for chain in chains for key in chain.output_keys)
        last = _combine_halves(np.frombuffer(output_keys, np.uint64).reshape(-1, 2))
        whole = self._prefixes[ends] + last * powers[np.repeat(lengths, counts)]
        self._outputs_by_hash: dict[int, list[int]] = {}
        for place, value in enumerate(whole.tolist()):
            self._outputs_by_hash.setdefault(value, []).append(place)
        self._match_positions = _positions_of(self._prefixes, whole)
        self._match_ranges = np.searchsorted(self._match_positions, self._offsets).tolist()

    def matches(self, call: int) -> Iterator[PrefixMatch]:
        first, end = self._match_ranges[call : call + 2]
        if first == end:
            return
        chain, keys, start = self._calls[call], self._keys[call], int(self._offsets[call])
        for place in self._match_positions[first:end][::-1].tolist():
            depth = place - start
            for owner in self._outputs_by_hash[int(self._prefixes[place])]:
                parent, output = self._outputs[owner]
                # Equal hashes are a hint; equal keys are the proof.
                if (
                    len(self._keys[parent]) == depth - 1
                    and self._calls[parent].scope == chain.scope
                    and self._calls[parent].output_keys[output]
                    == chain.message_keys[16 * depth - 16 : 16 * depth]
                    and np.array_equal(keys[: depth - 1], self._keys[parent])
                ):
                    yield depth, parent, output


def _positions_of(values: Hashes, wanted: Hashes) -> NDArray[np.intp]:
    """Where values are among those wanted. Most are not, and a table of low bits says so without sorting."""
    bits = np.uint64((1 << (64 * len(wanted)).bit_length()) - 1)
    table = np.zeros(int(bits) + 1, np.bool_)
    table[wanted & bits] = True
    likely = np.flatnonzero(table[values & bits])
    return likely[np.isin(values[likely], wanted)]


def _prefix_hashes(
    chains: Sequence[CallKeys], keys: Sequence[Hashes], lengths: NDArray[np.int64], powers: Hashes
) -> Hashes:
    """The hash of every prefix of every call, end to end: a sum of keys, each times its place's power."""
    starts = np.cumsum(lengths) - lengths
    flat = np.concatenate(keys) if len(keys) else np.empty((0, 2), np.uint64)
    places = np.arange(len(flat)) - np.repeat(starts, lengths)
    sums = np.concatenate(
        (np.zeros(1, np.uint64), np.cumsum(_combine_halves(flat) * powers[places], dtype=np.uint64))
    )
    scopes = np.array([chain.scope for chain in chains], np.uint64) * _MIX_C
    # A call has one prefix more than messages: the empty one.
    calls = np.repeat(np.arange(len(chains)), lengths + 1)
    prefixes: Hashes = sums[np.arange(len(calls)) - calls] + (scopes - sums[starts])[calls]
    return prefixes


def _combine_halves(keys: Hashes) -> Hashes:
    folded: Hashes = keys[:, 0] * _MIX_B + keys[:, 1]
    return folded


class TokenPrefixIndex:
    """For each call the outputs whose prompt and ids are a prefix of its prompt ids, deepest first.

    The depth of a hit is a number of ids. At most as many prefixes are looked up as a prompt has ids, so
    this too is linear in the log.
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
                before, said = self._prompts[parent], self._outputs[parent][choice]
                # An empty output is continued only by a longer prompt, or twins would continue each other.
                if before is not None and len(before) < len(prompt) and starts_with(prompt, before, said):
                    yield length, parent, choice


def starts_with(prompt: Ids, *parts: Ids | None) -> bool:
    """Whether a prompt begins with these ids, one part after the other."""
    place = 0
    for part in parts:
        if part is None or len(prompt) < place + len(part):
            return False
        if not np.array_equal(prompt[place : place + len(part)], part):
            return False
        place += len(part)
    return True


def _powers(count: int) -> Hashes:
    return np.cumprod(np.concatenate(([np.uint64(1)], np.full(count, _MIX_A))), dtype=np.uint64)


def _weighted_ids(ids: Ids, powers: Hashes) -> Hashes:
    # +1: a leading id 0 must change the hash.
    return (ids.astype(np.uint64) + np.uint64(1)) * powers[: len(ids)]
