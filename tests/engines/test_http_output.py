"""Output of servers that cannot be right: the call fails, and no token of that output is yielded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.vision import ImageSpan
from branchline.core.errors import EngineError, EngineOutputError
from branchline.core.message import Media
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Chunk
from branchline.engines.http import HttpEngine
from branchline.engines.sglang import SglangEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import PROMPT, collect, continuation, ids_of, params
from tests.engines.fake_servers import FOREIGN_ID, PLACEHOLDER, FakeServer, FakeSglang, FakeVllm, Lie
from tests.engines.manual_clock import run_with_frozen_clock
from tests.engines.replica_servers import replica_servers, request_counts

VOCAB_SIZE = 50_100
MESSAGES: dict[Lie, str] = {
    "id": f"id {FOREIGN_ID}, expected ids below {VOCAB_SIZE}",
    "logprob": "logprob 0.5, expected a finite number, at most 0",
    "after_finish": "1 ids after the finish reason, expected none",
    "too_many": "[67] tokens, expected at most max_tokens=5",
    "index": "choice 1, expected 0",
}
IMAGE_PROMPT = as_ids([5, PLACEHOLDER, PLACEHOLDER, 7])
IMAGES = (ImageSpan(Media("image", "digest", b"png"), 1, 2),)


class FakeVllmImages(FakeVllm):
    generate_path = "/inference/v1/generate"
    placeholder_counts = (2,)


class IncrementalSglang(FakeSglang):
    incremental = True


async def collect_into(chunks: list[Chunk], stream: AsyncIterator[Chunk]) -> None:
    """Collects chunks; those before an error are kept."""
    async for chunk in stream:
        chunks += [chunk]


SERVERS: list[tuple[type[FakeServer], type[HttpEngine], Sequence[ImageSpan]]] = [
    (FakeVllm, VllmEngine, ()),
    (FakeVllmImages, VllmEngine, IMAGES),
    (FakeSglang, SglangEngine, ()),
    (IncrementalSglang, SglangEngine, ()),
]


@pytest.mark.parametrize("lie", MESSAGES)
@pytest.mark.parametrize("flush_s", [0, 60])
@pytest.mark.parametrize(("server_type", "engine_type", "images"), SERVERS)
def test_output_that_cannot_be_right_is_an_error_that_names_it(
    server_type: type[FakeServer],
    engine_type: type[HttpEngine],
    images: Sequence[ImageSpan],
    flush_s: float,
    lie: Lie,
) -> None:
    async def main() -> None:
        async with server_type() as server:
            server.lie, server.lie_at = lie, 2
            engine = engine_type(server.url, name="e")
            prompt = IMAGE_PROMPT if images else PROMPT
            sampling = params(5, vocab_size=VOCAB_SIZE, flush_s=flush_s)
            chunks: list[Chunk] = []
            with pytest.raises(EngineOutputError, match=f"^e: {MESSAGES[lie]}"):
                await collect_into(chunks, engine.generate(prompt, sampling, images=images))
            assert not any(chunk.finish_reason for chunk in chunks)
            assert ids_of(chunks) == continuation(prompt, len(ids_of(chunks)))[0]
            if lie in ("id", "logprob"):
                assert len(ids_of(chunks)) <= 2
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(("server_type", "engine_type", "images"), SERVERS)
def test_output_within_the_vocabulary_and_rounding_errors_of_logprobs_are_accepted(
    server_type: type[FakeServer], engine_type: type[HttpEngine], images: Sequence[ImageSpan]
) -> None:
    async def main() -> None:
        async with server_type() as server:
            engine = engine_type(server.url)
            prompt = IMAGE_PROMPT if images else PROMPT
            ids = continuation(prompt, 5)[0]
            chunks = await collect(engine.generate(prompt, params(5, vocab_size=max(ids) + 1), images=images))
            assert ids_of(chunks) == ids
            with pytest.raises(EngineOutputError, match=f"id {max(ids)}, expected ids below {max(ids)}"):
                await collect(engine.generate(prompt, params(5, vocab_size=max(ids)), images=images))
            await engine.close()

    run_with_frozen_clock(main())


@given(
    logprobs=st.lists(
        st.one_of(
            st.floats(-1e4, 1e-5), st.sampled_from([0.5, 1e-3, np.inf, -np.inf, np.nan, -1e39, -3.4028235e38])
        ),
        min_size=1,
        max_size=5,
    )
)
def test_every_logprob_is_checked(logprobs: list[float]) -> None:
    request = VllmEngine("http://host", name="e").build_request(PROMPT, params())
    request.ids, request.logprobs, request.finish_reason = [1] * len(logprobs), logprobs, "stop"
    request._append_chunk()
    is_valid = all(value <= 1e-4 and value >= -3.4028235e38 for value in logprobs)
    assert bool(request.pending_chunks) == is_valid
    assert isinstance(request.error, EngineOutputError) != is_valid
    assert (request.finish_reason is None) != is_valid


@pytest.mark.parametrize("logprob", ["NaN", "Infinity", "null", '"x"'])
@pytest.mark.parametrize("engine_type", [VllmEngine, SglangEngine])
def test_logprob_that_is_no_number_is_an_error(engine_type: type[HttpEngine], logprob: str) -> None:
    request = engine_type("http://host", name="e").build_request(PROMPT, params())
    event = (
        f'{{"choices": [{{"token_ids": [1], "logprobs": {{"token_logprobs": [{logprob}]}}}}]}}'
        if engine_type is VllmEngine
        else f'{{"output_ids": [1], "meta_info": {{"completion_tokens": 1, '
        f'"output_token_logprobs": [[{logprob}, 1, null]]}}}}'
    )
    with pytest.raises(EngineError, match=r"^e: "):
        request.read([event.encode()])
    assert request.ids == []


def test_ids_after_a_finish_reason_that_a_later_event_repeats_are_an_error() -> None:
    """A server that repeats all output in each event, with the finish reason in an earlier one."""
    request = SglangEngine("http://host", name="e").build_request(PROMPT, params())
    events: list[dict[str, Any]] = [
        {
            "output_ids": [7],
            "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 7, None]]},
        },
        {
            "output_ids": [7, 8],
            "meta_info": {
                "completion_tokens": 2,
                "output_token_logprobs": [[-1.0, 7, None], [-1.0, 8, None]],
            },
        },
    ]
    events[0]["meta_info"]["finish_reason"] = {"type": "stop", "matched": 7}
    with pytest.raises(EngineOutputError, match="1 ids after the finish reason"):
        request.read([json.dumps(event).encode() for event in events])


@pytest.mark.parametrize("lie", ["id", "logprob", "index"])
def test_call_of_a_lying_replica_is_served_by_another(lie: Lie) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].lie = lie
            chunks = await collect(replicas.generate(PROMPT, params(5, vocab_size=VOCAB_SIZE), session="a"))
            assert ids_of(chunks) == continuation(PROMPT, 5)[0]
            assert request_counts(servers) == [1, 1]

    run_with_frozen_clock(main())


def test_call_fails_if_its_replica_lies_after_tokens_were_yielded_and_the_next_goes_elsewhere() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].lie, servers[0].lie_at, servers[0].yields_between_events = "logprob", 3, True
            sampling = params(5, vocab_size=VOCAB_SIZE)
            with pytest.raises(EngineOutputError, match=r"logprob 0\.5"):
                await collect(replicas.generate(PROMPT, sampling, session="a"))
            chunks = await collect(replicas.generate(PROMPT, sampling, session="a"))
            assert ids_of(chunks) == continuation(PROMPT, 5)[0]
            assert request_counts(servers) == [1, 1]

    run_with_frozen_clock(main())
