from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from branchline.engines.prompt_encoder import PromptEncoder

ids = st.lists(st.integers(0, 9), max_size=6)
steps = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.booleans(), ids), max_size=12)


@given(steps)
def test_encoded_prompt_is_complete(steps: list[tuple[str, bool, list[int]]]) -> None:
    encoder = PromptEncoder(max_bytes=900)
    last: dict[str, list[int]] = {}
    for session, extends, new in steps:
        prompt = [*last.get(session, []), *new] if extends else new
        last[session] = prompt
        assert encoder.encode(np.array(prompt, np.int32), session) == msgspec.json.encode(prompt)


def test_only_new_ids_are_encoded() -> None:
    encoder = PromptEncoder()
    first = np.arange(1000, dtype=np.int32)
    encoder.encode(first, "s")
    encoder._cache.put("s", (first, b"[cached]"))
    assert encoder.encode(np.append(first, np.int32(7)), "s") == b"[cached,7]"


def test_cache_is_limited_by_bytes() -> None:
    encoder = PromptEncoder(max_bytes=50_000)
    for number in range(100):
        encoder.encode(np.arange(1000, dtype=np.int32), f"session-{number}")
        assert encoder._cache.bytes <= 50_000
