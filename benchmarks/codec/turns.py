"""One more turn of a long conversation, beside rendering and encoding all of it again.

Every measured turn brings a message nobody has seen, behind a history that a session prepared turn by turn:
the caches hold what they would hold then, and nothing of the answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.codec.clock import median_cpu_s, timed
from benchmarks.codec.reference import FullRender
from benchmarks.codec.talks import (
    AGENT,
    CACHE,
    FOREIGN,
    SHORT,
    TOOLS,
    Mix,
    Talk,
    Writer,
    open_codec,
    play,
)
from benchmarks.measure import Report, cpu_s, ms
from branchline import Message
from branchline.chat.base import Extension, History
from branchline.chat.tokenizer import TokenizerDir

_TURNS, _FULL_TURNS = 48, 16
_IN_A_ROW = 12
_CHECKED_RENDERS = 100
"""Of so many renders one is made by jinja2 too."""
_TARGET_SIZE = 30_000
_TEMPLATE_TARGET, _VERBATIM_TARGET = 12, 50


@dataclass(frozen=True)
class Case:
    """A history, and the message that follows it."""

    mix: Mix
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

    def message(self, writer: Writer, talk: Talk) -> Message:
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
    Case(FOREIGN, 30_000),
    Case(AGENT, 130_000),
)


def table() -> Report:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    report = Report(
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
            f"{_IN_A_ROW} turns follow each other, as in a busy gateway. Cold: between two turns the other",
            f"sides work and garbage is collected; the median of {_FULL_TURNS // 2}.",
            f"Under template 1/{_CHECKED_RENDERS} of a jinja2 render is added: one in so many is checked.",
            "Equal: prompts whose ids are those of the full render, under template and verbatim.",
        ],
    )
    for case in _CASES:
        _measure(report, case, tokenizer, full)
    return report


def _measure(report: Report, case: Case, tokenizer: TokenizerDir, full: FullRender) -> None:
    by_template = _Side(case, tokenizer, "template")
    verbatim = _Side(case, tokenizer, "verbatim")
    full_s: list[float] = []
    equal: list[bool] = []
    in_a_row = 1 if case.is_cold else _IN_A_ROW
    rounds = _FULL_TURNS // 2 if case.is_cold else _TURNS // _IN_A_ROW
    for _ in range(rounds):
        for side in (by_template, verbatim):
            taken = side.take_turns(in_a_row)
            for message, ids in taken[: _FULL_TURNS // (2 * rounds)]:
                raw = full.write([*side.talk.messages, message])
                spent, whole = timed(partial(full.ids, raw, TOOLS))
                full_s.append(spent)
                equal.append(whole == ids)
    raw = full.write(by_template.talk.messages)
    check_s = median_cpu_s(lambda: full.template.render(raw, TOOLS)) / _CHECKED_RENDERS
    template_s, verbatim_s = median(by_template.spent_s) + check_s, median(verbatim.spent_s)
    whole_s = median(full_s)
    has_target = case.tokens == _TARGET_SIZE
    report.row(
        case.name,
        f"{by_template.talk.tokens:,}",
        len(by_template.talk.messages),
        f"{median(by_template.encoded):.0f}",
        ms(template_s),
        ms(verbatim_s),
        ms(whole_s),
        f"{whole_s / template_s:.1f}×",
        report.target(f"≥ {_TEMPLATE_TARGET}×", whole_s / template_s >= _TEMPLATE_TARGET)
        if has_target
        else "",
        f"{whole_s / verbatim_s:.1f}×",
        report.target(f"≥ {_VERBATIM_TARGET}×", whole_s / verbatim_s >= _VERBATIM_TARGET)
        if has_target
        else "",
        report.target(f"{sum(equal)}/{len(equal)}", all(equal)),
    )


class _Side:
    """A session of its own, so that no side finds what another has encoded."""

    def __init__(self, case: Case, tokenizer: TokenizerDir, history: History) -> None:
        self._case = case
        self._writer = Writer(case.mix, seed=len(history))
        self.talk = play(
            open_codec(tokenizer), self._writer, case.tokens, history, last_calls=not case.is_user
        )
        self.spent_s: list[float] = []
        self.encoded: list[int] = []

    def take_turns(self, count: int) -> list[tuple[Message, list[int]]]:
        """Measures turns that are not committed, so that each stands behind the same history."""
        taken: list[tuple[Message, Extension]] = []
        messages = [self._case.message(self._writer, self.talk) for _ in range(count)]
        cpu_s(lambda: taken.extend([(message, self._turn(message)) for message in messages]))
        return [(message, self.talk.prompt_ids(extension).tolist()) for message, extension in taken]

    def _turn(self, message: Message) -> Extension:
        encoder = self.talk.codec.encoder
        before, start = encoder.encoded_tokens, time.process_time()
        extension = self.talk.extend(message)
        self.spent_s.append(time.process_time() - start)
        self.encoded.append(encoder.encoded_tokens - before)
        assert extension.kept == len(self.talk.path), "the history was not kept"
        return extension
