"""The toy codec: rendering, parsing, and streamed deltas that add up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.base import NewMessage
from branchline.chat.toy import CALL, END_CALL, END_THINK, STOP, THINK
from branchline.core.token_arrays import as_ids

CODEC = ToyCodec.chatml()


def test_a_message_renders_as_role_and_content_and_the_generation_prompt_follows() -> None:
    codec = ToyCodec()
    whole = codec.extend((), [NewMessage(Message("user", "p"))])
    assert codec.decode(whole.message_tokens[0].ids) == "user:p\n"
    assert codec.decode(whole.generation_prompt_ids) == "assistant:"
    assert codec.count_tokens([Message("user", "p")]) == len("user:p\nassistant:")


def test_an_encoded_reply_parses_back() -> None:
    message = Message(
        "assistant",
        "so:",
        reasoning_content="hm",
        tool_calls=(ToolCall("look", '{"at": 1}'), ToolCall("go", "{}")),
    )
    parsed = CODEC.parse(CODEC.encode_reply(message))
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls) == (
        message.content,
        message.reasoning_content,
        message.tool_calls,
    )


def test_a_malformed_or_cut_call_stays_text() -> None:
    for ids in ([CALL, *b"nospace", END_CALL], [CALL, *b"look {"]):
        parser = CODEC.parser()
        parser.feed(ids)
        parser.finish("length")
        assert not parser.message.tool_calls
        assert parser.message.content == CODEC.decode(as_ids(ids))


tokens = st.sampled_from([*b"ab \xc3\xa9\xf0", THINK, END_THINK, CALL, END_CALL, STOP, 999])


@given(st.lists(tokens, max_size=24), st.lists(st.integers(0, 24), max_size=6))
def test_streamed_deltas_add_up_to_the_whole_parse(ids: list[int], cuts: list[int]) -> None:
    whole = CODEC.parser()
    whole.feed(ids)
    whole.finish("stop")
    streamed = CODEC.parser()
    edges = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    deltas = []
    for start, end in pairwise(edges):
        deltas += streamed.feed(ids[start:end])
    deltas += streamed.finish("stop")
    assert streamed.message == whole.message
    assert "".join(delta.content for delta in deltas) == whole.message.content
    assert "".join(delta.reasoning_content for delta in deltas) == whole.message.reasoning_content
    assert (
        tuple(delta.tool_call for delta in deltas if delta.tool_call is not None) == whole.message.tool_calls
    )
    assert [delta.index for delta in deltas if delta.tool_call is not None] == list(
        range(len(whole.message.tool_calls))
    )
