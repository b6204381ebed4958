"""An answer ends at the same token and has the same content, however its tokens are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.parsing.output_parser import OutputFormat, OutputParser
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Chunk, FinishReason
from branchline.runtime.answer import Answer, AnswerBuilder, AnswerDelta, StopStringMatcher

CODEC = ToyCodec.chatml()
STOP_ID = 260


def _feed(builder: AnswerBuilder, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[AnswerDelta]:
    """Adds ids in chunks, cut at `cuts`, until the answer has ended."""
    deltas: list[AnswerDelta] = []
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(bounds) if ids else [(0, 0)]:
        logprobs = -np.arange(start, end, dtype=np.float32)
        finish_reason: FinishReason | None = "stop" if end == len(ids) else None
        deltas.append(builder.add(Chunk(as_ids(ids[start:end]), logprobs, start // 3, finish_reason)))
        if builder.is_stopped:
            break
    return deltas


def _answer(builder: AnswerBuilder) -> Answer:
    return builder.answer(builder.generation())


def _content(deltas: list[AnswerDelta]) -> str:
    return "".join(part.content for delta in deltas for part in delta.deltas)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_text_and_tokens_end_with_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    builder = AnswerBuilder(0, CODEC.parser(), stops)
    deltas = _feed(builder, CODEC.encode_reply(Message("assistant", text)).tolist(), cuts)
    answer = _answer(builder)
    first_end = min([text.find(stop) + len(stop) for stop in stops if stop in text], default=None)
    if first_end is None:
        assert _content(deltas) == answer.message.content == text
        assert answer.ids.tolist() == [*text.encode(), STOP_ID]
        assert answer.stop_sequence is None
    else:
        # One token per character: the first character that completes a stop text is the last one kept.
        assert answer.ids.tolist() == list(text[:first_end].encode())
        assert answer.stop_sequence in stops
        kept = text[:first_end].removesuffix(answer.stop_sequence or "")
        assert _content(deltas) == answer.message.content == kept
        assert answer.finish_reason == "stop"
    assert answer.logprobs is not None
    assert answer.logprobs.tolist() == (-np.arange(len(answer.ids))).tolist()
    assert np.concatenate([delta.ids for delta in deltas]).tolist() == answer.ids.tolist()


def test_the_earlier_and_longer_of_two_stop_texts_that_end_together_counts() -> None:
    matcher = StopStringMatcher(("b", "ab"))
    assert matcher.feed("xab") == "x"
    assert matcher.matched == "ab"


def test_a_stop_text_does_not_span_a_tool_call() -> None:
    message = Message("assistant", "Obs", tool_calls=(ToolCall("look", "{}"),))
    builder = AnswerBuilder(0, CODEC.parser(), ("Obs{",))
    deltas = _feed(builder, CODEC.encode_reply(message).tolist())
    assert _answer(builder).stop_sequence is None
    assert [(part.content, part.tool_call is not None) for delta in deltas for part in delta.deltas] == [
        ("Obs", False),
        ("", True),
    ]


ONE_CALL = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"),))
TWO_CALLS = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"), ToolCall("listen", "{}")))


@pytest.mark.parametrize("cuts", [[], [3], list(range(60))])
@pytest.mark.parametrize("message", [ONE_CALL, TWO_CALLS])
def test_a_single_tool_call_ends_the_answer_and_keeps_its_stop_id(message: Message, cuts: list[int]) -> None:
    builder = AnswerBuilder(0, CODEC.parser(), single_tool_call=True, stop_ids=CODEC.stop_ids)
    _feed(builder, CODEC.encode_reply(message).tolist(), cuts)
    answer = _answer(builder)
    assert answer.ids.tolist() == CODEC.encode_reply(ONE_CALL, stop=message is ONE_CALL).tolist()
    assert answer.finish_reason == "tool_calls"
    assert [call.name for call in answer.message.tool_calls] == ["look"]


# -- chunk boundaries --------------------------------------------------------------------------------


def _hermes() -> OutputParser:
    """A real format with byte tokens, so that cuts fall inside characters and markers."""
    text = OutputFormat("hermes", "think").create_parser()
    return OutputParser(text, lambda token: bytes([token]), frozenset({STOP_ID}))


def _encode_hermes(message: Message) -> list[int]:
    thought = f"<think>\n{message.reasoning_content}\n</think>\n\n" if message.reasoning_content else ""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    return [*"\n".join([thought + message.content, *calls]).encode(), STOP_ID]


_words = st.text("aé🙂 <\n", max_size=8)
_tool_calls = st.builds(ToolCall, st.sampled_from(["look", "go"]), st.sampled_from(["{}", '{"a": "ü"}']))
_messages = st.builds(
    Message,
    st.just("assistant"),
    _words,
    reasoning_content=_words,
    tool_calls=st.lists(_tool_calls, max_size=2).map(tuple),
)
_outputs = st.one_of(
    st.tuples(st.just(_hermes), _messages.map(_encode_hermes)),
    st.tuples(st.just(_hermes), st.lists(st.sampled_from([0xC3, 0xA9, 0xF0, 60, 97, STOP_ID, 999]))),
    st.tuples(st.just(CODEC.parser), _messages.map(lambda message: CODEC.encode_reply(message).tolist())),
)


def _summary(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, str, int]], list[int]]:
    """What deltas add up to, without the random ids of tool calls."""
    parts = [part for delta in deltas for part in delta.deltas]
    calls = [(part.tool_call.name, part.tool_call.arguments, part.index) for part in parts if part.tool_call]
    ids = [token for delta in deltas for token in delta.ids.tolist()]
    return _content(deltas), "".join(part.reasoning_content for part in parts), calls, ids


@given(_outputs, st.lists(st.integers(0, 100), max_size=12))
def test_chunk_boundaries_do_not_change_the_answer(
    output: tuple[Callable[[], OutputParser], list[int]], cuts: list[int]
) -> None:
    create_parser, ids = output
    cut, uncut = AnswerBuilder(0, create_parser()), AnswerBuilder(0, create_parser())
    assert _summary(_feed(cut, ids, cuts)) == _summary(_feed(uncut, ids))
    generation, answer = cut.generation(), _answer(cut)
    assert generation.ids.tolist() == ids
    assert generation.logprobs is not None
    assert generation.logprobs.tolist() == (-np.arange(len(ids))).tolist()
    versions = np.broadcast_to(generation.versions, len(ids)).tolist()
    assert answer.versions == tuple(sorted(set(versions)))
    assert answer.finish_reason == _answer(uncut).finish_reason
    message, other = answer.message, _answer(uncut).message
    assert (message.content, message.reasoning_content) == (other.content, other.reasoning_content)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        (call.name, call.arguments) for call in other.tool_calls
    ]
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)


def test_versions_and_logprobs_belong_to_the_tokens_of_their_chunk() -> None:
    builder = AnswerBuilder(0, CODEC.parser())
    builder.add(Chunk(as_ids([97]), np.array([-1], np.float32), 5))
    builder.add(Chunk(as_ids([98, 99]), None, 6))
    builder.add(Chunk(finish_reason="length"))
    generation = builder.generation("cancelled")
    assert generation.finish_reason == "cancelled"
    assert generation.logprobs is not None
    assert np.array_equal(generation.logprobs, [-1, np.nan, np.nan], equal_nan=True)
    assert np.asarray(generation.versions).tolist() == [5, 6, 6]
    # The last chunk has no tokens, so its version sampled nothing.
    assert _answer(builder).versions == (5, 6)
    assert _answer(builder).finish_reason == "length"
