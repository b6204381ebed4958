"""A codec that encodes nothing: each message's ids are made beforehand and looked up by its key.

So what is measured is the tree's own work. Under `template` it still walks the whole path for thinking
that a template would leave out, as a real codec must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from branchline.chat.base import Extension, History, IncrementalParser, Piece, Recorded, Shown
from branchline.core.errors import CodecError
from branchline.core.message import Message
from branchline.core.runs import Ids, Origin, as_ids


@dataclass(frozen=True)
class ReplayCodec:
    """Hands out pre-made pieces."""

    pieces: Mapping[bytes, Piece]
    opening: Ids
    name: str = "replay"

    def extend(
        self,
        path: Sequence[Recorded],
        new: Sequence[Shown],
        *,
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        history: History,
    ) -> Extension:
        if history == "template" and any(entry.message.reasoning for entry in path):
            raise CodecError("replay: got a path with thinking, expected a conversation without")
        return Extension(len(path), tuple([self._piece(shown) for shown in new]), self.opening, 0)

    def _piece(self, shown: Shown) -> Piece:
        if shown.sampled_ids is None:
            return self.pieces[shown.message.key]
        spans = ((len(self.opening), Origin.TEMPLATE), (len(shown.sampled_ids), Origin.CONTEXT))
        return Piece(as_ids(np.concatenate((self.opening, shown.sampled_ids))), spans)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset()

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), template: Mapping[str, Any] | None = None
    ) -> IncrementalParser:
        raise CodecError("replay: got an output to parse, expected every generation to bring its message")

    def parse(
        self,
        ids: Ids,
        finish: str = "stop",
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> Message:
        raise CodecError("replay: got ids to parse, expected every generation to bring its message")

    def count(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> int:
        return sum(len(self.pieces[message.key].ids) for message in messages) + len(self.opening)

    def decode(self, ids: Ids) -> str:
        return " ".join(map(str, ids.tolist()))

    def token_bytes(self, token: int) -> bytes:
        return b"%d" % token

    def encode(self, text: str) -> Ids:
        raise CodecError("replay: got a text to encode, expected messages whose ids were made beforehand")

    def plain_parser(self) -> IncrementalParser:
        return self.parser()

    def spell(self, message: Message) -> Ids:
        return self.pieces[message.key].ids
