"""minijinja and jinja2, template by template: speed, and whether they render the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from benchmarks.codec.conversations import (
    AGENT,
    CACHE,
    NON_ASCII,
    SHORT,
    THINKING,
    TOOLS,
    ConversationMix,
    MessageWriter,
)
from benchmarks.measure import BenchmarkTable, best_cpu_s, format_ms
from branchline import Message
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.template_probe import probe_template_traits
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.errors import TemplateError

_MESSAGES = 91
_MIXES = (AGENT, SHORT, NON_ASCII, THINKING)
_NOW = datetime(2025, 1, 2, 3, 4)
_REFUSED = "refused"


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"minijinja and jinja2: a conversation of {_MESSAGES} messages, about 30k tokens",
        ["template", "calls", "characters", "minijinja ms", "jinja2 ms", "ratio", "refused", "equal", "used"],
        [
            "The best of 5. Equal: texts of conversations of 1 to 24 messages and of all, in four mixes.",
            "Templates that show no calls are given plain conversations. Refused: by the template itself.",
        ],
    )
    for path in sorted(CACHE.iterdir()):
        if (path / "tokenizer.json").exists():
            _row(report, TokenizerDir.open(path))
    return report


def _row(report: BenchmarkTable, tokenizer: TokenizerDir) -> None:
    source = tokenizer.template_source(tools=True)
    fast = ChatTemplate(source, tokenizer.special_tokens)
    exact = ChatTemplate(source, tokenizer.special_tokens, use_minijinja=False)
    traits = probe_template_traits(exact)
    tools = TOOLS if traits.shows_tools else ()
    whole = _template_messages(AGENT, traits, _MESSAGES)
    text = _render(fast, whole, tools)
    sides = (partial(_render, fast, whole, tools), partial(_render, exact, whole, tools))
    fast_s, exact_s = best_cpu_s(*sides)
    conversations = [
        _template_messages(mix, traits, count) for mix in _MIXES for count in (*range(1, 25), _MESSAGES)
    ]
    texts = [_render(exact, messages, tools) for messages in conversations]
    equal = [
        _render(fast, messages, tools) == exactly
        for messages, exactly in zip(conversations, texts, strict=True)
    ]
    report.add_row(
        tokenizer.path.name,
        "yes" if traits.shows_tool_calls else "no",
        f"{len(text):,}" if text != _REFUSED else _REFUSED,
        format_ms(fast_s),
        format_ms(exact_s),
        f"{exact_s / fast_s:.1f}×",
        texts.count(_REFUSED),
        report.target_cell(f"{sum(equal)}/{len(equal)}", all(equal)),
        "minijinja" if fast.uses_minijinja else f"jinja2: {fast.fallback_reason or 'no minijinja'}",
    )


def _template_messages(mix: ConversationMix, traits: TemplateTraits, count: int) -> list[dict[str, Any]]:
    """The first messages of a conversation, without calls where the template shows none."""
    plain = mix if traits.shows_tool_calls else replace(mix, user_every=1)
    messages: list[Message] = list(islice(MessageWriter(plain).messages(), count))
    return traits.to_template_messages(messages)


def _render(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> str:
    try:
        return template.render(messages, tools, now=_NOW)
    except TemplateError:
        return _REFUSED
