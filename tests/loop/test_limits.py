from __future__ import annotations

from typing import Any

import msgspec
import pytest

from branchline.core.errors import InputError
from branchline.loop.limits import LoopLimits, is_optional


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_assistant_turns", 0),
        ("max_user_turns", -1),
        ("max_parallel_calls", 0),
        ("tool_response_length", -1),
        ("response_length", 0),
        ("model_length", -5),
        ("max_new_tokens", 0),
        ("wall_clock_s", 0.0),
        ("tool_timeout_s", -1.0),
        ("tool_create_timeout_s", 0),
        ("tool_release_timeout_s", -1),
        ("interaction_timeout_s", 0.0),
    ],
)
def test_a_limit_that_lets_nothing_happen_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"limits\.{name}: got {value}, expected"):
        LoopLimits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tool_response_side": "center"}, "got 'center', expected one of left, right, middle"),
        ({"tool_response_unit": "words"}, "got 'words', expected one of tokens, characters"),
        ({"tool_response_unit": None}, "got None, expected one of tokens, characters"),
        (
            {"max_assistant_turns": "2"},
            "got '2', expected a whole number of 1 or more, or null for no limit",
        ),
        ({"max_user_turns": 1.5}, "got 1.5, expected a whole number of 0 or more, or null for no limit"),
        ({"max_new_tokens": True}, "got True, expected a whole number"),
        ({"wall_clock_s": "60"}, "got '60', expected a number of more than 0, or null for no limit"),
        ({"wall_clock_s": float("nan")}, "got nan, expected a number of more than 0"),
        ({"max_parallel_calls": None}, "got None, expected a whole number of 1 or more"),
    ],
)
def test_a_limit_of_another_kind_is_refused_by_name_when_it_is_written(given: Any, words: str) -> None:
    (name,) = given
    with pytest.raises(InputError) as refused:
        LoopLimits(**given)
    told = str(refused.value)
    assert told.startswith(f"limits.{name}: {words}")
    assert told.endswith("null for no limit") == is_optional(name), "nobody is told to write what is refused"


def test_limits_that_fit_are_taken_and_come_back_as_they_were() -> None:
    limits = LoopLimits(max_user_turns=0, tool_response_length=0, wall_clock_s=60, tool_timeout_s=None)
    assert msgspec.json.decode(msgspec.json.encode(limits), type=LoopLimits) == limits
    assert not limits.needs_token_counts
    assert LoopLimits(response_length=1).needs_token_counts
    assert LoopLimits(model_length=1).needs_token_counts
