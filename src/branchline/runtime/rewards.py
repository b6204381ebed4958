"""A reward as it is kept: a finite score and whatever travels with it, all of it JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from branchline.core.errors import MessageError


def validate_reward(given: object) -> dict[str, Any]:
    """A number, or an object with a `score` (or `reward`); refused here, because a bad one is kept for good.

    >>> validate_reward(1)
    {'score': 1.0}
    """
    reward: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"score": given}
    if "score" not in reward and "reward" in reward:
        reward["score"] = reward["reward"]
    score = reward.get("score")
    if score is None or isinstance(score, bool | str | bytes):
        raise MessageError("score", score, "a finite number, or an object with a score")
    try:
        reward["score"] = float(score)
    except (TypeError, ValueError, OverflowError):
        raise MessageError("score", score, "a finite number, or an object with a score") from None
    if not math.isfinite(reward["score"]):
        raise MessageError("score", score, "a finite number")
    for name, value in reward.items():
        try:
            msgspec.json.encode(value)
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise MessageError(str(name), type(value).__name__, f"JSON ({error})") from None
    return reward
