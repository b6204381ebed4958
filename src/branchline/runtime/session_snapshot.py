"""A session as of one moment, complete: another process that reads it has the same tree, id by id.

The encoded form has the records of the tree's commits, as the journal does, so decoding is a replay: the
copy's samples and trajectory are computed by the same code from the same values. The bytes of an image are
sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from branchline.core.call import Delivery
from branchline.core.errors import InputError, TreeError
from branchline.core.reward import read_recorded_reward
from branchline.core.sample import DropReason, ExportReport
from branchline.export.rewards import session_reward
from branchline.export.samples import Export, ExportPolicy, SampleStream, export_nothing
from branchline.export.trajectory import Trajectory
from branchline.tree.match import UNDELIVERED
from branchline.tree.media import detach_payloads, restore_payloads
from branchline.tree.tree import (
    NO_NODE,
    Delivered,
    NewNode,
    Tree,
    TreeDelta,
    check_record,
    decode_array,
    encode_record,
)

FORMAT = 1
"""The number of the encoded form; it changes if older readers cannot read it."""


def count_answered_calls(tree: Tree) -> int:
    """Returns how many calls a client continued, or had answers that were neither cancelled nor lost on their
    way."""
    repeated = {node for call in tree.calls for node in call.reused_nodes}
    return sum(
        tree.delivery(call) not in UNDELIVERED
        or any(tree.nodes[node].children or node in repeated for node in call.outputs)
        for call in tree.calls
    )


@dataclass(frozen=True)
class SessionSnapshot:
    """A session as it was when it was read."""

    id: str
    tree: Tree = field(repr=False)
    state: str = "open"
    """`open`, `completed`, `finalized` or `aborted`."""
    reason: str = ""
    rewards: tuple[Mapping[str, Any], ...] = ()
    agent: str = ""
    group: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    """An evaluation session is never exported."""
    export_policy: ExportPolicy = field(default_factory=ExportPolicy)
    """The policy of `export` and `trajectory` if the caller gives none."""

    @property
    def reward(self) -> float | None:
        """The last score that was posted for the session, not for a part of it."""
        return session_reward(self.rewards)

    def export(
        self,
        policy: ExportPolicy | None = None,
        *,
        include_aborted: bool = False,
        keep_calls: Iterable[str] = (),
    ) -> Export:
        """Returns the samples with the report on every sampled token.

        Evaluation sessions export no samples, aborted ones only with `include_aborted`. `keep_calls` are
        calls that are exported although they were cancelled.
        """
        stream = self.export_stream(policy, include_aborted=include_aborted, keep_calls=keep_calls)
        if isinstance(stream, Export):
            return stream
        return Export(list(stream), stream.report, frozenset(stream.counts))

    def export_stream(
        self,
        policy: ExportPolicy | None = None,
        *,
        include_aborted: bool = False,
        keep_calls: Iterable[str] = (),
    ) -> SampleStream | Export:
        """Does what `export` does, one sample at a time; an Export if there are none."""
        policy = policy or self.export_policy
        policy = replace(policy, keep_calls=policy.keep_calls.union(keep_calls))
        if self.is_eval:
            return export_nothing(self.tree, DropReason.EVALUATION)
        if self.state == "aborted" and not include_aborted:
            return export_nothing(self.tree, DropReason.ABORTED)
        if not self.tree.calls:
            return Export([], ExportReport(0, 0))
        return SampleStream(self.tree, policy, session=self.id, rewards=self.rewards, are_recorded=True)

    def trajectory(
        self, policy: ExportPolicy | None = None, *, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Returns the trajectory; that of an aborted session has failed, and so has one without an answered
        call. Evaluation sessions and aborted ones have no samples."""
        is_aborted = self.state == "aborted"
        trajectory = Trajectory.from_tree(
            self.tree,
            session=self.id,
            rewards=self.rewards,
            metrics=metrics,
            policy=policy or self.export_policy,
            failed=is_aborted or count_answered_calls(self.tree) == 0,
        )
        if not self.is_eval and not is_aborted:
            return trajectory
        reason = DropReason.EVALUATION if self.is_eval else DropReason.ABORTED
        return replace(trajectory, samples=(), report=export_nothing(self.tree, reason).report)

    def encode(self) -> bytes:
        """Returns the snapshot as MessagePack."""
        media: dict[str, bytes] = {}
        commits = []
        for commit in _commits(self.tree):
            detached, payloads = detach_payloads(commit)
            commits.append(detached)
            media |= payloads
        return encode_record(
            _EncodedSnapshot(
                FORMAT,
                self.id,
                self.state,
                self.reason,
                self.rewards,
                self.agent,
                self.group,
                self.metadata,
                self.is_eval,
                self.export_policy,
                tuple(commits),
                self.tree.deliveries,
                media,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> SessionSnapshot:
        """Returns the snapshot that `encode` wrote. Raises InputError for anything else."""
        tree = Tree()
        try:
            found = msgspec.msgpack.decode(data, type=_Format).format
            if found != FORMAT:
                raise InputError(f"snapshot format: got {found}, expected {FORMAT}: another release wrote it")
            encoded = _decoder.decode(data)
            for commit in encoded.commits:
                check_record(commit)
                tree.apply(restore_payloads(commit, encoded.media.get))
            for call_index, delivery in encoded.deliveries.items():
                tree.apply(Delivered(call_index, delivery))
        except (msgspec.DecodeError, TreeError, LookupError, ValueError, TypeError) as error:
            raise InputError(f"snapshot: got {data[:80]!r}, expected that of a session: {error}") from error
        return cls(
            encoded.id,
            tree,
            encoded.state,
            encoded.reason,
            tuple(map(read_recorded_reward, encoded.rewards)),
            encoded.agent,
            encoded.group,
            encoded.metadata,
            encoded.is_eval,
            encoded.export_policy,
        )


class _Format(msgspec.Struct):
    format: int


class _EncodedSnapshot(msgspec.Struct, frozen=True):
    format: int
    id: str
    state: str
    reason: str
    rewards: tuple[Mapping[str, Any], ...]
    agent: str
    group: str
    metadata: Mapping[str, Any]
    is_eval: bool
    export_policy: ExportPolicy
    commits: tuple[TreeDelta, ...]
    deliveries: dict[int, Delivery]
    media: dict[str, bytes]
    """The bytes of images and other media by digest."""


_decoder: msgspec.msgpack.Decoder[_EncodedSnapshot] = msgspec.msgpack.Decoder(
    _EncodedSnapshot, dec_hook=decode_array
)


def _commits(tree: Tree) -> Iterable[TreeDelta]:
    """Yields the commits that built a tree. A commit adds nodes at the end, its outputs last."""
    start = 1
    for call in tree.calls:
        end = max(call.outputs) + 1
        nodes = [
            NewNode(
                node.id,
                NO_NODE if node.parent is None else node.parent.id,
                node.message,
                node.ids,
                node.spans,
                node.source_id,
                node.output,
            )
            for node in tree.nodes[start:end]
        ]
        yield TreeDelta(tuple(nodes), call)
        start = end
