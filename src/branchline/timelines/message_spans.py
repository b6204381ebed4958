"""Which tokens of a merged timeline belong to which message.

A log has the ids of whole prompts, so only outputs have ids of their own. The ids before an output belong to
the message before it if that is the only one since the previous output. With a codec the conversation is
rendered again, and if that gives exactly the logged prompt, the tokens of every message are known. Nothing is
guessed: a message has no span if the log does not tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from branchline.chat.base import Codec, NewMessage
from branchline.core.errors import CodecError
from branchline.core.token_arrays import Origin
from branchline.timelines.merge import MergeResult
from branchline.timelines.timeline import Timeline
from branchline.tree.tree import Node

Span = tuple[int, int]
"""Positions on a timeline: the first token, and the one after the last."""


@dataclass(frozen=True)
class MessageSpans:
    """Locates the messages of the timelines of a merged log."""

    merged: MergeResult
    codec: Codec | None = None

    def of_timeline(self, timeline: Timeline) -> list[Span | None]:
        """Returns the span of each message of a timeline, or None if it is not known.

        The span of an output has the sampled ids; the generation prompt before it belongs to no message, or,
        without a codec, to the message before it.
        """
        spans = _spans_by_outputs(timeline.nodes)
        rendered = self._rendered_spans(timeline) if None in spans else None
        for index, node in enumerate(timeline.nodes):
            if rendered is not None and not node.is_sampled:
                spans[index] = rendered[index]
        return spans

    def _rendered_spans(self, timeline: Timeline) -> list[Span] | None:
        """Returns the spans of the last prompt's messages if the codec renders exactly the logged prompt."""
        leaf = timeline.leaf
        if self.codec is None or leaf.output is None:
            return None
        call = self.merged.logged_call(leaf.output.call_index)
        request, logged = call.request, call.prompt_ids
        if logged is None or not np.array_equal(timeline.ids[: leaf.sampled_start], logged):
            return None
        messages = [
            NewMessage(node.message if node.is_sampled else message, node.sampled_ids)
            for message, node in zip(request.messages, timeline.nodes[:-1], strict=True)
        ]
        try:
            extension = self.codec.extend(
                (),
                messages,
                tools=request.tools,
                chat_template_kwargs=request.chat_template_kwargs,
                history="template",
            )
        except CodecError:
            return None
        if not np.array_equal(extension.ids, logged):
            return None
        ends = np.cumsum([len(tokens.ids) for tokens in extension.message_tokens]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def _spans_by_outputs(nodes: Sequence[Node]) -> list[Span | None]:
    spans: list[Span | None] = []
    without_ids: list[int] = []
    for index, node in enumerate(nodes):
        if node.output is None and not len(node.ids):
            without_ids.append(index)
            spans.append(None)
            continue
        start = node.start
        if node.output is not None and node.spans and node.spans[0][1] == Origin.CONTEXT:
            start += node.spans[0][0]
            if len(without_ids) == 1:
                spans[without_ids[0]] = (node.start, start)
        without_ids.clear()
        spans.append((start, node.end) if node.end > start else None)
    return spans
