"""Replies in the format of a template: what is expressible is read back unchanged."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.message import Message, ToolCall
from branchline.testing.plans import PlanGenerator
from branchline.testing.probed_reply_encoder import ProbedReplyEncoder
from tests.chat.families import FAMILIES, load_codec

TOOLS = PlanGenerator(Random(0)).generate(0)[0].tools
CALL = ToolCall("work", '{"n": 1, "do": "it", "deep": true}', "abcdefgh1")


def encoder_of(family: str, seed: int = 0) -> ProbedReplyEncoder:
    return ProbedReplyEncoder(load_codec(family), Random(seed), tools=TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_expressible_reply_is_read_back(family: str, seed: int) -> None:
    encoder, codec = encoder_of(family, seed), load_codec(family)
    plan = PlanGenerator(Random(seed), reasoning=True, can_express=encoder.can_express).generate(2)
    for call in plan:
        for output in call.outputs:
            parsed = codec.parse(encoder.encode_reply(output.message), tools=TOOLS)
            assert parsed.key == output.message.key
            assert parsed.reasoning_content.strip() == output.message.reasoning_content


@pytest.mark.parametrize(
    ("family", "expressible"),
    [("qwen3", True), ("qwen2_5", True), ("llama3_2", False), ("mistral_nemo", False), ("gemma3", False)],
)
def test_text_next_to_a_call_is_expressible_where_the_template_shows_it(
    family: str, expressible: bool
) -> None:
    message = Message("assistant", "I look.", tool_calls=(CALL,))
    assert encoder_of(family).can_express(message) == expressible


def test_a_reply_that_cannot_be_expressed_is_replaced_by_a_similar_one() -> None:
    plan = PlanGenerator(Random(1), reasoning=True, can_express=encoder_of("gemma3").can_express).generate(6)
    messages = [output.message for call in plan for output in call.outputs]
    assert messages
    assert not any(message.tool_calls for message in messages)
