"""Where the time of one turn goes: each function of the codec is timed without the others it calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.codec.conversations import (
    AGENT,
    CACHE,
    SHORT,
    TOOLS,
    BenchmarkConversation,
    ConversationMix,
    MessageWriter,
    build_conversation,
    open_codec,
)
from benchmarks.codec.full_render import FullRender
from benchmarks.codec.timing import median_cpu_s
from benchmarks.measure import BenchmarkTable, cpu_s, format_ms
from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.prompt_builder import PromptBuilder
from branchline.chat.generic.span_finder import FieldMarkers, SpanFinder
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer import TokenizerDir

_TURNS, _TOKENS = 25, 30_000
_REST = "the rest"
_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("write template messages", TemplateTraits, "to_template_messages"),
    ("render, minijinja", ChatTemplate, "render"),
    ("compare with the last prompt", PromptBuilder, "_compare_with_remembered"),
    ("search for the nonce", FieldMarkers, "nonce_occurs_in"),
    ("locate messages", SpanFinder, "locate_messages"),
    ("encode: tokenizers", TokenizerDir, "encode"),
    ("encode: segments and cache", SegmentEncoder, "encode"),
    ("split ids", SegmentEncoder, "encode_parts"),
    ("assemble", PromptBuilder, "_assemble"),
)


class Stopwatch:
    """Exclusive CPU seconds by name: while an inner part runs, the clock of the outer part stops."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = [_REST]
        self._since = time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        self.spent_s[self._running[-1]] += now - self._since
        self._since = now

    def wrap(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self._switch()
            self._running.append(name)
            try:
                return run(*args, **options)
            finally:
                self._switch()
                self._running.pop()

        return wrapped

    def pop(self) -> dict[str, float]:
        """Returns the seconds since the last pop."""
        self._switch()
        spent, self.spent_s = dict(self.spent_s), defaultdict(float)
        return spent


@contextmanager
def _instrumented() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    originals = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in _PARTS]
    for (name, owner, attribute), (_, _, original) in zip(_PARTS, originals, strict=True):
        setattr(owner, attribute, watch.wrap(name, original))
    try:
        yield watch
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def table() -> BenchmarkTable:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    histories: tuple[HistoryPolicy, ...] = ("template", "verbatim")
    columns = [_measure(tokenizer, mix, history) for mix in (AGENT, SHORT) for history in histories]
    report = BenchmarkTable(
        f"Where a turn goes at {_TOKENS // 1000}k tokens, CPU ms",
        [
            "part",
            *(f"{conversation.session.id}: {conversation.session.history}" for conversation, _ in columns),
        ],
        [
            f"The median of {_TURNS} turns, each with a new message; a part counts without the others in it.",
        ],
    )
    for name in (*(name for name, _, _ in _PARTS), _REST):
        report.add_row(name, *(format_ms(parts.get(name, 0.0)) for _, parts in columns))
    report.add_row("all", *(format_ms(sum(parts.values())) for _, parts in columns))
    minijinja = open_codec(tokenizer).profile(tools=True).template
    for name, template in (("minijinja", minijinja), ("jinja2", full.template)):
        report.add_row(
            f"only rendered: {name}", *(_render(conversation, template, full) for conversation, _ in columns)
        )
    return report


def _render(conversation: BenchmarkConversation, template: ChatTemplate, full: FullRender) -> str:
    if conversation.session.history == "verbatim":
        return ""
    raw = full.to_template_messages(conversation.messages)
    return format_ms(median_cpu_s(lambda: template.render(raw, TOOLS)))


def _measure(
    tokenizer: TokenizerDir, mix: ConversationMix, history: HistoryPolicy
) -> tuple[BenchmarkConversation, dict[str, float]]:
    writer = MessageWriter(mix)
    conversation = build_conversation(open_codec(tokenizer), writer, _TOKENS, history)
    messages = [writer.result(conversation.messages[-1]) for _ in range(_TURNS)]
    turns: list[dict[str, float]] = []

    def run() -> None:
        for message in messages:
            watch.pop()
            conversation.extend(message)
            turns.append(watch.pop())

    with _instrumented() as watch:
        cpu_s(run)
    names = {name for turn in turns for name in turn}
    return conversation, {name: median(turn.get(name, 0.0) for turn in turns) for name in names}
