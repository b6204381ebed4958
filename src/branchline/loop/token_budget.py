"""What fits: of a tool's result, of an answer, of a whole conversation. Numbers in, numbers out."""

from __future__ import annotations

from msgspec import structs

from branchline.chat.base import Codec
from branchline.core.message import Message
from branchline.loop.state import LoopLimits, LoopState, StopReason
from branchline.loop.tools.truncate import truncate

_THREAD_CHARACTERS = 50_000
"""A result with more of them is cut by tokens in a thread: all of it is encoded, and all loops would wait."""


def remaining_tokens(limits: LoopLimits, tokens: int, first_tokens: int) -> int | None:
    """How many tokens an answer may have behind so many, of which so many are the first prompt's.

    >>> remaining_tokens(LoopLimits(response_length=100, model_length=150), tokens=80, first_tokens=20)
    40
    """
    rooms = [limits.max_new_tokens]
    if limits.response_length is not None:
        rooms.append(limits.response_length - (tokens - first_tokens))
    if limits.model_length is not None:
        rooms.append(limits.model_length - tokens)
    return min([room for room in rooms if room is not None], default=None)


def exhausted_limit(limits: LoopLimits, tokens: int, first_tokens: int) -> tuple[StopReason, str]:
    """Which limit leaves no room, and its figures."""
    used = tokens - first_tokens
    if limits.response_length is not None and used >= limits.response_length:
        return StopReason.RESPONSE_LENGTH, f"{used} tokens of {limits.response_length}"
    return StopReason.MODEL_LENGTH, f"{tokens} tokens of {limits.model_length}"


def reached_limit(limits: LoopLimits, state: LoopState) -> tuple[StopReason, str] | None:
    """Which limit makes the last answer the last, and its figures; None where the conversation may go on."""
    left = remaining_tokens(limits, state.tokens, state.first_prompt_tokens)
    if left is not None and left <= 0:
        return exhausted_limit(limits, state.tokens, state.first_prompt_tokens)
    for ending, turns, most in (
        (StopReason.ASSISTANT_TURNS, state.assistant_turns, limits.max_assistant_turns),
        (StopReason.USER_TURNS, state.user_turns, limits.max_user_turns),
    ):
        if most is not None and turns >= most:
            return ending, f"{turns} of {most}"
    return None


def is_slow_to_truncate(result: Message, limits: LoopLimits) -> bool:
    """Whether cutting a result to size takes so long that others should not have to wait for it."""
    counts_tokens = limits.tool_response_length is not None and limits.tool_response_unit == "tokens"
    return counts_tokens and len(result.content) > _THREAD_CHARACTERS


def truncate_result(result: Message, limits: LoopLimits, codec: Codec | None) -> Message:
    """A tool's result, its text cut to size; what else it shows stays."""
    if limits.tool_response_length is None:
        return result
    text = truncate(
        result.content,
        limits.tool_response_length,
        limits.tool_response_side,
        limits.tool_response_unit,
        encode=codec.encode if codec is not None else None,
        decode=codec.decode if codec is not None else None,
    )
    if text == result.content:
        return result
    return structs.replace(result, content=text, parts=(text, *result.media) if result.media else ())
