"""How many tokens an answer may have, which limit ends a conversation, and truncation of tool results.

Truncation marks what is missing:

    head   head...(truncated)
    tail   (truncated)...tail
    both   head...(truncated)...tail

The limit counts what is kept, in tokens or characters; the marker is not counted. A text that fits is
returned unchanged. A cut never splits a character: part of one counts as a token and is not shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import get_args

from msgspec import structs

from branchline.chat.base import Codec
from branchline.core.errors import InputError
from branchline.core.option_checks import check_count
from branchline.core.token_arrays import Ids
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import KeptPart, LoopLimits, TruncateUnit
from branchline.loop.tools.base import ToolResult

_THREAD_CHARACTERS = 50_000
"""Longer results are truncated by tokens in a thread: they are encoded whole, which would block all loops."""
_PARTS = get_args(KeptPart)
_REPLACEMENT_CHARACTER = "\ufffd"
"""What decoders write for part of a character."""


def remaining_tokens(limits: LoopLimits, tokens: int, first_prompt_tokens: int) -> int | None:
    """How many tokens an answer may have after a prompt of `tokens`; None if no limit bounds it.

    >>> limits = LoopLimits(response_length=100, model_length=150)
    >>> remaining_tokens(limits, tokens=80, first_prompt_tokens=20)
    40
    """
    remaining = [limits.max_new_tokens]
    if limits.response_length is not None:
        remaining.append(limits.response_length - (tokens - first_prompt_tokens))
    if limits.model_length is not None:
        remaining.append(limits.model_length - tokens)
    return min([count for count in remaining if count is not None], default=None)


def exhausted_limit(
    limits: LoopLimits, tokens: int, first_prompt_tokens: int, needed: int = 1
) -> tuple[StopReason, str] | None:
    """The limit that leaves fewer than `needed` tokens after a prompt of `tokens`, with its figures."""
    remaining = remaining_tokens(limits, tokens, first_prompt_tokens)
    if remaining is None or remaining >= needed:
        return None
    used = tokens - first_prompt_tokens
    if limits.response_length is not None and used >= limits.response_length:
        return StopReason.RESPONSE_LENGTH, f"{used} tokens of {limits.response_length}"
    return StopReason.MODEL_LENGTH, f"{tokens} tokens of {limits.model_length}"


def reached_limit(limits: LoopLimits, state: LoopState) -> tuple[StopReason, str] | None:
    """The limit that makes the last answer the final one, with its figures; None if there is none."""
    exhausted = exhausted_limit(limits, state.tokens, state.first_prompt_tokens)
    if exhausted is not None:
        return exhausted
    for reason, turns, limit in (
        (StopReason.ASSISTANT_TURNS, state.assistant_turns, limits.max_assistant_turns),
        (StopReason.USER_TURNS, state.user_turns, limits.max_user_turns),
    ):
        if limit is not None and turns >= limit:
            return reason, f"{turns} of {limit}"
    return None


async def truncate_result(result: ToolResult, limits: LoopLimits, codec: Codec | None) -> ToolResult:
    """The result with its text truncated to `tool_response_length`."""
    length, unit = limits.tool_response_length, limits.tool_response_unit
    if length is None:
        return result
    encode = decode = None
    if codec is not None:
        encode, decode = codec.encode, codec.decode
    arguments = result.content, length, limits.tool_response_keep, unit, encode, decode
    if unit == "tokens" and len(result.content) > _THREAD_CHARACTERS:
        content = await asyncio.to_thread(truncate, *arguments)
    else:
        content = truncate(*arguments)
    return structs.replace(result, content=content)


def truncate(
    text: str,
    limit: int,
    keep: KeptPart = "both",
    unit: TruncateUnit = "tokens",
    encode: Callable[[str], Ids] | None = None,
    decode: Callable[[Ids], str] | None = None,
) -> str:
    """The text, or the part that the limit allows; the unit `tokens` needs a codec's `encode` and `decode`.

    >>> truncate("abcdefgh", 4, "both", "characters")
    'ab...(truncated)...gh'
    """
    check_count("limit", limit, 0)
    if keep not in _PARTS:
        raise InputError(f"keep: got {keep!r}, expected one of {', '.join(_PARTS)}")
    last = {"head": 0, "tail": limit, "both": limit // 2}[keep]
    first = limit - last
    if unit == "characters":
        if len(text) <= limit:
            return text
        head, tail = text[:first], text[len(text) - last :]
    elif unit == "tokens":
        if encode is None or decode is None:
            raise InputError("unit: got 'tokens', expected encode and decode with it")
        ids = encode(text)
        if len(ids) <= limit:
            return text
        # Some tokenizers do not restore a text exactly, so the parts are compared with the decoded text.
        text = decode(ids)
        head = decode(ids[:first]).rstrip(_REPLACEMENT_CHARACTER) if first else ""
        tail = decode(ids[len(ids) - last :]).lstrip(_REPLACEMENT_CHARACTER) if last else ""
        head, tail = _common_prefix(head, text), _common_prefix(tail[::-1], text[::-1])[::-1]
    else:
        raise InputError(f"unit: got {unit!r}, expected tokens or characters")
    return (f"{head}..." if keep != "tail" else "") + "(truncated)" + (f"...{tail}" if keep != "head" else "")


def _common_prefix(part: str, text: str) -> str:
    """The start of the text as far as a separately decoded part agrees with it."""
    if text.startswith(part):
        return part
    for index, (one, other) in enumerate(zip(part, text, strict=False)):
        if one != other:
            return part[:index]
    return text
