"""A codec that encodes nothing: the ids of each message are made beforehand and looked up by key.

Benchmarks with it measure the work of the tree alone. Under `template` it still checks the whole path for
reasoning that a template would strip, as a real codec must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import (
    Extension,
    HistoryPolicy,
    IncrementalParser,
    MessageTokens,
    NewMessage,
    PathMessage,
)
from branchline.chat.vision import ImageSpan
from branchline.core.errors import CodecError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Origin, as_ids


@dataclass(frozen=True)
class ReplayCodec:
    """Returns prepared ids."""

    message_tokens: Mapping[bytes, MessageTokens]
    generation_prompt_ids: Ids
    name: str = "replay"

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any],
        history: HistoryPolicy,
    ) -> Extension:
        if history == "template" and any(entry.message.reasoning_content for entry in path):
            raise CodecError("replay: got a path with reasoning, expected a conversation without")
        return Extension(
            len(path), tuple([self._tokens_of(shown) for shown in new]), self.generation_prompt_ids, 0
        )

    def image_spans(
        self, messages: Sequence[Message], prompt_ids: Ids, is_sampled: NDArray[np.bool_] | None = None
    ) -> tuple[ImageSpan, ...]:
        return ()

    def _tokens_of(self, shown: NewMessage) -> MessageTokens:
        if shown.sampled_ids is None:
            return self.message_tokens[shown.message.key]
        spans = ((len(self.generation_prompt_ids), Origin.TEMPLATE), (len(shown.sampled_ids), Origin.CONTEXT))
        return MessageTokens(as_ids(np.concatenate((self.generation_prompt_ids, shown.sampled_ids))), spans)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def vocab_size(self) -> int | None:
        return None

    def with_clock(self, now: datetime) -> ReplayCodec:
        return self

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> IncrementalParser:
        raise CodecError("replay: got an output to parse, expected every generation to bring its message")

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Message:
        raise CodecError("replay: got ids to parse, expected every generation to bring its message")

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        return sum(len(self.message_tokens[message.key].ids) for message in messages) + len(
            self.generation_prompt_ids
        )

    def decode(self, ids: Ids) -> str:
        return " ".join(map(str, ids.tolist()))

    def token_bytes(self, token: int) -> bytes:
        return b"%d" % token

    def encode(self, text: str) -> Ids:
        raise CodecError("replay: got a text to encode, expected messages whose ids were made beforehand")

    def plain_parser(self) -> IncrementalParser:
        return self.parser()

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        return self.message_tokens[message.key].ids
