"""Stop texts and single calls end an answer at one token, whatever the chunks; and whatever way tokens come,
by chunk or by ear, they make the same answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.parsing.base import OutputParser
from branchline.chat.parsing.registry import create_text_parser
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, Tokens
from branchline.runtime.answer import AnswerBuilder, AnswerDelta, StopStringMatcher

CODEC = ToyCodec.chatml()


def _feed_chunks(choice: AnswerBuilder, ids: Ids, cuts: list[int]) -> list[AnswerDelta]:
    """Feeds ids in chunks until the choice has ended."""
    said = []
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        logprobs = -np.arange(start, end, dtype=np.float32)
        finish = "stop" if end == len(ids) else None
        said.append(choice.add_chunk(Chunk(ids[start:end], logprobs, 7, finish)))
        if choice.is_stopped:
            break
    return said


def _text(said: list[AnswerDelta]) -> str:
    return "".join(delta.content for bit in said for delta in bit.deltas)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_text_and_tokens_end_with_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    choice = AnswerBuilder(0, CODEC.parser(), stops)
    said = _feed_chunks(choice, CODEC.encode_reply(Message("assistant", text)), cuts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)
    if first is None:
        assert _text(said) == choice.message.content == text
        assert choice.ids.tolist() == [*text.encode(), 260]
        assert choice.answer.stop_sequence is None
    else:
        # One token a letter: the first letter that completes a stop text is the last one kept.
        assert choice.ids.tolist() == list(text[:first].encode())
        assert choice.answer.stop_sequence in stops
        kept = text[:first].removesuffix(choice.answer.stop_sequence or "")
        assert _text(said) == choice.message.content == kept
        assert choice.finish_reason == "stop"
    assert choice.generation("stop").logprobs.tolist() == (-np.arange(len(choice.ids))).tolist()  # type: ignore[union-attr]
    assert sum(len(bit.ids) for bit in said) == len(choice.ids)


def test_of_stop_texts_completed_by_one_letter_the_earlier_and_longer_counts() -> None:
    stops = StopStringMatcher(("b", "ab"))
    assert stops.feed("xab") == "x"
    assert stops.matched == "ab"


def test_a_stop_text_does_not_reach_over_a_tool_call() -> None:
    said = Message("assistant", "Obs", tool_calls=(ToolCall("look", "{}"),))
    choice = AnswerBuilder(0, CODEC.parser(), ("Obs{",))
    bits = _feed_chunks(choice, CODEC.encode_reply(said), [])
    assert choice.answer.stop_sequence is None
    assert [(delta.content, delta.tool_call is not None) for bit in bits for delta in bit.deltas] == [
        ("Obs", False),
        ("", True),
    ]


@pytest.mark.parametrize("cuts", [[], [3], list(range(60))])
def test_a_single_call_ends_the_answer_behind_the_token_that_completes_it(cuts: list[int]) -> None:
    both = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"), ToolCall("hear", "{}")))
    only = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"),))
    choice = AnswerBuilder(0, CODEC.parser(), single_tool_call=True)
    _feed_chunks(choice, CODEC.encode_reply(both), cuts)
    assert choice.ids.tolist() == CODEC.encode_reply(only, stop=False).tolist()
    assert choice.answer.finish_reason == "tool_calls"
    assert [call.name for call in choice.answer.message.tool_calls] == ["look"]


@pytest.mark.parametrize("cuts", [[], list(range(60))])
def test_a_model_that_stops_behind_its_single_call_is_seen_to_stop(cuts: list[int]) -> None:
    only = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"),))
    choice = AnswerBuilder(0, CODEC.parser(), single_tool_call=True, stop_ids=CODEC.stop_ids)
    _feed_chunks(choice, CODEC.encode_reply(only), cuts)
    assert choice.ids.tolist() == CODEC.encode_reply(only).tolist()
    assert choice.answer.finish_reason == "tool_calls"


# -- heard and taken ----------------------------------------------------------------------------------

_STOP_IDS = frozenset({260})


def _hermes() -> OutputParser:
    """A real format whose tokens are bytes, so that every character and every mark is cut everywhere."""
    text = create_text_parser("hermes", reasoning_format="think")
    return OutputParser(text, lambda token: bytes([token]), _STOP_IDS)


def _encode(message: Message) -> list[int]:
    thought = f"<think>\n{message.reasoning_content}\n</think>\n\n" if message.reasoning_content else ""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    return [*"\n".join([thought + message.content, *calls]).encode(), 260]


_words = st.text("aé🙂 <\n", max_size=8)
_messages = st.builds(
    Message,
    st.just("assistant"),
    _words,
    reasoning=_words,
    calls=st.lists(
        st.builds(ToolCall, st.sampled_from(["look", "go"]), st.sampled_from(["{}", '{"a": "ü"}'])),
        max_size=2,
    ).map(tuple),
)
_outputs = st.one_of(
    st.tuples(st.just(_hermes), _messages.map(_encode)),
    st.tuples(st.just(_hermes), st.lists(st.sampled_from([0xC3, 0xA9, 0xF0, 60, 97, 260, 999]), max_size=9)),
    st.tuples(st.just(CODEC.parser), _messages.map(lambda message: CODEC.encode_reply(message).tolist())),
)


def _joined_deltas(said: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, str, int]]]:
    """What deltas add up to, however they were cut."""
    deltas = [delta for bit in said for delta in bit.deltas]
    calls = [
        (delta.tool_call.name, delta.tool_call.arguments, delta.index) for delta in deltas if delta.tool_call
    ]
    return "".join(one.content for one in deltas), "".join(one.reasoning_content for one in deltas), calls


@given(_outputs, st.data())
def test_whatever_way_each_token_comes_the_answer_is_the_same(
    output: tuple[Callable[[], OutputParser], list[int]], data: st.DataObject
) -> None:
    make, ids = output
    # The last token is always taken: it comes with the finish.
    count = len(ids)
    cuts = data.draw(st.sets(st.integers(1, max(1, count - 1)))) if count > 1 else set()
    places = sorted({0, count, *cuts})
    ways = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    versions = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(places), max_size=len(places))))
    logprobs = [-place / 3 for place in range(count)]
    mixed, plain = AnswerBuilder(0, make()), AnswerBuilder(0, make())
    heard, taken = [], []
    told: list[tuple[int, float]] = []
    for (start, end), by_ear, version in zip(pairwise(places), ways, versions, strict=False):
        tokens = Tokens(ids[start:end], logprobs[start:end], version)
        is_last = end == count
        taken.append(plain.add_chunk(tokens.chunk("stop" if is_last else None)))
        if by_ear and not is_last:
            heard.append(mixed.hear(tokens))
        else:
            heard.append(mixed.add_chunk(tokens.chunk("stop" if is_last else None)))
        if data.draw(st.booleans()):
            assert mixed.ids.tolist() == ids[:end]  # looking changes nothing
        assert heard[-1].logprobs is not None
        told += zip(heard[-1].ids.tolist(), heard[-1].logprobs.tolist(), strict=True)
    if not count:
        for choice, said in ((mixed, heard), (plain, taken)):
            said.append(choice.add_chunk(Chunk(finish_reason="stop")))
    assert _joined_deltas(heard) == _joined_deltas(taken)
    assert told == list(zip(ids, np.array(logprobs, np.float32).tolist(), strict=True))
    one, other = mixed.generation("stop"), plain.generation("stop")
    assert one.ids.tolist() == other.ids.tolist() == ids
    assert _versions(one, count) == _versions(other, count)
    assert mixed.answer.versions == plain.answer.versions
    if count:
        assert one.logprobs is not None
        assert one.logprobs.dtype == np.float32
        assert one.logprobs.tolist() == np.array(logprobs, np.float32).tolist()
    assert _without_call_ids(mixed.message) == _without_call_ids(plain.message)
    assert mixed.answer.finish_reason == plain.answer.finish_reason
    assert len({call.id for call in mixed.tool_calls}) == len(mixed.tool_calls)


def _versions(generation: Any, count: int) -> list[int]:
    return np.broadcast_to(generation.versions, count).tolist()  # type: ignore[no-any-return]


def _without_call_ids(message: Message) -> tuple[Any, ...]:
    """Ids of calls are drawn anew for each."""
    return (
        message.content,
        message.reasoning_content,
        [(call.name, call.arguments) for call in message.tool_calls],
    )


def test_what_was_heard_belongs_to_nobody_else() -> None:
    choice = AnswerBuilder(0, CODEC.parser())
    first, second = Tokens([97], [-1.0], 0), Tokens([98], [-2.0], 0)
    said = choice.hear(first)
    choice.hear(second)
    first.ids.append(99)
    second.ids.clear()
    assert choice.ids.tolist() == [97, 98]
    assert said.tokens is first


def test_what_arrived_behind_the_clients_back_stands_behind_what_was_heard() -> None:
    choice = AnswerBuilder(0, CODEC.parser())
    choice.add_chunk(Chunk(as_ids([97]), np.array([-1], np.float32), 1))
    choice.hear(Tokens([98], [-2.0], 1))
    choice.hear(Tokens([99], [-3.0], 2))
    choice.keep(Chunk(as_ids([100]), np.array([-4], np.float32), 2))
    kept = choice.generation("cancelled")
    assert (kept.ids.tolist(), kept.finish_reason) == ([97, 98, 99, 100], "cancelled")
    assert kept.logprobs is not None
    assert kept.logprobs.tolist() == [-1, -2, -3, -4]
    assert _versions(kept, 4) == [1, 1, 2, 2]
    assert kept.message is not None
    assert kept.message.content == "abcd"


def test_a_version_that_sampled_nothing_had_no_part_in_an_answer() -> None:
    choice = AnswerBuilder(0, CODEC.parser())
    choice.hear(Tokens([97], [-1.0], 5))
    choice.add_chunk(Chunk(finish_reason="length"))  # whoever says only this knows no version
    assert choice.answer.versions == (5,)
    assert _versions(choice.generation("length"), 1) == [5]


@pytest.mark.parametrize(
    ("options", "may_end"), [({}, False), ({"stops": ("x",)}, True), ({"single_call": True}, True)]
)
def test_only_an_answer_that_its_engine_ends_can_be_heard(options: dict[str, Any], may_end: bool) -> None:
    assert AnswerBuilder(0, CODEC.parser(), **options).may_end == may_end
