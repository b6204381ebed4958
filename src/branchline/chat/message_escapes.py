"""Which texts of a conversation are escaped: the policy for `token_escapes`.

Text of users and tools never becomes a control token. In the other messages only special tokens are escaped,
because templates take replies apart at tokens such as `</think>`. A text that was sampled in ordinary tokens
never becomes a control token, whatever the options.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from branchline.chat.base import PromptMessage
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.chat.token_escapes import Escape
from branchline.core.call import CachedJsonDict, ToolList
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

_FULLY_ESCAPED_ROLES = frozenset({"user", "tool", "function"})
"""Roles whose text may come from anywhere."""


class MessageEscapes:
    """Escapes the control tokens in the texts of messages and tools."""

    def __init__(
        self, segment_encoder: SegmentEncoder, end_ids: frozenset[int], allow_special_tokens: bool = False
    ) -> None:
        self._encoder = segment_encoder
        self._end_ids = end_ids
        """The tokens that end a reply; they are no part of its text."""
        self._escaper = segment_encoder.escaper
        self._allow_special_tokens = allow_special_tokens

    def find(self, messages: Sequence[PromptMessage], first: int = 0) -> set[int]:
        """Returns the messages from an index on that contain the text of a control token."""
        occurs_in = self._escaper.occurs_in
        return {index for index in range(first, len(messages)) if occurs_in(messages[index].message)}

    def of_messages(
        self, messages: Sequence[PromptMessage], marked: Collection[int], escaped: Collection[int]
    ) -> dict[int, Escape]:
        """Returns how the texts of the messages in `escaped` are escaped. Sampled ids will replace the texts
        of those in `marked`, so the control tokens among these ids are shown as such."""
        return {index: self._of_message(messages[index], index in marked) for index in escaped}

    def of_context(self, message: Message) -> Escape:
        """Returns how the texts of a message that was not sampled are escaped."""
        return partial(self._escaper.escape_value, names=self._context_names(message))

    def escape_tools(self, tools: ToolList) -> Sequence[CachedJsonDict]:
        """Returns tools for a chat template. Their descriptions may come from anywhere."""
        return tools.cached_json_dicts if self._allow_special_tokens else self._escaper.escape_tools(tools)

    def _of_message(self, entry: PromptMessage, is_marked: bool) -> Escape:
        names = frozenset() if is_marked else self._context_names(entry.message)
        if entry.sampled_ids is not None:
            body = entry.sampled_ids[:-1] if self._has_end(entry.sampled_ids) else entry.sampled_ids
            names |= self._escaper.names - self._encoder.control_names_in(body)
        return partial(self._escaper.escape_value, names=names)

    def _has_end(self, ids: Ids) -> bool:
        return len(ids) > 0 and int(ids[-1]) in self._end_ids

    def _context_names(self, message: Message) -> frozenset[str]:
        if self._allow_special_tokens:
            return frozenset()
        return self._escaper.names if message.role in _FULLY_ESCAPED_ROLES else self._escaper.special_names
