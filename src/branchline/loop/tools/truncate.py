"""Tool results cut to size, with a mark where something is missing.

    left    (truncated)...tail
    right   head...(truncated)
    middle  head...(truncated)...tail

The limit counts what is kept, in the unit that is named; the mark comes on top. A text that fits is returned
as it is. A cut never falls inside a character: half of one counts as a token, and is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from branchline.core.errors import InputError
from branchline.core.token_arrays import Ids

TruncateSide = Literal["left", "right", "middle"]
TruncateUnit = Literal["tokens", "characters"]

_SIDES = ("left", "right", "middle")
_REPLACEMENT_CHARACTER = "\ufffd"
"""What decoders write for part of a character."""


def truncate(
    text: str,
    limit: int,
    side: TruncateSide = "middle",
    unit: TruncateUnit = "tokens",
    *,
    encode: Callable[[str], Ids] | None = None,
    decode: Callable[[Ids], str] | None = None,
) -> str:
    """The text, or as much of it as the limit allows; tokens need a codec's `encode` and `decode`.

    >>> truncate("abcdefgh", 4, "middle", "characters")
    'ab...(truncated)...gh'
    """
    if limit < 0:
        raise InputError(f"limit: got {limit}, expected 0 or more")
    if side not in _SIDES:
        raise InputError(f"side: got {side!r}, expected one of {', '.join(_SIDES)}")
    last = {"left": limit, "right": 0, "middle": limit // 2}[side]
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
        # What decoding gives, where a tokenizer does not give a text back as it was.
        text = decode(ids)
        head = _common_prefix(decode(ids[:first]).rstrip(_REPLACEMENT_CHARACTER), text) if first else ""
        tail = (
            _common_prefix(decode(ids[len(ids) - last :]).lstrip(_REPLACEMENT_CHARACTER)[::-1], text[::-1])[
                ::-1
            ]
            if last
            else ""
        )
    else:
        raise InputError(f"unit: got {unit!r}, expected tokens or characters")
    return (
        (f"{head}..." if side != "left" else "") + "(truncated)" + (f"...{tail}" if side != "right" else "")
    )


def _common_prefix(piece: str, whole: str) -> str:
    """How the whole begins, as far as a piece decoded by itself agrees."""
    if whole.startswith(piece):
        return piece
    for place, (one, other) in enumerate(zip(piece, whole, strict=False)):
        if one != other:
            return piece[:place]
    return whole
