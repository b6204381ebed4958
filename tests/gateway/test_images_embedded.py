"""Three turns with two images, through the gateway on the embedded engine with a vision-language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.vision import ImageSpan
from branchline.core.sample import Sample
from branchline.export.jsonl import read_jsonl, write_jsonl
from branchline.gateway.server import Gateway
from tests.chat.families import load_tokenizer
from tests.chat.generic.test_images import QWEN_VL
from tests.engines.tiny_model import hf, run, torch
from tests.engines.tiny_vision_model import full_logprobs, tiny_vision_config, tiny_vision_model
from tests.gateway.test_images import CAT, DOG, user

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `branchline serve --engine hf --model` takes it."""
    path: Path = tmp_path_factory.mktemp("tiny-qwen2.5-vl")
    tokenizer = load_tokenizer("qwen2_5")
    image_token = tokenizer.added_tokens["<|image_pad|>"]
    config = tiny_vision_config(image_token, vocab_size=tokenizer.vocab_size)
    tiny_vision_model(config=config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer.path / name).read_bytes())
    (path / "chat_template.jinja").write_text(QWEN_VL)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 28 * 28 * 40}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


async def ask(http: httpx.AsyncClient, session: Any, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """Posts a chat completion and returns the message of the answer."""
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": stream}
    response = await http.post(
        f"{session.base_url}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {session.api_key}"},
    )
    assert response.status_code == 200, response.text
    if not stream:
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return {"role": "assistant", "content": text}


async def converse(gateway: Gateway, http: httpx.AsyncClient, *, stream: bool) -> Sample:
    """Three turns with two images; returns the exported sample."""
    session = await gateway.session()
    messages: list[dict[str, Any]] = []
    for question in (user("What is this? ", CAT), user("And this? ", DOG), user("Which is bigger?")):
        messages.append(question)
        messages.append(await ask(http, session, messages, stream=stream))
    export = await session.finalize()
    assert export.report.is_balanced
    assert export.report.inexact_tokens == 0
    (sample,) = export.samples
    assert sample.exact
    assert len(sample.calls) == 3
    return sample


def assert_logprobs_are_those_of_transformers(model: Any, codec: GenericCodec, sample: Sample) -> None:
    """The trained tokens have the logprobs that one pass over the whole sample with its images gives."""
    ids = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    pad, start = codec.tokenizer.added_tokens[codec.image_token], 0
    assert codec.image_processor is not None
    images: list[ImageSpan] = []
    for media in sample.media:
        start = ids.index(pad, start)
        images.append(ImageSpan(media, start, codec.image_processor.placeholder_count(media)))
        start += images[-1].length
    assert sum(span.length for span in images) == ids.count(pad)
    logprobs = full_logprobs(model, ids, images, len(sample.prompt_ids))
    expected = logprobs[torch.arange(len(sample.response_ids)), torch.tensor(sample.response_ids.tolist())]
    trained = sample.response_mask == 1
    np.testing.assert_allclose(sample.response_logprobs[trained], expected.numpy()[trained], atol=5e-3)


def test_three_turns_with_two_images_are_exact_and_equal_streamed_and_whole(
    folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        codec, engine = GenericCodec.open(folder), hf.HfEngine.load(folder, device="cpu")
        assert engine.supports_images
        journal = tmp_path / "run.journal"
        async with (
            Gateway(engine=engine, codec=codec, journal=journal) as gateway,
            httpx.AsyncClient() as http,
        ):
            samples = [await converse(gateway, http, stream=stream) for stream in (False, True)]
        whole, streamed = samples
        assert whole.prompt_ids.tolist() == streamed.prompt_ids.tolist()
        assert whole.response_ids.tolist() == streamed.response_ids.tolist()
        assert [media.payload for media in whole.media] == [CAT.payload, DOG.payload]
        assert whole.trained_tokens <= 3 * MAX_TOKENS
        model = tiny_vision_model(
            config=tiny_vision_config(
                codec.tokenizer.added_tokens["<|image_pad|>"], vocab_size=codec.tokenizer.vocab_size
            )
        )
        assert_logprobs_are_those_of_transformers(model, codec, whole)
        target = tmp_path / "samples.jsonl"
        write_jsonl(samples, target)
        assert [one.media for one in read_jsonl(target)] == [one.media for one in samples]
        data = journal.read_bytes()
        assert [data.count(image.payload[-200:]) for image in (CAT, DOG)] == [1, 1]

    run(main())
