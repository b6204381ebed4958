"""One more turn of a long conversation, beside rendering and encoding all of it again.

Every measured turn brings a message nobody has seen, behind a history that a session prepared turn by turn:
the caches hold what they would hold then, and nothing of the answer.
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
from benchmarks.codec.timing import median_cpu_s, timed
from benchmarks.measure import BenchmarkTable, cpu_s, format_ms
from branchline import Message
from branchline.chat.base import Extension, HistoryPolicy
from branchline.chat.tokenizer import TokenizerDir

_TURNS, _FULL_TURNS = 48, 16
_CONSECUTIVE_TURNS = 12
_CHECKED_RENDERS = 100
"""Of so many renders one is made by jinja2 too."""
_TARGET_SIZE = 30_000
_TEMPLATE_TARGET, _VERBATIM_TARGET = 12, 50


@dataclass(frozen=True)
class Case:
    """A history, and the message that follows it."""

    mix: ConversationMix
    tokens: int
    is_user: bool = False
    new_tokens: int = 0
    """Of the new message, where it is not of the usual size."""
    is_cold: bool = False
    """Between two turns the other sides work: the processor's caches hold nothing of ours."""

    @property
    def name(self) -> str:
        follows = "user" if self.is_user else "tool"
        return f"{self.mix.name} {self.tokens // 1000}k + {follows}{', cold' * self.is_cold}"

    def message(self, writer: MessageWriter, talk: BenchmarkConversation) -> Message:
        if self.is_user:
            return writer.user(self.new_tokens)
        return writer.result(talk.messages[-1], self.new_tokens)


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
        "One turn: codec.extend beside a full render and encode (Qwen3)",
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
            f"{_CONSECUTIVE_TURNS} turns follow each other, as in a busy gateway. Cold: between two turns the other",
            f"sides work and garbage is collected; the median of {_FULL_TURNS // 2}.",
            f"Under template 1/{_CHECKED_RENDERS} of a jinja2 render is added: one in so many is checked.",
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
    raw = full.to_template_messages(by_template.conversation.messages)
    check_s = median_cpu_s(lambda: full.template.render(raw, TOOLS)) / _CHECKED_RENDERS
    template_s, verbatim_s = median(by_template.spent_s) + check_s, median(verbatim.spent_s)
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
    """A session of its own, so that no side finds what another has encoded."""

    def __init__(self, case: Case, tokenizer: TokenizerDir, history: HistoryPolicy) -> None:
        self._case = case
        self._writer = MessageWriter(case.mix, seed=len(history))
        self.conversation = build_conversation(
            open_codec(tokenizer), self._writer, case.tokens, history, last_calls=not case.is_user
        )
        self.spent_s: list[float] = []
        self.encoded: list[int] = []

    def measure_turns(self, count: int) -> list[tuple[Message, list[int]]]:
        """Measures turns that are not committed, so that each stands behind the same history."""
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
