"""Prompts that are more than a short addition: first renders, forks, and paths without a remembered text.

They profit from the segment cache, which all sessions of a codec share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from benchmarks.codec.conversations import (
    AGENT,
    CACHE,
    THINKING,
    TOOLS,
    BenchmarkConversation,
    MessageWriter,
    append_turn,
    build_conversation,
    first_prompt,
    open_codec,
)
from benchmarks.codec.full_render import FullRender
from benchmarks.codec.timing import timed
from benchmarks.measure import BenchmarkTable, format_ms
from branchline import Message, Request, Session
from branchline.chat.base import Extension
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.token_arrays import Ids

_REPEATS = 3
_TOKENS, _SYSTEM_TOKENS = 30_000, 20_000
_LAST_CYCLE = 4
"""Calls with reasoning in the last cycle of a conversation that had none before."""


@dataclass(frozen=True)
class Prompt:
    """One measured prompt."""

    spent_s: float
    encoded: int
    """Tokens that were not in the segment cache."""
    kept: int
    messages: tuple[Message, ...]
    ids: Ids


Scenario = Callable[[TokenizerDir, int], dict[str, Prompt]]
"""Runs a scenario from empty caches, with a seed, and returns its prompts by name."""


def forks() -> BenchmarkTable:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    report = BenchmarkTable(
        f"First renders and think-strip forks at {_TOKENS // 1000}k tokens (template)",
        ["prompt", "tokens", "messages", "kept", "CPU ms", "encoded", "full ms", "ratio", "equal"],
        [
            f"The median of {_REPEATS} runs from empty caches. Encoded: tokens not in the cache.",
            "Think strip: after a user message the template drops earlier reasoning.",
        ],
    )
    scenarios: tuple[Scenario, ...] = (_first, _long_cycle, _last_cycle)
    for scenario in scenarios:
        _rows(report, full, [scenario(tokenizer, seed) for seed in range(_REPEATS)])
    return report


def sessions() -> BenchmarkTable:
    tokenizer = TokenizerDir.open(CACHE / "qwen3")
    full = FullRender(tokenizer)
    report = BenchmarkTable(
        f"The first turn of a session with a system prompt of {_SYSTEM_TOKENS:,} tokens, and tools",
        ["prompt", "tokens", "messages", "kept", "CPU ms", "encoded", "full ms", "ratio", "equal"],
        [f"Session.prepare, the median of {_REPEATS} runs. Both sessions share a codec."],
    )
    _rows(report, full, [_second_session(tokenizer, seed) for seed in range(_REPEATS)])
    return report


def _rows(report: BenchmarkTable, full: FullRender, runs: Sequence[dict[str, Prompt]]) -> None:
    for name in runs[0]:
        prompts = [run[name] for run in runs]
        full_s: list[float] = []
        equal: list[bool] = []
        for prompt in prompts:
            spent, whole = timed(partial(full.encode, full.to_template_messages(prompt.messages), TOOLS))
            full_s.append(spent)
            equal.append(whole == prompt.ids.tolist())
        ours_s, whole_s, last = median(prompt.spent_s for prompt in prompts), median(full_s), prompts[-1]
        report.add_row(
            name,
            f"{len(last.ids):,}",
            len(last.messages),
            last.kept,
            format_ms(ours_s),
            f"{median(prompt.encoded for prompt in prompts):,}",
            format_ms(whole_s),
            f"{whole_s / ours_s:.1f}×",
            report.target_cell(f"{sum(equal)}/{len(equal)}", all(equal)),
        )


def _first(tokenizer: TokenizerDir, seed: int) -> dict[str, Prompt]:
    writer = MessageWriter(AGENT, seed)
    conversation = build_conversation(open_codec(tokenizer), writer, _TOKENS)
    messages = (*conversation.messages, writer.result(conversation.messages[-1]))
    codec = open_codec(tokenizer)
    cold = _timed_prompt(codec, messages, lambda: first_prompt(codec, messages))
    changed = (*conversation.messages, writer.result(conversation.messages[-1]))
    warm = _timed_prompt(codec, changed, lambda: first_prompt(codec, changed))
    # As after a restart: the tree is read from its journal, the codec remembers nothing.
    return {
        "first render, empty caches": cold,
        "first render, known segments": warm,
        "next turn, text forgotten": _turn(
            replace(conversation, codec=open_codec(tokenizer)), writer.result(conversation.messages[-1])
        ),
    }


def _long_cycle(tokenizer: TokenizerDir, seed: int) -> dict[str, Prompt]:
    writer = MessageWriter(THINKING, seed)
    conversation = build_conversation(open_codec(tokenizer), writer, _TOKENS)
    conversation = append_turn(
        conversation, writer.result(conversation.messages[-1]), writer.reply(calls=False)
    )
    return _forks(conversation, writer, "think strip, whole history")


def _last_cycle(tokenizer: TokenizerDir, seed: int) -> dict[str, Prompt]:
    writer, reasoning_writer = MessageWriter(AGENT, seed), MessageWriter(THINKING, seed + _REPEATS)
    conversation = build_conversation(open_codec(tokenizer), writer, _TOKENS, last_calls=False)
    conversation = append_turn(conversation, writer.user(), reasoning_writer.reply())
    for calls in (True,) * (_LAST_CYCLE - 1) + (False,):
        conversation = append_turn(
            conversation, writer.result(conversation.messages[-1]), reasoning_writer.reply(calls=calls)
        )
    return _forks(conversation, writer, f"think strip, last {_LAST_CYCLE} calls")


def _forks(conversation: BenchmarkConversation, writer: MessageWriter, name: str) -> dict[str, Prompt]:
    first = _turn(conversation, writer.user())
    again = _turn(conversation, writer.user())
    assert first.kept < len(conversation.path), "nothing was stripped"
    later = append_turn(conversation, writer.user(), writer.reply(calls=False))
    return {name: first, f"{name}, again": again, "  the turn after it": _turn(later, writer.user())}


def _turn(conversation: BenchmarkConversation, new: Message) -> Prompt:
    prompt = _timed_prompt(
        conversation.codec, (*conversation.messages, new), lambda: conversation.extend(new)
    )
    kept = [node.ids for node in conversation.path[: prompt.kept]]
    return replace(prompt, ids=np.concatenate([*kept, prompt.ids]))


def _timed_prompt(codec: GenericCodec, messages: tuple[Message, ...], run: Callable[[], Extension]) -> Prompt:
    before = codec.segment_encoder.encoded_tokens
    spent, extension = timed(run)
    encoded = codec.segment_encoder.encoded_tokens - before
    ids = np.concatenate(
        [*(piece.ids for piece in extension.message_tokens), extension.generation_prompt_ids]
    )
    return Prompt(spent, encoded, extension.kept, messages, ids)


def _second_session(tokenizer: TokenizerDir, seed: int) -> dict[str, Prompt]:
    writer = MessageWriter(replace(AGENT, system_tokens=_SYSTEM_TOKENS), seed)
    system, codec = writer.system(), open_codec(tokenizer)
    prompts: dict[str, Prompt] = {}
    for name in ("cold", "in a second session"):
        session = Session(name, codec)
        messages = (system, writer.user())
        before = codec.segment_encoder.encoded_tokens
        spent, turn = timed(partial(session.prepare, Request(messages, TOOLS)))
        encoded = codec.segment_encoder.encoded_tokens - before
        prompts[name] = Prompt(spent, encoded, 0, messages, turn.prompt_ids)
    return prompts
