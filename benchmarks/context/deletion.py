"""The cost of a deletion in a context of 100 messages, beside rendering and encoding everything again.

A deletion changes the prompt from the first deleted message on. The path before it is kept as it is, and of
what follows only the stubs and the result of the deletion are new text: replies keep their sampled ids, and
results are in the segment cache. The reference renders the whole view and encodes all of it. Both sides give
the same ids, because the sampled ids are those of the tokenizer's own encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median

import numpy as np

from benchmarks.codec.conversations import CACHE, TOOLS, ConversationMix, MessageWriter, open_codec
from benchmarks.codec.full_render import FullRender
from benchmarks.codec.timing import timed
from benchmarks.measure import BenchmarkTable, format_ms
from branchline import Generation, Message, Request, Session, ToolCall
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.context_edits import ContextEdit, build_view
from branchline.loop.context.context_state import label_result
from branchline.loop.tools.base import ToolResult
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.tree.tree import Turn

_MESSAGES = 100
_REPEATS = 3
_MIX = ConversationMix("reader", reply_tokens=120, result_tokens=400, user_every=0)


@dataclass(frozen=True)
class Measurement:
    """One prompt, made both ways."""

    turn: Turn
    shown: int
    prepare_s: float
    uncached_tokens: int
    full_s: float
    is_equal: bool


class Conversation:
    """A session whose last answer calls a tool; with the result, the next prompt has 100 messages."""

    def __init__(self, tokenizer: TokenizerDir, full: FullRender, seed: int) -> None:
        self._full = full
        self._codec = open_codec(tokenizer)
        self._session = Session("bench", self._codec)
        encoder = TemplateReplyEncoder(self._codec, Random(seed), vary_tokenization=False)
        writer = MessageWriter(_MIX, seed)
        self.history: list[Message] = []
        for message in writer.messages():
            if message.role == "assistant":
                if len(self.history) == _MESSAGES - 2:
                    message = Message("assistant", "", tool_calls=(ToolCall("run", '{"path": "x"}', "c"),))
                turn = self._session.prepare(Request(tuple(self.history), TOOLS))
                ids = encoder.encode_reply(message)
                self._session.commit(turn, Generation(ids, np.zeros(len(ids), np.float32), message=message))
            elif message.role == "tool":
                result = ToolResult(message.content, tool_call_id=message.tool_call_id)
                message = label_result(result, len(self.history), len(self.history) - 1)
            self.history.append(message)
            if len(self.history) == _MESSAGES - 1:
                break

    def measure(self, message_ids: Sequence[int]) -> Measurement:
        """The next prompt, with these messages deleted."""
        result = ToolResult('{"status":"success"}', tool_call_id=self.history[-1].tool_calls[0].id)
        history = [*self.history, label_result(result, len(self.history), len(self.history) - 1)]
        edits = [ContextEdit(tuple(message_ids))] if message_ids else []
        before = self._codec.segment_encoder.encoded_tokens

        def prepare() -> Turn:
            view = build_view(history, edits)
            return self._session.prepare(Request(view.messages, TOOLS))

        prepare_s, turn = timed(prepare)
        uncached = self._codec.segment_encoder.encoded_tokens - before
        messages = build_view(history, edits).messages
        full_s, ids = timed(partial(self._full.encode, self._full.to_template_messages(messages), TOOLS))
        is_equal = ids == turn.prompt_ids.tolist()
        return Measurement(turn, len(messages), prepare_s, uncached, full_s, is_equal)


def table() -> BenchmarkTable:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    report = BenchmarkTable(
        f"A deletion in a context of {_MESSAGES} messages (Qwen3)",
        ["prompt", "tokens", "CPU ms", "encoded", "not cached", "full ms", "full encoded", "ratio", "equal"],
        [
            f"View and Session.prepare, the median of {_REPEATS} sessions.",
            "Encoded: tokens made from text. Not cached: those that no earlier prompt of the codec had.",
            f"Full: {full.name}.",
        ],
    )
    results = list(range(3, _MESSAGES - 1, 2))
    deletions = {
        "no deletion": [],
        "the latest result": results[-1:],
        "a result in the middle": results[len(results) // 2 : len(results) // 2 + 1],
        "the first result": results[:1],
        "half of the results": results[: len(results) // 2],
        "all results": results,
    }
    for name, message_ids in deletions.items():
        # A session of its own for each: a deletion fills the cache with its stubs.
        runs = [Conversation(tokenizer, full, seed).measure(message_ids) for seed in range(_REPEATS)]
        prepare_s, full_s = median(run.prepare_s for run in runs), median(run.full_s for run in runs)
        last = runs[-1]
        report.add_row(
            name,
            f"{len(last.turn.prompt_ids):,}",
            format_ms(prepare_s),
            f"{median(run.turn.encoded_tokens for run in runs):,.0f}",
            f"{median(run.uncached_tokens for run in runs):,.0f}",
            format_ms(full_s),
            f"{len(last.turn.prompt_ids):,}",
            f"{full_s / prepare_s:.1f}×",
            report.target_cell(
                f"{sum(run.is_equal for run in runs)}/{len(runs)}", all(run.is_equal for run in runs)
            ),
        )
    return report
