"""When a loop stops, and how much of what it takes. Read from data sets and written by hand alike."""

from __future__ import annotations

import math
from functools import cache
from typing import get_args, get_type_hints

import msgspec

from branchline.core.errors import InputError
from branchline.loop.tools.truncate import TruncateSide, TruncateUnit

_MAY_BE_ZERO = ("tool_response_length", "max_user_turns")


class LoopLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to stop, and how much of what; None is no limit.

    Where no limit here says how long an answer may be, it has what the session says (`max_tokens`), or the
    gateway (`default_max_tokens`), or all the room that its prompt leaves; 4096 tokens where the engine does
    not say how much its model can hold. A session's `max_tokens` never lifts a limit.
    """

    max_assistant_turns: int | None = None
    """Answers of the model. The last one that any limit allows is shown to the interaction, if it called no
    tool, for its score; what the interaction says to it is not told to the model and counts as no turn."""
    max_user_turns: int | None = None
    """Answers to the model: the results of one turn's tool calls are one, a user's message is one."""
    max_parallel_calls: int = 8
    """Tool calls that run at once; further ones run after them."""
    tool_response_length: int | None = None
    """Of each tool result; what is longer is cut."""
    tool_response_unit: TruncateUnit = "tokens"
    tool_response_side: TruncateSide = "middle"
    tool_timeout_s: float | None = 60.0
    """Of one call, and of one `calc_reward`."""
    tool_create_timeout_s: float | None = 120.0
    """Of making one tool's instance."""
    tool_release_timeout_s: float | None = 30.0
    """Of putting one away; of an interaction's `finalize` too."""
    interaction_timeout_s: float | None = 600.0
    """Of one `start`, `respond` or `score` of an interaction; one that takes longer is an error."""
    response_length: int | None = None
    """Tokens behind the first prompt: all that is sampled, and all that is said to the model in between."""
    model_length: int | None = None
    """Tokens of a prompt and its answer together."""
    max_new_tokens: int | None = None
    """Of one answer."""
    wall_clock_s: float | None = None
    """Of all runs together; what is half done when it is over is left. What comes before the first turn and
    behind the last (making tools, judging, putting away) has limits of its own and does not count."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            value = getattr(self, name)
            if not _is_valid(name, value, hint):
                raise InputError(f"limits.{name}: got {value!r}, expected {_expected(name, hint)}")

    @property
    def needs_token_counts(self) -> bool:
        """Whether prompts have to be counted before they are asked."""
        return self.response_length is not None or self.model_length is not None


def is_optional(name: str) -> bool:
    """Whether a limit can be lifted; one of those that cannot is left at its default instead.

    >>> is_optional("wall_clock_s"), is_optional("max_parallel_calls")
    (True, False)
    """
    return name not in _hints() or type(None) in get_args(_hints()[name])


@cache
def _hints() -> dict[str, object]:
    """The types of all limits; they can be read only once the class is there."""
    return get_type_hints(LoopLimits)


def _is_valid(name: str, value: object, hint: object) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    if not isinstance(value, int | float):
        return True
    return math.isfinite(value) and (value > 0 if name.endswith("_s") else value >= _minimum(name))


def _minimum(name: str) -> int:
    return 0 if name in _MAY_BE_ZERO else 1


def _expected(name: str, hint: object) -> str:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"one of {', '.join(choices)}"
    what = "a number of more than 0" if name.endswith("_s") else f"a whole number of {_minimum(name)} or more"
    return f"{what}, or null for no limit" if choices else what
