"""Stop texts and single calls end an answer at one token, whatever the chunks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.core.runs import Ids
from branchline.engines.base import Chunk
from branchline.gateway.answers import Choice, Said, StopTexts

CODEC = ToyCodec.chatml()


def _played(choice: Choice, ids: Ids, cuts: list[int]) -> list[Said]:
    """Feeds ids in chunks until the choice has ended."""
    said = []
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        logprobs = -np.arange(start, end, dtype=np.float32)
        finish = "stop" if end == len(ids) else None
        said.append(choice.take(Chunk(ids[start:end], logprobs, 7, finish)))
        if choice.ended:
            break
    return said


def _text(said: list[Said]) -> str:
    return "".join(delta.text for bit in said for delta in bit.deltas)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_text_and_tokens_end_with_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    choice = Choice(0, CODEC.parser(), stops)
    said = _played(choice, CODEC.spell(Message("assistant", text)), cuts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)
    if first is None:
        assert _text(said) == choice.message.text == text
        assert choice.ids.tolist() == [*text.encode(), 260]
        assert choice.answer.stop is None
    else:
        # One token a letter: the first letter that completes a stop text is the last one kept.
        assert choice.ids.tolist() == list(text[:first].encode())
        assert choice.answer.stop in stops
        kept = text[:first].removesuffix(choice.answer.stop or "")
        assert _text(said) == choice.message.text == kept
        assert choice.finish == "stop"
    assert choice.generation("stop").logprobs.tolist() == (-np.arange(len(choice.ids))).tolist()  # type: ignore[union-attr]
    assert sum(len(bit.ids) for bit in said) == len(choice.ids)


def test_of_stop_texts_completed_by_one_letter_the_earlier_and_longer_counts() -> None:
    stops = StopTexts(("b", "ab"))
    assert stops.feed("xab") == "x"
    assert stops.found == "ab"


def test_a_stop_text_does_not_reach_over_a_tool_call() -> None:
    said = Message("assistant", "Obs", calls=(ToolCall("look", "{}"),))
    choice = Choice(0, CODEC.parser(), ("Obs{",))
    bits = _played(choice, CODEC.spell(said), [])
    assert choice.answer.stop is None
    assert [(delta.text, delta.call is not None) for bit in bits for delta in bit.deltas] == [
        ("Obs", False),
        ("", True),
    ]


@pytest.mark.parametrize("cuts", [[], [3], list(range(60))])
def test_a_single_call_ends_the_answer_behind_the_token_that_completes_it(cuts: list[int]) -> None:
    both = Message("assistant", "hm", calls=(ToolCall("look", "{}"), ToolCall("hear", "{}")))
    only = Message("assistant", "hm", calls=(ToolCall("look", "{}"),))
    choice = Choice(0, CODEC.parser(), single_call=True)
    _played(choice, CODEC.spell(both), cuts)
    assert choice.ids.tolist() == CODEC.spell(only, stop=False).tolist()
    assert choice.answer.finish == "tool_calls"
    assert [call.name for call in choice.answer.message.calls] == ["look"]


@pytest.mark.parametrize("cuts", [[], list(range(60))])
def test_a_model_that_stops_behind_its_single_call_is_seen_to_stop(cuts: list[int]) -> None:
    only = Message("assistant", "hm", calls=(ToolCall("look", "{}"),))
    choice = Choice(0, CODEC.parser(), single_call=True, stop_ids=CODEC.stop_ids)
    _played(choice, CODEC.spell(only), cuts)
    assert choice.ids.tolist() == CODEC.spell(only).tolist()
    assert choice.answer.finish == "tool_calls"
