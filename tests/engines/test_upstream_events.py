"""Whatever an upstream sends is read or is an EngineError; what is read can be encoded."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.engines.upstream_events import ChatDelta, EventReader

TEXTS = st.text(st.characters(), max_size=4) | st.sampled_from(["\ud83d", "\ude42", "a\ud83d", "error"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "thinking", "index", "id", "function", "name", "arguments", "token"]
            )
            | TEXTS,
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def _object(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names) | TEXTS, VALUES, max_size=5)


DELTAS = _object(
    "role", "content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call"
)
CHOICES = st.fixed_dictionaries(
    {}, optional={"delta": DELTAS | VALUES, "logprobs": VALUES, "finish_reason": VALUES, "error": VALUES}
)
EVENTS = VALUES | st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(CHOICES | VALUES, max_size=2) | VALUES,
        "usage": _object("prompt_tokens", "completion_tokens", "prompt_tokens_details") | VALUES,
        "error": VALUES,
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=4), st.booleans())
def test_any_event_is_read_or_is_an_error_of_the_upstream(events: list[Any], is_ascii: bool) -> None:
    reader = EventReader("up")
    deltas: list[ChatDelta] = []
    failures: list[EngineError] = []
    for event in events:
        data = json.dumps(event, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
        try:
            deltas.append(reader.read(data))
        except EngineError as error:
            failures.append(error)
    for failure in failures:
        assert failure.upstream_response is None or 400 <= failure.upstream_response.status <= 599
        msgspec.json.encode(str(failure))
    deltas.append(reader.flush())
    for delta in deltas:
        msgspec.json.encode(asdict(delta))


@given(st.text(), st.lists(st.integers(0, 40), max_size=6))
def test_a_text_that_is_cut_anywhere_is_joined_again(text: str, cuts: list[int]) -> None:
    units = text.encode("utf-16-le", "surrogatepass")
    places = sorted({0, len(units), *[min(2 * cut, len(units)) for cut in cuts]})
    pieces = [units[start:end].decode("utf-16-le", "surrogatepass") for start, end in pairwise(places)]
    reader = EventReader("up")
    deltas = [
        reader.read(json.dumps({"choices": [{"delta": {"content": piece}}]}).encode()) for piece in pieces
    ]
    joined = "".join(delta.content for delta in [*deltas, reader.flush()])
    assert joined == units.decode("utf-16-le", "replace")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"choices": ' + b"[" * 100_000,
        b'{"choices": [{"delta": {"tool_calls": 5}}]}',
        b'{"choices": [{"delta": {"x": 123456789012345678901234567890}}]}',
    ],
)
def test_a_hostile_event_is_read_or_is_an_error(data: bytes) -> None:
    with suppress(EngineError):
        msgspec.json.encode(asdict(EventReader("up").read(data)))
