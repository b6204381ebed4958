"""minijinja beside jinja2, template by template: how fast, and whether they write the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from benchmarks.codec.talks import AGENT, CACHE, FOREIGN, SHORT, THINKING, TOOLS, Mix, Writer
from benchmarks.measure import Report, best_cpu_s, ms
from branchline import Message
from branchline.chat.generic.dialect import Dialect, probe_dialect
from branchline.chat.generic.template import ChatTemplate
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.errors import TemplateError

_MESSAGES = 91
_MIXES = (AGENT, SHORT, FOREIGN, THINKING)
_NOW = datetime(2025, 1, 2, 3, 4)
_REFUSED = "refused"


def table() -> Report:
    report = Report(
        f"minijinja beside jinja2: a conversation of {_MESSAGES} messages, about 30k tokens",
        ["template", "calls", "letters", "minijinja ms", "jinja2 ms", "ratio", "refused", "equal", "used"],
        [
            "The best of 5. Equal: texts of conversations of 1 to 24 messages and of all, in four mixes.",
            "Templates that show no calls are given plain conversations. Refused: by the template itself.",
        ],
    )
    for path in sorted(CACHE.iterdir()):
        if (path / "tokenizer.json").exists():
            _row(report, TokenizerDir.open(path))
    return report


def _row(report: Report, tokenizer: TokenizerDir) -> None:
    source = tokenizer.template(tools=True).source
    fast = ChatTemplate(source, tokenizer.named_tokens)
    exact = ChatTemplate(source, tokenizer.named_tokens, fast=False)
    dialect = probe_dialect(exact)
    tools = TOOLS if dialect.shows_tools else ()
    whole = _written(AGENT, dialect, _MESSAGES)
    text = _render(fast, whole, tools)
    sides = (partial(_render, fast, whole, tools), partial(_render, exact, whole, tools))
    fast_s, exact_s = best_cpu_s(*sides)
    talks = [_written(mix, dialect, count) for mix in _MIXES for count in (*range(1, 25), _MESSAGES)]
    texts = [_render(exact, talk, tools) for talk in talks]
    equal = [_render(fast, talk, tools) == exactly for talk, exactly in zip(talks, texts, strict=True)]
    report.row(
        tokenizer.path.name,
        "yes" if dialect.shows_calls else "no",
        f"{len(text):,}" if text != _REFUSED else _REFUSED,
        ms(fast_s),
        ms(exact_s),
        f"{exact_s / fast_s:.1f}×",
        texts.count(_REFUSED),
        report.target(f"{sum(equal)}/{len(equal)}", all(equal)),
        "minijinja" if fast.is_fast else f"jinja2: {fast.mismatch or 'no minijinja'}",
    )


def _written(mix: Mix, dialect: Dialect, count: int) -> list[dict[str, Any]]:
    """The first messages of a conversation, without calls where the template shows none."""
    plain = mix if dialect.shows_calls else replace(mix, user_every=1)
    messages: list[Message] = list(islice(Writer(plain).history(), count))
    return dialect.write(messages)


def _render(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> str:
    try:
        return template.render(messages, tools, now=_NOW)
    except TemplateError:
        return _REFUSED
