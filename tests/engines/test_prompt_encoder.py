"""A prompt is written as all of it would be, however much of it was written before."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from branchline.engines.prompt_encoder import PromptEncoder

ids = st.lists(st.integers(0, 9), max_size=6)
steps = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.booleans(), ids), max_size=12)


@given(steps)
def test_what_is_written_is_always_the_whole_prompt(steps: list[tuple[str, bool, list[int]]]) -> None:
    writer = PromptEncoder(max_bytes=900)
    last: dict[str, list[int]] = {}
    for session, goes_on, new in steps:
        prompt = [*last.get(session, []), *new] if goes_on else new
        last[session] = prompt
        assert writer.encode(np.array(prompt, np.int32), session) == msgspec.json.encode(prompt)


def test_only_what_is_new_is_written() -> None:
    writer = PromptEncoder()
    first = np.arange(1000, dtype=np.int32)
    writer.encode(first, "s")
    known = writer._cache.get("s")
    assert known is not None
    writer._cache.put("s", (first, b"[as it was written]"))
    assert writer.encode(np.append(first, np.int32(7)), "s") == b"[as it was written,7]"


def test_memory_is_bounded_by_bytes() -> None:
    writer = PromptEncoder(max_bytes=50_000)
    for number in range(100):
        writer.encode(np.arange(1000, dtype=np.int32), f"session-{number}")
        assert writer._cache.bytes <= 50_000
