"""Pieces of an upstream's answer are joined, and its logprobs are those of the same bytes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import ToyCodec
from branchline.core.message import Message
from branchline.runtime.upstream_answer import align_logprobs, merge_extra

CODEC = ToyCodec.chatml()


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), st.lists(st.integers(1, 20), max_size=6)
)
def test_an_id_has_the_logprob_of_the_token_with_its_bytes(text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, len(data), *[cut for cut in cuts if cut < len(data)]})
    spans = list(pairwise(places))
    entries = [
        {"token": "?", "bytes": list(data[start:end]), "logprob": -float(index + 1)}
        for index, (start, end) in enumerate(spans)
    ]
    ids = CODEC.encode_reply(Message("assistant", text))
    logprobs = align_logprobs(ids, entries, CODEC)
    assert logprobs is not None
    assert len(logprobs) == len(ids)
    pieces = [CODEC.token_bytes(int(token)) for token in ids]
    begin = b"".join(pieces).find(data)
    ends = accumulate([len(piece) for piece in pieces], initial=-begin)
    for span, logprob in zip(pairwise(ends), logprobs, strict=True):
        if span in spans:
            assert logprob == -float(spans.index(span) + 1)
        else:
            assert np.isnan(logprob)


def test_tokens_that_are_not_in_the_answer_have_no_logprobs() -> None:
    ids = CODEC.encode_reply(Message("assistant", "fine"))
    assert align_logprobs(ids, [{"token": "other", "bytes": None, "logprob": -1.0}], CODEC) is None


@pytest.mark.parametrize(
    ("known", "new", "merged"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": "x"}, {"a": "y"}, {"a": "y"}),
        ({"a": "x"}, {"a": None}, {"a": "x"}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": [1]}, {"a": [2]}, {"a": [1, 2]}),
        (
            {"d": [{"index": 0, "type": "t", "text": "a"}]},
            {"d": [{"index": 0, "type": "t", "text": "b", "signature": "s"}, {"index": 1, "data": "x"}]},
            {"d": [{"index": 0, "type": "t", "text": "ab", "signature": "s"}, {"index": 1, "data": "x"}]},
        ),
        ({"d": [{"index": 0, "type": "t"}]}, {"d": [{"index": 0, "type": "u"}]}, None),
        ({"d": [{"text": "a"}]}, {"d": [{"text": "b"}]}, None),
    ],
)
def test_pieces_of_unknown_fields_are_joined(
    known: dict[str, object], new: dict[str, object], merged: dict[str, object] | None
) -> None:
    both = {"d": [*known.get("d", []), *new.get("d", [])]}  # type: ignore[misc]
    assert merge_extra(known, new) == (both if merged is None else merged)
