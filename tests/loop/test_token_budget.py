from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from branchline.chat.base import Codec
from branchline.chat.toy import ToyCodec
from branchline.core.errors import InputError
from branchline.core.token_arrays import Ids
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import KeptPart, LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.token_budget import reached_limit, truncate, truncate_result
from branchline.loop.tools.base import ToolResult, ToolSelection
from tests.chat.families import load_codec
from tests.hang import HANG_S
from tests.loop.harness import LoopScript, ScriptedToolCall, ScriptedTurn, loop_harness, run

LONG = "x" * 50_001


def state_with(**fields: int) -> LoopState:
    state = LoopState.begin(Task(()))
    for name, value in fields.items():
        setattr(state, name, value)
    return state


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (LoopLimits(), None),
        (LoopLimits(max_assistant_turns=3, max_user_turns=3, model_length=101, response_length=81), None),
        (LoopLimits(max_assistant_turns=2), (StopReason.ASSISTANT_TURNS, "2 of 2")),
        (LoopLimits(max_user_turns=1), (StopReason.USER_TURNS, "1 of 1")),
        (LoopLimits(model_length=100), (StopReason.MODEL_LENGTH, "100 tokens of 100")),
        (LoopLimits(response_length=80), (StopReason.RESPONSE_LENGTH, "80 tokens of 80")),
        (
            LoopLimits(max_assistant_turns=2, max_user_turns=1, model_length=100),
            (StopReason.MODEL_LENGTH, "100 tokens of 100"),
        ),
    ],
)
def test_reached_limit(limits: LoopLimits, expected: tuple[StopReason, str] | None) -> None:
    state = state_with(assistant_turns=2, user_turns=1, tokens=100, first_prompt_tokens=20)
    assert reached_limit(limits, state) == expected


