"""What the codecs of real tokenizers share: parsing outputs, decoding ids, and comparing replies.

The same reply can have several spellings: other ids, other whitespace, another JSON style. `ReplyReader`
decides whether two spellings are one reply; the sampled ids are then reused in place of the rendered text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    HistoryPolicy,
    NewMessage,
    PathMessage,
    Tools,
    reply_to_text,
)
from branchline.chat.parsing.output_parser import (
    REASONING_MARKERS,
    OutputFormat,
    OutputParser,
    parse_reply_bytes,
)
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.chat.tokenizer import ORDINARY, TokenizerDir
from branchline.chat.vision import ImageProcessor, ImageSpan, find_image_spans
from branchline.core.message import Message
from branchline.core.token_arrays import Ids


@dataclass(frozen=True)
class ReplyReader:
    """Reads sampled and rendered replies of one output format."""

    segment_encoder: SegmentEncoder
    stop_ids: frozenset[int]
    output_format: OutputFormat
    tools: Tools = ()
    joins_text_to_reasoning: bool = False
    """The template shows the text next to calls as reasoning, so the two are compared as one."""
    framing_ids: frozenset[int] = frozenset()
    """The control tokens that two replies with the same meaning may differ in."""

    def ends_with_stop(self, sampled: Ids) -> bool:
        """Whether the model ended the output itself."""
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def have_same_meaning(
        self, rendered: bytes, sampled: bytes, *, cut: bool, ignore_arguments: bool
    ) -> bool:
        """Whether two different spellings parse to one reply, apart from whitespace and the style of
        arguments. Empty reasoning that only one of them closes is a difference."""
        _, closer = REASONING_MARKERS.get(self.output_format.reasoning_format, ("", ""))
        shown, written = (reply.count(closer.encode()) if closer else 0 for reply in (rendered, sampled))
        # Reasoning that was cut may be closed by the template.
        if shown < written or (shown > written and not cut):
            return False
        for inside in (False, True):
            one, other = (
                parse_reply_bytes(
                    replace(self.output_format, starts_in_reasoning=inside).create_parser(self.tools),
                    reply,
                    cut=cut,
                    ignore_arguments=ignore_arguments,
                    join_text_to_reasoning=self.joins_text_to_reasoning,
                )
                for reply in (rendered, sampled)
            )
            if one == other:
                return True
        return False


class TokenizerCodec:
    """Base of the codecs that use a tokenizer directory."""

    stop_ids: frozenset[int]

    def __init__(self, tokenizer: TokenizerDir) -> None:
        self.tokenizer = tokenizer
        self.vocab_size: int | None = tokenizer.model_vocab_size
        self.segment_encoder = SegmentEncoder(tokenizer)
        self.image_processor: ImageProcessor | None = None
        """None if the model reads text only."""
        self.image_token = ""
        """The placeholder token of images."""

    def with_clock(self, now: datetime) -> Self:
        return self

    def extend(
        self,
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        *,
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        history: HistoryPolicy = "template",
    ) -> Extension:
        raise NotImplementedError

    def image_spans(
        self, messages: Sequence[Message], prompt_ids: Ids, is_sampled: NDArray[np.bool_] | None = None
    ) -> tuple[ImageSpan, ...]:
        if self.image_processor is None:
            return ()
        pad = self.tokenizer.added_tokens[self.image_token]
        return find_image_spans(messages, prompt_ids, pad, self.image_processor, is_sampled)

    def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> int:
        new = [NewMessage(message) for message in messages]
        return len(self.extend((), new, tools=tools, chat_template_kwargs=chat_template_kwargs).ids)

    def parser(
        self, tools: Tools = (), chat_template_kwargs: ChatTemplateKwargs | None = None
    ) -> OutputParser:
        raise NotImplementedError

    def parse(
        self,
        ids: Ids,
        finish_reason: str = "stop",
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Message:
        return self.parser(tools, chat_template_kwargs).parse(ids.tolist(), finish_reason).message

    def plain_parser(self) -> OutputParser:
        return OutputParser(OutputFormat().create_parser(), self.tokenizer.token_bytes, self.stop_ids)

    def encode(self, text: str) -> Ids:
        return self.tokenizer.encode(text)

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """Returns the ids of the reply as plain text, without a terminator: no template shows its format."""
        escaper = self.segment_encoder.escaper
        return self.segment_encoder.encode(escaper.escape(reply_to_text(message)), ORDINARY)

    def decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes_or(token, b"<%d>" % token)
