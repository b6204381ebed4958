"""Numbers and policies that a user sets for the agent `state`: nonsense is refused where it is set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from branchline.core.errors import InputError
from branchline.loop.agents import run_agent
from branchline.loop.context.context_loop import ContextOptions
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits
from branchline.loop.token_budget import truncate
from branchline.runtime.compaction import (
    Compaction,
    CompactionOptions,
    DropLeastImportant,
    DropOldest,
    Summarize,
)
from branchline.runtime.managed_session import SessionLimits
from tests.loop.context.harness import answer, context_harness
from tests.loop.harness import run

NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, False, "1", b"1", [1], {}, object()]
NO_COUNTS: list[Any] = [*NO_NUMBERS, 0, -1, 1.0, 1.5]

COUNTS = ("max_assistant_turns", "max_parallel_calls", "response_length", "model_length", "max_new_tokens")
COUNTS_FROM_0 = ("max_user_turns", "tool_response_length")
SECONDS = (
    "tool_timeout_s",
    "tool_create_timeout_s",
    "tool_release_timeout_s",
    "interaction_timeout_s",
    "wall_clock_s",
    "cancel_grace_s",
)


def limits_with(name: str) -> Callable[[Any], object]:
    return lambda value: LoopLimits(**{name: value})


# What each numeric option is set by, and what it refuses besides what is no number.
OPTIONS: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "context_length_penalty": (lambda value: ContextOptions(context_length_penalty=value), NO_NUMBERS),
    "response_room": (lambda value: ContextOptions(response_room=value), NO_COUNTS),
    "compaction_target": (
        lambda value: ContextOptions(compaction_target=value),
        [*NO_NUMBERS, 0, -0.5, 1.01, None],
    ),
    "DropOldest.keep_last": (lambda value: DropOldest(value), [*NO_COUNTS, None]),
    "DropLeastImportant.keep_last": (lambda value: DropLeastImportant(keep_last=value), [*NO_COUNTS, None]),
    "Summarize.keep_last": (lambda value: Summarize(keep_last=value), [*NO_COUNTS, None]),
    "compaction.trigger_tokens": (lambda value: CompactionOptions(value), [*NO_COUNTS, None]),
    "compaction.target_tokens": (lambda value: CompactionOptions(9, target_tokens=value), NO_COUNTS),
    "compaction.keep_last": (lambda value: CompactionOptions(9, keep_last=value), [*NO_COUNTS, None]),
    "session limits.calls": (lambda value: SessionLimits(calls=value), NO_COUNTS),
    "session limits.tokens": (lambda value: SessionLimits(tokens=value), NO_COUNTS),
    "truncate.limit": (lambda value: truncate("text", value, "head", "characters"), [*NO_NUMBERS, -1, 1.0]),
    **{f"limits.{name}": (limits_with(name), NO_COUNTS) for name in COUNTS},
    **{f"limits.{name}": (limits_with(name), [*NO_NUMBERS, -1, 1.0]) for name in COUNTS_FROM_0},
    **{f"limits.{name}": (limits_with(name), [*NO_NUMBERS, 0, -1]) for name in SECONDS},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_no_valid_number_is_refused_by_its_name(name: str) -> None:
    build, refused = OPTIONS[name]
    for value in refused:
        with pytest.raises(InputError) as error:
            build(value)
        assert f"{name.rpartition('.')[2]}: got {value!r}, expected" in str(error.value), (name, value)


def test_every_numeric_option_is_in_the_table() -> None:
    named = {name.rpartition(".")[2] for name in OPTIONS}
    for cls in (ContextOptions, DropOldest, DropLeastImportant, Summarize, CompactionOptions, LoopLimits):
        for field, kind in get_type_hints(cls, localns={"CompactionPolicy": object}).items():
            if field != "score" and any(one in (int, float) for one in (kind, *get_args(kind))):
                assert field in named, (cls.__name__, field)


@pytest.mark.parametrize("value", [-1.0, 0, 0.5, 3, None])
def test_penalties_are_finite_numbers_or_none(value: float | None) -> None:
    assert ContextOptions(context_length_penalty=value).context_length_penalty == value


class NoPlan: ...


class WrongArguments:
    def plan(self, messages: Any) -> Compaction | None:
        return None


class AsyncPlan:
    async def plan(self, messages: Any, tokens: Any, excess: int) -> Compaction | None:
        return None


@pytest.mark.parametrize(
    "policy", [NoPlan(), WrongArguments(), AsyncPlan(), DropOldest, "drop_oldest", 3, lambda *_: None]
)
def test_what_can_be_seen_to_be_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(InputError, match=r"^compaction: "):
        ContextOptions(compaction=policy)


@pytest.mark.parametrize("text", ["", "  ", None, 3])
def test_an_instruction_without_a_text_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"^instruction: got"):
        Summarize(text)
    with pytest.raises(InputError, match=r"^compaction.summary_instruction: got"):
        CompactionOptions(9, summary_instruction=text)


def test_a_score_that_is_no_function_and_an_unknown_policy_are_refused() -> None:
    score: Any = 3
    with pytest.raises(InputError, match=r"^score: got 3"):
        DropLeastImportant(score)
    name: Any = "drop"
    with pytest.raises(InputError, match=r"^compaction.policy: got 'drop', expected one of drop_oldest"):
        CompactionOptions(9, policy=name)


@pytest.mark.parametrize(
    ("limits", "options", "problem"),
    [
        (LoopLimits(model_length=100), ContextOptions(response_room=100), "response_room: got 100 tokens"),
        (LoopLimits(model_length=100, max_new_tokens=200), None, r"limits.max_new_tokens: got 200 tokens"),
        (LoopLimits(), ContextOptions(compaction=DropOldest()), r"limits.model_length: got None"),
    ],
)
def test_lengths_with_which_no_prompt_can_fit_are_refused_before_anything_is_asked(
    limits: LoopLimits, options: ContextOptions | None, problem: str
) -> None:
    async def test() -> None:
        async with context_harness([answer(text="x")], limits=limits, options=options) as s:
            with pytest.raises(InputError, match=problem):
                await run_agent(LoopState.begin(s.task()), s.context())
            assert s.model.replies == []

    run(test)


def test_options_are_applied_without_the_agents_tools_too() -> None:
    """They were ignored: the agent `tool` ran, without a penalty."""

    async def test() -> None:
        limits, options = LoopLimits(model_length=30, max_new_tokens=4), ContextOptions(-0.25)
        async with context_harness([answer(text="x")], limits=limits, options=options, tools=("echo",)) as s:
            state: LoopState = await s.run()
            assert (str(state.stop_reason), state.reward_score) == ("model_length", -0.25)

    run(test)