@pytest.mark.parametrize(
    ("text", "limits", "is_thread"),
    [
        (LONG, LoopLimits(tool_response_length=9), True),
        (LONG[1:], LoopLimits(tool_response_length=9), False),
        (LONG, LoopLimits(tool_response_length=9, tool_response_unit="characters"), False),
        (LONG, LoopLimits(), False),
    ],
)
def test_only_long_results_are_truncated_in_a_thread(
    text: str, limits: LoopLimits, is_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        threads: list[str] = []

        async def to_thread(function: Any, *args: Any) -> str:
            threads.append(function.__name__)
            return function(*args)  # type: ignore[no-any-return]

        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        result = await truncate_result(ToolResult(text, tool="x"), limits, ToyCodec())
        assert threads == ["truncate"] * is_thread
        assert (result.content == text) == (limits.tool_response_length is None)

    run(test)


class SlowCodec:
    """Encodes when its gate is open; encoding on the event loop would never return."""

    def __init__(self) -> None:
        self._toy = ToyCodec()
        self._loop = asyncio.get_running_loop()
        self.started = asyncio.Event()
        self.gate = threading.Event()

    def encode(self, text: str) -> Ids:
        self._loop.call_soon_threadsafe(self.started.set)
        assert self.gate.wait(HANG_S), "the gate was not opened"
        return self._toy.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._toy.decode(ids)


class SlowModel:
    """A model with a slow codec."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.codec = SlowCodec()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_cancellation_during_truncation_does_not_repeat_the_call(
    is_cancelled: bool,
) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn(tool_calls=(ScriptedToolCall(result=LONG),)), ScriptedTurn("end")))
        ) as s:
            model, cancel = SlowModel(s.model), CancelToken()
            state, limits = LoopState.begin(s.task()), LoopLimits(tool_response_length=4)
            tools = ToolSelection((s.tool,))
            async with AgentLoop(model, state, tools=tools, limits=limits) as loop:  # type: ignore[arg-type]
                task = asyncio.create_task(loop.run(cancel))
                await model.codec.started.wait()
                if is_cancelled:
                    cancel.cancel()
                model.codec.gate.set()
                assert (await task).is_cancelled == is_cancelled
                if is_cancelled:
                    assert state.pending_results[0].content == LONG
                    state = await loop.run()
            assert state.messages[3].content == "xx...(truncated)...xx"
            assert s.tool.executed == [(0, 0)], "a finished call does not run again"
            assert state.stop_reason is StopReason.STOP

    run(test)


TOY = ToyCodec()
PARTS: tuple[KeptPart, ...] = ("tail", "head", "both")


def by_tokens(text: str, limit: int, keep: KeptPart, codec: Codec = TOY) -> str:
    return truncate(text, limit, keep, "tokens", encode=codec.encode, decode=codec.decode)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("tail", "(truncated)...fgh"),
        ("head", "abc...(truncated)"),
        ("both", "ab...(truncated)...h"),
    ],
)
def test_the_marker_replaces_what_is_missing(keep: KeptPart, expected: str) -> None:
    assert truncate("abcdefgh", 3, keep, "characters") == expected
    assert by_tokens("abcdefgh", 3, keep) == expected


@pytest.mark.parametrize("keep", PARTS)
def test_a_text_that_fits_exactly_is_unchanged(keep: KeptPart) -> None:
    assert truncate("abcdefgh", 8, keep, "characters") == "abcdefgh"
    assert by_tokens("abcdefgh", 8, keep) == "abcdefgh"
    assert by_tokens("", 0, keep) == ""


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("tail", "(truncated)..."), ("head", "...(truncated)"), ("both", "...(truncated)...")],
)
def test_a_limit_of_0_leaves_only_the_marker(keep: KeptPart, expected: str) -> None:
    assert truncate("abc", 0, keep, "characters") == expected
    assert by_tokens("abc", 0, keep) == expected


def test_tokens_and_characters_count_differently() -> None:
    assert truncate("ééé", 3, "head", "characters") == "ééé"
    assert by_tokens("ééé", 3, "head") == "é...(truncated)", "three bytes are one and a half characters"


def test_a_cut_never_splits_a_character() -> None:
    text = "a🙂b"
    for limit in (1, 2, 3, 4):
        assert by_tokens(text, limit, "head") == "a...(truncated)"
    assert by_tokens(text, 5, "head") == "a🙂...(truncated)"
    assert by_tokens(text, 4, "tail") == "(truncated)...b"
    assert by_tokens(text, 5, "tail") == "(truncated)...🙂b"


def test_a_text_that_the_tokenizer_changes_is_truncated_as_decoded() -> None:
    def encode(text: str) -> Ids:
        return TOY.encode(text.lower())

    assert truncate("ABCDEF", 6, "tail", "tokens", encode=encode, decode=TOY.decode) == "ABCDEF"
    cut = truncate("ABCDEF", 4, "both", "tokens", encode=encode, decode=TOY.decode)
    assert cut == "ab...(truncated)...ef"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit: got -1, expected a whole number of 0 or more"),
        ({"keep": "top"}, "keep: got 'top', expected one of head, tail, both"),
        ({"unit": "words"}, "unit: got 'words', expected tokens or characters"),
        ({"unit": "tokens"}, "expected encode and decode with it"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        truncate(**{"text": "abc", "limit": 1, "keep": "tail", "unit": "characters", **arguments})


def kept_parts(shown: str, keep: KeptPart) -> tuple[str, str]:
    """Head and tail of a truncated text; only for texts that do not contain the marker."""
    head, _, tail = shown.partition("(truncated)")
    assert keep == "tail" or head.endswith("...")
    assert keep == "head" or tail.startswith("...")
    return head.removesuffix("..."), tail.removeprefix("...")


TEXTS = st.text(st.sampled_from("ab \né🙂日\ufffd\u0301"), max_size=30)


@given(TEXTS, st.integers(0, 40), st.sampled_from(PARTS))
@example("\ufffd", 2, "both")
def test_as_many_characters_as_allowed_are_kept(text: str, limit: int, keep: KeptPart) -> None:
    shown = truncate(text, limit, keep, "characters")
    if len(text) <= limit:
        assert shown == text
        return
    head, tail = kept_parts(shown, keep)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == limit
    assert len(head) - len(tail) in {"tail": (-limit,), "head": (limit,), "both": (0, 1)}[keep]


@given(TEXTS, st.integers(0, 60), st.sampled_from(PARTS))
@example("\ufffd", 2, "both")
@example("\ufffd\ufffd", 4, "head")
def test_at_most_as_many_tokens_as_allowed_are_kept(text: str, limit: int, keep: KeptPart) -> None:
    shown = by_tokens(text, limit, keep)
    if len(text.encode()) <= limit:
        assert shown == text
        return
    head, tail = kept_parts(shown, keep)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) <= len(text)
    kept = len(head.encode()) + len(tail.encode())
    assert kept <= limit
    if "\ufffd" not in text:
        # All but the parts of characters at the cuts.
        assert kept > limit - (3 if keep != "both" else 6) - 1


@pytest.mark.parametrize("family", ["qwen3", "llama3_2", "gemma3"])
def test_real_tokenizers_keep_whole_characters(family: str) -> None:
    codec = load_codec(family)

    @given(st.text(st.sampled_from("abc \n1é🙂日本語𓀀"), min_size=1, max_size=40), st.integers(0, 40))
    def check(text: str, limit: int) -> None:
        decoded = codec.decode(codec.encode(text))
        for keep in PARTS:
            shown = by_tokens(text, limit, keep, codec)
            if len(codec.encode(text)) <= limit:
                assert shown == text
                continue
            head, tail = kept_parts(shown, keep)
            assert decoded.startswith(head)
            assert decoded.endswith(tail)
            assert "\ufffd" not in shown
            assert len(head) + len(tail) <= len(decoded)

    check()
    text = "one two three four five six"
    ids = codec.encode(text)
    assert by_tokens(text, len(ids), "both", codec) == text
    assert by_tokens(text, 2, "head", codec) == codec.decode(ids[:2]) + "...(truncated)"
