"""One more turn of a long conversation, compared with rendering and encoding all of it again.

Every measured turn adds a new message to a history that a session prepared turn by turn, so the caches hold
what they would hold in production and nothing of the new message.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.codec.conversations import (
    AGENT,
    CACHE,
    NON_ASCII,
    SHORT,
    TOOLS,
    BenchmarkConversation,
    ConversationMix,
    MessageWriter,
    build_conversation,
    open_codec,
)
from benchmarks.codec.full_render import FullRender
from benchmarks.codec.timing import timed
from benchmarks.measure import BenchmarkTable, cpu_s, format_ms
from branchline import Message
from branchline.chat.base import Extension, HistoryPolicy
from branchline.chat.tokenizer import TokenizerDir

_TURNS, _FULL_TURNS = 48, 16
_CONSECUTIVE_TURNS = 12
_TARGET_SIZE = 30_000
_TEMPLATE_TARGET, _VERBATIM_TARGET = 12, 50


@dataclass(frozen=True)
class Case:
    """A history, and the message that follows it."""

    mix: ConversationMix
    tokens: int
    is_user: bool = False
    new_tokens: int = 0
    """The size of the new message if it is not the usual one."""
    is_cold: bool = False
    """Other work runs between two turns, so the processor's caches are cold."""

    @property
    def name(self) -> str:
        follows = "user" if self.is_user else "tool"
        return f"{self.mix.name} {self.tokens // 1000}k + {follows}{', cold' * self.is_cold}"

    def message(self, writer: MessageWriter, conversation: BenchmarkConversation) -> Message:
        if self.is_user:
            return writer.user(self.new_tokens)
        return writer.result(conversation.messages[-1], self.new_tokens)


_CASES = (
    Case(AGENT, 3_000),
    Case(AGENT, 30_000),
    Case(AGENT, 30_000, is_cold=True),
    Case(AGENT, 30_000, is_user=True),
    Case(AGENT, 30_000, new_tokens=700),
    Case(SHORT, 30_000),
    Case(NON_ASCII, 30_000),
    Case(AGENT, 130_000),
)


def table() -> BenchmarkTable:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    report = BenchmarkTable(
        "One turn: codec.extend compared with a full render and encode (Qwen3)",
        [
            "history + new",
            "tokens",
            "msgs",
            "new",
            "template ms",
            "verbatim ms",
            "full ms",
            "template",
            "target",
            "verbatim",
            "target",
            "equal",
        ],
        [
            f"Full: {full.name}.",
            f"CPU time, the median of {_TURNS} turns ({_FULL_TURNS} of full), each with a new message.",
            f"{_CONSECUTIVE_TURNS} consecutive turns, as in a busy gateway. Cold: other work runs",
            f"between two turns and garbage is collected; the median of {_FULL_TURNS // 2}.",
            "Equal: prompts whose ids are those of the full render, under template and verbatim.",
        ],
    )
    for case in _CASES:
        _measure(report, case, tokenizer, full)
    return report


def _measure(report: BenchmarkTable, case: Case, tokenizer: TokenizerDir, full: FullRender) -> None:
    by_template = _Subject(case, tokenizer, "template")
    verbatim = _Subject(case, tokenizer, "verbatim")
    full_s: list[float] = []
    equal: list[bool] = []
    in_a_row = 1 if case.is_cold else _CONSECUTIVE_TURNS
    rounds = _FULL_TURNS // 2 if case.is_cold else _TURNS // _CONSECUTIVE_TURNS
    for _ in range(rounds):
        for side in (by_template, verbatim):
            taken = side.measure_turns(in_a_row)
            for message, ids in taken[: _FULL_TURNS // (2 * rounds)]:
                raw = full.to_template_messages([*side.conversation.messages, message])
                spent, whole = timed(partial(full.encode, raw, TOOLS))
                full_s.append(spent)
                equal.append(whole == ids)
    template_s, verbatim_s = median(by_template.spent_s), median(verbatim.spent_s)
    whole_s = median(full_s)
    has_target = case.tokens == _TARGET_SIZE
    report.add_row(
        case.name,
        f"{by_template.conversation.tokens:,}",
        len(by_template.conversation.messages),
        f"{median(by_template.encoded):.0f}",
        format_ms(template_s),
        format_ms(verbatim_s),
        format_ms(whole_s),
        f"{whole_s / template_s:.1f}×",
        report.target_cell(f"≥ {_TEMPLATE_TARGET}×", whole_s / template_s >= _TEMPLATE_TARGET)
        if has_target
        else "",
        f"{whole_s / verbatim_s:.1f}×",
        report.target_cell(f"≥ {_VERBATIM_TARGET}×", whole_s / verbatim_s >= _VERBATIM_TARGET)
        if has_target
        else "",
        report.target_cell(f"{sum(equal)}/{len(equal)}", all(equal)),
    )


class _Subject:
    """A session with its own codec, so that no side uses what another has encoded."""

    def __init__(self, case: Case, tokenizer: TokenizerDir, history: HistoryPolicy) -> None:
        self._case = case
        self._writer = MessageWriter(case.mix, seed=len(history))
        self.conversation = build_conversation(
            open_codec(tokenizer), self._writer, case.tokens, history, last_calls=not case.is_user
        )
        self.spent_s: list[float] = []
        self.encoded: list[int] = []

    def measure_turns(self, count: int) -> list[tuple[Message, list[int]]]:
        """Measures turns that are not committed, so that each extends the same history."""
        taken: list[tuple[Message, Extension]] = []
        messages = [self._case.message(self._writer, self.conversation) for _ in range(count)]
        cpu_s(lambda: taken.extend([(message, self._measure_turn(message)) for message in messages]))
        return [(message, self.conversation.prompt_ids(extension).tolist()) for message, extension in taken]

    def _measure_turn(self, message: Message) -> Extension:
        encoder = self.conversation.codec.segment_encoder
        before, start = encoder.encoded_tokens, time.process_time()
        extension = self.conversation.extend(message)
        self.spent_s.append(time.process_time() - start)
        self.encoded.append(encoder.encoded_tokens - before)
        assert extension.kept == len(self.conversation.path), "the history was not kept"
        return extension
