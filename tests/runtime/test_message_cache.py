"""Cached messages equal freshly decoded ones."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import MessageError
from branchline.core.reader import read_message
from branchline.runtime.message_cache import BodyReader, MessageCache
from tests.gateway.harness import agent, run

READER = BodyReader("messages", ["model", "n"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text()}),
    max_size=6,
)


def _read(cache: MessageCache, messages: Any) -> list[Any]:
    body: Any = READER.read(json.dumps({"messages": messages}).encode())
    return cache.read_items(body["messages"], lambda raw, index: read_message(raw, "messages", index))


@given(st.lists(MESSAGES, max_size=4))
def test_cached_messages_equal_freshly_read_ones(requests: list[list[dict[str, str]]]) -> None:
    cache = MessageCache()
    for messages in requests:
        assert _read(cache, messages) == [read_message(message) for message in messages]


def test_only_new_messages_are_decoded() -> None:
    cache = MessageCache()
    first = _read(cache, [{"role": "user", "content": "a"}])
    again = _read(cache, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert again[0] is first[0]


def test_invalid_message_is_named_by_its_index_every_time() -> None:
    cache = MessageCache()
    for _ in range(2):
        with pytest.raises(MessageError, match=r"messages\[1\].role"):
            _read(cache, [{"role": "user", "content": "a"}, {"role": "wizard"}])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["messages", "model", "n", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_body_equals_its_plain_decoding(body: Any) -> None:
    data = json.dumps(body).encode()
    found: Any = READER.read(data)
    if isinstance(body, dict) and isinstance(found, dict):
        messages = found.get("messages")
        if isinstance(messages, list):
            messages = [
                msgspec.json.decode(item) if isinstance(item, msgspec.Raw) else item for item in messages
            ]
        assert messages == body.get("messages")
        assert [found.get(name) for name in ("model", "n")] == [body.get(name) for name in ("model", "n")]
    else:
        assert found == body


def test_cache_is_cleared_with_the_session() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.ask_text("p")
            assert a.session.managed.message_cache._values
            await a.session.finalize()
            assert not a.session.managed.message_cache._values

    run(test)


def test_lone_surrogate_is_accepted() -> None:
    async def test() -> None:
        async with agent("x") as a:
            for body in (
                b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}',
                b'{"user": "\\ud83d", "messages": [{"role": "user", "content": "p"}]}',
            ):
                url = f"{a.session.base_url}/chat/completions"
                answer = await a.http.post(url, content=body, headers=a.api_headers)
                assert answer.status_code == 200, answer.text

    run(test)
