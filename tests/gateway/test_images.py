"""A conversation with images through the gateway, over all protocols, with a scripted engine."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.renderers_codec.codec import RenderersCodec
from branchline.core.message import Media
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.export.jsonl import sample_from_json
from tests.chat.families import load_tokenizer
from tests.chat.generic.test_images import open_codec
from tests.chat.test_vision import make_image
from tests.gateway.harness import Agent, agent, run

CAT, DOG = make_image(90, 60, 1), make_image(60, 130, 2)
ANSWERS = ("a cat", "a dog", "both")


def data_url(image: Media) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.payload).decode()}"


def user(text: str, image: Media | None = None, *, protocol: str = "chat") -> dict[str, Any]:
    if image is None:
        return {"role": "user", "content": text}
    data = base64.b64encode(image.payload).decode()
    parts: dict[str, list[dict[str, Any]]] = {
        "chat": [
            {"type": "text", "text": text},
            {"type": "image_url", "image_url": {"url": data_url(image)}},
        ],
        "responses": [
            {"type": "input_text", "text": text},
            {"type": "input_image", "image_url": data_url(image)},
        ],
        "messages": [
            {"type": "text", "text": text},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        ],
    }
    return {"role": "user", "content": parts[protocol]}


def conversation(protocol: str) -> list[dict[str, Any]]:
    """The messages of the third turn; every turn sends a prefix of them."""
    return [
        user("What is this? ", CAT, protocol=protocol),
        {"role": "assistant", "content": ANSWERS[0]},
        user("And this? ", DOG, protocol=protocol),
        {"role": "assistant", "content": ANSWERS[1]},
        user("Which is bigger?"),
    ]


async def post(one: Agent, protocol: str, messages: list[dict[str, Any]], *, stream: bool) -> None:
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("chat/completions", {"messages": messages}),
        "responses": ("responses", {"input": messages}),
        "messages": ("messages", {"messages": messages, "max_tokens": 100}),
    }
    path, body = bodies[protocol]
    response = await one.http.post(
        f"{one.session.base_url}/{path}",
        json={"model": "m", "stream": stream, **body},
        headers=one.api_headers,
    )
    assert response.status_code == 200, response.text


def assert_exact_with_images(one: Agent) -> list[list[int]]:
    """Every prompt continues the one before it; returns the prompts."""
    engine = one.engine
    assert [[span.media.payload for span in images] for images in engine.received_images] == [
        [CAT.payload],
        [CAT.payload, DOG.payload],
        [CAT.payload, DOG.payload],
    ]
    prompts = [ids.tolist() for ids in engine.received_prompts]
    for before, answer, after in zip(prompts, ANSWERS, prompts[1:], strict=False):
        output = engine.codec.encode(answer).tolist()
        assert after[: len(before) + len(output)] == before + output
    return prompts


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_prompts_of_three_turns_with_two_images_are_exact_and_equal_streamed_and_whole(protocol: str) -> None:
    async def test() -> None:
        prompts: list[list[list[int]]] = []
        for stream in (False, True):
            async with agent(*ANSWERS, codec=open_codec()) as one:
                messages = conversation(protocol)
                for count in (1, 3, 5):
                    await post(one, protocol, messages[:count], stream=stream)
                prompts.append(assert_exact_with_images(one))
                (line,) = await one.timelines()
                assert line["ids"][: len(prompts[-1][2])] == prompts[-1][2]
        assert prompts[0] == prompts[1]

    run(test)


def test_the_sample_of_a_session_has_its_images_in_order() -> None:
    async def test() -> None:
        async with agent(*ANSWERS, codec=open_codec()) as one:
            messages = conversation("chat")
            for count in (1, 3, 5):
                await post(one, "chat", messages[:count], stream=False)
            (raw,) = (await one.get("/samples"))["samples"]
            sample = sample_from_json(raw)
            assert [media.payload for media in sample.media] == [CAT.payload, DOG.payload]
            assert sample.exact
            codec = one.engine.codec
            assert isinstance(codec, GenericCodec)
            pad = codec.tokenizer.added_tokens[codec.image_token]
            ids = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
            assert codec.image_processor is not None
            expected = sum(map(codec.image_processor.placeholder_count, sample.media))
            assert ids.count(pad) == expected

    run(test)


def test_the_renderers_codec_passes_images_to_the_engine() -> None:
    pytest.importorskip("renderers", reason="renderers is not installed")

    async def test() -> None:
        codec = RenderersCodec(load_tokenizer("qwen3"), "qwen3_vl")
        async with agent(*ANSWERS, codec=codec, engine=ScriptedEngine(codec, replies(*ANSWERS))) as one:
            messages = conversation("chat")
            for count in (1, 3, 5):
                await post(one, "chat", messages[:count], stream=False)
            assert_exact_with_images(one)

    run(test)


def test_an_engine_without_images_answers_400_and_records_nothing() -> None:
    async def test() -> None:
        codec = open_codec()
        engine = ScriptedEngine(codec, replies("x"), supports_images=False)
        async with agent(engine=engine) as one:
            response = await one.ask(user("look ", CAT))
            assert response.status_code == 400
            assert "images: got 1, expected none: scripted takes no images" in response.text
            assert await one.ask_text("hi") == "x"
            assert len(await one.timelines()) == 1

    run(test)


def test_a_broken_image_is_a_400() -> None:
    async def test() -> None:
        async with agent("x", codec=open_codec()) as one:
            part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            response = await one.ask({"role": "user", "content": [part]})
            assert response.status_code == 400
            assert "cannot be read" in response.text

    run(test)
