"""What a session's `sampling` does with the fields of a request: it overrides or removes them, and tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import MessageError
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.sampling import (
    check_session_sampling,
    find_overridden,
    find_overridden_in_body,
    merge_sampling,
    read_sampling_params,
)

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from([None, 0.5, 1, 1.0]) for name in NUMBERS},
        **{name: st.sampled_from([None, 0, 3]) for name in ("top_k", "seed")},
    },
)


def test_none_removes_a_field_of_the_request_and_its_default() -> None:
    options = SessionOptions(sampling={"seed": None, "top_p": None}, sampling_defaults={"top_p": 0.5})
    check_session_sampling(options)
    fields = merge_sampling({"seed": 7, "top_p": 0.1, "temperature": 0.3}, options)
    assert fields == {"temperature": 0.3}
    params = read_sampling_params(fields, "max_tokens")
    assert (params.seed, params.top_p) == (None, 1.0)


@given(FIELDS, FIELDS)
def test_what_is_overridden_is_what_would_be_sampled_otherwise(
    body: dict[str, Any], sampling: dict[str, Any]
) -> None:
    options = SessionOptions(sampling=sampling)
    found = find_overridden(body, options)
    assert found == find_overridden_in_body(json.dumps({"messages": [], **body}).encode(), options)
    assert found.items() <= body.items()
    for name, value in sampling.items():
        asked = merge_sampling({name: body.get(name)}, SessionOptions())
        got = merge_sampling({name: body.get(name)}, SessionOptions(sampling={name: value}))
        is_changed = read_sampling_params(asked, "max_tokens") != read_sampling_params(got, "max_tokens")
        assert (name in found) == (is_changed and body.get(name) is not None)


def test_values_that_ask_for_nothing_are_not_overridden() -> None:
    options = SessionOptions(sampling={"top_p": None, "top_k": None, "logit_bias": None, "temperature": 1.0})
    assert not find_overridden({"top_p": 1.0, "top_k": -1, "logit_bias": {}, "temperature": 1}, options)
    assert find_overridden({"top_p": 0.9, "max_tokens": 5}, options) == {"top_p": 0.9}


def test_half_an_emoji_in_a_body_hides_nothing() -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "top_p": 0.5}'
    assert find_overridden_in_body(body, SessionOptions(sampling={"top_p": None})) == {"top_p": 0.5}


@pytest.mark.parametrize("name", ["sampling", "sampling_defaults"])
def test_other_values_are_still_checked(name: str) -> None:
    options: dict[str, Any] = {name: {"top_p": 7, "seed": None}}
    with pytest.raises(MessageError, match=f"{name}.top_p"):
        check_session_sampling(SessionOptions(**options))
