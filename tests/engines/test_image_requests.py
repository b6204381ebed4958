"""Images in the requests of HTTP engines: one placeholder each, and the server's prompt is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.vision import ImageSpan
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.message import Media
from branchline.core.token_arrays import as_ids
from branchline.engines.http import HttpEngine, collapse_placeholders
from branchline.engines.replicas import Replicas
from branchline.engines.sglang import SglangEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import collect, continuation, float32, ids_of, logprobs_of, params
from tests.engines.fake_servers import PLACEHOLDER, FakeSglang, FakeVllm, expand_placeholders
from tests.engines.manual_clock import run_with_frozen_clock

COUNTS = (3, 1)
PROMPT = as_ids([5, *[PLACEHOLDER] * 3, 6, PLACEHOLDER, 7])
IMAGES = (
    ImageSpan(Media("image", "a", b"first", mime="image/jpeg"), 1, 3),
    ImageSpan(Media("image", "b", b"second"), 5, 1),
)
URLS = ["data:image/jpeg;base64,Zmlyc3Q=", "data:image/png;base64,c2Vjb25k"]


class FakeVllmTokens(FakeVllm):
    generate_path = "/inference/v1/generate"


SERVERS = [(FakeVllmTokens, VllmEngine), (FakeSglang, SglangEngine)]
servers = pytest.mark.parametrize(("server_type", "engine_type"), SERVERS, ids=["vllm", "sglang"])


def test_request_bodies_have_images_beside_the_ids() -> None:
    async def main() -> None:
        async with FakeVllmTokens() as vllm, FakeSglang() as sglang:
            for server, engine in (
                (vllm, VllmEngine(vllm.url, version=2)),
                (sglang, SglangEngine(sglang.url)),
            ):
                server.placeholder_counts = COUNTS
                await collect(engine.generate(PROMPT, params(2), images=IMAGES, session="s"))
                await engine.close()
            (body,) = vllm.bodies
            assert body["token_ids"] == [5, PLACEHOLDER, 6, PLACEHOLDER, 7]
            assert body["content_parts"] == [{"type": "image_url", "url": url} for url in URLS]
            assert body["return_token_ids"] is True
            assert body["cache_salt"] == "v2"
            assert body["sampling_params"]["logprobs"] == 0
            (body,) = sglang.bodies
            assert body["input_ids"] == [5, PLACEHOLDER, 6, PLACEHOLDER, 7]
            assert body["image_data"] == URLS
            assert body["return_prompt_token_ids"] is True

    run_with_frozen_clock(main())


@servers
def test_ids_and_logprobs_are_those_of_the_whole_prompt(
    server_type: Callable[[], Any], engine_type: Callable[[str], HttpEngine]
) -> None:
    async def main() -> None:
        async with server_type() as server:
            server.placeholder_counts = COUNTS
            engine = engine_type(server.url)
            chunks = await collect(engine.generate(PROMPT, params(8), images=IMAGES))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            await engine.close()

    run_with_frozen_clock(main())


@servers
def test_a_paused_generation_continues_with_its_images(
    server_type: Callable[[], Any], engine_type: Callable[[str], HttpEngine]
) -> None:
    async def main() -> None:
        async with server_type() as server:
            server.placeholder_counts, server.hold_after = COUNTS, 3
            engine = Replicas([engine_type(server.url)])
            assert engine.supports_images
            async with aclosing(engine.generate(PROMPT, params(8), images=IMAGES)) as stream:
                task = asyncio.create_task(collect(stream))
                await server.is_held.wait()
                await engine.pause()
                server.hold_after = None
                await engine.resume()
                assert ids_of(await task) == continuation(PROMPT, 8)[0]
            assert len(server.bodies) == 2
            await engine.close()

    run_with_frozen_clock(main())


@servers
@pytest.mark.parametrize("counts", [(3, 2), (1, 3)])
def test_another_prompt_at_the_server_is_an_error(
    server_type: Callable[[], Any], engine_type: Callable[[str], HttpEngine], counts: tuple[int, ...]
) -> None:
    async def main() -> None:
        async with server_type() as server:
            server.placeholder_counts = counts
            engine = engine_type(server.url)
            with pytest.raises(EngineError, match="saw another prompt"):
                await collect(engine.generate(PROMPT, params(8), images=IMAGES))
            await engine.close()

    run_with_frozen_clock(main())


def test_a_vllm_server_without_the_endpoint_is_a_clear_input_error() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            with pytest.raises(EngineInputError, match=r"images: .* expected .* --enable-scale-out"):
                await collect(engine.generate(PROMPT, params(8), images=IMAGES))
            grammar = {"type": "json_object"}
            with pytest.raises(EngineInputError, match="response_format"):
                await collect(engine.generate(PROMPT, params(8, grammar=grammar), images=IMAGES))
            await engine.close()

    run_with_frozen_clock(main())


@given(st.lists(st.one_of(st.integers(1, 5), st.just(0)), max_size=8))
def test_collapsed_placeholders_expand_to_the_same_prompt(pieces: list[int]) -> None:
    """A piece is the number of placeholders of an image, or 0 for text."""
    ids: list[int] = [1]
    images: list[ImageSpan] = []
    for count in pieces:
        if count:
            images.append(ImageSpan(Media("image", "d"), len(ids), count))
        ids += [PLACEHOLDER] * count if count else [2]
    prompt = as_ids(ids)
    collapsed = collapse_placeholders(prompt, images)
    assert len(collapsed) == len(ids) - sum(pieces) + len(images)
    counts = tuple(image.length for image in images)
    assert expand_placeholders(collapsed.tolist(), counts) == ids
